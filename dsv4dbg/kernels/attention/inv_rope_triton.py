"""inv_rope in Triton: a program takes a block of heads of one token, whole rows, so o is read and written once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4dbg.kernels.contract import ACT_DTYPES
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.rows import has_rows
from dsv4dbg.kernels.triton_codes import rounded, widened
from dsv4dbg.kernels.triton_run import arch_of, triton_implements


@triton.jit
def _inv_rope(
    o, positions, cos_sin, y, o_token, o_head, table_row, tokens, heads, channels,
    ROPE: tl.constexpr, ACT: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: ``[TOKENS, HEADS, BLOCK]``; the last ROPE of ``channels`` (at most BLOCK) are turned in pairs."""
    act: tl.constexpr = o.dtype.element_ty
    blocks = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head = tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS)[None, :, None]
    channel = tl.arange(0, BLOCK)[None, None, :]
    real = (token < tokens) & (head < heads) & (channel < channels)
    value = tl.load(o + token * o_token + head * o_head + channel, real, other=0.0)

    pair = tl.arange(0, BLOCK // 2)[None, None, :] - (channels - ROPE) // 2
    turned = (token < tokens) & (pair >= 0) & (pair < ROPE // 2)
    row = cos_sin + tl.load(positions + token, token < tokens, other=0) * table_row
    cos = tl.load(row + pair, turned, other=0.0)
    sin = tl.load(row + ROPE // 2 + pair, turned, other=0.0)
    if ACT:
        cos, sin = widened(rounded(cos, act)), widened(rounded(sin, act))
    a, b = tl.split(tl.reshape(widened(value), (TOKENS, HEADS, BLOCK // 2, 2)))
    result = tl.reshape(tl.join(a * cos + b * sin, b * cos - a * sin), (TOKENS, HEADS, BLOCK))
    result = tl.where(channel < channels - ROPE, value, rounded(result, act))
    tl.store(y + (token * heads + head) * channels + channel, result, real)


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    o, rope = args["o"], args["cos_sin"].shape[1]
    if o.dtype not in ACT_DTYPES or args["cos_sin"].dtype != torch.float32:
        return f"o is {o.dtype}, cos_sin is {args['cos_sin'].dtype}"
    if (o.shape[2] - rope) % 2 or rope % 2:
        return f"{rope} of {o.shape[2]} channels are no pairs of channels"
    if not has_rows(o, args["positions"], args["cos_sin"]):
        return "o, positions or cos_sin is not contiguous along its last dim"
    return None


def _shapes() -> Iterator[dict[str, Any]]:
    """Flash and Pro."""
    for heads in (64, 128):
        yield {
            "o": torch.empty(8192, heads, 512, dtype=torch.bfloat16, device="meta"),
            "positions": torch.empty(8192, dtype=torch.int64, device="meta"),
            "cos_sin": torch.empty(1048576, 64, device="meta"),
        }


@triton_implements("inv_rope", supports=_supports, shapes=_shapes)
def inv_rope_triton(
    o: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, numerics: Numerics
) -> torch.Tensor:
    """See the reference; the bits are the same."""
    y = torch.empty(o.shape, dtype=o.dtype, device=o.device)
    tokens, heads, channels = o.shape
    if not tokens:
        return y
    block = triton.next_power_of_2(channels)
    together = min(triton.next_power_of_2(heads), max(1, 4096 // block))
    arch = arch_of(o.device)
    rows = 16 if arch == "cpu" else 1
    _inv_rope[(triton.cdiv(tokens, rows) * triton.cdiv(heads, together),)](
        o, positions, cos_sin, y, o.stride(0), o.stride(1), cos_sin.stride(0), tokens, heads, channels,
        ROPE=cos_sin.shape[1], ACT=numerics.rope_table == "act", TOKENS=rows, HEADS=together, BLOCK=block,
        num_warps=2 if arch.startswith("sm_") else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return y
