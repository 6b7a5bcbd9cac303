"""``dsv4dbg bisect``: which op's candidate diverges or faults, where, and what kind of fault that is."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dsv4dbg.cli.options import free_path, token_ids
from dsv4dbg.cli.output import note, print_json
from dsv4dbg.errors import DbgError


@click.command()
@click.option("--op", "ops", multiple=True, metavar="OP", help="Test this op (may be given again; default: all).")
@click.option("--candidate", default="triton", show_default=True, metavar="NAME", help="Implementation under test.")
@click.option("--plugin", type=click.Path(path_type=Path), multiple=True, metavar="FILE", help="Load your kernels.")
@click.option("--check", "checks", multiple=True, metavar="NAME", help="Only this check (may be given again).")
@click.option(
    "--model",
    default=None,
    metavar="NAME|DIR",
    help="tiny, wide or a checkpoint (default: tiny; with coverage, wide too).",
)
@click.option("--workload", default=None, metavar="NAME|FILE", help="What is fed (default: coverage).")
@click.option("--prompt", default=None, metavar="TEXT", help="Instead of a workload: this prompt.")
@click.option("--tokens", default=None, metavar="IDS", help="Instead of a workload: token ids, or a file of them.")
@click.option("--decode", default=4, show_default=True, help="With a prompt: decode steps after it.")
@click.option("--trace", type=click.Path(path_type=Path), default=None, metavar="FILE", help="Take calls from a trace.")
@click.option("--numerics", default="official", show_default=True, help="Numerics profile: official or hf.")
@click.option("--kv-cache", default=None, metavar="FORMAT", help="As in capture.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--seed", default=0, show_default=True, help="Seed of the physical placement of cache pages.")
@click.option("--in-place", is_flag=True, help="Also swap the candidate into the live forward, and search there.")
@click.option("--timeout", default=120.0, show_default=True, help="Seconds that one run of the candidate may take.")
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1, 16), help="Candidates side by side.")
@click.option("--resume", type=click.Path(path_type=Path), default=None, metavar="JOURNAL", help="Go on with a run.")
@click.option("--reproducer", type=click.Path(path_type=Path), default=None, metavar="DIR", help="Write reproducers.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=None, help="Journal (default: in traces/).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def bisect(
    ops: tuple[str, ...], candidate: str, plugin: tuple[Path, ...], checks: tuple[str, ...], model: str | None,
    workload: str | None, prompt: str | None, tokens: str | None, decode: int, trace: Path | None, numerics: str,
    kv_cache: str | None, device: str, seed: int, in_place: bool, timeout: float, workers: int, resume: Path | None,
    reproducer: Path | None, output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Find the op whose candidate diverges or faults, where, and what kind of fault it is.

    The candidate runs in processes of its own, on every call of a forward that reaches the edges of its ops.

    \b
    dsv4dbg bisect --op sparse_mla_decode
    dsv4dbg bisect --op sparse-mla-decode --plugin my_decode.py --candidate mine --reproducer found
    dsv4dbg bisect --candidate mine --plugin mine.py --model wide --check differential
    dsv4dbg bisect --resume traces/bisect-0001.jsonl --plugin mine.py --candidate mine
    """
    given = [
        name
        for name, value in (
            ("--workload", workload), ("--prompt", prompt), ("--tokens", tokens), ("--trace", trace),
        )
        if value is not None
    ]  # fmt: skip
    if len(given) > 1:
        raise DbgError(f"{' and '.join(given)} were both given", "give one of them, or none for the coverage workload")
    if trace is not None and in_place:
        raise DbgError("--in-place needs a forward, and a trace is none", "leave --trace or --in-place away")
    if output is not None and resume is not None:
        raise DbgError("--resume goes on in the journal that it is given", "leave -o away")
    from dsv4dbg.bisect.run import bisect as run
    from dsv4dbg.bisect.settings import Settings
    from dsv4dbg.cli.bisect_report import Progress, document, show
    from dsv4dbg.model.recording import Request
    from dsv4dbg.site import op_name

    request = Request(
        prompt=prompt, tokens=token_ids(tokens) if tokens is not None else (), decode=decode, plugins=plugin,
        workload=workload or (None if given else "coverage"), model=model or "tiny", numerics=numerics, device=device,
        kv_cache=kv_cache or ("bf16" if numerics == "hf" else "fp8"), seed=seed,
    )  # fmt: skip
    settings = Settings(
        request, candidate, tuple(op_name(op) for op in ops), checks, trace, in_place, timeout, workers, reproducer,
        () if model or given else ("wide",),
    )  # fmt: skip
    path = resume or output or free_path("bisect", ".jsonl")
    with Progress() as progress:
        result = run(settings, path, resume is not None, progress)
    if as_json:
        print_json("bisect", document(result, settings, path))
    else:
        show(result, settings, path)
        if model == "tiny":
            note("note: tiny has one scale group per row and four heads; layout faults may hide in it: --model wide")
    sys.exit(result.exit_code)
