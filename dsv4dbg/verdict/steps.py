"""Stored formats as grids: decoding of raw bytes, and half a step around any value (numpy, shared with nobody).

``half step`` is the largest error of a correctly rounded value: a format with p significant bits has, at
``2^e <= |x| < 2^(e+1)``, half a step of ``2^(e-p)``, and below its smallest normal number that of its subnormals.
Tables are built from the bit definitions, not by a library, so that reference, oracle and judge share no codec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from dsv4dbg.pages import FP4_GROUP, KV_GROUP, PageLayout

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
UNIT = {"bf16": 2.0**-8, "f32": 2.0**-24}  # half a step of 1.0
SMALLEST_NORMAL = 2.0**-126  # of bf16 and float32; results below it may be flushed to zero
FP8_MAX = {"ocp": 448.0, "fnuz": 224.0}  # what quantisers scale to
FP4_MAX = 6.0
FP8_FLOOR, FP4_FLOOR = 1e-4, 6 * 2.0**-126  # least amax of a group

HalfStep = Callable[[slice, np.ndarray], np.ndarray]


def _minifloat(bits: int, mantissa: int, bias: int) -> np.ndarray:
    """All codes of a sign-magnitude format without special values, as float32."""
    code = np.arange(1 << bits)
    fraction, exponent = code & ((1 << mantissa) - 1), (code >> mantissa) & ((1 << (bits - 1 - mantissa)) - 1)
    significand = fraction / (1 << mantissa) + (exponent > 0)
    value = significand * np.exp2(np.maximum(exponent, 1) - bias)
    return np.where(code >> (bits - 1), -value, value).astype(np.float32)


E2M1 = _minifloat(4, 1, 1)
E4M3 = {"ocp": _minifloat(8, 3, 7), "fnuz": _minifloat(8, 3, 8)}
E4M3["ocp"][[0x7F, 0xFF]] = np.nan
E4M3["fnuz"][0x80] = np.nan
E8M0 = np.concatenate((np.exp2(np.arange(-127.0, 128.0)), [np.nan])).astype(np.float32)


def unpack_fp4(packed: np.ndarray) -> np.ndarray:
    """Bytes ``[..., n/2]`` to float32 ``[..., n]``, low nibble first."""
    return E2M1[np.stack((packed & 15, packed >> 4), axis=-1)].reshape(*packed.shape[:-1], -1)


def as_float(x: np.ndarray) -> np.ndarray:
    """bf16 to float32, anything else as it is."""
    return x.astype(np.float32) if x.dtype == BFLOAT16 else x


def unit(x: np.ndarray) -> float:
    return UNIT["bf16"] if x.dtype == BFLOAT16 else UNIT["f32"]


def power_of_two_below(x: np.ndarray) -> np.ndarray:
    """``2^floor(log2 |x|)`` by masking the mantissa (0 for 0; 0 for subnormal numbers of x's dtype)."""
    mask, bits = (0x7F800000, np.uint32) if x.dtype == np.float32 else (0x7FF0000000000000, np.uint64)
    return (x.view(bits) & bits(mask)).view(x.dtype)


def half_step(x: np.ndarray, unit: float) -> np.ndarray:
    """Half a step of bf16 or float32 at ``x``; below the smallest normal number all of it, for flushing."""
    below, smallest = power_of_two_below(x), x.dtype.type(SMALLEST_NORMAL)
    return np.maximum(below * x.dtype.type(unit), (below < smallest) * smallest)


@dataclass(frozen=True)
class Grid:
    """Where the values of one output may lie.

    Attributes:
        unit: half a step relative to the power of two below a value; finest part of the grid.
        half: ``half(rows, x)`` gives half a step for ``x``, rows ``rows`` of the oracle's values.
        maximum: sizes above it may become infinite.
        wide: values near the end of float32's range, to be compared in float64.
    """

    unit: float
    half: HalfStep
    maximum: float
    wide: bool = False


def float_grid(unit: float) -> Grid:
    return Grid(unit, lambda rows, x: half_step(x, unit), 3.38e38 if unit == UNIT["bf16"] else 3.4e38)


def power_of_two_scale(amax: np.ndarray, maximum: float) -> np.ndarray:
    """Least power of two >= amax / maximum; NaN for inf and NaN."""
    with np.errstate(invalid="ignore"):
        mantissa, exponent = np.frexp(amax / maximum)
    return np.where(np.isfinite(amax), np.ldexp(1.0, exponent - (mantissa == 0.5)), np.nan)


def group_amax(x: np.ndarray, group: int) -> np.ndarray:
    """``[rows, groups]``: largest size in every group of columns."""
    grouped = x.reshape(len(x), x.shape[1] // group, group)
    return np.maximum(grouped.max(axis=2, initial=0.0), -grouped.min(axis=2, initial=0.0))


def scaled_grid(oracle: np.ndarray, group: int, fmt: str, dialect: str, margin: float, smooth: bool = False) -> Grid:
    """FP8 or FP4 with one scale per group: a power of two (``smooth``: amax / maximum) by the oracle's values.

    Where amax lies within ``margin`` (relative) below an edge of the exponent, the larger scale counts: it
    doubles the steps of subnormal codes and no others.
    """
    maximum, floor = (FP4_MAX, FP4_FLOOR) if fmt == "fp4" else (FP8_MAX[dialect], FP8_FLOOR)
    amax = np.maximum(group_amax(oracle, group), floor) * (1 + margin)
    scale = amax / maximum if smooth else power_of_two_scale(amax, maximum)
    # e2m1: 2 significant bits, smallest normal 1; e4m3: 4 bits, 2^-6 (fnuz 2^-7)
    unit, normal = (2.0**-2, 1.0) if fmt == "fp4" else (2.0**-4, 2.0**-6 if dialect == "ocp" else 2.0**-7)

    def half(rows: slice, x: np.ndarray) -> np.ndarray:
        s = scale[rows].astype(x.dtype)[..., None]
        scaled = np.abs(x.reshape(*s.shape[:2], group)) / s
        below = np.maximum(power_of_two_below(scaled), x.dtype.type(normal))
        return (below * (s * x.dtype.type(unit))).reshape(x.shape)

    return Grid(unit, half, np.inf, wide=bool(amax.max(initial=0.0) > 1e37))


def beside(left: Grid, right: Grid, columns: int) -> Grid:
    """The first ``columns`` columns on ``left``, the others on ``right``."""

    def half(rows: slice, x: np.ndarray) -> np.ndarray:
        first, last = np.ascontiguousarray(x[:, :columns]), np.ascontiguousarray(x[:, columns:])
        return np.concatenate((left.half(rows, first), right.half(rows, last)), axis=1)

    return Grid(min(left.unit, right.unit), half, min(left.maximum, right.maximum))


def record_values(records: np.ndarray, layout: PageLayout) -> np.ndarray:
    """Records ``uint8 [n, record_bytes]`` decoded in the buffer's dialect: float32 ``[n, channels]``."""
    records, n = np.ascontiguousarray(records), layout.channels
    if layout.format == "f32":
        return records.view(np.float32)
    if layout.format == "bf16":
        return as_float(records.view(BFLOAT16))
    if layout.format == "fp4":
        scale = np.repeat(E8M0[records[:, n // 2 : n // 2 + n // FP4_GROUP]], FP4_GROUP, axis=1)
        return unpack_fp4(records[:, : n // 2]) * scale
    values = E4M3[layout.dialect]
    if layout.kind == "index":
        return values[records[:, :n]] * np.ascontiguousarray(records[:, n : n + 4]).view(np.float32)
    nope, data = n - layout.rope_channels, layout.fields[0]
    scale = np.repeat(E8M0[records[:, data : data + nope // KV_GROUP]], KV_GROUP, axis=1)
    rope = as_float(np.ascontiguousarray(records[:, nope:data]).view(BFLOAT16))
    return np.concatenate((values[records[:, :nope]] * scale, rope), axis=1)


def record_padding(layout: PageLayout) -> slice:
    """Bytes of a record that hold nothing."""
    if layout.kind == "kv" and layout.format == "fp8":
        nope = layout.channels - layout.rope_channels
        return slice(layout.fields[0] + nope // KV_GROUP, layout.record_bytes)
    return slice(layout.record_bytes, layout.record_bytes)


def record_grid(oracle: np.ndarray, layout: PageLayout, margin: float, simulated: bool) -> Grid:
    """Grid of a record's values; ``simulated``: quantised values in a bf16 or float32 buffer."""
    fmt, dialect = layout.format, layout.dialect or "ocp"
    plain = float_grid(UNIT["f32" if fmt == "f32" else "bf16"])
    if fmt in ("bf16", "f32") and not simulated:
        return plain
    if layout.kind == "index":
        if fmt == "fp8":
            return scaled_grid(oracle, layout.channels, "fp8", dialect, margin, smooth=True)
        return scaled_grid(oracle, FP4_GROUP, "fp4", dialect, margin)
    nope = layout.channels - layout.rope_channels
    return beside(scaled_grid(oracle[:, :nope], KV_GROUP, "fp8", dialect, margin), plain, nope)
