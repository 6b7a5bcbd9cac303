"""The compiler's process: records an implementation's launches and compiles each (see `compile_report`)."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler.errors import CompilationError
from triton.runtime.jit import create_function_from_signature

from dsv4dbg.kernels.child import parent
from dsv4dbg.kernels.compile_report import LDS_LIMIT, KernelReport, Task, occupancy, software_path
from dsv4dbg.kernels.contract import Op
from dsv4dbg.kernels.dims import WIDE
from dsv4dbg.kernels.numerics import OFFICIAL
from dsv4dbg.kernels.registry import Implementation, load_plugin, registry
from dsv4dbg.kernels.triton_run import Launch, recording


def target_of(arch: str) -> GPUTarget:
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


def calls(op: Op, implementation: Implementation, examples: bool) -> Iterator[dict[str, Any]]:
    """Arguments to record with: the declared shapes, and the op's wide examples where there are none or on request."""
    if implementation.shapes is not None:
        yield from (op.bind((), args) for args in implementation.shapes())
    if implementation.shapes is None or examples:
        assert op.examples_function is not None
        for example in op.examples_function(WIDE, np.random.default_rng(0)):
            yield op.bind((), example.args)


def record(op: Op, implementation: Implementation, target: GPUTarget, examples: bool) -> list[Launch]:
    """Launches that differ in more than sizes and addresses, in order."""
    found: dict[str, Launch] = {}
    with recording(target) as launches:
        for args in calls(op, implementation, examples):
            seen = {**args, "numerics": OFFICIAL}
            if implementation.supports and implementation.supports(None, target.arch, seen):
                continue
            if op.reads_numerics:
                args["numerics"] = OFFICIAL
            if implementation.prepare is not None:
                weights = {n: args[n] for n, a in op.args.items() if a.kind == "weight"}
                args["prepared"] = implementation.prepare(**weights)
            implementation.function(**args)
    for launch in launches:
        options, signature, constants, _ = specialised(launch, target)
        key = (
            launch.kernel.fn.__qualname__,
            launch.kernel.fn.__module__,
            signature,
            sorted(constants.items()),
            options,
        )
        found.setdefault(repr(key), launch)
    return list(found.values())


def specialised(launch: Launch, target: GPUTarget) -> tuple[Any, dict, dict, dict]:
    """Options, signature, constants and attributes of a launch, as the JIT would make them for this target."""
    backend = make_backend(target)
    kernel, kwargs = launch.kernel, {"debug": False, **launch.kwargs}
    for name in ("instrumentation_mode", "fpsan_homomorphic_casts"):
        if hasattr(knobs.compilation, name):
            kwargs.setdefault(name, getattr(knobs.compilation, name))
    bound, specialization, _ = create_function_from_signature(kernel.signature, kernel.params, backend)(
        *launch.args, **kwargs
    )
    return kernel._pack_args(backend, kwargs, bound, specialization, {})


def compile_launch(launch: Launch, target: GPUTarget) -> Any:
    """Triton's compiled kernel; raises what the compiler raises."""
    options, signature, constants, attributes = specialised(launch, target)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options.__dict__)


def report(launch: Launch, name: str, task: Task, target: GPUTarget) -> KernelReport:
    made = partial(KernelReport, name, task.op, task.implementation, task.arch)
    start = time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as caught, recording(target):
            warnings.simplefilter("always")
            compiled = compile_launch(launch, target)
    except Exception as error:
        return made(seconds=time.perf_counter() - start, error=_cause(error))
    code = compiled.asm["amdgcn"]
    scratch = _number(r"\.private_segment_fixed_size:", code)
    lds, warps = compiled.metadata.shared, compiled.metadata.num_warps
    instructions = tuple(sorted(set(re.findall(r"v_(?:s?mfmac?|s?wmmac?)_\w+", code))))
    return made(
        warps=warps,
        lds_bytes=lds,
        lds_limit=LDS_LIMIT[task.arch],
        vgpr=_number(r"\.vgpr_count:", code),
        agpr=_number(r"\.agpr_count:", code),
        sgpr=_number(r"\.sgpr_count:", code),
        spills=_number(r"\.vgpr_spill_count:", code) + (_number(r"\.sgpr_spill_count:", code) if scratch else 0),
        scratch_bytes=scratch,
        occupancy=occupancy(task.arch, _number(r"; Occupancy:", code), lds, warps),
        matrix_instructions=instructions,
        software_path=software_path(compiled.asm["ttir"], code, instructions, [str(w.message) for w in caught]),
        seconds=time.perf_counter() - start,
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern + r"\s*(\d+)", text)
    return int(found[1]) if found else 0


def _cause(error: BaseException) -> str:
    """The root of a compiler's error in one line, with the line of the kernel's file."""
    where, root = "", error
    while root is not None:
        if isinstance(root, CompilationError) and root.node is not None:
            where = f", at line {getattr(root.node, 'lineno', '?')} of the kernel"
        if root.__cause__ is None:
            break
        root = root.__cause__
    lines = [line for line in str(root).splitlines() if line.strip()] or [""]
    if isinstance(root, CompilationError):  # source lines, then the cause
        return lines[-1].strip() + where
    return f"{type(root).__name__}: {lines[0].strip()}{where}"


def names(launches: list[Launch], target: GPUTarget) -> list[str]:
    """Kernel names; those launched in several forms with what the forms differ in: constants, then pointer types."""
    constants, pointers = [], []
    for launch in launches:
        options, signature, found, _ = specialised(launch, target)
        arguments = list(signature)
        values = {arguments[path[0]]: value for path, value in found.items() if len(path) == 1 and value is not None}
        constants.append({**values, "warps": options.num_warps, "stages": options.num_stages})
        pointers.append({k: v for k, v in signature.items() if str(v).startswith("*")})
    result = [launch.kernel.fn.__name__.strip("_") for launch in launches]
    for values in (constants, pointers):
        alike = {name: [v for v, n in zip(values, result, strict=True) if n == name] for name in result}
        result = [_with(name, v, alike[name]) for name, v in zip(result, values, strict=True)]
    return result


def _with(name: str, values: dict[str, Any], forms: list[dict[str, Any]]) -> str:
    shown = [f"{k}={_short(v)}" for k, v in values.items() if len({repr(form.get(k)) for form in forms}) > 1]
    return f"{name}[{', '.join(shown)}]" if shown else name


def _short(value: Any) -> str:
    return "/".join(str(v) for v in value if v != "") if isinstance(value, tuple) else str(value)


def _serve() -> None:
    connection = parent()
    connection.send(True)
    loaded: set[Any] = set()
    while True:
        try:
            task: Task = connection.recv()
        except EOFError:
            return
        for plugin in set(task.plugins) - loaded:
            load_plugin(plugin)
            loaded.add(plugin)
        op, implementation = registry().op(task.op), registry().implementation(task.op, task.implementation)
        target = target_of(task.arch)
        try:
            launches = record(op, implementation, target, task.examples)
        except Exception as error:
            text = f"its launches could not be recorded: {_cause(error)}"
            failed = KernelReport(f"({task.implementation})", task.op, task.implementation, task.arch, error=text)
            connection.send(("report", failed))
            launches = []
        labels = names(launches, target)
        for label, launch in list(zip(labels, launches, strict=True))[task.skip :]:
            connection.send(("start", label))
            connection.send(("report", report(launch, label, task, target)))
        connection.send(("done", None))


if __name__ == "__main__":
    _serve()
