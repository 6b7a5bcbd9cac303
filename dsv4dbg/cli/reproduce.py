"""``dsv4dbg reproduce``: a fault at one site of a trace as a directory that shows it anywhere."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dsv4dbg.cli.options import one_call
from dsv4dbg.cli.output import note, print_json, size
from dsv4dbg.cli.traces import open_call


@click.command()
@one_call
@click.option("--no-shrink", is_flag=True, help="Keep the call as it is.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, metavar="DIR", help="A new directory.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def reproduce(
    trace: Path, site: str, candidate: str, plugin: tuple[Path, ...], model: str | None, device: str, timeout: float,
    no_shrink: bool, output: Path, as_json: bool,
) -> None:  # fmt: skip
    """Write a reproducer of a fault: inputs, right results, the implementation, and a script that runs it.

    The call of SITE (as in replay) is run, cut down while it fails in the same way, and written to a directory that
    needs neither the checkpoint nor this tool: python DIR/reproduce.py ends with exit code 1 while the fault exists.

    Exit code: 1 the fault was reproduced, 0 the candidate is right there (nothing is written), 2 bad input, 125 the
    candidate cannot run there.

    \b
    dsv4dbg reproduce traces/tiny-0001.h5 L2.attn.wq_b --candidate mine --plugin mine.py -o reproducer
    python reproducer/reproduce.py
    """
    from dsv4dbg.bisect.protocol import Hello
    from dsv4dbg.bisect.reproducer import vacant
    from dsv4dbg.bisect.retry import reproduce as reproduced
    from dsv4dbg.model.environment import environment
    from dsv4dbg.model.run import open_device
    from dsv4dbg.trace.reader import Trace

    vacant(output)
    with Trace.open(trace) as opened:
        if opened.notice:
            note(f"note: {trace}: {opened.notice}")
        call = open_call(opened, site, model)
    hello, here = Hello(candidate, plugin, device), environment(open_device(device))
    found = reproduced(output, call, hello, here, timeout=timeout, smaller=not no_shrink)
    files = [path for path in output.rglob("*") if path.is_file()] if found else []
    if as_json:
        print_json("reproduce", {
            "trace": str(trace), "site": call.site.path, "op": call.op.name, "candidate": candidate, "device": device,
            "reproducer": str(output) if found else None, "confirmed": found.confirmed if found else None,
            "mode": found.failure.mode if found else None, "finding": found.finding if found else None,
            "files": len(files), "bytes": sum(path.stat().st_size for path in files),
        })  # fmt: skip
    elif found is None:
        print(f"{candidate} is right at {call.site} ({call.op.name}); nothing is written")
    else:
        print(f"{found.finding['verdict']}: {candidate} at {call.site} ({call.op.name})")
        print(f"  {found.finding['sentence']}")
        print(f"{output}: {len(files)} files, {size(sum(path.stat().st_size for path in files))}")
        if not found.confirmed:
            note("note: the script did not show the fault when it was run once more; it may be rare")
        print(f"next: python {output / 'reproduce.py'}")
    sys.exit(1 if found else 0)
