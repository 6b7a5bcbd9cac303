"""What mhc_pre and mhc_head share in Triton: the mix GEMM, split over its columns, and the pass that ends it.

`_mix` reads the streams once: a program multiplies a block of tokens by a slice of fn's columns and writes partial sums
of the mixes and of the squares. Where X is bf16, fn comes in three bf16 parts (`parts_of`), whose products with X are
exact: a float32 GEMM on bf16 matrix units, without TF32. NVIDIA's cut off the accumulator's last bits at every step, so
they add up one tile of columns only; tiles are added outside. `_finish` adds the slices, makes the weights and
collapses the streams: it reads X again, from the last tokens on, which the device's cache may still hold. In mhc_pre
further programs of its grid make post and comb, the Sinkhorn iterations of several tokens side by side in registers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dsv4dbg.kernels.contract import ACT_DTYPES
from dsv4dbg.kernels.rows import has_rows, row_piece
from dsv4dbg.kernels.triton_codes import dot, load_operand, rounded, widened
from dsv4dbg.kernels.triton_run import arch_of, processors

MOST_STREAMS = 8  # more mixes would want other tiles


@triton.jit
def _mix(
    streams, fn, fn_parts, parts, x_token, tokens, flat, mixes, per_slice,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Program (block of M tokens, slice): ``parts[slice, token, :mixes + 1]``: mixes, then the sum of squares."""
    token = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)[:, None]
    piece = tl.program_id(1)
    mix = tl.arange(0, N)
    x_row = streams + token * x_token
    at = mix[:, None].to(tl.int64) * flat
    size = tl.full((), N, tl.int64) * flat
    acc = tl.zeros((M, N), tl.float32)
    squares = tl.zeros((M, K), tl.float32)
    for start in range(piece * per_slice, tl.minimum((piece + 1) * per_slice, flat), K):
        column = start + tl.arange(0, K)[None, :]
        x = load_operand(x_row + column, (token < tokens) & (column < flat))
        wide = widened(x)
        squares += wide * wide
        if streams.dtype.element_ty == tl.bfloat16:
            tile = tl.zeros((M, N), tl.float32)
            for part in tl.static_range(3):
                weight = load_operand(fn_parts + part * size + at + column, column < flat)
                tile = dot(x, tl.trans(weight), tile)
            acc += tile
        else:
            weight = tl.load(fn + at + column, (mix[:, None] < mixes) & (column < flat), other=0.0)
            acc = dot(x, tl.trans(weight), acc)
    row = parts + (piece.to(tl.int64) * tokens + token) * N
    tl.store(row + mix[None, :], acc, (token < tokens) & (mix[None, :] < mixes))
    tl.store(row + mixes, tl.sum(squares, 1)[:, None], token < tokens)


@triton.jit
def _total(parts, place, there, tokens, SLICES: tl.constexpr, N: tl.constexpr):
    """Sum over the slices at ``place`` (int64, of elements of a slice)."""
    piece = tl.arange(0, SLICES) * tl.full((), tokens, tl.int64) * N
    values = tl.load(parts + (tl.expand_dims(place, -1) + piece), tl.expand_dims(there, -1), other=0.0)
    return tl.sum(values, len(place.shape))


@triton.jit
def _factor(parts, token, there, tokens, flat, mixes, norm_eps, SLICES: tl.constexpr, N: tl.constexpr):
    """Reciprocal root mean square of tokens' streams."""
    return tl.rsqrt(_total(parts, token * N + mixes, there, tokens, SLICES, N) / flat + norm_eps)


