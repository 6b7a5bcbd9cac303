"""moe_combine in Triton: elementwise; a program takes a piece of one row, or several short rows."""

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
def _combine(
    routed, shared, y, routed_row, shared_row, rows, channels,
    ACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: ROWS rows, BLOCK channels; neighbours in a row are neighbours in the grid."""
    act: tl.constexpr = shared.dtype.element_ty
    pieces = tl.cdiv(channels, BLOCK)
    row = (tl.program_id(0) // pieces).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)[None, :]
    real = (row < rows) & (column < channels)
    total = tl.load(routed + row * routed_row + column, real, other=0.0)
    if ACT:
        total = widened(rounded(total, act))
    total += widened(tl.load(shared + row * shared_row + column, real, other=0.0))
    tl.store(y + row * channels + column, rounded(total, act), real)


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    routed, shared = args["routed"], args["shared"]
    if routed.dtype != torch.float32 or shared.dtype not in ACT_DTYPES:
        return f"routed is {routed.dtype}, shared is {shared.dtype}"
    if not has_rows(routed, shared):
        return "routed or shared is not contiguous along the channels"
    return None


def _shapes() -> Iterator[dict[str, Any]]:
    """Flash and Pro."""
    for channels in (4096, 7168):
        routed = torch.empty(8192, channels, device="meta")
        yield {"routed": routed, "shared": routed.to(torch.bfloat16)}


@triton_implements("moe_combine", supports=_supports, shapes=_shapes)
def moe_combine_triton(routed: torch.Tensor, shared: torch.Tensor, *, numerics: Numerics) -> torch.Tensor:
    """See the reference; the bits are the same."""
    y = torch.empty(shared.shape, dtype=shared.dtype, device=shared.device)
    rows, channels = shared.shape
    if not rows:
        return y
    arch = arch_of(shared.device)
    block = row_piece(arch, channels)
    together = 64 if arch == "cpu" else max(1, 1024 // block)
    _combine[(triton.cdiv(rows, together) * triton.cdiv(channels, block),)](
        routed, shared, y, routed.stride(0), shared.stride(0), rows, channels,
        ACT=numerics.combine == "act", ROWS=together, BLOCK=block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return y
