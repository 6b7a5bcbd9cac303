"""How two stored tensors of one dtype and shape differ: one pass over the bits of both, a block at a time.

A *row* is what the leading dims name (a token, a head of a token): dims are taken into the row from the
right until it has `ROW` elements. Of every row the sums of ``d^2``, ``a^2`` and ``b^2`` are taken in float32, where
``d = b - a``; they give its relative error, and together those of the whole tensor. Equal bits count as no difference
whatever they mean, so masked scores of -inf do not hide the others.

Memory is a few blocks (`Workspace`), however large or oddly shaped the tensors are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import ml_dtypes
import numpy as np

from dsv4dbg.trace.records import STORAGE

BLOCK = 1 << 16  # elements at a time: a dozen passes over them stay in a second-level cache of 1 MB
ROW = 32  # least elements of a row, if the dims have so many
PENDING = 4096  # rows that are summed up together
MATMUL = 64  # elements of a row from which one product per row beats one product with a vector of ones
FLOATS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32, "float64": np.float64}


@dataclass(frozen=True)
class Apart:
    """A comparison of a reference's tensor ``a`` and a candidate's ``b``.

    Attributes:
        elements, different: how many there are, and how many have other bits.
        rows, rows_different: the same of rows.
        row: coordinates, in the leading dims, of the row with the largest error; for dtypes that are not numbers of
            FLOATS, of the first row that differs.
        error: ``|b - a| / |a|`` over the whole tensor (inf where a is 0 and b is not, or where b is broken).
        row_error: the same of ``row``.
        largest: largest finite ``|b - a|``.
        similarity: cosine of the angle between a and b; ``scale``: the factor on a that comes nearest to b.
        broken: elements that are finite in a and not in b.
    """

    elements: int = 0
    different: int = 0
    rows: int = 0
    rows_different: int = 0
    row: tuple[int, ...] = ()
    error: float = 0.0
    row_error: float = 0.0
    largest: float = 0.0
    similarity: float = 1.0
    scale: float = 1.0
    broken: int = 0

    @property
    def equal(self) -> bool:
        return not self.different

    @property
    def share(self) -> float:
        """Share of elements that differ."""
        return self.different / self.elements if self.elements else 0.0


def row_dims(shape: tuple[int, ...]) -> int:
    """How many leading dims name a row."""
    count, columns = len(shape), 1
    while count > 1 and columns < ROW:
        count -= 1
        columns *= shape[count]
    return count


class Source(Protocol):
    """Gives a tensor's bytes in order (`dsv4dbg.trace.bits.Bits`)."""

    def fill(self, out: memoryview) -> None: ...


class Workspace:
    """Buffers of one thread, used again for every tensor."""

    def __init__(self) -> None:
        self._raw = [np.empty(BLOCK * 8, np.uint8) for _ in range(2)]
        self._numbers: dict[type, list[np.ndarray]] = {}
        self._mask = np.empty(BLOCK, bool)

    def raw(self, side: int, nbytes: int) -> np.ndarray:
        return self._raw[side][:nbytes]

    def numbers(self, kind: type, count: int) -> list[np.ndarray]:
        """Three arrays of ``count`` numbers: room for a, b and their difference."""
        if kind not in self._numbers:
            self._numbers[kind] = [np.empty(BLOCK, kind) for _ in range(3)]
        return [buffer[:count] for buffer in self._numbers[kind]]

    def mask(self, count: int) -> np.ndarray:
        return self._mask[:count]


