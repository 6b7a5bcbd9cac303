"""Matrix products with stored weights in Triton, shared by linear layers, output projections and experts.

A weight is ``[out, inp]``: plain (bf16, float32), FP8 with one scale per 128 x 128, or MXFP4 with one E8M0 scale per
32 channels. Power-of-two scales go into the bf16 operand, where they are exact; float32 scales are applied to the
product of every 128 channels. FP8 activations too are bf16 operands, quantised and dequantised once (`simulated`), so
no dot is narrower than bf16 on any device.

Tiles are transposed, ``[out, token]``: decoded weights are the left operand, which may come from registers, and a few
tokens are the narrow side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dsv4dbg.kernels.triton_codes import (
    INTERPRETED,
    amax,
    dot,
    e8m0_decode,
    fp8_decode,
    fp8_encode,
    fp8_scale,
    operand,
    rounded,
    widened,
)
from dsv4dbg.kernels.triton_run import arch_of, processors

GROUP = 128  # channels of the activations that share one scale, and edge of a block of FP8 weights


@triton.jit
def simulated(x, axis: tl.constexpr):
    """float32 ``x``, whose ``axis`` is one group of channels, to FP8 (OCP) and back."""
    reciprocal, byte = fp8_scale(amax(x, axis), "ocp")
    codes = fp8_encode(x * tl.expand_dims(reciprocal, axis), "ocp")
    return fp8_decode(codes, "ocp") * tl.expand_dims(e8m0_decode(byte), axis)


@triton.jit
def exact_operand(x, dtype: tl.constexpr, NVIDIA: tl.constexpr):
    """float32 values that ``dtype`` holds exactly, as an operand of `dot`."""
    if INTERPRETED or dtype == tl.float32:
        return x
    elif NVIDIA:
        return x.to(dtype)
    else:
        return (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def fp4_values(code):
    """`fp4_decode` for products: it does not matter that minus zero keeps its sign."""
    wide = code.to(tl.uint16)
    return ((((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True) * 16384.0).to(tl.float32)


@triton.jit
def fetch(pointer, index, end, EVEN: tl.constexpr):
    """What lies at ``pointer``; without EVEN 0 where ``index`` is not below ``end``."""
    if EVEN:
        return tl.load(pointer)
    else:
        return tl.load(pointer, index < end, other=0)


@triton.jit
def fetch_scales(pointer, k, inp, EVEN: tl.constexpr, K: tl.constexpr):
    """E8M0 bytes ``[row, K / 32]`` from ``pointer`` on; four at a time where that is what a tile needs."""
    group = tl.arange(0, K // 32)[None, :]
    if EVEN and K == 128:
        words = tl.load(pointer.to(tl.pointer_type(tl.uint32)))  # so wide that loads can run ahead of the loop
        return ((words[:, None] >> (8 * group).to(tl.uint32)) & 255).to(tl.uint8)
    else:
        return fetch(pointer[:, None] + group, k // 32 + group, inp // 32, EVEN)


@triton.jit
def plain_operand(x, dtype: tl.constexpr):
    """bf16 or float32 values, as loaded, as an operand of ``dtype``; float32 is rounded to bf16."""
    if x.dtype == dtype and not INTERPRETED:
        return x
    else:
        return operand(widened(x), dtype)


@triton.jit
def accumulate(
    acc, x, weight, scale, row_offset, scale_offset, k, inp,
    FORMAT: tl.constexpr, ROUND: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """``acc + W[rows, k : k + K] @ x[k : k + K, tokens]`` in float32.

    Args:
        acc: ``[row, token]``. x: ``[K, token]``, as loaded.
        row_offset, scale_offset: of the rows in ``weight`` and in ``scale``; one block's for all rows of an FP8 weight.
        ROUND: weights are rounded to x's dtype. EVEN: ``inp`` is a multiple of K.
        NVIDIA: FP8 is converted in hardware (exactly).
    """
    if FORMAT == "mxfp4":
        byte = (k // 2 + tl.arange(0, K // 2))[None, :]
        codes = fetch(weight + row_offset[:, None] + byte, byte, inp // 2, EVEN)
        scales = fetch_scales(scale + scale_offset + k // 32, k, inp, EVEN, K)
        values = tl.reshape(fp4_values(tl.join(codes & 15, codes >> 4)), (codes.shape[0], K))
        factor = tl.broadcast_to(tl.expand_dims(e8m0_decode(scales), 2), (codes.shape[0], K // 32, 32))
        weight_tile = exact_operand(values * tl.reshape(factor, (codes.shape[0], K)), x.dtype, NVIDIA)
        return dot(weight_tile, plain_operand(x, x.dtype), acc)
    else:
        channel = (k + tl.arange(0, K))[None, :]
        stored = fetch(weight + row_offset[:, None] + channel, channel, inp, EVEN)
        dtype: tl.constexpr = x.dtype
        if FORMAT == "fp8":
            x = plain_operand(x, dtype)
            values = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32) if NVIDIA else fp8_decode(stored, "ocp")
            factor = tl.load(scale + scale_offset + k // 128)
            if scale.dtype.element_ty == tl.uint8:
                return dot(exact_operand(values * e8m0_decode(factor), dtype, NVIDIA), x, acc)
            elif ROUND:
                return dot(operand(values * factor, dtype), x, acc)
            else:
                return acc + dot(exact_operand(values, dtype, NVIDIA), x, tl.zeros(acc.shape, tl.float32)) * factor
        elif stored.dtype == tl.float32 and not ROUND:
            return dot(stored, widened(x), acc)
        else:
            return dot(plain_operand(stored, dtype), plain_operand(x, dtype), acc)


@triton.jit
def _simulate(x, y, tokens, channels, x_token, TOKENS: tl.constexpr):
    """Program (block of tokens, group of 128 channels)."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * 128 + tl.arange(0, 128)
    real = (token < tokens)[:, None]
    values = simulated(widened(tl.load(x + token[:, None] * x_token + channel, real, other=0.0)), 1)
    tl.store(y + token[:, None] * channels + channel, rounded(values, tl.bfloat16), real)


