"""moe_combine: routed experts plus shared expert."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from dsv4dbg.compare import Dense
from dsv4dbg.kernels.contract import Example, op, tensor
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.invariants import finite
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.samples import TOKENS, activations, normal


@op(
    family="moe",
    args={"routed": tensor("token channel", "f32"), "shared": tensor("token channel", "act")},
    outputs={"y": tensor("token channel", "act")},
    compare={"y": Dense(magnitude=("routed", "shared"), roundings=2)},
    invariants=(finite("y"),),
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


@moe_combine.oracle
def _(routed: np.ndarray, shared: np.ndarray, *, numerics: Numerics) -> np.ndarray:
    return routed + shared


@moe_combine.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    for tokens in TOKENS:
        shared = activations(rng, tokens, dims.hidden)
        yield Example(f"{tokens}", {"routed": normal(rng, tokens, dims.hidden), "shared": shared})
    shared = activations(rng, 3, dims.hidden)
    routed = normal(rng, 3, dims.hidden)
    routed[0] = 0
    shared[1] = 0
    routed[2] = -shared[2].float() * (1 + normal(rng, dims.hidden, scale=1e-3))
    yield Example("zero rows and cancellation", {"routed": routed, "shared": shared})
    step = torch.exp2(torch.floor(torch.log2(shared.float().abs().clamp_min(1e-30))) - 8)  # half a bf16 step
    yield Example("halfway between bf16 values", {"routed": step, "shared": shared})
