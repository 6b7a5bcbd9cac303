"""All ops and implementations, found by walking this package. The noun *Implementation* lives here.

Every module of ``dsv4dbg.kernels.<family>`` may declare ops and implementations. A module that does not import
(no triton, say) is kept as `Unavailable` with its reason and shown by ``dsv4dbg ops``; nothing raises at start.
Names that begin with ``zoo:`` lead to deliberately wrong implementations (`dsv4dbg.kernels.zoo`), which are in no list.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.contract import Op
from dsv4dbg.plan import REFERENCE
from dsv4dbg.site import op_name

ENTRY_POINTS = "dsv4dbg.implementations"
ZOO = "zoo:"
Supports = Callable[..., str | None]
Shapes = Callable[[], Iterable[Mapping[str, Any]]]


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
        function: takes the reference's arguments.
        supports: ``supports(device, arch, args)`` returns None, or the reason why it cannot run; ``args`` are all
            arguments by name and ``numerics``.
        prepare: runs once per layer on the op's weights and returns what ``function`` gets as ``prepared``.
        shapes: yields arguments at model sizes, on the meta device, for which kernels are compiled offline.
    """

    op: str
    name: str
    function: Callable[..., Any]
    supports: Supports | None = None
    prepare: Callable[..., Any] | None = None
    shapes: Shapes | None = None

    def why_not(self, device: torch.device, arch: str, args: dict[str, Any]) -> str | None:
        return self.supports(device, arch, args) if self.supports else None


@dataclass(frozen=True)
class Unavailable:
    """A module that could not be imported, and why."""

    module: str
    reason: str


@dataclass
class Registry:
    ops: dict[str, Op] = field(default_factory=dict)
    implementations: dict[tuple[str, str], Implementation] = field(default_factory=dict)
    unavailable: list[Unavailable] = field(default_factory=list)

    def op(self, name: str) -> Op:
        name = op_name(name)
        if name not in self.ops:
            raise DbgError(f"unknown op '{name}'", f"known: {', '.join(sorted(self.ops))}")
        return self.ops[name]

    def find(self, op: str, name: str) -> Implementation | None:
        """An implementation, or a zoo case, by name."""
        if not name.startswith(ZOO):
            return self.implementations.get((op, name))
        from dsv4dbg.kernels.zoo.case import cases  # only now: it imports the ops

        case = cases().get(name.removeprefix(ZOO))
        return case.implementations.get(op) if case else None

    def implementation(self, op: str, name: str) -> Implementation:
        found = self.find(op, name)
        if found is None:
            known = ", ".join(self.names(op)) or "none"
            raise DbgError(f"op {op} has no implementation '{name}'", f"it has: {known}")
        return found

    def broken(self, op: str, name: str) -> str | None:
        """Why the module of an implementation did not import; None if there is no such module."""
        found = (u for u in self.unavailable if u.module.endswith(f".{op}_{name}"))
        return next((f"{u.module} is unavailable: {u.reason}" for u in found), None)

    def names(self, op: str) -> list[str]:
        return [name for o, name in self.implementations if o == op]

    def add_op(self, op: Op) -> None:
        self.ops[op.name] = op
        self.add(Implementation(op.name, REFERENCE, op.reference))

    def add(self, implementation: Implementation) -> None:
        self.implementations[implementation.op, implementation.name] = implementation


_pending: list[Implementation] = []


def implements(
    op: str,
    name: str,
    *,
    supports: Supports | None = None,
    prepare: Callable[..., Any] | None = None,
    shapes: Shapes | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the decorated function, which has the reference's signature, as implementation ``name`` of ``op``."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _pending.append(Implementation(op_name(op), name, function, supports, prepare, shapes))
        return function

    return register


def _collect(target: Registry, module: Any) -> None:
    for value in vars(module).values():
        if isinstance(value, Op):
            target.add_op(value)
    while _pending:
        target.add(_pending.pop(0))


def _take(target: Registry, module_name: str) -> None:
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        _pending.clear()
        target.unavailable.append(Unavailable(module_name, str(error)))
        return
    _collect(target, module)


@cache
def registry() -> Registry:
    """The registry of this package and of installed entry points, built once per process."""
    found = Registry()
    root = importlib.import_module("dsv4dbg.kernels")
    for info in pkgutil.walk_packages(root.__path__, "dsv4dbg.kernels."):
        family = info.name.split(".")[2]
        if info.name.count(".") == 3 and family != "zoo":  # dsv4dbg.kernels.<family>.<module>
            _take(found, info.name)
    for entry in entry_points(group=ENTRY_POINTS):
        _take(found, entry.value)
    return found


def import_file(path: Path) -> tuple[Any, list[Implementation]]:
    """Import a user's file: its module, and the implementations that it declares with `implements`, unregistered.

    Like a script, it may import what stands beside it.
    """
    path = Path(path)
    if not path.is_file():
        raise DbgError(f"plug-in {path} is not a file")
    if (beside := str(path.resolve().parent)) not in sys.path:
        sys.path.append(beside)
    registry()  # built now, so that a file that asks for it does not find its own half of it
    spec = importlib.util.spec_from_file_location(f"dsv4dbg_plugin_{path.stem}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise DbgError(f"plug-in {path} does not import: {type(error).__name__}: {error}") from error
    finally:
        declared = list(_pending)
        _pending.clear()
    return module, declared


def load_plugin(path: Path) -> list[Implementation]:
    """Import a user's file and register the implementations that it declares with `implements`."""
    module, declared = import_file(path)
    for implementation in declared:
        registry().op(implementation.op)
        if implementation.name == REFERENCE:
            raise DbgError(f"plug-in {path} calls its {implementation.op} '{REFERENCE}'; that is the reference's name")
    if not declared:
        raise DbgError(f"plug-in {path} declares no implementation", "decorate one with @implements('op', 'name')")
    _collect(registry(), module)
    for implementation in declared:
        registry().add(implementation)
    return declared
