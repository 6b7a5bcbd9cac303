"""moe_experts: the routed experts (grouped GEMMs, clamped SwiGLU, weighted sum)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dsv4dbg.compare import Dense
from dsv4dbg.kernels import oracle
from dsv4dbg.kernels.contract import Example, Invariant, attr, op, tensor, weight
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.formats import block_dequantize, fp4_dequantize, fp8_dequantize, fp8_quantize
from dsv4dbg.kernels.invariants import first
from dsv4dbg.kernels.moe.swiglu import clamped_swiglu
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.samples import TOKENS, activations, fp4_weight, fp8_weight, normal

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


def finite_rows(call: Mapping[str, Any]) -> str | None:
    """Experts that no token chose may hold anything."""
    bad = ~np.isfinite(call["y"]).all(axis=-1) & np.isfinite(call["x"]).all(axis=-1)
    return f"y of token {first(bad)[0]} is not finite, x is" if bad.any() else None


def zero_without_experts(call: Mapping[str, Any]) -> str | None:
    bad = (call["ids"] < 0).all(axis=-1) & (call["y"] != 0).any(axis=-1)
    return f"token {first(bad)[0]} has no expert, y is not zero" if bad.any() else None


@op(
    family="moe",
    args={
        "x": tensor("token channel", "act"),
        "ids": tensor("token choice", "i32", "experts of every token; -1: none"),
        "weights": tensor("token choice", "f32"),
        "w1": weight("expert inner channel_stored", "u8 e4m3fn bf16 f32", "gate"),
        "w1_scale": weight("expert inner_block channel_block", "u8 f32", optional=True),
        "w3": weight("expert inner channel_stored", "u8 e4m3fn bf16 f32", "up"),
        "w3_scale": weight("expert inner_block channel_block", "u8 f32", optional=True),
        "w2": weight("expert channel inner_stored", "u8 e4m3fn bf16 f32", "down"),
        "w2_scale": weight("expert channel_block inner_block", "u8 f32", optional=True),
        "limit": attr("clamp before SiLU: gate from above only, up on both sides"),
    },
    outputs={"y": tensor("token channel", "f32")},
    compare={
        "y": Dense(
            "choice inner",
            ("y.terms",),
            roundings=4,
            inner="w2_scale",
            more={"experts=act": 3, "routing_weight=after": 1, "combine=act": 6},
        )
    },
    invariants=(Invariant("y finite where x is", finite_rows), Invariant("zero without experts", zero_without_experts)),
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


@moe_experts.oracle
def _(
    x: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    w1: np.ndarray,
    w1_scale: np.ndarray | None,
    w3: np.ndarray,
    w3_scale: np.ndarray | None,
    w2: np.ndarray,
    w2_scale: np.ndarray | None,
    *,
    limit: float,
    numerics: Numerics,
) -> dict[str, np.ndarray]:
    def operands(values: np.ndarray, w: np.ndarray, scale: np.ndarray | None, expert: int) -> tuple[np.ndarray, ...]:
        if scale is None:
            return values, w[expert].T
        one_scale_per_row = scale.shape[1] == w.shape[1]
        dense = (oracle.mx if one_scale_per_row else oracle.fp8_blocks)(w[expert], scale[expert])
        return oracle.quantize(values, 128)[0], dense.T

    def apply(values: np.ndarray, w: np.ndarray, scale: np.ndarray | None, expert: int) -> np.ndarray:
        return np.matmul(*operands(values, w, scale, expert))

    y, squares = np.zeros(x.shape), np.zeros(x.shape)
    for expert in np.unique(ids[ids >= 0]):
        token, choice = np.nonzero(ids == expert)
        factor = weights[token, choice, None]
        gate = np.minimum(apply(x[token], w1, w1_scale, expert), limit)
        up = np.clip(apply(x[token], w3, w3_scale, expert), -limit, limit)
        inner = gate * np.exp(np.minimum(gate, 0)) / (1 + np.exp(-np.abs(gate))) * up
        before, after = (factor, 1.0) if numerics.routing_weight == "before" else (1.0, factor)
        values, dense = operands(inner * before, w2, w2_scale, expert)
        np.add.at(y, token, values @ dense * after)
        np.add.at(squares, token, values**2 @ dense**2 * after**2)
    return {"y": y, "y.terms": np.sqrt(squares)}


def expert_weights(rng: np.random.Generator, dims: Dims, fmt: str, used: np.ndarray) -> dict[str, torch.Tensor | None]:
    """w1, w3, w2 and their scales in format ``fmt``; experts not in ``used`` hold only NaN."""
    unused = np.setdiff1d(np.arange(dims.experts), used)
    result: dict[str, torch.Tensor | None] = {}
    for name in ("w1", "w3", "w2"):
        out, inp = (dims.hidden, dims.expert_inner) if name == "w2" else (dims.expert_inner, dims.hidden)
        scale = None
        if fmt == "mxfp4":
            w, scale = fp4_weight(rng, dims.experts, out, inp)
        elif fmt == "bf16":
            w = normal(rng, dims.experts, out, inp, scale=inp**-0.5).to(torch.bfloat16)
        else:
            pairs = [fp8_weight(rng, out, inp) for _ in range(dims.experts)]
            w, scale = (torch.stack([p[i].view(torch.uint8) for p in pairs]) for i in (0, 1))
            w[unused] = 0xFF
            w = w.view(torch.float8_e4m3fn)
            if fmt == "fp8 f32 scale":
                scale = torch.exp2(scale.float() - 127) * (1 + normal(rng, *scale.shape).sigmoid())
        nan = w if scale is None else scale
        nan[unused] = 0xFF if nan.dtype == torch.uint8 else float("nan")
        result |= {name: w, f"{name}_scale": scale}
    return result


def routing(rng: np.random.Generator, tokens: int, pool: np.ndarray, choices: int) -> dict[str, torch.Tensor]:
    """ids and weights of tokens that choose different experts of ``pool``."""
    ids = np.array([rng.permutation(pool)[:choices] for _ in range(tokens)]).reshape(tokens, choices)
    weights = normal(rng, tokens, choices).softmax(-1) * 1.5
    return {"ids": torch.from_numpy(ids.astype(np.int32)), "weights": weights}


@moe_experts.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    pool = np.sort(rng.permutation(dims.experts)[: dims.topk_experts + 1])
    limit = {"limit": 10.0}
    for fmt in ("mxfp4", "fp8 e8m0 scale", "fp8 f32 scale", "bf16"):
        stored = expert_weights(rng, dims, fmt, pool) | limit
        for tokens in TOKENS if fmt == "mxfp4" else (0, 3, 129):
            chosen = routing(rng, tokens, pool, dims.topk_experts)
            yield Example(f"{fmt}, {tokens}", {"x": activations(rng, tokens, dims.hidden), **chosen, **stored})
        chosen = routing(rng, 7, pool, dims.topk_experts)
        x = activations(rng, 7, dims.hidden, scale=30.0)
        x[2] = 0
        chosen["weights"][3, 0] = 0
        chosen["ids"][4, 0] = -1
        chosen["ids"][5] = -1
        yield Example(f"{fmt}, beyond the limit, zero row, zero weight, no expert", {"x": x, **chosen, **stored})
        only = np.array([dims.experts - 1])
        stored = expert_weights(rng, dims, fmt, only) | limit
        x = activations(rng, 63, dims.hidden)
        yield Example(f"{fmt}, all tokens on the last expert", {"x": x, **routing(rng, 63, only, 1), **stored})
