"""Clamped SwiGLU, shared by silu_mul (shared expert) and moe_experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsv4dbg.kernels.numerics import Numerics


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float, numerics: Numerics) -> torch.Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``.

    Returns:
        the product in float32, not yet rounded; with ``experts="act"`` every step is rounded to gate's dtype.
    """
    if numerics.experts == "f32":
        gate, up = gate.float(), up.float()
    return (F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)).float()
