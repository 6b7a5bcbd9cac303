"""silu_mul: clamped SwiGLU of the shared expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dsv4dbg.compare import Dense
from dsv4dbg.kernels.contract import Example, Invariant, attr, op, tensor
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.invariants import first
from dsv4dbg.kernels.moe.swiglu import clamped_swiglu
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.samples import TOKENS, activations


def bounded(call: Mapping[str, Any]) -> str | None:
    """``|y| <= limit^2`` up to rounding, wherever both inputs are finite."""
    gate, up, y = (np.asarray(call[name]).astype(np.float64) for name in ("gate", "up", "y"))
    bad = np.isfinite(gate) & np.isfinite(up) & ~(np.abs(y) <= call["limit"] ** 2 * (1 + 2**-8))
    return f"y is {y[bad][0]:g} at {first(bad)}, limit {call['limit']:g}" if bad.any() else None


@op(
    family="moe",
    args={
        "gate": tensor("token inner", "act"),
        "up": tensor("token inner", "act"),
        "limit": attr("clamp: gate from above only, up on both sides"),
    },
    outputs={"y": tensor("token inner", "act")},
    compare={"y": Dense(roundings=2)},
    invariants=(Invariant("at most the square of the limit", bounded),),
    switches=("experts",),
)
def silu_mul(gate: torch.Tensor, up: torch.Tensor, *, limit: float, numerics: Numerics) -> torch.Tensor:
    """``y = round(silu(min(gate, limit)) * clamp(up, -limit, limit))``: clamp first, float32 inside, one rounding.

    With ``experts="act"`` SiLU and product are each rounded to gate's dtype. NaN passes through the clamp; -inf in
    gate gives NaN.

    Args:
        gate, up: ``[token, inner]`` bf16 (or float32).
    """
    return clamped_swiglu(gate, up, limit, numerics).to(gate.dtype)


@silu_mul.oracle
def _(gate: np.ndarray, up: np.ndarray, *, limit: float, numerics: Numerics) -> np.ndarray:
    gate = np.minimum(gate, limit)
    sigmoid = np.exp(np.minimum(gate, 0)) / (1 + np.exp(-np.abs(gate)))
    return gate * sigmoid * np.clip(up, -limit, limit)


@silu_mul.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    inner = dims.expert_inner
    for tokens in TOKENS:
        gate, up = activations(rng, tokens, inner, scale=2.0), activations(rng, tokens, inner, scale=2.0)
        yield Example(f"{tokens}", {"gate": gate, "up": up, "limit": 10.0})
    gate, up = activations(rng, 3, inner), activations(rng, 3, inner)
    gate[0], up[1] = 0, 0
    yield Example("zero rows", {"gate": gate, "up": up, "limit": 10.0})
    ramp = torch.linspace(-300, 300, inner).to(torch.bfloat16)
    edge = torch.tensor([10, -10, 10.0625, -10.0625, 9.9375, -0.0, 1e-30, -88, -104, 200, 3e38, -3e38])
    edge = edge.repeat(inner // len(edge) + 1)[:inner].to(torch.bfloat16)
    gate, up = torch.stack((ramp, edge, edge, ramp)), torch.stack((edge, ramp, edge.flip(0), ramp.flip(0)))
    yield Example("beyond the limits", {"gate": gate, "up": up, "limit": 10.0})
    yield Example("limit 1", {"gate": gate, "up": up, "limit": 1.0})
