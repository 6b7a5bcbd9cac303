"""moe_experts in Triton: five launches, no synchronisation with the host.

1. Activations are quantised and dequantised once (`gemm_triton.simulate`; not for plain weights).
2. `_sort`: a program per expert counts and lists the (token, choice) pairs that chose it, in order.
3. `_gate_up`: a program per tile of inner channels and of one expert's tokens multiplies by w1 and w3; clamp, SiLU,
   routing weight and the second quantiser are its epilogue. Rows of ``inner`` are pairs in sorted order.
4. `_down`: the same tiling for w2, one rounding, back to the pairs' own order.
5. `_combine`: a program per token adds its experts in ascending order.

The number of tiles depends on the routing, so as many programs as could be needed start, and those beyond end at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4dbg.kernels.linear.gemm_triton import (
    Tile,
    accumulate,
    fetch,
    format_of,
    not_adjacent,
    simulate,
    simulated,
    stored,
    tile_of,
)
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.triton_codes import rounded, widened
from dsv4dbg.kernels.triton_run import arch_of, triton_implements


@triton.jit
def _sort(ids, order, counts, pairs, BLOCK: tl.constexpr):
    """Program expert: its pairs to ``order``, behind those of lower experts; their number to ``counts``."""
    expert = tl.program_id(0)
    start = 0
    for first in range(0, pairs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        chosen = tl.load(ids + at, at < pairs, other=-1)
        start += tl.sum(((chosen >= 0) & (chosen < expert)).to(tl.int32))
    place = start
    for first in range(0, pairs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        hit = (tl.load(ids + at, at < pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(hit, 0) - hit, at, hit != 0)
        place += tl.sum(hit)
    tl.store(counts + expert, place - start)


@triton.jit
def _tile(counts, experts, tile, EXPERTS: tl.constexpr, M: tl.constexpr):
    """The ``tile``-th block of M pairs: its expert (``experts`` if there is none), sorted places, which are real."""
    every = tl.arange(0, EXPERTS)
    count = tl.load(counts + every, every < experts, other=0)
    blocks = (count + M - 1) // M
    expert = tl.sum((tl.cumsum(blocks, 0) <= tile).to(tl.int32))
    expert = tl.minimum(expert, experts)
    before = every < expert
    row = (tile - tl.sum(tl.where(before, blocks, 0))) * M + tl.arange(0, M)
    real = row < tl.sum(tl.where(every == expert, count, 0))
    return expert, row + tl.sum(tl.where(before, count, 0)), real


@triton.jit
def _offsets(expert, first, row, w_expert, w_row, s_expert, s_row, FORMAT: tl.constexpr):
    """Of rows ``row`` of one expert's weight, from ``first`` on, and of their scales."""
    expert, row = expert.to(tl.int64), row.to(tl.int64)
    block = first // 128 if FORMAT == "fp8" else row
    return expert * w_expert + row * w_row, expert * s_expert + block * s_row


@triton.jit
def _swiglu(gate, up, factor, limit, act: tl.constexpr, EACH: tl.constexpr, BEFORE: tl.constexpr):
    """Clamped SwiGLU of float32 products, rounded to ``act``; with EACH every step of it."""
    gate, up = widened(rounded(gate, act)), widened(rounded(up, act))
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    gate = gate / (1.0 + tl.exp(-gate))
    if EACH:
        gate = widened(rounded(gate, act))
    inner = gate * up
    if EACH:
        inner = widened(rounded(inner, act))
    if BEFORE:
        inner = inner * factor[None, :]
    return widened(rounded(inner, act))


