"""One pass over an output: errors in units of the derived rounding noise, summed per segment of a row.

Every element i gets, from the oracle's value O alone, half a step ``h`` of the stored format and the noise ``a`` of
what comes before the store (`Noise`). The error of a correctly computed value has a standard deviation of at most
``sigma = h / sqrt(3) + a`` (a rounding error is spread evenly over +-h) and a size of at most ``h + CONFIDENCE a``.
What is summed:

    z2    sum (e/sigma)^2           mean at most 1 for correct values
    bias  sum sign(O) e/sigma       mean 0; truncation gives -0.87 n (e is -h on average, sigma = h/sqrt 3)
    shift sum e/sigma               mean 0; rounding to -inf gives -0.87 n
    fit   sum O e/sigma^2           with weight = sum O^2/sigma^2, fit/weight is the best-fit scale minus one
    worst largest |e| / (h (1 + extra) + CONFIDENCE a)
    flips how often |e| > h: not the nearest stored value to O
    turns flips away from zero minus flips toward it

Arrays are processed in blocks that stay in the cache, in float32 where the stored format is coarse enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsv4dbg.verdict.steps import Grid, as_float

BLOCK = 1 << 15  # elements that are processed at a time: a dozen float32 arrays of this size fit into the L2 cache
SEGMENT = 128  # most columns of a segment
CONFIDENCE = 8.0  # standard deviations of the noise that a single element may be off, beside its rounding
SHARED = ("count", "weight", "blur", "size", "chance", "leap", "least")


@dataclass(frozen=True)
class Noise:
    """Error before the store: ``a_i = rounded max(|O_i|, mixed_i) + summed max(|O_i|, terms_i)``.

    Attributes:
        rounded: from roundings to the activation dtype, relative.
        summed: from float32 arithmetic, relative; ``functions``: the part of it from elementary functions.
        mixed, terms: sizes of what the element was made from, ``[rows, 1]`` or ``[rows, columns]``.
        extra: rounding errors of the stored format that are allowed beside the one stored.
        worst: largest error from roundings in units of ``rounded``: sqrt(3 k) for k roundings of the value itself,
            each at most u = rounded sqrt(3 / k); CONFIDENCE where errors of many values are mixed.
        jump: what a single step of a quantiser inside the op may move an element, relative to ``mixed``.
    """

    rounded: float
    summed: float
    mixed: np.ndarray
    terms: np.ndarray
    extra: float = 0.0
    jump: float = 0.0
    functions: float = 4 * 2.0**-24
    worst: float = CONFIDENCE

    @property
    def relative(self) -> float:
        return self.rounded + self.summed

    def at(self, rows: slice, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Standard deviation ``a`` and largest error ``CONFIDENCE a`` (with ``worst`` for roundings) of elements."""
        kind = size.dtype.type
        a = np.maximum(size, self.terms[rows].astype(size.dtype, copy=False)) * kind(self.summed)
        largest = a * kind(CONFIDENCE)
        if self.rounded:
            part = np.maximum(size, self.mixed[rows].astype(size.dtype, copy=False)) * kind(self.rounded)
            a += part
            largest += part * kind(self.worst)
        return a, largest


@dataclass
class Sums:
    """Sums per segment, ``[rows, segments]`` float64 each; ``worst`` is a maximum."""

    z2: np.ndarray
    bias: np.ndarray
    shift: np.ndarray
    fit: np.ndarray
    square: np.ndarray
    flips: np.ndarray
    turns: np.ndarray
    broken: np.ndarray
    worst: np.ndarray


@dataclass
class Measured:
    """What one pass finds.

    ``shared`` sums depend on the oracle only: ``count`` of judged elements, ``weight``, ``blur`` = sum |O| a/sigma^2,
    ``size`` = sum O^2, ``chance`` = expected flips, ``least`` = share of the noise that no implementation avoids (the
    store and elementary functions), ``leap`` = sum (jump/2 sigma)^2: one inner step of a channel that holds a quarter
    of the energy.
    """

    sums: list[Sums]
    shared: dict[str, np.ndarray]
    width: int
    columns: int


def segment_width(columns: int) -> int:
    """Largest divisor of ``columns`` up to SEGMENT; all columns where that would be less than 16."""
    width = next((w for w in range(min(SEGMENT, columns), 0, -1) if columns % w == 0), 1)
    return width if width >= 16 else max(columns, 1)


