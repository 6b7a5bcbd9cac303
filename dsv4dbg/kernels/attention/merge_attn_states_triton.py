"""merge_attn_states in Triton: a program takes a block of heads of one token, whole rows."""

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


@triton.jit
def _weighted(o, factor, seen):
    """``o * factor``, 0 for a side without keys whatever its o holds."""
    return tl.where(seen, widened(o) * factor, 0.0)


@triton.jit
def _merge(
    o_a, lse_a, o_b, lse_b, sink, o, lse, a_token, a_head, b_token, b_head, tokens, heads, channels,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: ``[TOKENS, HEADS, BLOCK]``; ``channels`` are at most BLOCK."""
    blocks = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head = tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS)[None, :, None]
    channel = tl.arange(0, BLOCK)[None, None, :]
    there = (token < tokens) & (head < heads)
    real = there & (channel < channels)
    place = token * heads + head
    a = tl.load(o_a + token * a_token + head * a_head + channel, real, other=0.0)
    b = tl.load(o_b + token * b_token + head * b_head + channel, real, other=0.0)
    size_a = tl.load(lse_a + place, there, other=0.0)
    size_b = tl.load(lse_b + place, there, other=0.0)

    maximum = tl.maximum(size_a, size_b, propagate_nan=tl.PropagateNan.ALL)
    top = tl.where(maximum == float("-inf"), 0.0, maximum)
    weight_a, weight_b = tl.exp(size_a - top), tl.exp(size_b - top)
    total = weight_a + weight_b
    denominator = total
    if sink is not None:
        denominator += tl.exp(tl.load(sink + head, head < heads, other=0.0) - top)
    result = _weighted(a, weight_a, size_a != float("-inf")) + _weighted(b, weight_b, size_b != float("-inf"))
    result = tl.where(maximum == float("-inf"), 0.0, result / denominator)
    tl.store(o + place * channels + channel, rounded(result, o.dtype.element_ty), real)
    tl.store(lse + place, maximum + tl.log(total), there)


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    sides, sizes = [args["o_a"], args["o_b"]], [args["lse_a"], args["lse_b"]]
    if any(o.dtype not in ACT_DTYPES for o in sides):
        return f"o_a is {sides[0].dtype}, o_b is {sides[1].dtype}"
    if args["sink"] is not None:
        sizes.append(args["sink"])
    if any(x.dtype != torch.float32 for x in sizes):
        return "lse_a, lse_b or sink is not float32"
    if not has_rows(*sides) or not all(x.is_contiguous() for x in sizes):
        return "o_a or o_b is not contiguous along the channels, or lse_a, lse_b or sink is not contiguous"
    return None


def _shapes() -> Iterator[dict[str, Any]]:
    """Flash and Pro; partial results in bf16 and in float32."""
    for heads in (64, 128):
        for dtype in ACT_DTYPES:
            o = torch.empty(8192, heads, 512, dtype=dtype, device="meta")
            lse = torch.empty(8192, heads, device="meta")
            yield {"o_a": o, "lse_a": lse, "o_b": o, "lse_b": lse, "sink": lse[0]}


@triton_implements("merge_attn_states", supports=_supports, shapes=_shapes)
def merge_attn_states_triton(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference; only exp and log differ in their last bits."""
    o = torch.empty(o_a.shape, dtype=o_a.dtype, device=o_a.device)
    lse = torch.empty(lse_a.shape, dtype=torch.float32, device=o_a.device)
    tokens, heads, channels = o.shape
    if not tokens:
        return o, lse
    block = triton.next_power_of_2(channels)
    together = min(triton.next_power_of_2(heads), max(1, 4096 // block))
    rows = 16 if arch_of(o.device) == "cpu" else 1
    _merge[(triton.cdiv(tokens, rows) * triton.cdiv(heads, together),)](
        o_a, lse_a, o_b, lse_b, sink, o, lse, o_a.stride(0), o_a.stride(1), o_b.stride(0), o_b.stride(1),
        tokens, heads, channels, TOKENS=rows, HEADS=together, BLOCK=block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return o, lse
