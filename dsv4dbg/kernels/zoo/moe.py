"""Zoo cases of the routers and the experts."""

from __future__ import annotations

import math
from typing import Any

import torch

from dsv4dbg.kernels.moe.hash_router import hash_router
from dsv4dbg.kernels.moe.moe_experts import moe_experts
from dsv4dbg.kernels.moe.moe_router import moe_router
from dsv4dbg.kernels.moe.silu_mul import silu_mul
from dsv4dbg.kernels.zoo.case import case

SMALL = 256  # tokens below which an engine takes another kernel


@case("bias-in-weights", op="moe_router", bug="G13", kind="values", shows="weights, not the choice")
def bias_in_weights(*, logits: torch.Tensor, bias: torch.Tensor, scale: float, **call: Any) -> Any:
    """aiter#4247: the bias that steers the choice is in the weights too."""
    _, ids = moe_router(logits=logits, bias=bias, scale=scale, **call)
    scores = torch.nn.functional.softplus(logits.float()).sqrt() + bias.float()
    chosen = scores.gather(1, ids.long())
    return chosen / chosen.sum(-1, keepdim=True) * scale, ids


@case("sigmoid-router", op="moe_router", bug="G12", kind="values", shows="weights of most tokens, few choices")
def sigmoid_router(*, logits: torch.Tensor, bias: torch.Tensor, topk: int, scale: float, **call: Any) -> Any:
    """flashinfer#5190: the kernel scores by sigmoid; this model's scores are sqrt(softplus)."""
    scores = torch.sigmoid(logits.float())
    ids = (scores + bias.float()).sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    chosen = scores.gather(1, ids)
    return chosen / chosen.sum(-1, keepdim=True) * scale, ids.int()


@case("weights-not-scaled", op="moe_router", kind="values", shows="every token", fingerprint="ratio 0.6667")
def weights_not_scaled(*, scale: float, **call: Any) -> Any:
    """The weights sum to 1; the model's routed_scaling_factor is left out."""
    return moe_router(scale=1.0, **call)


@case("hash-of-next-token", op="hash_router", bug="D11", kind="values", shows="hash-routed layers, most tokens")
def hash_of_next_token(*, token_ids: torch.Tensor, **call: Any) -> Any:
    """ik_llama.cpp#2309: what is stored for a token is read at its neighbour's index; experts of the wrong token."""
    return hash_router(token_ids=token_ids.roll(-1), **call)


@case("hash-weights-nan", op="hash_router", bug="G06", kind="values", shows="weights of few tokens; ids are right")
def hash_weights_nan(*, logits: torch.Tensor, **call: Any) -> Any:
    """vllm-ascend#9676: scores are not kept in float32; low ones become 0, and 0 / 0 is a weight of NaN."""
    return hash_router(logits=torch.where(logits < -1, -math.inf, logits), **call)


@case("no-clamp", op="silu_mul", bug="G07", kind="values", shows="elements beyond the limit of 10 only")
def no_clamp(*, limit: float, **call: Any) -> torch.Tensor:
    """sglang-das#250: the fused activation ignores swiglu_limit."""
    return silu_mul(limit=math.inf, **call)


@case("experts-no-clamp", op="moe_experts", bug="G07", kind="values", shows="inner values beyond 10 only")
def experts_no_clamp(*, limit: float, **call: Any) -> torch.Tensor:
    """sglang-das#250: the experts' activation ignores swiglu_limit."""
    return moe_experts(limit=math.inf, **call)


@case("gate-up-swapped", op="moe_experts", bug="G03", kind="values", shows="every token")
def gate_up_swapped(*, w1: Any, w1_scale: Any, w3: Any, w3_scale: Any, **call: Any) -> torch.Tensor:
    """vllm#44893: the weights lie as (up, gate) where the call says (gate, up)."""
    return moe_experts(w1=w3, w1_scale=w3_scale, w3=w1, w3_scale=w1_scale, **call)


@case("small-batch-layout", op="moe_experts", bug="G11", kind="values", shows="calls of fewer than 256 tokens")
def small_batch_layout(*, x: torch.Tensor, w2: torch.Tensor, **call: Any) -> torch.Tensor:
    """ATOM#1302: below 256 tokens another kernel runs, which expects the nibbles of a byte the other way round."""
    swapped = (w2 << 4) | (w2 >> 4) if w2.dtype == torch.uint8 and len(x) < SMALL else w2
    return moe_experts(x=x, w2=swapped, **call)


@case("experts-off-by-one", op="moe_experts", bug="G16", kind="values", shows="every token")
def experts_off_by_one(*, ids: torch.Tensor, w1: torch.Tensor, **call: Any) -> torch.Tensor:
    """tokenspeed#1490: the map from experts to those of this rank is shifted."""
    return moe_experts(ids=torch.where(ids < 0, ids, (ids + 1) % len(w1)), w1=w1, **call)


_accumulator: dict[tuple[int, ...], torch.Tensor] = {}


@case("accumulator-not-zeroed", op="moe_experts", bug="G15", kind="state", shows="every call but the first of a shape")
def accumulator_not_zeroed(**call: Any) -> torch.Tensor:
    """aiter#4494: split-K state is not reset between launches; results are added to those of the launch before."""
    y = moe_experts(**call)
    total = _accumulator.setdefault((*y.shape,), torch.zeros_like(y))
    return total.add_(y).clone()
