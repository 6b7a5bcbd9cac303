"""How a reproducer tells wrong results from right ones: a few numbers with limits, measured when it is written.

The judge needs the whole tool; a reproducer must not. Every output is measured in several ways, for the reference and
for the candidate at fault, and the first measure that sets them clearly apart becomes the criterion, its limit halfway
between the two on a logarithmic scale. Outputs that none sets apart get a coarse one, which a kernel that is put right
must meet too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dsv4dbg.compare import IndexSet, Routing, RoutingWeights
from dsv4dbg.kernels.contract import Op
from dsv4dbg.kernels.paged import Cache, read, read_records
from dsv4dbg.kernels.table import Call

APART = 16.0  # candidate over reference: the limit is then at least 4 times the reference's own
NARROW = 3.0  # the same where nothing sets them that far apart
COARSE = 0.01  # share of integers that may differ in an output that is not known to be wrong
NOTHING = 0.5  # stands for a count of 0 where a ratio is taken
ORDER_FREE = (IndexSet, Routing, RoutingWeights)


@dataclass(frozen=True)
class Criterion:
    """A limit on one measure of one output.

    Attributes:
        measure: a name of `MEASURES`, or ``differing``: elements (bytes of cache records) unlike the reference's.
        limit: more than this is wrong.
        reference, candidate: the measure when the case was written.
        order_free: a row's elements may come in any order.
    """

    output: str
    measure: str
    limit: float
    reference: float
    candidate: float
    order_free: bool = False

    @property
    def apart(self) -> bool:
        return self.candidate > self.limit


@dataclass(frozen=True)
class _Rows:
    """One result: ``values`` float64 ``[row, n]`` if it holds numbers, ``codes`` integers ``[row, n]``."""

    values: np.ndarray | None
    codes: np.ndarray
    unit: float


def row_error(values: np.ndarray, truth: np.ndarray) -> float:
    """Largest relative L2 error of a row against the oracle."""
    sizes = np.linalg.norm(truth, axis=1)
    floor = sizes.max(initial=0.0) * 1e-3 or 1.0  # a row of zeros is measured by its neighbours
    return float((np.linalg.norm(values - truth, axis=1) / np.maximum(sizes, floor)).max(initial=0.0))


def element_error(values: np.ndarray, truth: np.ndarray) -> float:
    """Largest error of an element, relative to its size and its row's."""
    sizes = np.abs(truth) + np.sqrt(np.mean(truth**2, axis=1, keepdims=True)) if truth.size else truth
    return float((np.abs(values - truth) / np.maximum(sizes, 1e-30)).max(initial=0.0))


def bias(values: np.ndarray, truth: np.ndarray) -> float:
    """Mean error away from zero or towards it, relative to the mean size."""
    size = np.abs(truth).mean() if truth.size else 0.0
    return float(abs((np.sign(truth) * (values - truth)).mean()) / size) if size else 0.0


MEASURES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "row error": row_error, "element error": element_error, "bias": bias,
}  # fmt: skip


def criteria(
    op: Op, call: Call, reference: Mapping[str, Any], oracle: Mapping[str, Any], candidate: Mapping[str, Any] | None
) -> list[Criterion]:
    """One criterion for every output and mutated cache; those that set the candidate apart first.

    Args:
        reference, candidate: results by name, tensors and caches on the CPU; no candidate if it gave none.
        oracle: float64 arrays by name, for the outputs that it speaks of.
    """
    names, found = (*op.outputs, *op.mutates), list[Criterion]()
    for apart in (APART, NARROW):
        found = [_criterion(op, call, name, reference, oracle, candidate, apart) for name in names]
        if candidate is None or any(c.apart for c in found):
            break
    else:
        found = [_differing(call, c, reference, candidate) for c in found]
    return sorted(found, key=lambda c: not c.apart)


def _criterion(
    op: Op, call: Call, name: str, reference: Mapping[str, Any], oracle: Mapping[str, Any],
    candidate: Mapping[str, Any] | None, apart: float,
) -> Criterion:  # fmt: skip
    order_free = isinstance(op.compare[name], ORDER_FREE)
    given, theirs = candidate or reference, _rows(call, name, reference[name])
    blank = Criterion(name, "differing", 0.0, 0.0, 0.0, order_free)
    truth = _truth(oracle.get(name), theirs)
    if theirs.values is None or truth is None:
        limit = max(NOTHING, COARSE * theirs.codes.size)
        return replace(blank, limit=limit, candidate=_measure(blank, call, given, reference, oracle))
    found, worst = [], 0.0
    for measure in MEASURES:
        blank = replace(blank, measure=measure)
        noise = theirs.unit if measure != "bias" else worst / math.sqrt(max(1, truth.size))
        mine = max(noise, _measure(blank, call, reference, reference, oracle))
        wrong = _measure(blank, call, given, reference, oracle)
        worst = max(worst, mine)
        found.append(replace(blank, limit=APART * mine, reference=mine, candidate=wrong))
        if wrong > apart * mine:
            return replace(found[-1], limit=mine * math.sqrt(max(apart, min(wrong, 1.0) / mine)))
    return found[0]


