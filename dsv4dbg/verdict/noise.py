"""The derived noise of an output: from the roundings, the number of terms and their size that the contract states.

rounded = u sqrt(k / 3)                     k roundings to activations of half step u, spread evenly
rounded^2 += 1.6 * 0.045 * rounded          an FP8 quantiser behind them: a rounding moves a value over a tie
                                            with probability 0.4 a / h, and then by 2h; h is 0.045 |x| rms
summed  = (sqrt(n) + 4) 2^-24               n terms in float32, errors in random order; 4 for exp, rsqrt, division
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dsv4dbg.compare import Dense
from dsv4dbg.verdict.metrics import Noise
from dsv4dbg.verdict.steps import UNIT, as_float, unit

FUNCTIONS = 4.0  # float32 half steps for elementary functions on the way
FP8_STEP = 2.0**-3  # largest step of e4m3 relative to its value
EXTRA = 2.0  # half steps: one more rounding to the stored format than the contract has (|x| may double h)


def act_unit(op: Any, args: Mapping[str, Any]) -> float:
    """Half step of the dtype of activations in this call."""
    if isinstance(args.get("act"), str):
        return UNIT[args["act"]]
    acts = [args[n] for n, a in op.args.items() if "act" in a.dtype.split() and args.get(n) is not None]
    return max((unit(np.asarray(x)) for x in acts), default=_weights_unit(op, args))


def _weights_unit(op: Any, args: Mapping[str, Any]) -> float:
    weights = [args[n] for n, a in op.args.items() if a.kind == "weight" and "bf16" in a.dtype.split()]
    return max((unit(np.asarray(x)) for x in weights if x is not None), default=UNIT["f32"])


def terms_of(op: Any, names: str, args: Mapping[str, Any]) -> int:
    """Product of the sizes of the named dims, found in the arguments' shapes."""
    sizes: dict[str, int] = {}
    for name, arg in op.args.items():
        value = args.get(name)
        if isinstance(value, np.ndarray) and value.ndim == len(arg.dims.split()):
            sizes.update({d: n for d, n in zip(arg.dims.split(), value.shape, strict=True) if d not in sizes})
    return int(np.prod([max(sizes.get(d, 1), 1) for d in names.split()])) if names else 0


def row_size(oracle: np.ndarray) -> np.ndarray:
    """Root mean square of the finite values of every row, ``[rows, 1]``."""
    with np.errstate(all="ignore"):
        square = np.einsum("ij,ij->i", oracle, oracle)
        if not np.isfinite(square).all():
            finite = np.where(np.isfinite(oracle), oracle, 0)
            square = np.einsum("ij,ij->i", finite, finite)
        return np.sqrt(square / max(oracle.shape[1], 1))[:, None]


def _largest(value: np.ndarray, dims: list[str], row: list[str], rows: int) -> np.ndarray:
    """Largest size in what belongs to a row: the dims that ``value`` and the row begin with, else all of it."""
    value = np.abs(as_float(np.asarray(value)).astype(np.float64))
    value = np.where(np.isfinite(value), value, 0)
    lead = next((i for i, (a, b) in enumerate(zip(dims, row, strict=False)) if a != b), min(len(dims), len(row)))
    count = int(np.prod(value.shape[:lead]))
    if not lead or not count:
        return np.full((rows, 1), value.max(initial=0.0))
    return np.repeat(value.reshape(count, -1).max(axis=1, initial=0.0), rows // count)[:, None]


def roundings_of(compare: Dense, args: Mapping[str, Any], numerics: Any) -> int:
    """Roundings to activations in this call."""
    count = compare.roundings
    for condition, more in compare.more.items():
        switch, _, value = condition.partition("=")
        argument, _, _ = condition.partition(":")
        if value:
            count += more * (getattr(numerics, switch, None) == value)
        else:
            count += more * (getattr(args.get(argument), "dtype", None) == np.float32)
    return count


def noise_of(
    op: Any, name: str, compare: Dense, args: Mapping[str, Any], oracle: Mapping[str, Any], flat: np.ndarray,
    stored: float, numerics: Any,
) -> Noise:  # fmt: skip
    """Noise of a `Dense` output whose oracle values are ``flat [rows, columns]``, stored with half step ``stored``."""
    act = act_unit(op, args)
    own = any(source.endswith(".terms") for source in compare.magnitude)
    size = np.zeros(flat.shape) if own else row_size(flat)
    for source in compare.magnitude:
        if source in oracle and np.shape(oracle[source]) == np.shape(oracle[name]):
            size = np.maximum(size, np.abs(np.asarray(oracle[source], np.float64)).reshape(flat.shape))
        else:
            value, dims = (
                (oracle[source], op.outputs[source].dims) if source in oracle else (args[source], op.args[source].dims)
            )
            size = np.maximum(size, _largest(value, dims.split(), compare.row.split(), len(flat)))
    mixed = size if compare.terms or compare.magnitude else np.zeros((len(flat), 1))
    roundings = roundings_of(compare, args, numerics)
    inside = max(roundings - 1, 0) if stored >= act else roundings
    rounded = act * np.sqrt(inside / 3)
    quantised = bool(compare.inner) and args.get(compare.inner) is not None
    if quantised:
        rounded = np.sqrt(rounded**2 + 1.6 * 0.045 * rounded)
    summed = (np.sqrt(terms_of(op, compare.terms, args)) + FUNCTIONS) * UNIT["f32"]
    return Noise(float(rounded), float(summed), mixed, size, EXTRA, FP8_STEP * quantised, FUNCTIONS * UNIT["f32"])
