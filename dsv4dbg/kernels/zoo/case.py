"""Zoo cases: implementations that are wrong on purpose, each re-creating a public fault, to prove that it is found.

A case is a declaration in a module of this package::

    @case("no-sink", op="sparse_mla_prefill", kind="values", shows="every token; less with more keys")
    def no_sink(*, sink, **call):
        \"""The sink's term is left out of the denominator.\"""
        return sparse_mla_prefill(sink=None, **call)

Plans and candidates name it ``zoo:no-sink``; no other name leads to it, and the registry does not list it. Modules
whose names end in ``_triton`` hold real kernels, for faults that only a device has; in Triton's interpreter they do
what the interpreter can do of it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from dsv4dbg.kernels.registry import ZOO, Implementation

KINDS = {
    "values": "a wrong result that the call's inputs alone decide",
    "state": "wrong after other calls in the same process, right in a fresh one",
    "race": "other bits from run to run",
    "memory": "memory is read or written that the call does not own or never wrote",
    "fault": "the call raises, or its process ends",
    "hang": "the call does not return",
    "together": "two ops, each right as long as only one of them is swapped",
}


@dataclass(frozen=True)
class Case:
    """One planted fault.

    Attributes:
        op: the op that is at fault.
        bug: id of the public report that it re-creates, in the project's collection of reports; empty for a rule of the
            model that is broken without one.
        kind: one of `KINDS`.
        shows: where in a forward it shows, in words.
        implementations: op -> its implementation; more than ``op``'s own where the fault takes two.
        fingerprint: words of the fingerprint that the judge finds, if it has one for this fault.
        model: the smallest model on whose coverage workload it shows: ``tiny`` or ``wide``.
        device: ``cuda`` for a fault that no CPU shows.
    """

    name: str
    op: str
    bug: str
    kind: str
    shows: str
    implementations: Mapping[str, Implementation]
    fingerprint: str = ""
    model: str = "tiny"
    device: str = ""

    @property
    def implementation(self) -> Implementation:
        return self.implementations[self.op]

    @property
    def doc(self) -> str:
        """The fault and the rule broken, in one paragraph."""
        return " ".join((self.implementation.function.__doc__ or "").split())


_declared: dict[str, Case] = {}


def case(
    name: str, *, op: str, kind: str, shows: str, bug: str = "", fingerprint: str = "", model: str = "tiny",
    device: str = "", partner: tuple[str, Callable[..., Any]] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
    """Declare the decorated function, which takes the reference's arguments by keyword, as a `Case`.

    Args:
        partner: another op and its implementation, without which the fault does not show.
    """
    assert kind in KINDS, kind
    assert name not in _declared, name

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        functions = {op: function, **(dict([partner]) if partner else {})}
        made = {o: Implementation(o, f"{ZOO}{name}", f) for o, f in functions.items()}
        _declared[name] = Case(name, op, bug, kind, shows, made, fingerprint, model, device)
        return function

    return declare


@cache
def cases() -> dict[str, Case]:
    """All cases by name. Those of modules that do not import (no triton) are missing."""
    root = importlib.import_module(__package__ or "")
    for info in pkgutil.iter_modules(root.__path__, f"{root.__name__}."):
        try:
            importlib.import_module(info.name)
        except ImportError:
            if not info.name.endswith("_triton"):
                raise
    return dict(_declared)
