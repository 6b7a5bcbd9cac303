"""mhc_post in Triton: a program takes a block of channels of one token in all streams: X is read and written once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4dbg.kernels.contract import ACT_DTYPES
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.rows import has_rows, row_piece
from dsv4dbg.kernels.triton_codes import rounded, widened
from dsv4dbg.kernels.triton_run import arch_of, triton_implements


@triton.jit
def _post(
    y, streams, post, comb, mixed, y_token, x_token, x_stream, tokens, channels,
    HC: tl.constexpr, ACT: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: ``[TOKENS, HC, BLOCK]``; neighbours in a row are neighbours in the grid."""
    act: tl.constexpr = streams.dtype.element_ty
    pieces = tl.cdiv(channels, BLOCK)
    token = (tl.program_id(0) // pieces).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    channel = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    there = token < tokens
    real = there & (channel < channels)
    target = tl.arange(0, HC)[None, :, None]
    weight = tl.load(post + token * HC + target, there, other=0.0)
    if ACT:
        weight = widened(rounded(weight, act))
    value = widened(tl.load(y + token * y_token + channel, real, other=0.0))
    expanded = weight * value
    mix = tl.zeros((TOKENS, HC, BLOCK), tl.float32)
    for stream in tl.static_range(HC):
        row = tl.load(comb + (token * HC + stream) * HC + target, there, other=0.0)
        if ACT:
            row = widened(rounded(row, act))
        x = widened(tl.load(streams + token * x_token + stream * x_stream + channel, real, other=0.0))
        mix = row * x if stream == 0 else mix + row * x
    if ACT:
        expanded, mix = widened(rounded(expanded, act)), widened(rounded(mix, act))
    place = (token * HC + target) * channels + channel
    tl.store(mixed + place, rounded(expanded + mix, act), real)


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    y, streams = args["y"], args["streams"]
    if streams.dtype not in ACT_DTYPES or y.dtype != streams.dtype:
        return f"streams is {streams.dtype}, y is {y.dtype}"
    hc = streams.shape[1]
    if hc & (hc - 1) or hc > 16:
        return f"{hc} streams: not a power of two up to 16"
    if not has_rows(y, streams):
        return "y or streams is not contiguous along the channels"
    for name in ("post", "comb"):
        if args[name].dtype != torch.float32 or not args[name].is_contiguous():
            return f"{name} is not float32 or not contiguous"
    return None


def _shapes() -> Iterator[dict[str, Any]]:
    """Flash and Pro."""
    for channels in (4096, 7168):
        streams = torch.empty(8192, 4, channels, dtype=torch.bfloat16, device="meta")
        comb = torch.empty(8192, 4, 4, device="meta")
        yield {"y": streams[:, 0].contiguous(), "streams": streams, "post": comb[:, 0].contiguous(), "comb": comb}


@triton_implements("mhc_post", supports=_supports, shapes=_shapes)
def mhc_post_triton(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, *, numerics: Numerics
) -> torch.Tensor:
    """See the reference; the sums have its order and so its bits."""
    mixed = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    tokens, hc, channels = streams.shape
    if not tokens:
        return mixed
    arch = arch_of(streams.device)
    block = row_piece(arch, channels)
    rows = 16 if arch == "cpu" else 1
    _post[(triton.cdiv(tokens, rows) * triton.cdiv(channels, block),)](
        y, streams, post, comb, mixed, y.stride(0), streams.stride(0), streams.stride(1), tokens, channels,
        HC=hc, ACT=numerics.mhc_mix == "act", TOKENS=rows, BLOCK=block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return mixed
