"""``dsv4dbg compile``: what AMD's compiler makes of every kernel, offline."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dsv4dbg.cli.output import columns, note, print_json, progress
from dsv4dbg.errors import Untestable

if TYPE_CHECKING:
    from dsv4dbg.kernels.compile_report import KernelReport


@click.command("compile")
@click.option("--arch", default="gfx942,gfx950", show_default=True, metavar="LIST", help="Also gfx1151, gfx1201.")
@click.option("--op", "ops", multiple=True, metavar="OP", help="Only this op's kernels (may be given again).")
@click.option(
    "--plugin", type=click.Path(path_type=Path), multiple=True, metavar="FILE", help="Compile your kernels too."
)
@click.option("--examples", is_flag=True, help="Also in the forms in which the op's examples launch them.")
@click.option("--timeout", default=120.0, show_default=True, metavar="SECONDS", help="For one kernel.")
@click.option(
    "--jobs", type=click.IntRange(min=1), default=None, help="Compilers at once (default: half the processors)."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def compile(
    arch: str, ops: tuple[str, ...], plugin: tuple[Path, ...], examples: bool, timeout: float, jobs: int | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Compile every Triton kernel for AMD GPUs, without one: LDS, registers, spills, matrix instructions.

    Exit code 1 if a kernel fails, spills registers or needs more LDS than there is.

    \b
    dsv4dbg compile
    dsv4dbg compile --arch gfx950 --op sparse-mla-decode
    dsv4dbg compile --plugin my_decode.py --op sparse-mla-decode --json
    """
    import importlib.util

    if importlib.util.find_spec("triton") is None:
        raise Untestable("Triton is not installed", "pip install 'dsv4dbg[cpu]', or the triton of your ROCm torch")
    from dsv4dbg.kernels.compile_report import compile_all, tasks
    from dsv4dbg.kernels.registry import load_plugin

    for file in plugin:
        load_plugin(file)
    arches = [part.strip() for part in arch.split(",") if part.strip()]
    todo = tasks(ops, arches, plugin, examples)
    found = list(progress(compile_all(todo, timeout, jobs), None, "compiling"))
    found.sort(key=lambda k: (k.op, k.implementation, k.name, arches.index(k.arch)))
    bad = [kernel for kernel in found if kernel.problem]
    if not found:
        raise Untestable("no implementation launches a Triton kernel", "dsv4dbg ops shows what there is")
    if as_json:
        print_json("compile", {"kernels": [kernel.to_json() for kernel in found]})
    else:
        _show(found, bad, arches)
    sys.exit(1 if bad else 0)


def _show(found: list[KernelReport], bad: list[KernelReport], arches: list[str]) -> None:
    where = ", ".join(arches)
    if bad:
        print(f"{len(bad)} of {len(found)} kernels are no good on {where}")
    else:
        print(f"{len(found)} kernels compile for {where}: no spills, LDS within its limit")
    head = (
        "op",
        "kernel",
        "arch",
        "LDS",
        "VGPR (AGPR)",
        "SGPR",
        "spills",
        "scratch",
        "waves",
        "seconds",
        "matrix instructions",
    )
    print(columns([head, *map(_row, found)], "  "))
    for kernel in bad:
        note(f"{kernel.op} {kernel.name} on {kernel.arch}: {kernel.problem}")
    slow = sorted({(k.op, k.name, k.arch, k.software_path) for k in found if k.software_path})
    for op, name, arch, text in slow:
        print(f"slow path: {op} {name} on {arch}: {text}")
    print(f"next: dsv4dbg capture --prompt TEXT --plan 'op:{(bad or found)[0].op}={(bad or found)[0].implementation}'")


def _row(k: KernelReport) -> tuple[str, ...]:
    if k.error:
        return (k.op, k.name, k.arch, *("-",) * 6, f"{k.seconds:.1f}", k.error)
    return (
        k.op, k.name, k.arch, f"{k.lds_bytes}/{k.lds_limit}", f"{k.vgpr} ({k.agpr})", str(k.sgpr), str(k.spills),
        str(k.scratch_bytes), str(k.occupancy), f"{k.seconds:.1f}",
        ", ".join(name.removeprefix("v_") for name in k.matrix_instructions) or "none",
    )  # fmt: skip
