"""fp8_linear: a linear layer with block-scaled FP8 weights and activations quantised on the way in."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from dsv4dbg.compare import Dense
from dsv4dbg.kernels import oracle
from dsv4dbg.kernels.contract import Example, op, tensor, weight
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.formats import block_dequantize, e8m0_decode, fp8_dequantize, fp8_quantize
from dsv4dbg.kernels.invariants import finite, zero_rows
from dsv4dbg.kernels.samples import TOKENS, activations, fp8_weight, normal

BLOCK = 128  # channels of a group of activations, and edge of a block of weights


@op(
    family="linear",
    args={
        "x": tensor("token channel", "act"),
        "weight": weight("out channel", "e4m3fn"),
        "scale": weight("block block_in", "u8 f32", "E8M0 bytes or factors, one per 128 x 128"),
    },
    outputs={"y": tensor("token out", "act")},
    compare={"y": Dense(terms="channel")},
    invariants=(finite("y"), zero_rows("x", "y")),
)
def fp8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``y = round(dequant(quant(x)) @ dequant(weight)^T)``: float32 accumulation, one rounding to x's dtype.

    x is quantised as `act_quant` does with group 128 in the OCP dialect, whatever dialect the device has. Scales
    multiply.

    Args:
        x: ``[token, K]`` bf16 (or float32), K a multiple of 128.
        weight: ``[N, K]`` e4m3fn (OCP bytes). scale: ``[ceil(N / 128), K / 128]``.
    Returns:
        ``[token, N]`` like x.
    """
    quantized = fp8_dequantize(*fp8_quantize(x, BLOCK))
    return F.linear(quantized, block_dequantize(weight, scale, BLOCK)).to(x.dtype)


@fp8_linear.oracle
def _(x: np.ndarray, weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return oracle.quantize(x, BLOCK)[0] @ oracle.fp8_blocks(weight, scale, BLOCK).T


@fp8_linear.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    def example(name: str, x: torch.Tensor, out: int) -> Example:
        weight, scale = fp8_weight(rng, out, x.shape[1])
        return Example(name, {"x": x, "weight": weight, "scale": scale})

    for tokens in TOKENS:
        yield example(f"{tokens} tokens, wq_a", activations(rng, tokens, dims.hidden), dims.q_lora)
    yield example("wq_b", activations(rng, 3, dims.q_lora), dims.heads * dims.head_dim)
    for out in (1, 127, 130):
        yield example(f"{out} outputs", activations(rng, 5, dims.hidden), out)
    yield example("12 blocks deep", activations(rng, 5, 12 * BLOCK), dims.q_lora)
    unlike = torch.from_numpy(np.exp2(rng.integers(-12, 12, (5, dims.hidden // BLOCK, 1)))).to(torch.bfloat16)
    groups = (activations(rng, 5, dims.hidden // BLOCK, BLOCK) * unlike).flatten(1)
    yield example("groups of unlike size", groups, dims.q_lora)
    small = activations(rng, 4, dims.hidden) * torch.tensor([[1.0], [0.0], [1e-6], [1e20]], dtype=torch.bfloat16)
    yield example("zero, sub-floor and huge rows", small, dims.q_lora)
    yield example("float32", normal(rng, 5, dims.hidden), dims.q_lora)
    floats = dict(example("", activations(rng, 5, dims.hidden), dims.q_lora + 1).args)
    yield Example("float32 scales", {**floats, "scale": e8m0_decode(floats["scale"]) * 1.3})