def _differing(call: Call, coarse: Criterion, reference: Mapping[str, Any], candidate: Mapping[str, Any]) -> Criterion:
    """The criterion of last resort for an output: how many elements are unlike the reference's."""
    blank = replace(coarse, measure="differing", reference=0.0)
    count = _measure(blank, call, candidate, reference, {})
    return replace(blank, limit=math.sqrt(NOTHING * count), candidate=count) if count else coarse


def broken(
    found: list[Criterion], call: Call, results: Mapping[str, Any], reference: Mapping[str, Any],
    oracle: Mapping[str, Any],
) -> list[str]:  # fmt: skip
    """One sentence for every criterion that results do not meet."""
    sentences = []
    for criterion in found:
        theirs, mine = _data(reference[criterion.output]), _data(results[criterion.output])
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            sentences.append(
                f"{criterion.output} is {mine.dtype} {list(mine.shape)}, it must be {theirs.dtype} {list(theirs.shape)}"
            )
            continue
        value = _measure(criterion, call, results, reference, oracle)
        if not value <= criterion.limit:
            sentences.append(
                f"{criterion.measure} of {criterion.output} is {value:.3g}; at most {criterion.limit:.3g} is right, "
                f"the reference has {criterion.reference:.3g}"
            )
    return sentences


def _measure(
    criterion: Criterion, call: Call, results: Mapping[str, Any], reference: Mapping[str, Any],
    oracle: Mapping[str, Any],
) -> float:  # fmt: skip
    name = criterion.output
    if _data(results[name]).shape != _data(reference[name]).shape:
        return math.inf
    mine = _rows(call, name, results[name])
    if criterion.measure == "differing":
        theirs = _rows(call, name, reference[name]).codes
        if criterion.order_free:
            return float(sum(len(np.setxor1d(a, b)) for a, b in zip(mine.codes, theirs, strict=True)))
        return float((mine.codes != theirs).sum())
    truth = _truth(oracle[name], mine)
    assert truth is not None
    assert mine.values is not None
    values = np.sort(mine.values, 1) if criterion.order_free else mine.values
    truth = np.sort(truth, 1) if criterion.order_free else truth
    real = np.isfinite(truth)
    if not np.isfinite(values[real]).all():
        return math.inf
    values, truth = np.where(real, values, 0.0), np.where(real, truth, 0.0)
    return MEASURES[criterion.measure](np.nan_to_num(values), truth)


def _truth(oracle: Any, like: _Rows) -> np.ndarray | None:
    """The oracle's output as rows, where it gives one of that size."""
    if oracle is None or like.values is None or np.size(oracle) != like.values.size:
        return None
    return np.asarray(oracle, np.float64).reshape(like.values.shape)


def _data(value: Any) -> torch.Tensor:
    return value.data if isinstance(value, Cache) else value


def _rows(call: Call, name: str, value: Any) -> _Rows:
    """A result as rows; of a mutated cache the records written, decoded."""
    if isinstance(value, Cache):
        slots = call.args[call.op.mutates[name]].reshape(-1).cpu()
        slots = slots[slots >= 0]
        decoded = read(value, slots, torch.float32)
        unit = 2.0**-24 if value.layout.format == "f32" else 2.0**-9
        return _Rows(decoded.double().numpy(), torch.cat(read_records(value, slots), 1).numpy(), unit)
    rows = value.reshape(-1, value.shape[-1] if value.dim() else 1) if value.numel() else value.reshape(0, 1)
    if not value.is_floating_point():
        return _Rows(None, rows.long().numpy(), 0.0)
    if value.element_size() == 1:
        return _Rows(None, rows.contiguous().view(torch.uint8).numpy(), 0.0)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    return _Rows(rows.double().numpy(), rows.contiguous().view(bits).numpy(), torch.finfo(value.dtype).eps / 2)
