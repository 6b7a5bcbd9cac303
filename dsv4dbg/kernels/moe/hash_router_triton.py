"""hash_router in Triton: a program takes a block of tokens; only the chosen experts' logits are read and scored."""

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


@triton.jit
def _hash_router(
    logits, table, token_ids, weights, ids, tokens, choices,
    logits_token, logits_expert, table_row, table_column, token_stride, scale, eps,
    STEP: tl.constexpr, T: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Program p: tokens p T .. p T + T - 1; K is a power of two from ``choices`` on."""
    token = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    column = tl.arange(0, K)
    vocab = tl.load(token_ids + token * token_stride, token < tokens, other=0).to(tl.int64)
    real = (token < tokens)[:, None] & (column < choices)[None, :]
    expert = tl.load(table + vocab[:, None] * table_row + column[None, :] * table_column, real, other=0).to(tl.int64)
    z = tl.load(logits + token[:, None] * logits_token + expert * logits_expert, real, other=0.0)
    chosen = tl.where(real, scores(codes.widened(z), STEP), 0.0)
    place = token[:, None] * choices + column[None, :]
    tl.store(weights + place, weights_of(chosen, eps, scale, STEP), real)
    tl.store(ids + place, expert.to(tl.int32), real)


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    if args["tid2eid"].dtype not in (torch.int64, torch.int32):
        return f"tid2eid is {args['tid2eid'].dtype}"
    return unsupported(args)


def _shapes() -> Iterator[dict[str, Any]]:
    """Flash and Pro."""
    for experts, scale in ((256, 1.5), (384, 2.5)):
        yield {
            "logits": torch.empty(4096, experts, device="meta"),
            "tid2eid": torch.empty(129280, 6, dtype=torch.int64, device="meta"),
            "token_ids": torch.empty(4096, dtype=torch.int64, device="meta"),
            "scale": scale,
        }


@triton_implements("hash_router", supports=_supports, shapes=_shapes)
def hash_router_triton(
    logits: torch.Tensor, tid2eid: torch.Tensor, token_ids: torch.Tensor, *, scale: float, numerics: Numerics
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference. One launch."""
    tokens, choices = logits.shape[0], tid2eid.shape[1]
    weights = torch.empty(tokens, choices, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, choices, dtype=torch.int32, device=logits.device)
    if not tokens:
        return weights, ids
    width = triton.next_power_of_2(choices)
    block = max(1, (1 << 12 if arch_of(logits.device) == "cpu" else 1 << 8) // width)
    _hash_router[(triton.cdiv(tokens, block),)](
        logits, tid2eid, token_ids, weights, ids, tokens, choices, logits.stride(0), logits.stride(1),
        tid2eid.stride(0), tid2eid.stride(1), token_ids.stride(0), scale, numerics.router_eps,
        STEP=rounding(logits, numerics), T=block, K=width, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return weights, ids
