"""Op: a named computation with its contract. The nouns *Op*, *Arg* and *Example* live here.

An op module declares what goes in, what comes out, what is mutated, how outputs are compared and what always
holds; capture, replay, checks, docs and screens are generic over that declaration::

    @op(
        family="norm",
        args={"x": tensor("token channel", "act"), "weight": weight("channel", "bf16 f32"), "eps": attr()},
        outputs={"y": tensor("token channel", "act")},
        compare={"y": Dense(terms="channel")},
    )
    def rms_norm(x, weight, *, eps): ...        # the PyTorch reference, which is the spec

    @rms_norm.oracle
    def _(x, weight, *, eps): ...               # float64 numpy, independent

    @rms_norm.examples
    def _(dims, rng): yield Example(...)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dsv4dbg.compare import Comparator
from dsv4dbg.kernels.dims import Dims

ACT_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Pointer:
    """An argument that points into a paged cache; -1 points nowhere.

    Attributes:
        arg: name of the integer argument.
        unit: what it counts: a ``slot`` (page * entries + offset) or a ``page``.
        first, until: attributes of the call that bound the columns which point into this cache; '' for no bound.
    """

    arg: str
    unit: str = "slot"
    first: str = ""
    until: str = ""

    def columns(self, args: Mapping[str, Any]) -> slice:
        """The part of the argument's last dim that points into the cache."""
        return slice(args[self.first] if self.first else None, args[self.until] if self.until else None)


@dataclass(frozen=True)
class Arg:
    """One argument or output of an op.

    Attributes:
        kind: ``tensor`` (an activation or index), ``weight`` (comes from the checkpoint), ``table`` (a constant of the
            run such as cos/sin), ``cache`` (a paged `Cache`), or ``attr`` (a Python scalar).
        dims: names of the dimensions, outermost first, for axis labels: ``token head channel``.
        dtype: accepted dtypes, space separated; ``act`` is the dtype of activations (bf16, or f32 in exactness tests).
        optional: may be None.
        slots: for a cache that the op mutates, the argument that names the slots it writes.
        read: for a cache, the arguments that name what is read of it.
        doc: one line, where the name does not say it all.
    """

    kind: str
    dims: str = ""
    dtype: str = ""
    optional: bool = False
    slots: str = ""
    doc: str = ""
    read: tuple[Pointer, ...] = ()

    @property
    def pointers(self) -> tuple[Pointer, ...]:
        """All that point into a cache: nothing else of it is read or written."""
        return (*((Pointer(self.slots),) if self.slots else ()), *self.read)


def tensor(dims: str, dtype: str, doc: str = "", optional: bool = False) -> Arg:
    return Arg("tensor", dims, dtype, optional, doc=doc)


def weight(dims: str, dtype: str, doc: str = "", optional: bool = False) -> Arg:
    return Arg("weight", dims, dtype, optional, doc=doc)


def table(dims: str, dtype: str, doc: str = "") -> Arg:
    return Arg("table", dims, dtype, doc=doc)


def cache(doc: str = "", *read: Pointer, slots: str = "", optional: bool = False) -> Arg:
    """A paged cache, read where ``read`` points; with ``slots`` the op writes exactly the records that this argument
    names (-1: none)."""
    return Arg("cache", "page byte", "u8", optional, slots, doc, read)


def attr(doc: str = "") -> Arg:
    return Arg("attr", doc=doc)


@dataclass(frozen=True)
class Invariant:
    """Something that holds for every correct call, checked without a reference.

    ``check(call)`` gets all arguments and outputs by name (numpy arrays; caches as they are) and returns None, or
    one sentence that says what is wrong and where.
    """

    name: str
    check: Callable[[Mapping[str, Any]], str | None]


@dataclass(frozen=True)
class Example:
    """One set of inputs: name, arguments by name (torch tensors on CPU, `Cache`, scalars)."""

    name: str
    args: Mapping[str, Any]


Examples = Callable[[Dims, np.random.Generator], Iterator[Example]]


@dataclass
class Op:
    """A named computation: contract, reference, oracle and examples. Calling it runs the reference."""

    name: str
    family: str
    args: Mapping[str, Arg]
    outputs: Mapping[str, Arg]
    reference: Callable[..., Any]
    compare: Mapping[str, Comparator]
    invariants: tuple[Invariant, ...] = ()
    switches: tuple[str, ...] = ()
    oracle_function: Callable[..., Any] | None = field(default=None, repr=False)
    examples_function: Examples | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        signature = [p for p in inspect.signature(self.reference).parameters if p != "numerics"]
        if signature != list(self.args):
            raise TypeError(f"op {self.name}: signature {signature} is not the contract's {list(self.args)}")
        judged = set(self.outputs) | set(self.mutates)
        if set(self.compare) != judged:
            raise TypeError(f"op {self.name}: compares {sorted(self.compare)}, yields {sorted(judged)}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.reference(*args, **kwargs)

    @property
    def mutates(self) -> dict[str, str]:
        """Mutated cache arguments -> the argument that names the slots written."""
        return {name: arg.slots for name, arg in self.args.items() if arg.slots}

    @property
    def reads_numerics(self) -> bool:
        return bool(self.switches)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of a call by name, in contract order, None for optional ones left out."""
        bound = dict(zip(self.args, args, strict=False))
        bound.update(kwargs)
        missing = [n for n, a in self.args.items() if n not in bound and not a.optional]
        unknown = [n for n in bound if n not in self.args]
        if missing or unknown:
            raise TypeError(f"op {self.name}: missing {missing}, unknown {unknown}")
        return {name: bound.get(name) for name in self.args}

    def name_outputs(self, result: Any) -> dict[str, torch.Tensor]:
        """The result of an implementation (None, a tensor or a tuple) as a mapping in contract order."""
        values = () if result is None else result if isinstance(result, tuple) else (result,)
        if len(values) != len(self.outputs):
            raise TypeError(f"op {self.name}: returned {len(values)} outputs, the contract has {len(self.outputs)}")
        return dict(zip(self.outputs, values, strict=True))

    def oracle(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: the op in float64, written independently (numpy arguments, see `dsv4dbg.kernels.oracle`)."""
        self.oracle_function = function
        return function

    def examples(self, function: Examples) -> Examples:
        """Decorator: generator of small inputs for a set of sizes."""
        self.examples_function = function
        return function


def op(
    *,
    family: str,
    args: Mapping[str, Arg],
    compare: Mapping[str, Comparator],
    outputs: Mapping[str, Arg] | None = None,
    invariants: tuple[Invariant, ...] = (),
    switches: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Op]:
    """Declare an op; the decorated function becomes its PyTorch reference.

    ``switches`` are the fields of `Numerics` that the reference reads; with any, it takes ``numerics`` by keyword.
    """

    def declare(reference: Callable[..., Any]) -> Op:
        return Op(
            reference.__name__, family, dict(args), dict(outputs or {}), reference, dict(compare), invariants, switches
        )

    return declare
