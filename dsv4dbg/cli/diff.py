"""``dsv4dbg diff``: two traces, and the first op that is to blame."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsv4dbg.cli.output import columns, note, print_json, progress
from dsv4dbg.compare import Verdict
from dsv4dbg.errors import DbgError, Untestable

if TYPE_CHECKING:
    from dsv4dbg.diff import Diff, Judge, SiteDiff
    from dsv4dbg.trace.reader import Trace

GLYPHS = {Verdict.PASS: "·", Verdict.ROUNDING: "▁", Verdict.DRIFT: "▄", Verdict.DIVERGED: "█"}
ROWS = 12  # sites that the table shows


@click.command()
@click.argument("reference", type=click.Path(path_type=Path))
@click.argument("candidate", type=click.Path(path_type=Path))
@click.option("--model", default=None, metavar="NAME|DIR", help="Where the weights are (default: the trace's model).")
@click.option("--no-judge", is_flag=True, help="Compare bits only; do not run reference and oracle.")
@click.option(
    "--plugin", type=click.Path(path_type=Path), multiple=True, metavar="FILE", help="Load your kernels first."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def diff(
    reference: Path, candidate: Path, model: str | None, no_judge: bool, plugin: tuple[Path, ...], as_json: bool
) -> None:
    """Compare two traces of the same prompt: the first divergence, a ribbon over the layers, a table.

    A site whose inputs already differed is judged again on the candidate's own inputs, with the model's weights, so
    that only an op that is itself at fault is DIVERGED. Exit code 1 if one is, 0 if none, 125 if nothing could be
    compared.

    \b
    dsv4dbg diff reference.h5 candidate.h5
    dsv4dbg diff reference.h5 candidate.h5 --no-judge
    """
    from dsv4dbg.diff import Diff, check_comparable, compare_traces, missing_sites
    from dsv4dbg.trace.reader import Trace

    with Trace.open(reference) as first, Trace.open(candidate) as second:
        for trace in (first, second):
            if trace.notice:
                note(f"note: {trace.path}: {trace.notice}")
        check_comparable(first, second)
        judge, problem = (None, "") if no_judge else _judge(second, model, plugin)
        result = Diff()
        result.only_reference, result.only_candidate = missing_sites(first, second)
        walk = compare_traces(first, second, _intended(first, second), judge)
        result.sites.extend(progress(walk, len(second.sites()), "comparing"))
        if not result.sites:
            raise Untestable(f"{reference} and {candidate} have no site in common")
        problem = problem or getattr(judge, "problem", "")
        if as_json:
            print_json("diff", _document(result, first, second, problem))
        else:
            _show(result, first, second, problem)
    sys.exit(1 if result.verdict >= Verdict.DIVERGED else 0)


def _judge(trace: Trace, model: str | None, plugins: tuple[Path, ...]) -> tuple[Judge | None, str]:
    """The judge, or None and why there is none. A model that the user names must be right; the trace's may be gone."""
    import torch

    from dsv4dbg.bisect.rejudge import Rejudge
    from dsv4dbg.kernels.registry import load_plugin
    from dsv4dbg.model.checkpoint import open_model
    from dsv4dbg.model.weights import ModelWeights

    for file in plugins:
        load_plugin(file)
    name = model or str(trace.manifest.get("model"))
    try:
        checkpoint = open_model(name)
    except DbgError as error:
        if model:
            raise
        return Rejudge(trace, None), f"the model's weights are not at hand: {error.message}"
    return Rejudge(trace, ModelWeights(checkpoint, torch.device("cpu"))), ""


def _intended(first: Trace, second: Trace) -> dict[str, tuple[str, ...]]:
    """Op -> switches in which the numerics profiles of the two captures differ."""
    names = [str(t.manifest.get("numerics", "official")) for t in (first, second)]
    if names[0] == names[1]:
        return {}
    from dsv4dbg.kernels.numerics import differences, profile
    from dsv4dbg.kernels.registry import registry

    changed = set(differences(profile(names[0]), profile(names[1])))
    ops = registry().ops.values()
    return {op.name: tuple(s for s in op.switches if s in changed) for op in ops if changed & set(op.switches)}


def _headline(result: Diff, first: Trace, second: Trace) -> str:
    if result.identical:
        return f"bit-identical: all {len(result.sites):,} site calls"
    site = result.first
    missing = len(result.only_reference) + len(result.only_candidate)
    if site is None:
        return f"all {len(result.sites):,} common site calls agree; {missing:,} are in one trace only"
    if site.verdict == Verdict.DIVERGED:
        return f"DIVERGED at {site.record.site} ({site.record.site.op}): {site.sentence}"
    if result.unjudged:
        return f"nothing judged DIVERGED; the traces part first at {site.record.site} ({site.record.site.op}): {site.sentence}"
    return f"no op is at fault; the traces part first at {site.record.site} ({site.record.site.op}): {site.sentence}"


