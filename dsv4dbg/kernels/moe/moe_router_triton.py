"""moe_router in Triton: a program takes a block of tokens with all their experts, and the best expert k times.

Ranks are 64-bit integers, the score's bits in order and the expert's number below, so one maximum finds the best score
and the lowest id of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4dbg.kernels import triton_codes as codes
from dsv4dbg.kernels.moe.router_triton import rounding, scores, unsupported, weights_of
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.triton_run import arch_of, triton_implements

SCORES = 1 << 8  # of a program: few, so that a row lies in one warp


@triton.jit
def _ordered(x):
    """float32 to int32 in the same order: -0 equals 0, NaN is above all."""
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return tl.where(x == x, ordered, 0x7FC00000)


@triton.jit
def _moe_router(
    logits, bias, weights, ids, tokens, experts, topk, logits_token, logits_expert, bias_stride, scale, eps,
    STEP: tl.constexpr, T: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Program p: tokens p T .. p T + T - 1; E and K are powers of two from ``experts`` and ``topk`` on."""
    token = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    expert, column = tl.arange(0, E), tl.arange(0, K)
    real = (token < tokens)[:, None] & (expert < experts)[None, :]
    z = tl.load(logits + token[:, None] * logits_token + expert[None, :] * logits_expert, real, other=0.0)
    added = codes.widened(tl.load(bias + expert * bias_stride, expert < experts, other=0.0))
    ranked = scores(codes.widened(z), STEP) + added[None, :]
    rank = (_ordered(ranked).to(tl.int64) << 32) | (E - 1 - expert)[None, :].to(tl.int64)
    rank = tl.where((expert < experts)[None, :], rank, -(1 << 63))

    choice = tl.zeros((T, K), tl.int32)
    for k in range(topk):
        best = E - 1 - (tl.max(rank, 1) & (E - 1)).to(tl.int32)
        rank = tl.where(expert[None, :] == best[:, None], -(1 << 63), rank)
        choice = tl.where(column[None, :] == k, best[:, None], choice)
    stored = (token < tokens)[:, None] & (column < topk)[None, :]
    z = tl.load(logits + token[:, None] * logits_token + choice * logits_expert, stored, other=0.0)
    chosen = tl.where(stored, scores(codes.widened(z), STEP), 0.0)  # again, which is cheaper than to carry them
    place = token[:, None] * topk + column[None, :]
    tl.store(weights + place, weights_of(chosen, eps, scale, STEP), stored)
    tl.store(ids + place, choice, stored)


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    experts = args["logits"].shape[1]
    if not 0 < args["topk"] <= experts:
        return f"{args['topk']} of {experts} experts"
    return unsupported(args)


def _shapes() -> Iterator[dict[str, Any]]:
    """Flash and Pro."""
    for experts, scale in ((256, 1.5), (384, 2.5)):
        yield {
            "logits": torch.empty(4096, experts, device="meta"),
            "bias": torch.empty(experts, device="meta"),
            "topk": 6,
            "scale": scale,
        }


@triton_implements("moe_router", supports=_supports, shapes=_shapes)
def moe_router_triton(
    logits: torch.Tensor, bias: torch.Tensor, *, topk: int, scale: float, numerics: Numerics
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference. One launch."""
    tokens, experts = logits.shape
    weights = torch.empty(tokens, topk, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, topk, dtype=torch.int32, device=logits.device)
    if not tokens:
        return weights, ids
    width = triton.next_power_of_2(experts)
    block = max(1, (1 << 14 if arch_of(logits.device) == "cpu" else SCORES) // width)
    _moe_router[(triton.cdiv(tokens, block),)](
        logits, bias, weights, ids, tokens, experts, topk, logits.stride(0), logits.stride(1), bias.stride(0), scale,
        numerics.router_eps,
        STEP=rounding(logits, numerics), T=block, E=width, K=triton.next_power_of_2(topk),
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return weights, ids
