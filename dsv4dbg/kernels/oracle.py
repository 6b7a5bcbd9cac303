"""Running an op's oracle: arguments as numpy in float64, and number codecs that share nothing with the reference.

Oracles see bf16 and float32 tensors as float64 arrays, integers as int64, raw bytes (uint8 and float8 weights) as
uint8, and caches as `OracleCache`. They round at every FP8, FP4 and E8M0 point of the contract and nowhere at bf16.
The codecs are ml_dtypes' tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch

from dsv4dbg.kernels.contract import Op
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.pages import FP4_GROUP, KV_GROUP, PageLayout

_FP8 = {"ocp": (ml_dtypes.float8_e4m3fn, 448.0), "fnuz": (ml_dtypes.float8_e4m3fnuz, 224.0)}
_CODES = np.arange(256, dtype=np.uint8)


def e8m0(scale: np.ndarray) -> np.ndarray:
    """E8M0 bytes to float64."""
    return _CODES.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)[scale]


def fp8(codes: np.ndarray, dialect: str = "ocp") -> np.ndarray:
    """e4m3 bytes to float64."""
    return _CODES.view(_FP8[dialect][0]).astype(np.float64)[codes]


def fp4(packed: np.ndarray) -> np.ndarray:
    """Packed e2m1 bytes ``[..., n/2]`` to float64 ``[..., n]``, low nibble first; minus zero becomes zero."""
    values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64) + 0.0
    pairs = np.stack((values[packed & 15], values[packed >> 4]), axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def mx(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """MXFP4 ``[..., n/2]`` with E8M0 bytes ``[..., n/32]`` to float64 ``[..., n]``."""
    values = fp4(packed)
    return values * np.repeat(e8m0(scale), values.shape[-1] // scale.shape[-1], axis=-1)


def fp8_blocks(codes: np.ndarray, scale: np.ndarray, block: int = 128) -> np.ndarray:
    """FP8 weight ``[..., out, in]`` and block scales (E8M0 bytes or floats) to float64."""
    factor = e8m0(scale) if scale.dtype == np.uint8 else scale
    factor = np.repeat(np.repeat(factor, block, axis=-2), block, axis=-1)
    return fp8(codes) * factor[..., : codes.shape[-2], : codes.shape[-1]]


def _power_of_two_scale(amax: np.ndarray, maximum: float) -> np.ndarray:
    """Smallest power of two >= amax / maximum, found exactly (frexp), as float64; NaN for inf and NaN."""
    mantissa, exponent = np.frexp(amax / maximum)
    scale = np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))
    return np.where(np.isfinite(amax), scale, np.nan)


def quantize(x: np.ndarray, group: int, fmt: str = "fp8", dialect: str = "ocp") -> tuple[np.ndarray, np.ndarray]:
    """Round ``x [..., n]`` to FP8 or FP4 with one power-of-two scale per group.

    Returns:
        the dequantised values ``[..., n]`` and the scales ``[..., n / group]``, both float64.
    """
    grouped = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    dtype, maximum = (ml_dtypes.float4_e2m1fn, 6.0) if fmt == "fp4" else _FP8[dialect]
    floor = 6.0 * 2.0**-126 if fmt == "fp4" else 1e-4
    amax = np.maximum(np.abs(grouped).max(axis=-1, initial=0.0), floor)
    scale = _power_of_two_scale(amax, maximum)
    scaled = np.clip(grouped / scale[..., None], -maximum, maximum)
    rounded = scaled.astype(dtype).astype(np.float64) + 0.0
    return (rounded * scale[..., None]).reshape(x.shape), scale


@dataclass(frozen=True)
class OracleCache:
    """A paged cache as numpy bytes, decoded into dense float64 rows on demand."""

    data: np.ndarray
    layout: PageLayout

    def rows(self, slots: np.ndarray) -> np.ndarray:
        """Records at ``slots`` (>= 0) as float64 ``[n, channels]``."""
        return decode_records(self.layout.read(self.data, slots), self.layout)


def decode_records(records: np.ndarray, layout: PageLayout) -> np.ndarray:
    """Record bytes ``uint8 [n, record_bytes]`` to float64 ``[n, channels]``."""
    records = np.ascontiguousarray(records)
    if layout.format in ("bf16", "f32"):
        dtype = ml_dtypes.bfloat16 if layout.format == "bf16" else np.float32
        return records.view(dtype).astype(np.float64)
    if layout.format == "fp4":
        half = layout.channels // 2
        return mx(records[:, :half], records[:, half : half + layout.channels // FP4_GROUP])
    if layout.kind == "index":
        scale = np.ascontiguousarray(records[:, layout.channels :]).view(np.float32).astype(np.float64)
        return fp8(records[:, : layout.channels], layout.dialect) * scale
    nope = layout.channels - layout.rope_channels
    groups = nope // KV_GROUP
    scale = np.repeat(e8m0(records[:, layout.fields[0] : layout.fields[0] + groups]), KV_GROUP, axis=1)
    rope = np.ascontiguousarray(records[:, nope : layout.fields[0]]).view(ml_dtypes.bfloat16).astype(np.float64)
    return np.concatenate((fp8(records[:, :nope], layout.dialect) * scale, rope), axis=1)


def to_numpy(value: Any) -> Any:
    """One argument as the oracle sees it."""
    if isinstance(value, Cache):
        return OracleCache(value.data.detach().cpu().numpy().copy(), value.layout)
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    if value.dtype in (torch.bfloat16, torch.float32, torch.float64):
        return value.double().numpy()
    if value.dtype in (torch.uint8, torch.bool):
        return value.numpy()
    if value.element_size() == 1:  # the float8 types
        return value.view(torch.uint8).numpy()
    return value.long().numpy()


def run_oracle(op: Op, args: Mapping[str, Any], numerics: Numerics) -> dict[str, np.ndarray]:
    """The oracle's outputs by name; for a mutated cache the values before quantisation, one row per slot >= 0.

    A reference that reads switches has an oracle that takes ``numerics`` too.
    """
    assert op.oracle_function is not None, f"op {op.name} has no oracle"
    kwargs = {name: to_numpy(args.get(name)) for name in op.args}
    if op.reads_numerics:
        kwargs["numerics"] = numerics
    result = op.oracle_function(**kwargs)
    if isinstance(result, dict):
        return result
    values = result if isinstance(result, tuple) else (result,)
    return dict(zip([*op.outputs, *op.mutates], values, strict=True))