def _ribbon(result: Diff) -> list[tuple[str, str]]:
    """One line per phase: a glyph per layer, the gravest verdict of its sites."""
    worst: dict[str, dict[int, Verdict]] = {}
    for site in result.sites:
        layer = site.record.layer
        if layer is not None:
            line = worst.setdefault(site.record.phase, {})
            line[layer] = max(line.get(layer, Verdict.PASS), site.verdict)
    return [
        (phase, "".join(GLYPHS[line[i]] if i in line else " " for i in range(max(line) + 1)))
        for phase, line in worst.items()
    ]


def _show(result: Diff, first: Trace, second: Trace, problem: str) -> None:
    print(_headline(result, first, second))
    print()
    print(columns([*(_ribbon(result)), ("", "· same  ▁ rounding  ▄ drift  █ diverged, one cell per layer")], "  "))
    counts = [f"{result.count(v):,} {v.name}" for v in GLYPHS if result.count(v)]
    judged = f"{sum(s.judged for s in result.sites):,} judged, {result.unjudged:,} unjudged"
    print(f"\n{len(result.sites):,} site calls: {', '.join(counts)}; {judged}")
    for paths, trace in ((result.only_reference, first), (result.only_candidate, second)):
        if paths:
            print(f"only in {trace.path}: {len(paths):,} site calls, such as {paths[0]}")
    if problem and result.unjudged:
        print(f"not judged: {problem}")
    shown = _table(result)
    if shown:
        head = ("site", "op", "verdict", "rel. error", "worst row", "why")
        print("\n" + columns([head, *map(_row, shown)], "  "))
    print(f"\nnext: {_next(result, second)}")


def _table(result: Diff) -> list[SiteDiff]:
    """The sites worth a line: every DIVERGED one, then the first that differ."""
    diverged = [s for s in result.sites if s.verdict == Verdict.DIVERGED]
    others = [s for s in result.sites if s.verdict not in (Verdict.PASS, Verdict.DIVERGED)]
    return (diverged + others)[:ROWS]


def _row(site: SiteDiff) -> tuple[str, ...]:
    worst = site.worst
    error, row = (
        (f"{worst.error:.2e}", f"{worst.row} ({worst.row_error:.1e})") if not worst.reason else ("", str(worst.row))
    )
    return (
        str(site.record.site), site.record.site.op, site.verdict.name if site.judged else "unjudged", error, row,
        site.sentence if len(site.sentence) < 90 else site.sentence[:87] + "...",
    )  # fmt: skip


def _next(result: Diff, candidate: Trace) -> str:
    site = result.first
    if site is None:
        return "nothing to do: the traces agree"
    return f"dsv4dbg ops {site.record.site.op}"


def _document(result: Diff, first: Trace, second: Trace, problem: str) -> dict[str, Any]:
    def describe(site: SiteDiff) -> dict[str, Any]:
        worst = site.worst
        return {
            "site": str(site.record.site), "op": site.record.site.op, "layer": site.record.layer,
            "phase": site.record.phase, "implementation": site.record.implementation, "verdict": site.verdict.name,
            "judged": site.judged, "inputs_equal": site.inputs_equal, "intended": list(site.intended),
            "sentence": site.sentence, "where": {k: str(v) for k, v in site.where.items()},
            "fingerprints": list(site.fingerprints), "relative_error": worst.error, "worst_row": worst.row,
            "worst_row_error": worst.row_error,
        }  # fmt: skip

    differing = [s for s in result.sites if s.verdict != Verdict.PASS]
    return {
        "verdict": result.verdict.name,
        "identical": result.identical,
        "first": describe(result.first) if result.first else None,
        "first_difference": describe(result.first_difference) if result.first_difference else None,
        "sites": {
            "compared": len(result.sites), "judged": len(result.sites) - result.unjudged, "unjudged": result.unjudged,
            **{v.name.lower(): result.count(v) for v in GLYPHS},
            "only_reference": len(result.only_reference), "only_candidate": len(result.only_candidate),
        },
        "differing": [describe(s) for s in differing],
        "ribbon": dict(_ribbon(result)),
        "not_judged_because": problem if result.unjudged else "",
        "reference": str(first.path),
        "candidate": str(second.path),
    }  # fmt: skip
