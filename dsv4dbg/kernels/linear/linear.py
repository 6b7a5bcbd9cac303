"""linear: a plain linear layer (router, indexer weights, compressor projections), float32 GEMM."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from dsv4dbg.compare import Dense
from dsv4dbg.kernels.contract import Example, attr, op, tensor, weight
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.invariants import finite, zero_rows
from dsv4dbg.kernels.samples import TOKENS, activations, normal


@op(
    family="linear",
    args={
        "x": tensor("token channel", "act"),
        "weight": weight("out channel", "bf16 f32"),
        "out": attr("dtype of the result: f32, or act for one rounding to x's"),
    },
    outputs={"y": tensor("token out", "act f32")},
    compare={"y": Dense(terms="channel")},
    invariants=(finite("y"), zero_rows("x", "y")),
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


@linear.oracle
def _(x: np.ndarray, weight: np.ndarray, *, out: str) -> np.ndarray:
    return x @ weight.T


@linear.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    def example(name: str, x: torch.Tensor, rows: int, out: str, dtype: torch.dtype = torch.bfloat16) -> Example:
        weight = normal(rng, rows, x.shape[1], scale=x.shape[1] ** -0.5).to(dtype)
        return Example(name, {"x": x, "weight": weight, "out": out})

    for tokens in TOKENS:
        x = activations(rng, tokens, dims.hidden)
        yield example(f"{tokens} tokens, router", x, dims.experts, "f32")
        yield example(f"{tokens} tokens, indexer weights", x, dims.index_heads, "act")
    yield example("compressor", activations(rng, 5, dims.hidden), 2 * dims.head_dim, "f32")
    yield example("float32 weights", activations(rng, 5, dims.hidden), dims.experts, "f32", torch.float32)
    yield example("odd sizes", activations(rng, 5, 67), 13, "act")
    yield example("float32", normal(rng, 5, dims.hidden), dims.experts, "act", torch.float32)
    unlike = activations(rng, 4, dims.hidden) * torch.tensor([[1.0], [0.0], [1e-18], [1e15]], dtype=torch.bfloat16)
    yield example("zero, tiny and huge rows", unlike, dims.experts, "act")