@dataclass
class _Running:
    """What is known so far. Finished rows wait in ``pending`` until there are enough to be worth a few numpy calls."""

    different: int = 0
    rows_different: int = 0
    broken: int = 0
    largest: float = 0.0
    total: np.ndarray = field(default_factory=lambda: np.zeros(3))  # sums of d^2, a^2, b^2
    row: int = 0
    row_error: float = -1.0
    row_size: float = 0.0
    pending: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    first_pending: int = 0
    count_pending: int = 0

    def add(self, differs: np.ndarray, sums: np.ndarray) -> None:
        """Take the next whole rows: which of them differ, and their sums ``[3, rows]`` (``[0, rows]``: no numbers)."""
        self.pending.append((differs, sums))
        self.count_pending += len(differs)
        if self.count_pending >= PENDING:
            self.settle()

    def settle(self) -> None:
        """Take all pending rows into account."""
        if not self.pending:
            return
        differs = np.concatenate([part[0] for part in self.pending])
        sums = np.concatenate([part[1] for part in self.pending], axis=1)
        first = self.first_pending
        self.first_pending, self.count_pending, self.pending = first + len(differs), 0, []
        count = int(np.count_nonzero(differs))
        if len(sums):
            self.total += sums.sum(axis=1, dtype=np.float64)
        if not count:
            return
        if len(sums):
            errors = np.where(differs, relative(sums[0], sums[1]), -1.0)
            at = int(np.argmax(errors))
            if (errors[at], sums[0, at]) > (self.row_error, self.row_size):
                self.row, self.row_error, self.row_size = first + at, float(errors[at]), float(sums[0, at])
        elif not self.rows_different:
            self.row = first + int(np.argmax(differs))
        self.rows_different += count


def relative(difference2: np.ndarray, size2: np.ndarray) -> np.ndarray:
    """Relative error from sums of squares: 0 of 0 is 0, anything else of 0 is inf, and so is what is not a number."""
    with np.errstate(all="ignore"):
        error = np.sqrt(difference2.astype(np.float64) / size2)
    return np.where(difference2 == 0, 0.0, np.where(np.isnan(error), np.inf, error))


def apart(a: Source, b: Source, dtype: str, shape: tuple[int, ...], work: Workspace) -> Apart:
    """Compare the reference's bits ``a`` with the candidate's ``b``, both of ``dtype`` and ``shape``."""
    storage, elements, leading = STORAGE[dtype], math.prod(shape), row_dims(shape)
    rows = math.prod(shape[:leading])
    if not elements:
        return Apart(rows=rows)
    columns = elements // rows
    number, bits = FLOATS.get(dtype), np.dtype(f"u{storage.itemsize}")
    found = _Running()
    open_sums, open_differs = np.zeros((0 if number is None else 3, 1)), np.zeros(1, bool)
    with np.errstate(all="ignore"):
        for start, count in _blocks(rows, columns):
            x, y = (work.raw(side, count * storage.itemsize) for side in (0, 1))
            a.fill(x.data)
            b.fill(y.data)
            mask = np.not_equal(x.view(bits), y.view(bits), out=work.mask(count))
            different = int(np.count_nonzero(mask))
            found.different += different
            width = min(columns, count)
            differs = _any(mask, different, width, work)
            if number is None:
                sums = np.zeros((0, len(differs)))
            else:
                sums = _sums(x.view(number), y.view(number), mask, different, width, found, work)
            if count >= columns:
                found.add(differs, sums)
                continue
            open_differs, open_sums = open_differs | differs, open_sums + sums  # a piece of a row
            if (start + count) % columns == 0:
                found.add(open_differs, open_sums)
                open_differs, open_sums = np.zeros_like(open_differs), np.zeros_like(open_sums)
    found.settle()
    return _summary(found, elements, rows, shape[:leading], number is not None)


def _blocks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """(first element, elements) of pieces of at most BLOCK elements: some whole rows, or a part of one."""
    step = BLOCK // columns * columns or BLOCK
    start, end = 0, rows * columns
    while start < end:
        count = min(step, end - start)
        if columns > BLOCK:
            count = min(count, columns - start % columns)
        yield start, count
        start += count


