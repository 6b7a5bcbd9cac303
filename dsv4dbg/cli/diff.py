"""``dsv4dbg diff``: two traces, and the first op that is to blame."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dsv4dbg.cli.output import note, print_json, progress
from dsv4dbg.cli.traces import open_weights
from dsv4dbg.errors import DbgError, Untestable

if TYPE_CHECKING:
    from dsv4dbg.diff import Intent, Judge
    from dsv4dbg.trace.reader import Trace


@click.command()
@click.argument("reference", type=click.Path(path_type=Path))
@click.argument("candidate", type=click.Path(path_type=Path))
@click.option("--model", default=None, metavar="NAME|DIR", help="Where the weights are (default: the trace's model).")
@click.option("--no-judge", is_flag=True, help="Compare bits only; do not run reference and oracle.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def diff(reference: Path, candidate: Path, model: str | None, no_judge: bool, as_json: bool) -> None:
    """Compare two traces of the same prompt: the first op that differs, and whether it is at fault.

    An op whose inputs are equal bit for bit, run by the same code in the same place, is DIVERGED if any bit of its
    output differs. Otherwise the reference and a float64 oracle run again on the candidate's own inputs, with the
    model's weights, so that an error made earlier does not count against an op (DRIFT).

    Exit code: 0 what differs is explained, 1 an op is at fault, 2 bad input, 125 some of what differs could not be
    judged (or the traces have nothing in common).

    \b
    dsv4dbg capture --prompt "The capital of France is" -o reference.h5
    dsv4dbg capture --prompt "The capital of France is" --plugin mine.py --plan op:rms_norm=mine -o mine.h5
    dsv4dbg diff reference.h5 mine.h5
    dsv4dbg diff reference.h5 mine.h5 --no-judge --json
    dsv4dbg diff reference.h5 mine.h5 --model /models/DeepSeek-V4-Flash
    """
    from dsv4dbg.cli.diff_report import document, show
    from dsv4dbg.diff import add_fault, check_comparable, compare_traces, finished_in_both
    from dsv4dbg.trace.reader import Trace

    with Trace.open(reference) as first, Trace.open(candidate) as second:
        check_comparable(first, second)
        for trace in (first, second):
            if trace.notice:
                note(f"note: {trace.path}: {trace.notice}")
        pairs, result = finished_in_both(first, second)
        judge = None if no_judge else _judge(second, model)
        walk = compare_traces(first, second, pairs, _intent(first, second), judge)
        result.sites.extend(progress(walk, len(pairs), "comparing"))
        add_fault(result, first, second)
        if not result.judgeable:
            raise Untestable(
                f"{reference} and {candidate} have no finished site call in common",
                "capture both with the same --sites",
            )
        if as_json:
            print_json("diff", document(result, first, second))
        else:
            show(result, first, second, no_judge)
    sys.exit(result.exit_code)


def _judge(trace: Trace, model: str | None) -> Judge:
    """Judges sites of ``trace``; torch and the model load when the first site needs them.

    A model that the user names must be there. The one that the trace names may be gone.
    """
    if model is not None:
        from dsv4dbg.model.checkpoint import open_model

        open_model(model)
    judges: list[Judge] = []

    def judge(reference, candidate):
        if not judges:
            from dsv4dbg.bisect.rejudge import Rejudge

            judges.append(Rejudge(trace, lambda: open_weights(model or str(trace.manifest.get("model")))))
        return judges[0](reference, candidate)

    return judge


def _intent(first: Trace, second: Trace) -> Intent:
    """What the two captures were asked to do differently: numerics profiles and formats of caches."""
    from dsv4dbg.diff import Intent

    formats = first.manifest.get("kv_cache") != second.manifest.get("kv_cache")
    names = [t.manifest.get("numerics", "official") for t in (first, second)]
    if names[0] == names[1]:
        return Intent({}, formats)
    from dsv4dbg.kernels.numerics import differences, profile
    from dsv4dbg.kernels.registry import registry

    try:
        changed = set(differences(profile(str(names[0])), profile(str(names[1]))))
    except DbgError as error:  # made by another version: what it means to differ in is not known
        note(f"note: {error.message}")
        return Intent({}, formats)
    ops = registry().ops.values()
    return Intent({op.name: tuple(s for s in op.switches if s in changed) for op in ops}, formats)
