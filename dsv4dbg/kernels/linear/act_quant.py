"""act_quant: activations to FP8 with one E8M0 scale per group of channels."""

from __future__ import annotations

import torch

from dsv4dbg.compare import Codes, Scales
from dsv4dbg.kernels.contract import attr, op, tensor
from dsv4dbg.kernels.formats import fp8_quantize


@op(
    family="linear",
    args={
        "x": tensor("token channel", "act"),
        "group": attr("channels that share a scale"),
        "dialect": attr("ocp (e4m3fn) or fnuz (e4m3fnuz)"),
    },
    outputs={"codes": tensor("token channel", "u8"), "scale": tensor("token group", "u8", "E8M0")},
    compare={"codes": Codes(scale="scale", format="fp8", group=0), "scale": Scales(codes="codes")},
)
def act_quant(x: torch.Tensor, *, group: int, dialect: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Per group: ``s = 2^ceil(log2(max(amax, 1e-4) / M))``, codes ``e4m3(clamp(x / s, -M, M))``, ties to even.

    ``M`` is 448 (ocp) or 224 (fnuz); fnuz never emits 0x80.

    Args:
        x: ``[token, channel]`` bf16 (or float32), channels a multiple of ``group``.
    Returns:
        codes ``uint8 [token, channel]``, scale ``uint8 [token, channel / group]``: the value is ``2^(byte - 127)``.
    """
    return fp8_quantize(x, group, dialect)
