"""``dsv4dbg capture``: a forward with every op's inputs and outputs written to a trace."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import click

from dsv4dbg.cli.options import free_path, read_text, token_ids
from dsv4dbg.cli.output import columns, note, print_json, size
from dsv4dbg.errors import DbgError
from dsv4dbg.plan import Plan
from dsv4dbg.site import Pattern


@click.command()
@click.option("--prompt", default=None, metavar="TEXT", help="Prompt text; gets no BOS.")
@click.option(
    "--prompt-file", type=click.Path(path_type=Path), default=None, metavar="FILE", help="Prompt from a file."
)
@click.option("--tokens", default=None, metavar="IDS", help="Prompt as token ids: '1,2,3', or a file of them.")
@click.option("--chat", is_flag=True, help="Wrap the prompt as a user's turn.")
@click.option("--decode", default=4, show_default=True, help="Decode steps after the prompt's own next token.")
@click.option(
    "--verify", type=click.IntRange(2, 8), default=None, metavar="N", help="Decode N tokens a step with drafts."
)
@click.option(
    "--drafts", default=None, metavar="IDS", help="With --verify: draft ids or a file (default: the MTP block)."
)
@click.option("--workload", default=None, metavar="NAME|FILE", help="Instead of a prompt: coverage, or a JSON file.")
@click.option("--chunk", type=click.IntRange(min=1), default=None, help="Prefill in pieces of this many tokens.")
@click.option("--plan", default="*=torch", show_default=True, metavar="SPEC", help="Which implementation runs where.")
@click.option("--plugin", type=click.Path(path_type=Path), multiple=True, metavar="FILE", help="Load your kernels.")
@click.option("--sites", multiple=True, metavar="PATTERN", help="Keep only these sites (may be given again).")
@click.option("--layers", default=None, metavar="A-B", help="Keep only these layers.")
@click.option("--model", default="tiny", show_default=True, metavar="NAME|DIR", help="tiny, wide or a checkpoint.")
@click.option("--numerics", default="official", show_default=True, help="Numerics profile: official or hf.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option(
    "--kv-cache", default=None, metavar="FORMAT",
    help="fp8, fp8-fnuz, fp8-fnuz-window, bf16 or f32 (default: fp8; bf16 with --numerics hf).",
)  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Seed of the physical placement of cache pages.")
@click.option("--measure", is_flag=True, help="Also time the forward without capture.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=None, help="Trace file (default: in traces/).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def capture(
    prompt: str | None, prompt_file: Path | None, tokens: str | None, chat: bool, decode: int,
    verify: int | None, drafts: str | None, workload: str | None, chunk: int | None,
    plan: str, plugin: tuple[Path, ...], sites: tuple[str, ...], layers: str | None, model: str, numerics: str,
    device: str, kv_cache: str | None, seed: int, measure: bool, output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Run a forward and write every op's inputs, outputs and cache writes to a trace.

    \b
    dsv4dbg capture --prompt "The capital of France is"
    dsv4dbg capture --prompt "..." --plan 'op:rms_norm=mine' --plugin mine.py -o mine.h5
    dsv4dbg capture --model wide --workload coverage --sites op:compress_insert
    dsv4dbg capture --model wide --tokens 1,2,3,4,5 --sites 'L2.attn.*' --sites op:moe_router
    """
    prompts = (("--prompt", prompt), ("--prompt-file", prompt_file), ("--tokens", tokens), ("--workload", workload))
    given = [name for name, value in prompts if value is not None]
    if len(given) != 1:
        raise DbgError(
            f"{' and '.join(given)} were both given" if given else "there is no prompt",
            "give one of --prompt TEXT, --prompt-file FILE, --tokens IDS and --workload NAME",
        )
    from dsv4dbg.model import recording

    request = recording.Request(
        prompt=read_text(prompt_file) if prompt_file else prompt,
        tokens=token_ids(tokens) if tokens is not None else (),
        chat=chat,
        decode=decode,
        verify=verify,
        drafts=token_ids(drafts) if drafts is not None else None,
        workload=workload,
        chunk=chunk,
        model=model,
        numerics=numerics,
        plan=Plan.parse(plan),
        plugins=plugin,
        sites=tuple(Pattern(s) for s in sites) + _layer_patterns(layers),
        device=device,
        kv_cache=kv_cache or ("bf16" if numerics == "hf" else "fp8"),
        seed=seed,
    )
    done = recording.record(request, output or free_path(Path(model).name or "model", ".h5"))
    overhead = None
    if measure:
        plain = recording.measure(replace(request, plugins=()))
        overhead = {"plain_s": plain, "captured_s": done.seconds, "ratio": done.seconds / plain}
    if as_json:
        document = {
            "completion": done.completion, "completion_tokens": done.tokens, "prompt_tokens": len(done.prompt_tokens),
            "trace": str(done.path), "sites": done.sites, "bytes": done.bytes, "plan": done.plan,
            "fallbacks": done.fallbacks, "environment": done.environment, "seconds": done.seconds,
            "regimes": done.regimes,
        }  # fmt: skip
        print_json("capture", document | ({"overhead": overhead} if overhead else {}))
        return
    if workload:
        missed = [name for name, reached in done.regimes.items() if not reached]
        print(f"workload {workload}: {len(done.regimes) - len(missed)} of {len(done.regimes)} regimes reached")
        print("\n".join(f"  not reached: {name}" for name in missed))
    else:
        print(f"{prompt or ''}{done.completion}\n" if done.completion is not None else f"tokens {done.tokens}\n")
    rows = [
        ("trace", f"{done.path}  ({size(done.bytes)}, {done.sites:,} site calls)"),
        ("plan", done.plan),
        ("model", f"{model}, numerics {numerics}, caches {request.kv_cache}, {device}"),
        ("time", f"{done.seconds:.2f} s, of it {done.capture_seconds:.2f} s writing"),
    ]
    if overhead:
        rows.append(
            ("overhead", f"{overhead['ratio']:.2f} times the forward without capture ({overhead['plain_s']:.2f} s)")
        )
    print(columns(rows))
    for what, reason in done.fallbacks.items():
        note(f"note: {what} fell back to torch: {reason}")
    print(f"next   dsv4dbg diff {done.path} CANDIDATE.h5   (the same prompt captured with another --plan)")


def _layer_patterns(layers: str | None) -> tuple[Pattern, ...]:
    if layers is None:
        return ()
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", layers)
    if not match:
        raise DbgError(f"'{layers}' is not a range of layers", "write --layers 3-7 or --layers 5")
    first, last = match[1], match[2] or match[1]
    return Pattern(f"L{first}-{last}"), Pattern(f"L{first}-{last}.*")
