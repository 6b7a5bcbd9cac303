"""Steps that oracles of the attention ops share, in float64 numpy; nothing here is shared with the references."""

from __future__ import annotations

import numpy as np

from dsv4dbg.kernels import oracle
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.pages import FP4_GROUP, KV_GROUP, PageLayout


def rope(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Rotate pairs of the last r channels of ``x [token, ..., channel]`` as complex numbers; ``table [token, r]``."""
    half = table.shape[-1] // 2
    turn = table[:, :half] + 1j * table[:, half:]
    turn = turn.reshape(len(x), *(1,) * (x.ndim - 2), half)
    pairs = (x[..., -2 * half :: 2] + 1j * x[..., 1 - 2 * half :: 2]) * turn
    turned = np.stack((pairs.real, pairs.imag), axis=-1).reshape(*x.shape[:-1], 2 * half)
    return np.concatenate((x[..., : -2 * half], turned), axis=-1)


def hadamard(x: np.ndarray) -> np.ndarray:
    """``y_i = n^-0.5 sum_j (-1)^popcount(i & j) x_j`` over the last dim."""
    n = x.shape[-1]
    both = np.arange(n)[:, None] & np.arange(n)
    signs = 1.0 - 2.0 * (np.array([bin(v).count("1") for v in both.ravel()]).reshape(n, n) % 2)
    return x @ signs / np.sqrt(n)


def quantize_kv(x: np.ndarray, rope_channels: int) -> np.ndarray:
    """All but the last ``rope_channels`` channels rounded to FP8 values in groups of 64."""
    nope = x.shape[-1] - rope_channels
    return np.concatenate((oracle.quantize(x[..., :nope], KV_GROUP)[0], x[..., nope:]), axis=-1)


def quantize_index(x: np.ndarray) -> np.ndarray:
    """All channels rounded to FP4 values in groups of 32."""
    return oracle.quantize(x, FP4_GROUP, "fp4")[0]


def stored(name: str, values: np.ndarray, layout: PageLayout, numerics: Numerics) -> dict[str, np.ndarray]:
    """Rows to store in cache ``name``; where a plain cache gets sim-quantised values, the unquantised rows too."""
    if layout.format not in ("bf16", "f32"):
        return {name: values}
    if layout.kind == "index" and numerics.index_quant:
        return {name: quantize_index(values), f"{name}.unquantized": values}
    if layout.kind == "kv" and numerics.kv_quant:
        return {name: quantize_kv(values, layout.rope_channels), f"{name}.unquantized": values}
    return {name: values}