@triton.jit
def _gemm(
    x, weight, scale, y, tokens, out, inp, x_token, x_group, weight_row, scale_row, per_split, RESULT: tl.constexpr,
    FORMAT: tl.constexpr, ROUND: tl.constexpr, EVEN: tl.constexpr, N: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
    NVIDIA: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Program (tile of N outputs and M tokens, group of outputs, split of the channels).

    Tiles go through eight blocks of outputs before the next block of tokens, so that both stay in the cache. APART: K
    channels are summed apart and then added, because NVIDIA's matrix units truncate when they add to a sum, which the
    bits of a float32 result show.
    """
    rows, columns = tl.cdiv(out, N), tl.cdiv(tokens, M)
    band = tl.program_id(0) // (8 * columns)
    height = tl.minimum(rows - 8 * band, 8)
    within = tl.program_id(0) % (8 * columns)
    first = (8 * band + within % height) * N
    row = first + tl.arange(0, N)
    token = (within // height).to(tl.int64) * M + tl.arange(0, M)
    real = (row < out)[:, None] & (token < tokens)[None, :]
    group, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    block = (group * out + first) // 128
    row = group * out + tl.minimum(row, out - 1)  # what is beyond the edges reads the last row and is not stored
    token = tl.minimum(token, tokens - 1)
    x_at = x + token[None, :] * x_token + group * x_group
    acc = tl.zeros((N, M), tl.float32)
    for k in range(split * per_split, tl.minimum((split + 1) * per_split, inp), K):
        channel = (k + tl.arange(0, K))[:, None]
        values = fetch(x_at + channel, channel, inp, EVEN)
        start = tl.zeros((N, M), tl.float32) if APART else acc
        part = accumulate(
            start, values, weight, scale, row * weight_row, block * scale_row, k, inp, FORMAT, ROUND, EVEN, K, NVIDIA
        )
        acc = tl.fma(part, 1.0, acc) if APART else part  # a plain sum would become the dot's own again
    place = (split.to(tl.int64) * tokens + token)[None, :] * (tl.num_programs(1) * out) + row[:, None]
    tl.store(y + place, rounded(widened(rounded(acc, RESULT)), y.dtype.element_ty), real)


@triton.jit
def _sum_splits(parts, y, count, RESULT: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Partial sums ``[split, count]`` added in order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + at, at < count, other=0.0)
    for split in range(1, SPLITS):
        total += tl.load(parts + split * count + at, at < count, other=0.0)
    tl.store(y + at, rounded(widened(rounded(total, RESULT)), y.dtype.element_ty), at < count)


class Tile(NamedTuple):
    """Launch parameters: outputs, tokens and channels of a tile, warps, pipeline stages."""

    out: int
    tokens: int
    channels: int
    warps: int
    stages: int


def tile_of(arch: str, tokens: int, dtype: torch.dtype) -> Tile:
    """Tiles that fit LDS: 64 KiB on gfx942, 160 KiB on gfx950, 227 KiB on Hopper.

    Args:
        tokens: that share a weight. dtype: of the operands.
    """
    width = min(128, max(16, triton.next_power_of_2(tokens)))
    if arch == "cpu":  # in the interpreter large tiles are cheap and many programs are not
        return Tile(128, width, 128, 4, 1)
    if dtype == torch.float32:
        return Tile(64, min(width, 32), 32, 4, 1)
    if arch.startswith("sm_"):
        return Tile(128, width, 128, 8, 3) if width > 64 else Tile(64, width, 128, 4, 4)
    return Tile(128, width, 64, 8, 2) if width > 64 else Tile(64, width, 64 if width > 16 else 128, 4, 2)


def format_of(weight: torch.Tensor, scale: torch.Tensor | None) -> str:
    """``plain``, ``fp8`` or ``mxfp4``, as `accumulate` calls it."""
    if scale is None:
        return "plain"
    return "mxfp4" if weight.dtype == torch.uint8 else "fp8"


def stored(weight: torch.Tensor) -> torch.Tensor:
    """The bytes of a quantised weight, a plain weight as it is."""
    return weight.view(torch.uint8) if weight.itemsize == 1 else weight


def simulate(x: torch.Tensor) -> torch.Tensor:
    """``[token, channel]`` bf16 or float32, quantised to FP8 per 128 channels and dequantised, bf16 (exact)."""
    tokens, channels = x.shape
    y = torch.empty(tokens, channels, dtype=torch.bfloat16, device=x.device)
    rows = min(32, triton.next_power_of_2(tokens))
    _simulate[triton.cdiv(tokens, rows), channels // GROUP](
        x, y, tokens, channels, x.stride(0), rows, enable_fp_fusion=False
    )
    return y


def multiply(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, y: torch.Tensor, result: torch.dtype,
    round_weight: bool = False,
) -> None:  # fmt: skip
    """``y[t, g] = round(W[g] @ x[t, g])``.

    Args:
        x: ``[token, group, inp]``, channels adjacent. weight: ``[group * out, inp]`` (see `accumulate`).
        y: ``[token, group * out]`` contiguous, bf16 or float32; ``result``: the dtype of the one rounding.
        round_weight: the dequantised weight is rounded to x's dtype.
    """
    tokens, groups, inp = x.shape
    out, arch, form = len(weight) // groups, arch_of(x.device), format_of(weight, scale)
    wide = torch.float32 in (x.dtype, torch.float32 if weight.dtype == torch.float32 and not round_weight else None)
    tile = tile_of(arch, tokens, torch.float32 if wide else torch.bfloat16)
    if scale is not None and groups > 1:
        tile = tile._replace(out=math.gcd(tile.out, out))  # tiles inside blocks of scales
    nvidia = arch.startswith("sm_")
    apart = nvidia and result == torch.float32 and not wide
    if apart:
        tile = tile._replace(channels=32)
    tiles = triton.cdiv(out, tile.out) * triton.cdiv(tokens, tile.tokens)
    splits = max(1, min(16, 2 * processors(x.device) // (tiles * groups), inp // (4 * GROUP)))
    per_split = triton.cdiv(triton.cdiv(inp, splits), GROUP) * GROUP
    splits = triton.cdiv(inp, per_split)
    target = y if splits == 1 else torch.empty(splits, *y.shape, dtype=torch.float32, device=x.device)
    kinds = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    _gemm[tiles, groups, splits](
        x, stored(weight), scale, target, tokens, out, inp, x.stride(0), x.stride(1), weight.stride(0),
        0 if scale is None else scale.stride(0), per_split, kinds[result] if splits == 1 else tl.float32,
        form, round_weight, inp % tile.channels == 0, tile.out, tile.tokens, tile.channels, nvidia, apart,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    if splits > 1:
        count = y.numel()
        _sum_splits[(triton.cdiv(count, 1024),)](target, y, count, kinds[result], splits, 1024, enable_fp_fusion=False)


def not_adjacent(args: Mapping[str, Any], *names: str) -> str | None:
    """The reason, where the innermost elements of one of these tensors are not adjacent."""
    for name in names:
        value = args.get(name)
        if isinstance(value, torch.Tensor) and value.numel() and value.shape[-1] > 1 and value.stride(-1) != 1:
            return f"the last dimension of {name} is strided"
    return None
