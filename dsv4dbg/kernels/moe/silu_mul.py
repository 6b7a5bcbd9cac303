"""silu_mul: clamped SwiGLU of the shared expert."""

from __future__ import annotations

import torch

from dsv4dbg.compare import Dense
from dsv4dbg.kernels.contract import attr, op, tensor
from dsv4dbg.kernels.moe.swiglu import clamped_swiglu
from dsv4dbg.kernels.numerics import Numerics


@op(
    family="moe",
    args={
        "gate": tensor("token inner", "act"),
        "up": tensor("token inner", "act"),
        "limit": attr("clamp: gate from above only, up on both sides"),
    },
    outputs={"y": tensor("token inner", "act")},
    compare={"y": Dense()},
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
