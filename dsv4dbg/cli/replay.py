"""``dsv4dbg replay``: one site of a trace again, with another implementation."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dsv4dbg.cli.options import one_call
from dsv4dbg.cli.output import columns, note, print_json
from dsv4dbg.cli.traces import open_call


@click.command()
@one_call
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def replay(
    trace: Path, site: str, candidate: str, plugin: tuple[Path, ...], model: str | None, device: str, timeout: float,
    as_json: bool,
) -> None:  # fmt: skip
    """Run one site of a trace again with another implementation, and judge it against reference and oracle.

    SITE is a site with its step (decode3/L2.attn.wq_b), or without one for the first call of it. The candidate runs in
    a process of its own, on the inputs that the site had.

    Exit code: 0 the candidate is right, 1 it is at fault, 2 bad input, 125 it cannot run there.

    \b
    dsv4dbg replay traces/tiny-0001.h5 L2.attn.wq_b
    dsv4dbg replay traces/tiny-0001.h5 decode3/L2.attn.sparse_mla_decode --plugin my_decode.py --candidate mine
    """
    from dsv4dbg.bisect.protocol import Hello
    from dsv4dbg.bisect.retry import replayed
    from dsv4dbg.trace.reader import Trace

    with Trace.open(trace) as opened:
        if opened.notice:
            note(f"note: {trace}: {opened.notice}")
        call = open_call(opened, site, model)
    found, reference_s, candidate_s = replayed(call, Hello(candidate, plugin, device), timeout)
    if as_json:
        print_json("replay", {
            "trace": str(trace), "site": call.site.path, "op": call.op.name, "reference": "torch",
            "candidate": candidate, "device": device, "verdict": found.verdict.name, "sentence": found.sentence,
            "where": found.where, "fingerprint": found.fingerprints, "evidence": found.evidence,
            "threshold": found.threshold, "reference_s": reference_s, "candidate_s": candidate_s,
        })  # fmt: skip
    else:
        print(f"{found.verdict.name}: {candidate} at {call.site} ({call.op.name})")
        print(f"  {found.sentence}")
        where = ", ".join(f"{name} {value}" for name, value in found.where.items())
        rows = [("where", where), ("fingerprint", "; ".join(found.fingerprints))]
        rows += [("reference", _seconds(reference_s)), ("candidate", _seconds(candidate_s))]
        print(columns([row for row in rows if row[1]], "  "))
        if found.bad:
            plugins = "".join(f" --plugin {path}" for path in plugin)
            print(f"next: dsv4dbg reproduce {trace} {call.site.path} --candidate {candidate}{plugins} -o reproducer")
    sys.exit(1 if found.bad else 0)


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3g} ms"
