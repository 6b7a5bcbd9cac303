"""silu_mul in Triton: elementwise; a program takes a piece of one row, or several short rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4dbg.kernels.contract import ACT_DTYPES
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.rows import has_rows, row_piece
from dsv4dbg.kernels.triton_codes import rounded, widened
from dsv4dbg.kernels.triton_run import arch_of, triton_implements


@triton.jit
def _silu_mul(
    gate, up, y, gate_row, up_row, rows, inner, limit,
    ACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: ROWS rows, BLOCK channels; neighbours in a row are neighbours in the grid."""
    act: tl.constexpr = gate.dtype.element_ty
    pieces = tl.cdiv(inner, BLOCK)
    row = (tl.program_id(0) // pieces).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)[None, :]
    real = (row < rows) & (column < inner)
    g = widened(tl.load(gate + row * gate_row + column, real, other=0.0))
    u = widened(tl.load(up + row * up_row + column, real, other=0.0))
    g = tl.where(g > limit, limit, g)  # comparisons, unlike minimum and maximum, let NaN through
    u = tl.where(u > limit, limit, u)
    u = tl.where(u < -limit, -limit, u)
    if ACT:  # a limit between two values of the dtype
        g, u = widened(rounded(g, act)), widened(rounded(u, act))
    silu = g / (1.0 + tl.exp(-g))
    if ACT:
        silu = widened(rounded(silu, act))
    tl.store(y + row * inner + column, rounded(silu * u, act), real)


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    gate, up = args["gate"], args["up"]
    if gate.dtype not in ACT_DTYPES or up.dtype != gate.dtype:
        return f"gate is {gate.dtype}, up is {up.dtype}"
    if not has_rows(gate, up):
        return "gate or up is not contiguous along the channels"
    return None


def _shapes() -> Iterator[dict[str, Any]]:
    """Flash and Pro: gate and up are halves of one matrix."""
    for inner in (2048, 3072):
        both = torch.empty(8192, 2 * inner, dtype=torch.bfloat16, device="meta")
        yield {"gate": both[:, :inner], "up": both[:, inner:], "limit": 10.0}


@triton_implements("silu_mul", supports=_supports, shapes=_shapes)
def silu_mul_triton(gate: torch.Tensor, up: torch.Tensor, *, limit: float, numerics: Numerics) -> torch.Tensor:
    """See the reference; only exp differs in its last bits."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows, inner = gate.shape
    if not rows:
        return y
    arch = arch_of(gate.device)
    block = row_piece(arch, inner)
    together = 64 if arch == "cpu" else max(1, 1024 // block)
    _silu_mul[(triton.cdiv(rows, together) * triton.cdiv(inner, block),)](
        gate, up, y, gate.stride(0), up.stride(0), rows, inner, limit,
        ACT=numerics.experts == "act", ROWS=together, BLOCK=block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return y