@triton.jit
def _gate_up(
    x, w1, w1_scale, w3, w3_scale, weights, order, counts, inner, experts, choices, width, channels, limit,
    x_token, w_expert, w_row, s_expert, s_row,
    ACT: tl.constexpr, FORMAT: tl.constexpr, QUANTIZE: tl.constexpr, EACH: tl.constexpr, BEFORE: tl.constexpr,
    EVEN: tl.constexpr, EXPERTS: tl.constexpr, N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """Program (tile of N inner channels, block of M pairs): ``inner[place] = q(swiglu(w1 x, w3 x) * weight)``."""
    expert, place, real = _tile(counts, experts, tl.program_id(1), EXPERTS, M)
    if expert == experts:
        return
    pair = tl.load(order + place, real, other=0)
    first = tl.program_id(0) * N
    row = first + tl.arange(0, N)
    w_at, s_at = _offsets(expert, first, tl.minimum(row, width - 1), w_expert, w_row, s_expert, s_row, FORMAT)
    x_at = x + (pair // choices).to(tl.int64)[None, :] * x_token
    gate = tl.zeros((N, M), tl.float32)
    up = tl.zeros((N, M), tl.float32)
    for k in range(0, channels, K):
        channel = (k + tl.arange(0, K))[:, None]
        values = fetch(x_at + channel, channel, channels, EVEN)
        gate = accumulate(gate, values, w1, w1_scale, w_at, s_at, k, channels, FORMAT, False, EVEN, K, NVIDIA)
        up = accumulate(up, values, w3, w3_scale, w_at, s_at, k, channels, FORMAT, False, EVEN, K, NVIDIA)
    factor = tl.load(weights + pair, real, other=0.0)
    result = _swiglu(gate, up, factor, limit, ACT, EACH, BEFORE)
    if QUANTIZE:
        result = simulated(result, 0)
    pointer = inner + place.to(tl.int64)[None, :] * width + row[:, None]
    tl.store(pointer, rounded(result, inner.dtype.element_ty), (row < width)[:, None] & real[None, :])


@triton.jit
def _down(
    inner, w2, w2_scale, weights, order, counts, parts, experts, width, channels, w_expert, w_row, s_expert, s_row,
    FORMAT: tl.constexpr, BEFORE: tl.constexpr,
    EVEN: tl.constexpr, EXPERTS: tl.constexpr, N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """Program (tile of N channels, block of M pairs): ``parts[pair] = round(w2 inner)``."""
    expert, place, real = _tile(counts, experts, tl.program_id(1), EXPERTS, M)
    if expert == experts:
        return
    act: tl.constexpr = parts.dtype.element_ty
    first = tl.program_id(0) * N
    row = first + tl.arange(0, N)
    w_at, s_at = _offsets(expert, first, tl.minimum(row, channels - 1), w_expert, w_row, s_expert, s_row, FORMAT)
    inner_at = inner + tl.where(real, place, 0).to(tl.int64)[None, :] * width
    acc = tl.zeros((N, M), tl.float32)
    for k in range(0, width, K):
        channel = (k + tl.arange(0, K))[:, None]
        values = fetch(inner_at + channel, channel, width, EVEN)
        acc = accumulate(acc, values, w2, w2_scale, w_at, s_at, k, width, FORMAT, False, EVEN, K, NVIDIA)
    pair = tl.load(order + place, real, other=0)
    result = rounded(acc, act)
    if not BEFORE:
        result = rounded(widened(result) * tl.load(weights + pair, real, other=0.0)[None, :], act)
    pointer = parts + pair.to(tl.int64)[None, :] * channels + row[:, None]
    tl.store(pointer, result, (row < channels)[:, None] & real[None, :])


@triton.jit
def _combine(
    ids, parts, y, tokens, choices, channels,
    EACH: tl.constexpr, CHOICES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, block of channels): experts added in ascending order; EACH: rounded at every add."""
    act: tl.constexpr = parts.dtype.element_ty
    none: tl.constexpr = 0x7FFFFFFF
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    choice = tl.arange(0, CHOICES)[None, :]
    listed = (token < tokens)[:, None] & (choice < choices)
    chosen = tl.load(ids + token[:, None] * choices + choice, listed, other=-1)
    key = tl.where(chosen >= 0, chosen * CHOICES + choice, none)  # ascending expert, then choice
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for _ in range(choices):
        lowest = tl.min(key, 1)
        row = (token * choices + lowest % CHOICES)[:, None]
        real = (lowest != none)[:, None] & (channel < channels)
        total += widened(tl.load(parts + row * channels + channel, real, other=0.0))
        if EACH:
            total = widened(rounded(total, act))
        key = tl.where(key == lowest[:, None], none, key)
    tl.store(y + token[:, None] * channels + channel, total, (token < tokens)[:, None] & (channel < channels))


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    names = ("w1", "w1_scale", "w3", "w3_scale", "w2", "w2_scale")
    if any(args[name] is not None and not args[name].is_contiguous() for name in ("ids", "weights", *names)):
        return "ids, weights or an expert weight is not contiguous"
    pairs = [(args[name], args[f"{name}_scale"]) for name in ("w1", "w3", "w2")]
    if len({(w.dtype, None if s is None else s.dtype) for w, s in pairs}) > 1:
        return "w1, w3 and w2 are not in one format"
    if any(s is not None and s.data_ptr() % 4 for _, s in pairs):
        return "the scales of an expert weight are not aligned to 4 bytes"
    return not_adjacent(args, "x")


def _shapes() -> Iterator[dict[str, Any]]:
    """Flash and Pro in MXFP4; Flash's base model (FP8, float32 scales), FP8 with E8M0 scales and bf16."""
    u8, fp8, f32, bf16 = torch.uint8, torch.float8_e4m3fn, torch.float32, torch.bfloat16
    flash = (4096, 2048, 256)
    for (channels, inner, experts), dtype, scale in (
        (flash, u8, u8), ((7168, 3072, 384), u8, u8), (flash, fp8, f32), (flash, fp8, u8), (flash, bf16, None),
    ):  # fmt: skip
        for tokens in (1, 64, 8192):
            stored = {}
            for name, out, inp in (("w1", inner, channels), ("w3", inner, channels), ("w2", channels, inner)):
                columns, block = (inp // 2, (1, 32)) if dtype == u8 else (inp, (128, 128))
                size = (experts, out // block[0], inp // block[1])
                stored[name] = torch.empty(experts, out, columns, dtype=dtype, device="meta")
                stored[f"{name}_scale"] = None if scale is None else torch.empty(size, dtype=scale, device="meta")
            yield {
                "x": torch.empty(tokens, channels, dtype=bf16, device="meta"),
                "ids": torch.empty(tokens, 6, dtype=torch.int32, device="meta"),
                "weights": torch.empty(tokens, 6, device="meta"),
                **stored,
                "limit": 10.0,
            }


@triton_implements("moe_experts", supports=_supports, shapes=_shapes)
def moe_experts_triton(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w1: torch.Tensor,
    w1_scale: torch.Tensor | None,
    w3: torch.Tensor,
    w3_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
    *,
    limit: float,
    numerics: Numerics,
) -> torch.Tensor:
    """See the reference. All weights are in one format; MXFP4 and E8M0-scaled FP8 products are exact."""
    (tokens, channels), choices = x.shape, ids.shape[1]
    experts, width, pairs, device = w1.shape[0], w1.shape[1], ids.numel(), x.device
    y = torch.empty(tokens, channels, dtype=torch.float32, device=device)
    if not y.numel():
        return y
    act = tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float32
    form, quantize, before = format_of(w1, w1_scale), w1_scale is not None, numerics.routing_weight == "before"
    values = simulate(x) if quantize else x
    operands = torch.float32 if torch.float32 in (values.dtype, w1.dtype) else torch.bfloat16
    arch = arch_of(device)
    tile = _tile_of(arch, pairs // experts + 1, operands)
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    inner = torch.empty(pairs, width, dtype=values.dtype, device=device)
    parts = torch.empty(pairs, channels, dtype=x.dtype, device=device)
    blocks = min(pairs, pairs // tile.tokens + experts)
    common = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    sizes = (triton.next_power_of_2(experts), tile.out, tile.tokens, tile.channels, arch.startswith("sm_"))

    def strides(weight: torch.Tensor, scale: torch.Tensor | None) -> tuple[int, ...]:
        return (*weight.stride()[:2], *((0, 0) if scale is None else scale.stride()[:2]))

    block = min(4096, max(16, triton.next_power_of_2(pairs)))
    _sort[(experts,)](ids, order, counts, pairs, block, enable_fp_fusion=False)
    _gate_up[triton.cdiv(width, tile.out), blocks](
        values, stored(w1), w1_scale, stored(w3), w3_scale, weights, order, counts, inner, experts, choices, width,
        channels, limit, values.stride(0), *strides(w1, w1_scale),
        act, form, quantize, numerics.experts == "act", before, channels % tile.channels == 0, *sizes, **common,
    )  # fmt: skip
    _down[triton.cdiv(channels, tile.out), blocks](
        inner, stored(w2), w2_scale, weights, order, counts, parts, experts, width, channels, *strides(w2, w2_scale),
        form, before, width % tile.channels == 0, *sizes, **common,
    )  # fmt: skip
    block = min(1024, triton.next_power_of_2(channels))
    rows = min(64, triton.next_power_of_2(tokens)) if arch == "cpu" else 1
    _combine[triton.cdiv(tokens, rows), triton.cdiv(channels, block)](
        ids, parts, y, tokens, choices, channels, numerics.combine == "act", triton.next_power_of_2(choices), rows,
        block, enable_fp_fusion=False,
    )  # fmt: skip
    return y


def _tile_of(arch: str, tokens: int, dtype: torch.dtype) -> Tile:
    """As `tile_of` for experts of ``tokens`` tokens each on average; tiles hold whole groups of 128 inner channels."""
    nvidia = arch.startswith("sm_")
    tile = tile_of(arch, tokens if nvidia else min(tokens, 64), dtype)._replace(out=128)
    if arch == "cpu" or dtype == torch.float32:
        return tile
    return tile._replace(channels=128 if nvidia else 64, warps=8 if tile.tokens > 32 else 4, stages=min(tile.stages, 3))
