"""How Triton implementations are declared, where they run, and how their launches are seen.

On a GPU an implementation runs in this process. On CPU tensors it runs in Triton's interpreter, which must be chosen
before Triton is imported, and so in a process of its own (`dsv4dbg.kernels.interpreter`); the caller notices nothing.
For the compile report it runs with its launches recorded instead of made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import triton
from triton import knobs
from triton.compiler.compiler import make_backend
from triton.errors import TritonError
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from dsv4dbg.kernels import interpreter
from dsv4dbg.kernels.fill import FilledEmpties
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.registry import Shapes, Supports, implements
from dsv4dbg.kernels.table import device_arch

INTERPRETED = bool(knobs.runtime.interpret)
UNCOMPILED = "PassManager::run failed"  # the text of a RuntimeError where the compiler gives up
EMULATED_PROCESSORS = 8  # for choices by the number of processors where there is no device
_recorded_arch: str | None = None


def arch_of(device: torch.device) -> str:
    """``gfx942``, ``sm_90``, or ``cpu`` in the interpreter; what launch parameters may depend on."""
    return _recorded_arch or _device_arch(device)


@functools.cache
def _device_arch(device: torch.device) -> str:
    return device_arch(device)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors or compute units of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return EMULATED_PROCESSORS


def triton_implements(
    op: str,
    name: str = "triton",
    *,
    supports: Supports | None = None,
    prepare: Callable[..., Any] | None = None,
    shapes: Shapes | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`implements` for a function that launches Triton kernels: on CPU tensors it runs in the interpreter's process.

    ``shapes()`` yields arguments at model sizes on the meta device, for which the kernels are compiled too.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        return implements(op, name, supports=supports, prepare=prepare, shapes=shapes)(on_cpu_interpreted(function))

    return declare


def on_cpu_interpreted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: a call with CPU tensors is made in the interpreter's process, any other one here."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _here(args, kwargs):
            return function(*args, **kwargs)
        return interpreter.call(function, args, kwargs)[0]

    return call


def _here(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """False for CPU tensors outside the interpreter."""
    if INTERPRETED or _recorded_arch is not None:
        return True
    values = [v.data if isinstance(v, Cache) else v for v in (*args, *kwargs.values())]
    return not any(isinstance(v, torch.Tensor) and v.device.type == "cpu" for v in values)


@dataclass
class Observation:
    """What an implementation did: torch operators by name and count, kernels launched in order."""

    operators: dict[str, int] = field(default_factory=dict)
    launches: list[str] = field(default_factory=list)


def observed(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], fill: int
) -> tuple[Any, Observation]:
    """Call an implementation and watch it, in whatever process it runs.

    Args:
        fill: byte that memory allocated inside (``torch.empty`` and the like) is filled with.
    """
    inner = getattr(function, "__wrapped__", None)
    if inner is not None and not _here(args, kwargs):
        return interpreter.call(inner, args, kwargs, fill)
    watch = _Watch(fill)
    with _running(watch.launch), watch:
        result = function(*args, **kwargs)
    return result, watch.seen


class _Watch(FilledEmpties):
    def __init__(self, fill: int) -> None:
        super().__init__(fill)
        self.seen = Observation()
        self._inside = False  # a kernel: the interpreter's own operators do not count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside:
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.seen.operators[name] = self.seen.operators.get(name, 0) + 1
        return super().__torch_dispatch__(func, types, args, kwargs)

    def launch(self, run: Callable[..., Any], kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.seen.launches.append(kernel.fn.__name__)
        self._inside = True
        try:
            return run(kernel, *args, **kwargs)
        finally:
            self._inside = False


@dataclass(frozen=True)
class Launch:
    """One launch as an implementation asked for it; options such as ``num_warps`` are among ``kwargs``."""

    kernel: Any
    grid: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def launching(change: Callable[[Mapping[str, int]], Mapping[str, int]]) -> Iterator[list[str]]:
    """Inside, kernels are launched with other options; yields the names of those that were, in order.

    A launch that the compiler or the device does not take in the other form is made as it was asked for.

    Args:
        change: gets ``num_warps`` and ``num_stages`` of a launch and returns those that are to differ.
    """
    otherwise: list[str] = []

    def launch(run: Callable[..., Any], kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = change({name: kwargs.get(name, default) for name, default in _default_options().items()})
        if changed:
            try:
                result = run(kernel, *args, **{**kwargs, **changed})
            except (TritonError, RuntimeError) as error:
                if not isinstance(error, TritonError) and UNCOMPILED not in str(error):
                    raise
            else:
                otherwise.append(kernel.fn.__name__)
                return result
        return run(kernel, *args, **kwargs)

    with _running(launch):
        yield otherwise


def _default_options() -> dict[str, int]:
    """Options of a launch that names none, on the device at hand."""
    target: Any = triton.runtime.driver.active.get_current_target()
    options: Any = make_backend(target).parse_options({})
    return {"num_warps": options.num_warps, "num_stages": options.num_stages}


@contextmanager
def recording(target: Any) -> Iterator[list[Launch]]:
    """Inside, launches are collected and not made, as on a device that ``target`` (a GPUTarget) describes."""
    global _recorded_arch
    launches: list[Launch] = []

    def record(run: Callable[..., Any], kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        options = {k: v for k, v in kwargs.items() if k not in ("grid", "warmup")}
        launches.append(Launch(kernel, kwargs["grid"], args, options))

    def all_configs(self: Autotuner, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for config in self.prune_configs(kwargs):
            self.fn.run(*args, **{**kwargs, **config.all_kwargs()})

    driver, tune = triton.runtime.driver, Autotuner.run
    before = driver.__dict__.get("_active")
    _recorded_arch, Autotuner.run = target.arch, all_configs
    driver.set_active(cast(Any, _Driver(target)))
    try:
        with _running(record):
            yield launches
    finally:
        _recorded_arch, Autotuner.run = None, tune
        driver._active = before


@dataclass(frozen=True)
class _Driver:
    """Stands in for Triton's driver: the target without a device."""

    target: Any

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def _running(launch: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``kernel[grid](...)`` calls ``launch(run, kernel, args, kwargs)``."""

    def replaced(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: launch(run, self, args, kwargs)

    kinds: tuple[Any, ...] = (JITFunction, InterpretedFunction)
    originals = [kind.run for kind in kinds]
    for kind, run in zip(kinds, originals, strict=True):
        kind.run = replaced(run)
    try:
        yield
    finally:
        for kind, run in zip(kinds, originals, strict=True):
            kind.run = run