@triton.jit
def _finish(
    streams, parts, scale, base, y, post, comb,
    x_token, tokens, channels, mixes, norm_eps, hc_eps, iters, weight_programs,
    HC: tl.constexpr, N: tl.constexpr, SLICES: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    WEIGHTS: tl.constexpr,
):  # fmt: skip
    """The first ``weight_programs`` programs: post and comb of WEIGHTS tokens; the others: y ``[M, BLOCK]``."""
    program = tl.program_id(0)
    if program < weight_programs:
        if post is not None:
            _weights(
                program, parts, scale, base, post, comb, tokens, channels * HC, mixes, norm_eps, hc_eps, iters,
                HC, N, SLICES, WEIGHTS,
            )  # fmt: skip
    else:
        _collapse(
            program - weight_programs, streams, parts, scale, base, y, x_token, tokens, channels, mixes, norm_eps,
            hc_eps, HC, N, SLICES, M, BLOCK,
        )  # fmt: skip


@triton.jit
def _collapse(
    program, streams, parts, scale, base, y, x_token, tokens, channels, mixes, norm_eps, hc_eps,
    HC: tl.constexpr, N: tl.constexpr, SLICES: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y ``[M, BLOCK]``: streams added in ascending order."""
    pieces = tl.cdiv(channels, BLOCK)
    block = tl.cdiv(tokens, M) - 1 - program // pieces
    token = block.to(tl.int64) * M + tl.arange(0, M)[:, None]
    channel = program % pieces * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = token < tokens
    factor = _factor(parts, token, there, tokens, channels * HC, mixes, norm_eps, SLICES, N)
    total = tl.zeros((M, BLOCK), tl.float32)
    for stream in tl.static_range(HC):
        mix = _total(parts, token * N + stream, there, tokens, SLICES, N) * factor
        weight = tl.sigmoid(mix * tl.load(scale) + tl.load(base + stream)) + hc_eps
        place = token * x_token + stream * channels + channel
        x = widened(tl.load(streams + place, there & (channel < channels), other=0.0))
        total = weight * x if stream == 0 else total + weight * x
    tl.store(y + token * channels + channel, rounded(total, y.dtype.element_ty), there & (channel < channels))


@triton.jit
def _weights(
    program, parts, scale, base, post, comb, tokens, flat, mixes, norm_eps, hc_eps, iters,
    HC: tl.constexpr, N: tl.constexpr, SLICES: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """post ``[M, 1, HC]`` and comb ``[M, HC, HC]``."""
    token = program.to(tl.int64) * M + tl.arange(0, M)[:, None, None]
    there = token < tokens
    factor = _factor(parts, token, there, tokens, flat, mixes, norm_eps, SLICES, N)
    stream, target = tl.arange(0, HC)[None, :, None], tl.arange(0, HC)[None, None, :]
    mix = _total(parts, token * N + HC + target, there, tokens, SLICES, N) * factor
    weight = 2 * tl.sigmoid(mix * tl.load(scale + 1) + tl.load(base + HC + target))
    tl.store(post + token * HC + target, weight, there)
    place = stream * HC + target
    mix = _total(parts, token * N + 2 * HC + place, there, tokens, SLICES, N) * factor
    logits = mix * tl.load(scale + 2) + tl.load(base + 2 * HC + place)
    tl.store(comb + token * (HC * HC) + place, _sinkhorn(logits, hc_eps, iters), there)


@triton.jit
def _sinkhorn(logits, eps, iters):
    """``[token, stream, target]``: softmax over targets plus eps, then divided by column and row sums in turn."""
    value = tl.exp(logits - tl.max(logits, 2, keep_dims=True))
    value = value / tl.sum(value, 2, keep_dims=True) + eps
    value = value / (tl.sum(value, 1, keep_dims=True) + eps)
    for _ in range(1, iters):
        value = value / (tl.sum(value, 2, keep_dims=True) + eps)
        value = value / (tl.sum(value, 1, keep_dims=True) + eps)
    return value


class Config(NamedTuple):
    """Tiles of the GEMM and of the pass after it."""

    tokens: int  # of a tile of the GEMM
    columns: int
    slices: int
    finish_tokens: int
    finish_channels: int


def config(device: torch.device, tokens: int, flat: int, channels: int) -> Config:
    """Tiles that fit LDS everywhere; as many slices as fill the device, at most 32 and a power of two."""
    rows = 64 if tokens > 32 else 16
    wanted = max(1, min(32, flat // 512, 4 * processors(device) // triton.cdiv(tokens, rows)))
    slices = 1 << (wanted.bit_length() - 1)
    arch = arch_of(device)
    block = row_piece(arch, channels)
    return Config(rows, 64, slices, 16 if arch == "cpu" else max(1, 1024 // block), block)


def parts_of(fn: torch.Tensor) -> torch.Tensor:
    """``fn [mix, flat]`` as three bf16 parts ``[part, mix, flat]`` that add up to it exactly, the smallest first.

    There are as many mixes as the GEMM's tile has, further ones 0.
    """
    mixes, flat = fn.shape
    parts = torch.zeros(3, columns_of(mixes), flat, dtype=torch.bfloat16, device=fn.device)
    rest = fn
    for part in (2, 1, 0):
        leading = (rest.view(torch.int32) & -65536).view(torch.float32)  # 8 significant bits: exact in bf16
        parts[part, :mixes] = leading
        rest = rest - leading
    return parts


def columns_of(mixes: int) -> int:
    """Columns of the GEMM's tile; the sum of squares is one more."""
    return max(16, triton.next_power_of_2(mixes + 1))


def run(
    streams: torch.Tensor,
    fn: torch.Tensor,
    fn_parts: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    y: torch.Tensor,
    post: torch.Tensor | None = None,
    comb: torch.Tensor | None = None,
) -> None:
    """Write y ``[token, channel]`` and, in mhc_pre, post and comb."""
    tokens, hc, channels = streams.shape
    if not tokens:
        return
    flat, mixes = hc * channels, len(base)
    tile = config(streams.device, tokens, flat, channels)
    columns = columns_of(mixes)
    parts = torch.empty(tile.slices, tokens, columns, dtype=torch.float32, device=streams.device)
    per_slice = triton.cdiv(triton.cdiv(flat, tile.columns), tile.slices) * tile.columns
    _mix[(triton.cdiv(tokens, tile.tokens), tile.slices)](
        streams, fn, fn_parts, parts, streams.stride(0), tokens, flat, mixes, per_slice,
        M=tile.tokens, N=columns, K=tile.columns, num_warps=4, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    weight_tokens = 64 // tile.slices
    weight_programs = triton.cdiv(tokens, weight_tokens) if post is not None else 0
    programs = triton.cdiv(tokens, tile.finish_tokens) * triton.cdiv(channels, tile.finish_channels)
    _finish[(weight_programs + programs,)](
        streams, parts, scale, base, y, post, comb,
        streams.stride(0), tokens, channels, mixes, norm_eps, hc_eps, iters, weight_programs,
        HC=hc, N=columns, SLICES=tile.slices, M=tile.finish_tokens, BLOCK=tile.finish_channels,
        WEIGHTS=weight_tokens, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def unsupported(args: Mapping[str, Any]) -> str | None:
    """Why `run` cannot serve these arguments, or None."""
    if args["numerics"].mhc_norm != "after":
        return f"mhc_norm={args['numerics'].mhc_norm} (it multiplies the mixes, after the GEMM)"
    streams = args["streams"]
    hc, channels = streams.shape[1:]
    if streams.dtype not in ACT_DTYPES:
        return f"streams is {streams.dtype}"
    if hc & (hc - 1) or hc > MOST_STREAMS:
        return f"{hc} streams: not a power of two up to {MOST_STREAMS}"
    if not has_rows(streams) or (streams.numel() and hc > 1 and streams.stride(1) != channels):
        return "the streams of a token are not contiguous"
    for name in ("fn", "scale", "base"):
        if args[name].dtype != torch.float32 or not args[name].is_contiguous():
            return f"{name} is not float32 or not contiguous"
    return None
