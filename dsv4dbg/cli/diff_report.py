"""What ``dsv4dbg diff`` prints: the answer, a ribbon over the layers, a table, the next command; or a JSON document."""

from __future__ import annotations

import math
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable
from typing import Any

from dsv4dbg.cli.output import columns
from dsv4dbg.compare import Verdict
from dsv4dbg.diff import Diff, SiteDiff
from dsv4dbg.site import BLOCK
from dsv4dbg.trace.reader import Trace
from dsv4dbg.trace.side_by_side import TensorDiff
from dsv4dbg.trace.text import one_line, shorten

SEVERITY = ["same", "rounding", "drift", "unjudged", "diverged", "fault"]  # of a cell of the ribbon
GLYPHS = dict(zip(SEVERITY, "·▁▄?█✗", strict=True))
PLAIN = dict(zip(SEVERITY, ".:+?#X", strict=True))  # for terminals that cannot show the others
ROWS = 12  # sites that the table shows
LEAST = 20  # characters of the last column that are worth printing
RULER = 10  # layers between two numbers above the ribbon
_MTP = re.compile(r"mtp\d+")


def severity(site: SiteDiff) -> str:
    if site.verdict >= Verdict.FAULT:
        return "fault"
    if site.verdict == Verdict.DIVERGED:
        return "diverged"
    if site.unjudged and site.verdict:
        return "unjudged"
    return {Verdict.PASS: "same", Verdict.ROUNDING: "rounding"}.get(site.verdict, "drift")


def label(site: SiteDiff) -> str:
    """A site with what its name does not say: the op, and an implementation other than the reference's."""
    op, implementation = shorten(site.record.site.op), shorten(site.record.implementation)
    words = [] if site.record.site.name.endswith(op) else [op]
    if implementation and implementation != site.reference.implementation:
        words.append(f"by {implementation}")
    return f"{site.record.site} ({' '.join(words)})" if words else str(site.record.site)


def headline(result: Diff) -> list[str]:
    """The answer, in one line or two."""
    count, missing = len(result.judgeable), result.missing
    if result.identical:
        return [f"bit-identical: all {count:,} site calls"]
    site = result.first
    if site is None:
        same = "bit-identical" if not any(s.inputs for s in result.sites) else "equal outputs"
        tail = f"; {missing:,} more are in one trace only" if missing else ""
        return [f"{same} at all {count:,} site calls that both traces have{tail}"]
    if site.verdict >= Verdict.DIVERGED:
        lines = [f"{site.verdict.name} at {label(site)}", f"  {site.sentence}"]
        earlier = result.first_difference
        if earlier is not None and earlier is not site:
            lines.append(f"  the traces part before that, at {label(earlier)}: {severity(earlier)}")
        return lines
    differing = [s for s in result.unjudged if s.verdict]
    if differing:
        start = f"not judged: {len(differing):,} of the {count:,} site calls"
        return [f"{start}; the traces part first at {label(site)}", f"  {site.sentence}"]
    return [f"no op is at fault; the traces part first at {label(site)}", f"  {site.sentence}"]


