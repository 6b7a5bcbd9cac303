"""act_quant in Triton: a program quantises one group of channels of a block of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4dbg.kernels.triton_codes import amax, fp8_encode, fp8_scale, widened
from dsv4dbg.kernels.triton_run import triton_implements


@triton.jit
def _quantize(
    x, codes, scale, tokens, groups, x_token, x_channel,
    DIALECT: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Program (block of TOKENS tokens, group)."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    group = tl.program_id(1).to(tl.int64)
    channel = group * GROUP + tl.arange(0, GROUP)
    real = (token < tokens)[:, None]
    values = widened(tl.load(x + token[:, None] * x_token + channel[None, :] * x_channel, real, other=0.0))
    reciprocal, byte = fp8_scale(amax(values, 1), DIALECT)
    code = fp8_encode(values * reciprocal[:, None], DIALECT)
    tl.store(codes + token[:, None] * (groups * GROUP) + channel[None, :], code, real)
    tl.store(scale + token * groups + group, byte, token < tokens)


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    group = args["group"]
    if group < 16 or group & (group - 1):
        return f"groups of {group} channels: only powers of two from 16 on"
    return None


def _shapes() -> Iterator[dict[str, Any]]:
    for channels in (4096, 7168):
        for group, dialect in ((128, "ocp"), (128, "fnuz"), (64, "ocp")):
            x = torch.empty(8192, channels, dtype=torch.bfloat16, device="meta")
            yield {"x": x, "group": group, "dialect": dialect}


@triton_implements("act_quant", supports=_supports, shapes=_shapes)
def act_quant_triton(x: torch.Tensor, *, group: int, dialect: str) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference."""
    tokens, channels = x.shape
    groups = channels // group
    codes = torch.empty(tokens, channels, dtype=torch.uint8, device=x.device)
    scale = torch.empty(tokens, groups, dtype=torch.uint8, device=x.device)
    if codes.numel():
        rows = min(4096 // group, triton.next_power_of_2(tokens))
        _quantize[triton.cdiv(tokens, rows), groups](
            x, codes, scale, tokens, groups, x.stride(0), x.stride(1), dialect, group, rows, enable_fp_fusion=False
        )
    return codes, scale