def _any(mask: np.ndarray, count: int, width: int, work: Workspace) -> np.ndarray:
    """Which rows of a mask with ``count`` true elements have one."""
    rows = len(mask) // width
    if count in (0, len(mask)):
        return np.full(rows, count > 0)
    if width == 1:
        return mask.copy()
    if width >= MATMUL:
        return np.asarray(mask.reshape(rows, width).any(axis=1))
    numbers = work.numbers(np.float32, len(mask))[2]
    numbers[...] = mask
    return np.asarray(_per_row(numbers, width) > 0)


def _per_row(values: np.ndarray, width: int) -> np.ndarray:
    return values.reshape(-1, width) @ np.ones(width, values.dtype)


def _squares(values: np.ndarray, width: int, out: np.ndarray | None = None) -> np.ndarray:
    """Sum of squares of each row. A product of matrices is the fastest way that numpy has, for either kind of row."""
    if width >= MATMUL:
        rows = values.reshape(-1, 1, width)
        return np.matmul(rows, rows.transpose(0, 2, 1), out=None if out is None else out.reshape(-1, 1, 1)).reshape(-1)
    squares = np.square(values) if width == 1 else _per_row(np.square(values), width)
    if out is not None:
        out[...] = squares
    return squares


def _sums(
    x: np.ndarray, y: np.ndarray, mask: np.ndarray, different: int, width: int, found: _Running, work: Workspace
) -> np.ndarray:
    """Sums of d^2, a^2 and b^2 of each row of a block, ``[3, rows]``; notes the largest d and what is broken."""
    kind = np.float64 if x.dtype == np.float64 else np.float32
    a, b, d = work.numbers(kind, len(x))
    a = _converted(x, a)
    sums = np.zeros((3, len(x) // width), kind)
    _squares(a, width, sums[1])
    if not different:
        if not math.isfinite(sums[1].sum()):
            _squares(np.where(np.isfinite(a), a, 0), width, sums[1])
        sums[2] = sums[1]
        return sums
    b = _converted(y, b)
    np.subtract(b, a, out=d)
    _squares(d, width, sums[0])
    _squares(b, width, sums[2])
    if not math.isfinite(sums.sum()):
        return _careful_sums(a, b, mask, width, found)
    found.largest = max(found.largest, float(np.abs(d, out=d).max()))
    return sums


def _converted(values: np.ndarray, room: np.ndarray) -> np.ndarray:
    if values.dtype == room.dtype:
        return values
    room[...] = values
    return room


def _careful_sums(a: np.ndarray, b: np.ndarray, mask: np.ndarray, width: int, found: _Running) -> np.ndarray:
    """`_sums` of a block with elements that are not finite: equal ones count as 0, others as an infinite difference."""
    finite_a, finite_b = np.isfinite(a), np.isfinite(b)
    both = finite_a & finite_b
    d = np.where(mask & both, b - a, 0)
    found.largest = max(found.largest, float(np.abs(d).max()))
    d[mask & ~both & ~(np.isnan(a) & np.isnan(b))] = np.inf
    found.broken += int(np.count_nonzero(finite_a & ~finite_b))
    return np.stack([_squares(v, width) for v in (d, np.where(finite_a, a, 0), np.where(finite_b, b, 0))])


def _summary(found: _Running, elements: int, rows: int, leading: tuple[int, ...], numbers: bool) -> Apart:
    row = tuple(int(i) for i in np.unravel_index(found.row, leading)) if found.different and leading else ()
    result = Apart(elements, found.different, rows, found.rows_different, row)
    if not numbers or not found.different:
        return result
    difference2, a2, b2 = (float(x) for x in found.total)
    similarity = scale = math.nan
    if np.isfinite(found.total).all() and a2 and b2:
        product = (a2 + b2 - difference2) / 2
        similarity, scale = product / math.sqrt(a2) / math.sqrt(b2), product / a2
    return Apart(
        elements, found.different, rows, found.rows_different, row,
        float(relative(np.array(difference2), np.array(a2))), max(found.row_error, 0.0), found.largest,
        similarity, scale, found.broken,
    )  # fmt: skip