def ribbon(result: Diff) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Names of the cells (``embed``, ``L0``..., ``head``, ``mtp0``), and per phase the gravest severity of each."""
    phases: dict[str, dict[str, str]] = {}
    for site in result.sites:
        cells = phases.setdefault(site.record.phase, {})
        cell = _cell(site)
        cells[cell] = max(cells.get(cell, "same"), severity(site), key=SEVERITY.index)
    names = {name for cells in phases.values() for name in cells}
    layers = [int(name[1:]) for name in names if name.startswith("L")]
    order = ["embed", *(f"L{i}" for i in range(min(max(layers, default=-1) + 1, 4096))), "head"]
    return [*order, *sorted(names - set(order))], phases


def _cell(site: SiteDiff) -> str:
    if site.record.layer is not None:
        return f"L{site.record.layer}"
    scope = site.record.site.name.partition(".")[0]
    return scope if _MTP.fullmatch(scope) or scope in ("embed", "head") else "other"


def _drawn(names: list[str], phases: dict[str, dict[str, str]], glyphs: dict[str, str]) -> str:
    """The ribbon as text: one cell per layer with numbers above, the ends and MTP blocks in columns of their own."""
    layers = [name for name in names if name[1:].isdigit() and name[0] == "L"]
    ends = [name for name in names if name not in layers]
    ruler = "".join(f"L{i}".ljust(RULER) for i in range(0, len(layers), RULER))[: max(len(layers), 3)].rstrip()
    before, after = ends[:1], ends[1:]
    rows = [("", *before, ruler, *after)]
    for phase, cells in phases.items():
        line = "".join(glyphs[cells[name]] if name in cells else " " for name in layers)
        side = {name: glyphs[cells[name]] if name in cells else "" for name in ends}
        rows.append((phase, *(side[n] for n in before), line, *(side[n] for n in after)))
    return columns(rows, "  ")


def show(result: Diff, first: Trace, second: Trace, no_judge: bool) -> None:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    glyphs = GLYPHS if _can_print("".join(GLYPHS.values())) else PLAIN
    names, phases = ribbon(result)
    used = [s for s in SEVERITY if any(s in cells.values() for cells in phases.values())]
    lines = _wrapped(headline(result), width)
    if not result.identical:
        lines += ["", _drawn(names, phases, glyphs), "  " + "  ".join(f"{glyphs[s]} {s}" for s in used)]
        lines += ["", *_wrapped(_counts(result, first, second), width)]
        table = _table(result)
        if table:
            lines += ["", _columns([("site", "verdict", "rel. error", "worst row", "why"), *map(_row, table)], width)]
    lines += ["", f"next   {_next(result, first, second, no_judge)}"]
    print("\n".join(lines))


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _counts(result: Diff, first: Trace, second: Trace) -> list[str]:
    """How many sites of each kind there are, and what was not judged and why."""
    total, unjudged = len(result.judgeable), result.unjudged
    kinds = Counter(severity(s) for s in result.judgeable)
    words = ", ".join(f"{kinds[s]:,} {s}" for s in SEVERITY if kinds[s] and s != "unjudged")
    lines = [
        f"{total:,} site calls: {words or 'none known'}; {total - len(unjudged):,} judged, {len(unjudged):,} unjudged"
    ]
    reasons = Counter(s.unjudged for s in unjudged)
    for reason, count in reasons.most_common(3):
        lines.append(f"  {count:,} unjudged: {reason}")
    if len(reasons) > 3:
        lines.append(
            f"  {sum(reasons.values()) - sum(n for _, n in reasons.most_common(3)):,} unjudged for other reasons"
        )
    for paths, trace in ((result.only_reference, first), (result.only_candidate, second)):
        if paths:
            lines.append(f"  {len(paths):,} only in {trace.path}, the first is {paths[0]}")
    return lines


def _table(result: Diff) -> list[SiteDiff]:
    """The sites worth a line: those at fault, then the first that differ."""
    differing = [s for s in result.judgeable if s.verdict != Verdict.PASS]
    return sorted(differing, key=lambda s: s.verdict < Verdict.DIVERGED)[:ROWS]


def _row(site: SiteDiff) -> tuple[str, ...]:
    name, worst = site.worst
    at = ", ".join(f"{dim} {i}" for dim, i in worst.at.items())
    return label(site), severity(site), _error(worst), f"{name} {at}".strip(), site.sentence


def _error(diff: TensorDiff) -> str:
    """The relative error where there is one, else how much of the tensor differs."""
    if diff.broken:
        return f"{diff.broken:,} not finite"
    if diff.numbers and not diff.reason:
        return f"{diff.error:.1e}" if diff.error < math.inf else "inf"
    return f"{diff.share:.1%} differ" if diff.elements else "other form" if diff.reason else ""


def _columns(rows: Iterable[tuple[str, ...]], width: int) -> str:
    """A table that is no wider than a terminal of ``width`` (0: there is none): the last column gives way."""
    rows = list(rows)
    if width and columns([(*row[:-1], "") for row in rows], "  ").find("\n") > width - LEAST:
        rows = [row[:-1] for row in rows]
    lines = columns(rows, "  ").splitlines()
    return "\n".join(line if not width or len(line) <= width else line[: width - 3] + "..." for line in lines)


def _wrapped(lines: list[str], width: int) -> list[str]:
    """Sentences on as many lines as a terminal of ``width`` needs."""
    if not width:
        return lines
    options = {"subsequent_indent": "    ", "break_on_hyphens": False, "break_long_words": False}
    return [part for line in lines for part in textwrap.wrap(line, width, **options)]


def _next(result: Diff, first: Trace, second: Trace, no_judge: bool) -> str:
    site = result.first
    if site is None:
        return "dsv4dbg ops   (the implementations that a plan can name)"
    command = f"dsv4dbg diff {first.path} {second.path}"
    if result.exit_code == 125 and no_judge:
        return f"{command}   (judges what differs)"
    if result.exit_code == 125 and any("weights" in s.unjudged for s in result.unjudged):
        return f"{command} --model DIR   (with the weights, to judge what differs)"
    op = site.record.site.op
    return (
        f"dsv4dbg ops {shorten(op)}   (its contract)"
        if op != BLOCK
        else f"dsv4dbg capture --sites '{site.record.site.name}.*' ..."
    )


def document(result: Diff, first: Trace, second: Trace) -> dict[str, Any]:
    """The whole comparison as JSON; sites that do not differ are only counted."""
    names, phases = ribbon(result)
    kinds = Counter(severity(s) for s in result.judgeable)
    differing = [s for s in result.judgeable if s.verdict or s.unjudged]
    earliest = result.first_difference
    return {
        "verdict": result.verdict.name,
        "exit_code": result.exit_code,
        "identical": result.identical,
        "answer": " ".join(line.strip() for line in headline(result)),
        "first": _describe(result.first) if result.first else None,
        "first_difference": _describe(earliest) if earliest else None,
        "sites": {
            "compared": len(result.judgeable), "judged": len(result.judgeable) - len(result.unjudged),
            "unjudged": len(result.unjudged), **{s: kinds[s] for s in SEVERITY if s != "unjudged"},
            "blocks": sum(s.view for s in result.sites), "only_reference": len(result.only_reference),
            "only_candidate": len(result.only_candidate),
        },
        "differing": [_describe(s) for s in differing],
        "only_reference": result.only_reference,
        "only_candidate": result.only_candidate,
        "ribbon": {"cells": names, "phases": phases},
        "not_judged_because": dict(Counter(s.unjudged for s in result.unjudged).most_common(20)),
        "reference": _about(first),
        "candidate": _about(second),
        "same_environment": first.manifest.get("environment") == second.manifest.get("environment"),
    }  # fmt: skip


def _about(trace: Trace) -> dict[str, Any]:
    kept = ("model", "numerics", "plan", "kv_cache", "seed", "environment")
    return {"trace": str(trace.path), "notice": trace.notice, **{key: trace.manifest.get(key) for key in kept}}


def _describe(site: SiteDiff) -> dict[str, Any]:
    record, decision = site.record, site.decision
    name, _ = site.worst
    return {
        "site": str(record.site), "op": record.site.op, "layer": record.layer, "phase": record.phase,
        "implementation": record.implementation, "reference_implementation": site.reference.implementation,
        "verdict": site.verdict.name, "judged": not site.unjudged, "unjudged_because": site.unjudged,
        "inputs_equal": not site.inputs, "inputs_differ": list(site.inputs), "intended": list(site.intended),
        "sentence": site.sentence, "where": _plain(decision.where) if decision else {},
        "fingerprints": list(decision.fingerprints) if decision else [], "worst_output": name,
        "outputs": {n: _measured(t) for n, t in site.outputs.items() if not t.equal},
        "judgement": _plain(decision.outputs) if decision else None,
    }  # fmt: skip


def _measured(diff: TensorDiff) -> dict[str, Any]:
    found = {
        "reason": diff.reason, "dtype": diff.dtype, "elements": diff.elements, "different": diff.different,
        "rows": diff.rows, "rows_different": diff.rows_different, "row": diff.at,
    }  # fmt: skip
    if diff.numbers:
        found |= {
            "relative_error": diff.error, "row_relative_error": diff.row_error, "largest_difference": diff.largest,
            "similarity": diff.similarity, "scale": diff.scale, "not_finite": diff.broken,
        }  # fmt: skip
    return _plain(found)


def _plain(value: Any) -> Any:
    """Only what JSON has: numbers that are not finite become null, keys and anything else text."""
    if isinstance(value, dict | Counter) or hasattr(value, "items"):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else one_line(str(value))
