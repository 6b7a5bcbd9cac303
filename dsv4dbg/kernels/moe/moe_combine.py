"""moe_combine: routed experts plus shared expert."""

from __future__ import annotations

import torch

from dsv4dbg.compare import Dense
from dsv4dbg.kernels.contract import op, tensor
from dsv4dbg.kernels.numerics import Numerics


@op(
    family="moe",
    args={"routed": tensor("token channel", "f32"), "shared": tensor("token channel", "act")},
    outputs={"y": tensor("token channel", "act")},
    compare={"y": Dense(magnitude=("routed", "shared"))},
    switches=("combine",),
)
def moe_combine(routed: torch.Tensor, shared: torch.Tensor, *, numerics: Numerics) -> torch.Tensor:
    """``y = round(routed + shared)``: added in float32, one rounding to shared's dtype.

    With ``combine="act"`` routed is rounded to shared's dtype before the addition.

    Args:
        routed: ``[token, channel]`` float32, result of `moe_experts`.
        shared: ``[token, channel]`` bf16 (or float32).
    """
    if numerics.combine == "act":
        routed = routed.to(shared.dtype)
    return (routed.float() + shared.float()).to(shared.dtype)