def measure(values: list[np.ndarray], oracle: np.ndarray, grid: Grid, noise: Noise) -> Measured:
    """Errors of each of ``values`` (``[rows, columns]``, stored dtype or decoded) against ``oracle``."""
    rows, columns = oracle.shape
    width = segment_width(columns)
    segments = columns // width if columns else 0
    fine = grid.unit < 2.0**-12 or grid.wide
    kind = np.float64 if fine else np.float32
    shape = (rows, segments)
    sums = [Sums(*(np.zeros(shape) for _ in range(9))) for _ in values]
    shared = {name: np.zeros(shape) for name in SHARED}
    ones = np.ones(width, kind)

    def total(x: np.ndarray) -> np.ndarray:
        return (x.reshape(-1, width) @ ones).reshape(-1, segments)

    step = max(1, BLOCK // max(columns, 1))
    with np.errstate(all="ignore"):
        for start in range(0, rows if columns else 0, step):
            part = slice(start, start + step)
            o = oracle[part].astype(kind)
            h = grid.half(part, o)
            known = (np.abs(o) <= grid.maximum) & np.isfinite(h)  # False for NaN, and where a group has no scale
            all_known = bool(known.all())
            finite, h = (o, h) if all_known else (np.where(known, o, 0), np.where(known, h, 1))
            size = np.abs(finite)
            a, largest = noise.at(part, size)
            sigma = h * kind(3**-0.5) + a
            limit = h * kind(1 + noise.extra) + largest
            if noise.jump:
                jump = noise.mixed[part].astype(kind) * kind(noise.jump)
                limit += jump
                shared["leap"][part] = total(np.square(jump / (2 * sigma)))
            least = h * kind(3**-0.5) + np.maximum(size, noise.terms[part].astype(kind)) * kind(noise.functions)
            shared["least"][part] = total(np.square(least / sigma))
            weight = finite / sigma
            sign = np.sign(finite)
            shared["count"][part] = total(known.astype(kind))
            shared["weight"][part] = total(weight * weight)
            shared["blur"][part] = total(np.abs(weight) * (a / sigma))
            shared["size"][part] = total(size * size)
            shared["chance"][part] = total(np.minimum(a / h * kind(0.4), 1) * known)
            edge = h * kind(1 + 2.0**-10)
            for value, s in zip(values, sums, strict=True):
                x = as_float(value[part]).astype(kind, copy=False)
                e = x - o
                if not (all_known and np.isfinite(np.dot(e.ravel(), e.ravel()))):
                    s.broken[part] = total(_broken(x, o, known).astype(kind))
                    e = np.where(known & np.isfinite(x), e, 0)
                z = e / sigma
                s.z2[part] = total(z * z)
                s.shift[part] = total(z)
                s.bias[part] = total(z * sign)
                s.fit[part] = total(z * weight)
                s.square[part] = total(e * e)
                signed = e * sign
                np.abs(e, out=e)
                flipped = (e > edge).astype(kind)
                s.flips[part] = total(flipped)
                if s.flips[part].any():
                    s.turns[part] = total(flipped * np.sign(signed))
                s.worst[part] = (e / limit).reshape(-1, width).max(axis=1).reshape(-1, segments)
    return Measured(sums, shared, width, columns)


def _broken(x: np.ndarray, o: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Not finite where the oracle is, or not its infinity; what overflows the stored format may be anything large."""
    largest = np.finfo(x.dtype).max / 4
    wrong = np.isinf(o) & (x != o) & ~(np.sign(o) * x > largest)
    return (known & ~np.isfinite(x)) | wrong


def rows_apart(a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """Two captures without an oracle, ``[rows, columns]``: per row the sums ``difference^2``, ``a^2``, ``a b``, ``b^2``
    and the largest difference, in one pass at about memory speed. NaN and inf show as such in the sums."""
    rows, columns = a.shape
    found = {name: np.zeros(rows, np.float32) for name in ("difference2", "a2", "ab", "b2", "largest")}
    step = max(1, BLOCK // max(columns, 1))
    with np.errstate(all="ignore"):
        for start in range(0, rows if columns else 0, step):
            part = slice(start, start + step)
            x, y = as_float(a[part]), as_float(b[part])
            d = x - y
            found["difference2"][part] = np.einsum("ij,ij->i", d, d)
            found["a2"][part] = np.einsum("ij,ij->i", x, x)
            found["ab"][part] = np.einsum("ij,ij->i", x, y)
            found["b2"][part] = np.einsum("ij,ij->i", y, y)
            found["largest"][part] = np.maximum(d.max(axis=1), -d.min(axis=1))
    return found


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal shape, dtype and bytes."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return a.size == 0 or bool(np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8)))
