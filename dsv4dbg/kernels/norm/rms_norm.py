"""rms_norm: root-mean-square norm with a learned weight (attn_norm, ffn_norm, q_norm, kv_norm, final norm)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from dsv4dbg.compare import Dense
from dsv4dbg.kernels.contract import Example, attr, op, tensor, weight
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.samples import TOKENS, activations, norm_weight


@op(
    family="norm",
    args={
        "x": tensor("token channel", "act"),
        "weight": weight("channel", "bf16 f32"),
        "eps": attr("added to the mean square"),
    },
    outputs={"y": tensor("token channel", "act")},
    compare={"y": Dense(terms="channel")},
)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """``y = round(weight * (x * rsqrt(mean(x^2) + eps)))``: float32 inside, one rounding to x's dtype.

    Args:
        x: ``[token, channel]`` bf16 (or float32).
        weight: ``[channel]`` bf16 or float32.
    """
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * x32).to(x.dtype)


@rms_norm.oracle
def _(x: np.ndarray, weight: np.ndarray, *, eps: float) -> np.ndarray:
    return weight * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


@rms_norm.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    for channels in (dims.hidden, dims.q_lora):
        w = norm_weight(rng, channels)
        for tokens in TOKENS:
            x = activations(rng, tokens, channels)
            yield Example(f"{tokens}x{channels}", {"x": x, "weight": w, "eps": 1e-6})
        zero = activations(rng, 3, channels)
        zero[1] = 0
        yield Example(f"zero row, {channels}", {"x": zero, "weight": w, "eps": 1e-6})
        huge = activations(rng, 2, channels) * torch.tensor([[1e-18], [1e15]], dtype=torch.bfloat16)
        yield Example(f"tiny and huge rows, {channels}", {"x": huge, "weight": w, "eps": 1e-6})
