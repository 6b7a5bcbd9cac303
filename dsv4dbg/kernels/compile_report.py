"""Offline compile report: what AMD's compiler makes of every kernel, without a GPU.

Implementations run with their launches recorded (`triton_run.recording`), on the shapes that they declare or on their
op's examples; each distinct launch is compiled for each architecture in a child process that is killed when it takes
too long. LDS is held to its limit here: Triton compiles more than a device has, and only a driver would refuse it.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.child import Child, ChildDied

KIB = 1024
LDS_LIMIT = {"gfx942": 64 * KIB, "gfx950": 160 * KIB, "gfx1151": 64 * KIB, "gfx1201": 64 * KIB}
LDS_SHARED = {**LDS_LIMIT, "gfx1151": 128 * KIB, "gfx1201": 128 * KIB}  # what four SIMDs share
ARCHES = tuple(LDS_LIMIT)
SIMDS = 4
START_SECONDS = 300.0  # for a compiler's imports on a busy machine


@dataclass(frozen=True)
class KernelReport:
    """One kernel, compiled for one architecture.

    Attributes:
        name: the kernel, with its constants where one implementation launches it in several forms.
        lds_bytes, lds_limit: local memory of a workgroup.
        vgpr, agpr, sgpr: registers per lane or wave; vgpr counts agpr where both come from one file (gfx9).
        spills: registers that went to memory (scalar ones that went to lanes of vector registers are not counted);
            scratch_bytes: memory per lane that they and arrays take.
        occupancy: waves per SIMD that registers and LDS leave room for.
        matrix_instructions: mnemonics in the machine code.
        software_path: what is done slowly that the source asks for, or "".
        error: why there is no machine code, or "".
    """

    name: str
    op: str
    implementation: str
    arch: str
    warps: int = 0
    lds_bytes: int = 0
    lds_limit: int = 0
    vgpr: int = 0
    agpr: int = 0
    sgpr: int = 0
    spills: int = 0
    scratch_bytes: int = 0
    occupancy: int = 0
    matrix_instructions: tuple[str, ...] = ()
    software_path: str = ""
    seconds: float = 0.0
    error: str = ""

    @property
    def problem(self) -> str:
        """Why the kernel is no good on this architecture, or ""."""
        if self.error:
            return self.error
        if self.lds_bytes > self.lds_limit:
            return f"LDS {self.lds_bytes} exceeds {self.lds_limit}"
        return f"{self.spills} registers spilled" if self.spills else ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "matrix_instructions": list(self.matrix_instructions)}


@dataclass(frozen=True)
class Task:
    """One implementation for one architecture; ``skip`` launches are reported already."""

    op: str
    implementation: str
    arch: str
    plugins: tuple[Path, ...] = ()
    examples: bool = False
    skip: int = 0


def compile_all(tasks: Iterable[Task], timeout: float = 120.0, jobs: int | None = None) -> Iterator[KernelReport]:
    """Reports of all kernels of ``tasks``, as they come.

    Args:
        timeout: seconds that one kernel may take.
        jobs: compilers at work at once (default: one per two processors, at least two).
    """
    jobs = jobs or max(2, (os.cpu_count() or 2) // 2)
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(jobs) as pool:
        compilers: list[Compiler] = []

        def run(task: Task) -> list[KernelReport]:
            compiler = compilers.pop() if compilers else Compiler(cache, timeout)
            try:
                return compiler.run(task)
            finally:
                compilers.append(compiler)

        try:
            for done in as_completed([pool.submit(run, task) for task in tasks]):
                yield from done.result()
        finally:
            for compiler in compilers:
                compiler.close()


class Compiler:
    """A child process that compiles, replaced when it dies."""

    def __init__(self, cache: str, timeout: float) -> None:
        self._environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        self._timeout = timeout
        self._child: Child | None = None
        self._ready = False

    def run(self, task: Task) -> list[KernelReport]:
        reports: list[KernelReport] = []
        while True:
            name = f"({task.implementation})"
            child = self._child = self._child or Child("dsv4dbg.kernels.compile_child", self._environment)
            try:
                if not self._ready:
                    child.wait(START_SECONDS)
                    self._ready = child.connection.recv()
                child.connection.send(Task(**{**vars(task), "skip": len(reports)}))
                while True:
                    child.wait(self._timeout)
                    kind, value = child.connection.recv()
                    if kind == "done":
                        return reports
                    if kind == "start":
                        name = value
                    else:
                        reports.append(value)
            except (EOFError, OSError, ChildDied) as error:
                died = error if isinstance(error, ChildDied) else child.died()
                self._child, self._ready = None, False
                text = f"the compiler {cause(str(died))}"
                reports.append(KernelReport(name, task.op, task.implementation, task.arch, error=text))
                if name == f"({task.implementation})":  # before any kernel: nothing to skip to
                    return reports

    def close(self) -> None:
        if self._child is not None:
            self._child.close(kill=True)


def cause(text: str) -> str:
    """One line of a compiler's output: how it ended, and the line that names an error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"LLVM ERROR|error:|Error\b|Assertion", line)]
    first = lines[0].removesuffix("; its last words:")
    return f"{first}: {errors[0]}" if errors and errors[0] != lines[0] else first


