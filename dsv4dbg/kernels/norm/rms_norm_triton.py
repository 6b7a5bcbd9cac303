"""rms_norm in Triton: a program takes one whole row, or several short ones, so x is read once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4dbg.kernels.contract import ACT_DTYPES
from dsv4dbg.kernels.rows import has_rows
from dsv4dbg.kernels.triton_codes import rounded, widened
from dsv4dbg.kernels.triton_run import arch_of, triton_implements

LARGEST = 16384  # channels of a row that fit the registers of one program


@triton.jit
def _rms_norm(x, weight, y, x_row, rows, channels, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Program: ROWS rows of ``channels`` (at most BLOCK)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    real = (row < rows) & (column < channels)
    value = widened(tl.load(x + row * x_row + column, real, other=0.0))
    factor = tl.rsqrt(tl.sum(value * value, 1) / channels + eps)
    scaled = widened(tl.load(weight + column, column < channels, other=0.0)) * (value * factor[:, None])
    tl.store(y + row * channels + column, rounded(scaled, y.dtype.element_ty), real)


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    x, weight = args["x"], args["weight"]
    if x.dtype not in ACT_DTYPES or weight.dtype not in ACT_DTYPES:
        return f"x is {x.dtype}, weight is {weight.dtype}"
    if x.shape[1] > LARGEST:
        return f"{x.shape[1]} channels, a row of at most {LARGEST} fits a program"
    if not has_rows(x, weight):
        return "x or weight is not contiguous along the channels"
    return None


def _shapes() -> Iterator[dict[str, Any]]:
    """Hidden size, q and kv rows of Flash and Pro."""
    for channels in (4096, 7168, 1024, 1536, 512, 128):
        x = torch.empty(8192, channels, dtype=torch.bfloat16, device="meta")
        yield {"x": x, "weight": x[0], "eps": 1e-6}


@triton_implements("rms_norm", supports=_supports, shapes=_shapes)
def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """See the reference; only the order of the sum of squares differs."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, channels = x.shape
    if not rows:
        return y
    block = triton.next_power_of_2(channels)
    together = max(1, (32768 if arch_of(x.device) == "cpu" else 2048) // block)
    _rms_norm[(triton.cdiv(rows, together),)](
        x, weight, y, x.stride(0), rows, channels, eps,
        ROWS=together, BLOCK=block, num_warps=8 if block > 4096 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return y
