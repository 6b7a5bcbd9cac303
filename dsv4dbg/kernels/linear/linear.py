"""linear: a plain linear layer (router, indexer weights, compressor projections), float32 GEMM."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsv4dbg.compare import Dense
from dsv4dbg.kernels.contract import attr, op, tensor, weight


@op(
    family="linear",
    args={
        "x": tensor("token channel", "act"),
        "weight": weight("out channel", "bf16 f32"),
        "out": attr("dtype of the result: f32, or act for one rounding to x's"),
    },
    outputs={"y": tensor("token out", "act f32")},
    compare={"y": Dense(terms="channel")},
)
def linear(x: torch.Tensor, weight: torch.Tensor, *, out: str) -> torch.Tensor:
    """``y = x @ weight^T``: float32 inputs, accumulation and result; with ``out="act"`` one rounding to x's dtype.

    Args:
        x: ``[token, K]`` bf16 (or float32). weight: ``[N, K]`` bf16 or float32.
    Returns:
        ``[token, N]`` float32, or like x.
    """
    y = F.linear(x.float(), weight.float())
    return y.to(x.dtype) if out == "act" else y
