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

BLOCK = 1 << 17  # elements at a time: enough to make the calls of numpy cheap, and few enough for the caches
ROW = 32  # least elements of a row, if the dims have so many
MOST_BLOCKS = 64  # kinds of blocks whose views are kept
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
    """Buffers of one thread, used again for every tensor, and the `_Block` views into them."""

    def __init__(self) -> None:
        self.raw = np.empty(2 * BLOCK * 8, np.uint8)
        self.values = np.empty(3 * BLOCK * 8, np.uint8)
        self.mask = np.empty(BLOCK, bool)
        self._blocks: dict[tuple[str, int, int], _Block] = {}

    def block(self, dtype: str, count: int, width: int) -> _Block:
        """Room for ``count`` elements of both tensors in pieces of ``width``."""
        if len(self._blocks) > MOST_BLOCKS:
            self._blocks.clear()
        key = (dtype, count, width)
        if key not in self._blocks:
            self._blocks[key] = _Block(self, *key)
        return self._blocks[key]


class _Block:
    """One block of both tensors: their bits, and where they are numbers these and their difference.

    Numbers lie one after the other as a, b, d, so that one call takes the squares of all three. What has the kind
    in which it is computed is read to its place there; the rest is read beside and converted.
    """

    def __init__(self, work: Workspace, dtype: str, count: int, width: int) -> None:
        storage, number = STORAGE[dtype], FLOATS.get(dtype)
        self.count, self.width, self.rows = count, width, count // width
        self.numeric = number is not None
        kind = np.dtype(np.float64 if number is np.float64 else np.float32)
        self.values = work.values[: 3 * count * kind.itemsize].view(kind).reshape(3, count)
        self._direct = number is not None and np.dtype(number) == kind
        raw = (
            self.values[:2]
            if self._direct
            else work.raw[: 2 * count * storage.itemsize].view(storage).reshape(2, count)
        )
        self.targets = tuple(half.view(np.uint8).data for half in raw)
        self._typed = raw.view(number) if number is not None else raw
        self._bits = raw.view(f"u{storage.itemsize}")
        self.mask = work.mask[:count]
        self._mask_rows = self.mask.reshape(self.rows, width)
        self._rows = self.values.reshape(3 * self.rows, 1, width)
        self._columns = self._rows.transpose(0, 2, 1)
        self._ones = np.ones(width, kind)

    def compare(self) -> int:
        """Fill ``mask`` from the bits; returns how many elements differ."""
        np.not_equal(self._bits[0], self._bits[1], out=self.mask)
        return int(np.count_nonzero(self.mask))

    def differing_rows(self, different: int) -> np.ndarray:
        if different in (0, self.count):
            return np.full(self.rows, different > 0)
        if self.width == 1:
            return self.mask.copy()
        if self.width >= MATMUL:
            return np.asarray(self._mask_rows.any(axis=1))
        return np.asarray(self._mask_rows.astype(np.float32) @ self._ones.astype(np.float32) > 0)

    def sums(self, different: int, found: _Running) -> np.ndarray:
        """Sums of d^2, a^2 and b^2 of each row, ``[3, rows]``; notes the largest d and what is broken."""
        a, b, d = self.values
        if not different:
            if not self._direct:
                a[...] = self._typed[0]
            size = self._squares(1)
            if not math.isfinite(size.sum()):
                a[~np.isfinite(a)] = 0
                size = self._squares(1)
            return np.stack((np.zeros_like(size[0]), size[0], size[0]))
        if not self._direct:
            self.values[:2] = self._typed
        np.subtract(b, a, out=d)
        squares = self._squares(3)
        if not math.isfinite(squares.sum()):
            self._clean(found)
            squares = self._squares(3)
        largest = float(np.abs(d, out=d).max())
        if largest == math.inf:
            largest = float(d[d < math.inf].max(initial=0.0))
        found.largest = max(found.largest, largest)
        return squares[[2, 0, 1]]

    def _squares(self, count: int) -> np.ndarray:
        """Sums of squares of each row of the first ``count`` of a, b, d: as products of matrices they are fastest."""
        if self.width >= MATMUL:
            rows = count * self.rows
            return np.matmul(self._rows[:rows], self._columns[:rows]).reshape(count, self.rows)
        squares = np.square(self.values[:count])
        return squares if self.width == 1 else (squares.reshape(-1, self.width) @ self._ones).reshape(count, self.rows)

    def _clean(self, found: _Running) -> None:
        """Elements that are not finite count as 0 where they are equal, and else as an infinite difference."""
        a, b, d = self.values
        finite_a, finite_b = np.isfinite(a), np.isfinite(b)
        both = finite_a & finite_b
        found.broken += int(np.count_nonzero(finite_a & ~finite_b))
        d[~(self.mask & both)] = 0
        d[self.mask & ~both & ~(np.isnan(a) & np.isnan(b))] = np.inf
        a[~finite_a] = 0
        b[~finite_b] = 0


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
    elements, leading = math.prod(shape), row_dims(shape)
    rows = math.prod(shape[:leading])
    if not elements:
        return Apart(rows=rows)
    columns = elements // rows
    found, numeric = _Running(), dtype in FLOATS
    open_sums, open_differs = np.zeros((3 if numeric else 0, 1)), np.zeros(1, bool)
    with np.errstate(all="ignore"):
        for start, count in _blocks(rows, columns):
            block = work.block(dtype, count, min(columns, count))
            for source, target in zip((a, b), block.targets, strict=True):
                source.fill(target)
            different = block.compare()
            if not different and count == elements:
                return Apart(elements, rows=rows)
            found.different += different
            differs = block.differing_rows(different)
            sums = block.sums(different, found) if numeric else np.zeros((0, block.rows))
            if count >= columns:
                found.add(differs, sums)
                continue
            open_differs, open_sums = open_differs | differs, open_sums + sums  # a piece of a row
            if (start + count) % columns == 0:
                found.add(open_differs, open_sums)
                open_differs, open_sums = np.zeros_like(open_differs), np.zeros_like(open_sums)
    found.settle()
    return _summary(found, elements, rows, shape[:leading], numeric)


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
