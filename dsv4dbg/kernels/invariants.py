"""Running an op's invariants, and those that several ops share.

A check sees values as an oracle does: floating-point numbers as float64 arrays, raw bytes as uint8, caches as
`OracleCache`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from dsv4dbg.kernels import oracle
from dsv4dbg.kernels.arrays import CacheArray
from dsv4dbg.kernels.contract import Invariant, Op

WIDENED = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))


def violations(op: Op, call: Mapping[str, Any]) -> dict[str, str]:
    """Broken invariants of ``op``: name -> what is wrong and where.

    Args:
        call: all arguments and outputs by name, as torch tensors or as `arrays.to_arrays` gives them.
    """
    values = {name: _as_oracle(value) for name, value in call.items()}
    found = {invariant.name: invariant.check(values) for invariant in op.invariants}
    return {name: sentence for name, sentence in found.items() if sentence}


def _as_oracle(value: Any) -> Any:
    if isinstance(value, CacheArray):
        return oracle.OracleCache(value.data, value.layout)
    if isinstance(value, np.ndarray) and value.dtype in WIDENED:
        return value.astype(np.float64)
    return oracle.to_numpy(value)


def first(where: np.ndarray) -> tuple[int, ...]:
    """Index of the first true element, as plain integers for a message."""
    return tuple(int(i) for i in np.argwhere(where)[0])


def finite(*outputs: str) -> Invariant:
    """The named outputs hold no NaN and no infinity, provided that every floating-point argument is finite."""

    def check(call: Mapping[str, Any]) -> str | None:
        floats = {n: v for n, v in call.items() if isinstance(v, np.ndarray) and v.dtype.kind == "f"}
        if not all(np.isfinite(v).all() for n, v in floats.items() if n not in outputs):
            return None
        for name in outputs:
            bad = ~np.isfinite(floats[name])
            if bad.any():
                return f"{name} is {floats[name][bad][0]} at {first(bad)} ({bad.sum()} of {bad.size} not finite)"
        return None

    return Invariant(f"{' and '.join(outputs)} finite", check)


def zero_rows(source: str, output: str) -> Invariant:
    """Rows of ``source`` that are zero give rows of ``output`` that are zero."""

    def check(call: Mapping[str, Any]) -> str | None:
        given, got = call[source], call[output]
        bad = ~given.any(axis=tuple(range(1, given.ndim))) & got.any(axis=tuple(range(1, got.ndim)))
        return f"row {first(bad)[0]} of {source} is zero, of {output} is not" if bad.any() else None

    return Invariant(f"zero rows of {source} give zero rows of {output}", check)
