"""Last steps of a KV or indexer row before it is stored: rows of the rope table, sim-quant, Hadamard, encoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dsv4dbg.kernels import formats, oracle, paged
from dsv4dbg.kernels.contract import Invariant
from dsv4dbg.kernels.invariants import first
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.pages import FP4_GROUP, KV_GROUP


def rope_rows(cos_sin: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype, numerics: Numerics) -> torch.Tensor:
    """Rows ``[token, r]`` of the table, rounded to ``dtype`` where the stack keeps its table in activations' dtype."""
    rows = cos_sin[positions.long()]
    return rows.to(dtype) if numerics.rope_table == "act" else rows


def sim_quant_kv(values: torch.Tensor, rope_channels: int) -> torch.Tensor:
    """Round all but the last ``rope_channels`` channels to FP8 (OCP, groups of 64) and back, in values' dtype."""
    nope = values.shape[-1] - rope_channels
    rounded = formats.fp8_dequantize(*formats.fp8_quantize(values[..., :nope], KV_GROUP))
    return torch.cat((rounded.to(values.dtype), values[..., nope:]), dim=-1)


def sim_quant_index(values: torch.Tensor) -> torch.Tensor:
    """Round all channels to FP4 (groups of 32) and back, in values' dtype."""
    return formats.fp4_dequantize(*formats.fp4_quantize(values, FP4_GROUP)).to(values.dtype)


def store_kv(cache: Cache, slots: torch.Tensor, values: torch.Tensor, numerics: Numerics) -> None:
    """Store KV rows ``[token, channel]``; a plain cache gets sim-quantised values where ``kv_quant`` is set."""
    if numerics.kv_quant and cache.layout.format in paged.DTYPES:
        values = sim_quant_kv(values, cache.layout.rope_channels)
    paged.write(cache, slots, values)


def rotate_index(values: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """Hadamard rotation of an indexer row where the stack has one."""
    return formats.hadamard(values) if numerics.index_hadamard else values


def store_index(cache: Cache, slots: torch.Tensor, values: torch.Tensor, numerics: Numerics) -> None:
    """Store indexer keys ``[token, channel]``; a plain cache gets sim-quantised values where ``index_quant`` is set."""
    values = rotate_index(values, numerics)
    if numerics.index_quant and cache.layout.format in paged.DTYPES:
        values = sim_quant_index(values)
    paged.write(cache, slots, values)


def stored_finite(cache: str, slots: str) -> Invariant:
    """Records that a call stored decode to finite values, provided that its floating-point arguments are finite."""

    def check(call: Mapping[str, Any]) -> str | None:
        floats = (v for v in call.values() if isinstance(v, np.ndarray) and v.dtype.kind == "f")
        if not all(np.isfinite(v).all() for v in floats):
            return None
        written = call[slots][call[slots] >= 0]
        bad = ~np.isfinite(oracle.to_numpy(call[cache]).rows(written))
        if bad.any():
            row, channel = first(bad)
            return f"{cache} holds a value that is not finite at slot {written[row]}, channel {channel}"
        return None

    return Invariant(f"{cache} finite at {slots}", check)