def occupancy(arch: str, by_registers: int, lds: int, warps: int) -> int:
    """Waves per SIMD, at least 1 if a workgroup fits at all."""
    if not lds:
        return by_registers
    groups = LDS_SHARED[arch] // lds
    return min(by_registers, max(1, groups * warps // SIMDS)) if groups else 0


def software_path(ttir: str, machine_code: str, instructions: Iterable[str], warnings: Iterable[str] = ()) -> str:
    """What the source asks for and the machine code does with other instructions, in words; "" if nothing."""
    kinds = [re.sub(r".*\d+x\d+x\d+_?", "", name) for name in instructions]
    wanted = {"f32": r"^f32", "f16": r"^f16", "bf16": r"^bf16", "i8": r"i8|iu8|iu4"}
    found = [str(w).splitlines()[0] for w in warnings if "fp8" in str(w).lower() or "f8" in str(w)]
    for a, b in sorted(set(re.findall(r"tt\.dot .*: tensor<(?:\d+x)+(\w+)> \* tensor<(?:\d+x)+(\w+)>", ttir))):
        pattern = wanted.get(a, r"fp8|bf8|f8f6f4" if a.startswith("f8") else r"^$")
        if not any(re.search(pattern, kind) for kind in kinds):
            instead = f"as {', '.join(sorted(set(kinds)))} matrix product" if kinds else "without matrix instructions"
            found.append(f"{a} x {b} dot {instead}")
    if "tt.dot_scaled" in ttir and not any("scale" in name for name in instructions):
        found.append("scaled dot without scaled matrix instructions")
    if re.search(r"tt\.fp_to_fp.*f8E", ttir) and not re.search(r"v_cvt_\w*(fp8|bf8)", machine_code):
        found.append("FP8 conversion in software")
    return "; ".join(found)


def tasks(
    ops: Iterable[str], arches: Iterable[str], plugins: tuple[Path, ...] = (), examples: bool = False
) -> list[Task]:
    """Every implementation besides the reference of these ops (none named: of all), for every architecture."""
    from dsv4dbg.kernels.registry import registry
    from dsv4dbg.plan import REFERENCE

    unknown = [arch for arch in arches if arch not in ARCHES]
    if unknown:
        raise DbgError(f"architecture '{unknown[0]}' is not known here", f"known: {', '.join(ARCHES)}")
    chosen = {registry().op(name).name for name in ops} or set(registry().ops)
    names = [(op, name) for op, name in registry().implementations if name != REFERENCE and op in chosen]
    return [Task(op, name, arch, plugins, examples) for op, name in names for arch in arches]
