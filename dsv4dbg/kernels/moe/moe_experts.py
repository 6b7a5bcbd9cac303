"""moe_experts: the routed experts (grouped GEMMs, clamped SwiGLU, weighted sum)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsv4dbg.compare import Dense
from dsv4dbg.kernels.contract import attr, op, tensor, weight
from dsv4dbg.kernels.formats import block_dequantize, fp4_dequantize, fp8_dequantize, fp8_quantize
from dsv4dbg.kernels.moe.swiglu import clamped_swiglu
from dsv4dbg.kernels.numerics import Numerics

GROUP = 128  # channels of the activations that share one scale


def expert_weight(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """One expert's weight ``[out, in]`` as float32 (exact): MXFP4, FP8 in 128 x 128 blocks, or plain."""
    if scale is None:
        return weight.float()
    if weight.dtype == torch.uint8:
        return fp4_dequantize(weight, scale)
    return block_dequantize(weight, scale)


def quantized(x: torch.Tensor) -> torch.Tensor:
    """x rounded to FP8 with one power-of-two scale per 128 channels, as float32."""
    return fp8_dequantize(*fp8_quantize(x, GROUP))


@op(
    family="moe",
    args={
        "x": tensor("token channel", "act"),
        "ids": tensor("token choice", "i32", "experts of every token; -1: none"),
        "weights": tensor("token choice", "f32"),
        "w1": weight("expert inner channel_stored", "u8 fp8 bf16 f32", "gate"),
        "w1_scale": weight("expert inner_block channel_block", "u8 f32", optional=True),
        "w3": weight("expert inner channel_stored", "u8 fp8 bf16 f32", "up"),
        "w3_scale": weight("expert inner_block channel_block", "u8 f32", optional=True),
        "w2": weight("expert channel inner_stored", "u8 fp8 bf16 f32", "down"),
        "w2_scale": weight("expert channel_block inner_block", "u8 f32", optional=True),
        "limit": attr("clamp before SiLU: gate from above only, up on both sides"),
    },
    outputs={"y": tensor("token channel", "f32")},
    compare={"y": Dense(terms="choice inner", roundings=4)},
    switches=("experts", "routing_weight", "combine"),
)
def moe_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w1: torch.Tensor,
    w1_scale: torch.Tensor | None,
    w3: torch.Tensor,
    w3_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
    *,
    limit: float,
    numerics: Numerics,
) -> torch.Tensor:
    """``y = sum over chosen experts e, ascending, of round(w2[e] @ q(round(weight * swiglu(g, u))))``.

    ``g = round(w1[e] @ q(x))``, ``u = round(w3[e] @ q(x))``; ``q`` is the activation quantiser (FP8, power-of-two
    scale per 128 channels), absent for plain weights. GEMMs accumulate in float32; ``round`` is to x's dtype.
    ``routing_weight="after"`` multiplies behind w2 (one more rounding); ``combine="act"`` rounds the running sum at
    every addition. Experts that no token chose are not read. A token without experts gets 0.

    Args:
        x: ``[token, channel]`` bf16 (or float32).
        ids: ``[token, choice]`` int32, -1 for none.
        weights: ``[token, choice]`` float32.
        w1, w3: ``[expert, inner, channel]``; w2: ``[expert, channel, inner]``. MXFP4: packed uint8 with half the
            columns, scales E8M0 uint8 ``[expert, rows, columns/32]``. FP8 e4m3fn: scales ``[expert, rows/128,
            columns/128]``, E8M0 uint8 or float32. bf16 or float32: scales None.
    Returns:
        ``[token, channel]`` float32.
    """
    experts = w1.shape[0]
    values = x.float() if w1_scale is None else quantized(x)
    y = torch.zeros(x.shape, dtype=x.dtype if numerics.combine == "act" else torch.float32, device=x.device)
    flat = torch.where(ids < 0, experts, ids).flatten().long()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts + 1).tolist()[:experts]
    for expert, pairs in enumerate(order[: sum(counts)].split(counts)):
        if not len(pairs):
            continue
        token = pairs // ids.shape[1]
        factor = weights.flatten()[pairs, None]
        gate, up = (
            F.linear(values[token], expert_weight(w[expert], None if s is None else s[expert])).to(x.dtype)
            for w, s in ((w1, w1_scale), (w3, w3_scale))
        )
        inner = clamped_swiglu(gate, up, limit, numerics)
        if numerics.routing_weight == "before":
            inner = inner * factor
        inner = inner.to(x.dtype)
        inner = inner.float() if w2_scale is None else quantized(inner)
        out = F.linear(inner, expert_weight(w2[expert], None if w2_scale is None else w2_scale[expert])).to(x.dtype)
        if numerics.routing_weight == "after":
            out = (out.float() * factor).to(x.dtype)
        y.index_add_(0, token, out.to(y.dtype))
    return y.float()
