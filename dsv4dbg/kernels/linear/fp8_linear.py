"""fp8_linear: a linear layer with block-scaled FP8 weights and activations quantised on the way in."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsv4dbg.compare import Dense
from dsv4dbg.kernels.contract import op, tensor, weight
from dsv4dbg.kernels.formats import block_dequantize, fp8_dequantize, fp8_quantize

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
