"""Offline compilation of a candidate's Triton kernels for AMD GPUs, as a check of a bisect."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from dsv4dbg.bisect.subject import Outcome, Subject
from dsv4dbg.compare import Verdict
from dsv4dbg.kernels.compile_report import KernelReport, Task, compile_all

ARCHES = ("gfx942", "gfx950")

Compiled = Callable[[], list[KernelReport]]


def compiled(op: str, candidate: str, plugins: tuple[Path, ...], timeout: float) -> list[KernelReport]:
    """Reports of all kernels of one implementation; ``timeout``: seconds that one kernel may take."""
    if importlib.util.find_spec("triton") is None:
        return []
    return list(compile_all([Task(op, candidate, arch, plugins) for arch in ARCHES], timeout))


def offline_compile(subject: Subject) -> Outcome:
    """Every kernel compiles for gfx942 and gfx950 and fits their LDS; spilled registers are noted."""
    reports = subject.compiled()
    if not reports:
        return Outcome(Verdict.SKIPPED, "it launches no Triton kernel")
    unusable = [r for r in reports if r.error or r.lds_bytes > r.lds_limit]
    if unusable:
        first = unusable[0]
        evidence = {"kind": "compilation", "problems": [f"{r.name} on {r.arch}: {r.problem}" for r in unusable]}
        return Outcome(Verdict.FAULT, f"{first.name} on {first.arch}: {first.problem}", evidence=evidence)
    spilling = [f"{r.name} on {r.arch}: {r.problem}" for r in reports if r.problem]
    kernels = f"{len(reports)} kernels compile for {' and '.join(ARCHES)}"
    return Outcome(Verdict.PASS, f"{kernels}; {spilling[0]}" if spilling else f"{kernels} without spills")
