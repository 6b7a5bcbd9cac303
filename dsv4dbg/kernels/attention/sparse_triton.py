"""Sparse attention in Triton: a pass over splits of the key lists, and a merge of the splits.

One kernel serves decode and prefill: rows of a dense workspace are records of a bf16 or float32 cache with one record
a page. Heads are the rows of the matrix products, so a row of keys is read and decoded once for a block of heads.
Softmax runs over blocks of keys as in the official kernel: P is rounded to q's dtype for PV, and not for the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dsv4dbg.kernels.contract import ACT_DTYPES
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.triton_codes import (
    dot,
    e8m0_decode,
    field_offset,
    fp8_decode,
    load_operand,
    operand,
    rounded,
)
from dsv4dbg.kernels.triton_run import arch_of, processors


class Layout(NamedTuple):
    """What a kernel must know of a cache at compile time; see `PageLayout`."""

    format: str
    dialect: str
    entries: int
    channels: int
    rope: int
    data: int  # bytes of a data row
    scales: int  # bytes of a scale row

    @classmethod
    def of(cls, cache: Cache) -> Layout:
        page = cache.layout
        data, scales = (*page.fields, 0)[:2]
        return cls(page.format, page.dialect, page.entries, page.channels, page.rope_channels, data, scales)


@triton.jit
def load_rows(
    cache, page_stride, slots, valid, LAYOUT: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Channels FIRST .. FIRST + COUNT of the records at ``slots``, decoded, as operands of `dot` ``[key, COUNT]``.

    Zeros where not ``valid``. COUNT is a power of two and a multiple of 64.
    """
    entries: tl.constexpr = LAYOUT[2]
    column = FIRST + tl.arange(0, COUNT)[None, :]
    row = cache + field_offset(slots, page_stride, entries, 0, LAYOUT[5])[:, None]
    if LAYOUT[0] == "bf16":
        return load_operand(row.to(tl.pointer_type(tl.bfloat16)) + column, valid[:, None])
    elif LAYOUT[0] == "f32":
        return operand(tl.load(row.to(tl.pointer_type(tl.float32)) + column, valid[:, None], other=0.0), dtype)
    else:
        dialect: tl.constexpr = LAYOUT[1]
        nope: tl.constexpr = LAYOUT[3] - LAYOUT[4]
        codes = tl.load(row + column, valid[:, None] & (column < nope), other=0)
        group = FIRST // 64 + tl.arange(0, COUNT // 64)[None, :]
        scales = cache + field_offset(slots, page_stride, entries, entries * LAYOUT[5], LAYOUT[6])[:, None]
        byte = tl.load(scales + group, valid[:, None] & (group < nope // 64), other=127)
        scale = tl.broadcast_to(e8m0_decode(byte)[:, :, None], (slots.shape[0], COUNT // 64, 64))
        low = operand(fp8_decode(codes, dialect) * tl.reshape(scale, codes.shape), dtype)
        if nope >= FIRST + COUNT:
            return low
        else:
            rope = (row + nope).to(tl.pointer_type(tl.bfloat16)) + (column - nope)
            return tl.where(column < nope, low, load_operand(rope, valid[:, None] & (column >= nope)).to(low.dtype))


@triton.jit
def _step(
    q_a, q_b, cache, page_stride, slots, scale, maximum, total, acc_a, acc_b, LAYOUT: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """One block of keys of the running softmax; channels in halves a and b, which halves the registers in flight."""
    half: tl.constexpr = q_a.shape[1]
    valid = slots >= 0
    keys_a = load_rows(cache, page_stride, slots, valid, LAYOUT, 0, half, dtype)
    keys_b = load_rows(cache, page_stride, slots, valid, LAYOUT, half, half, dtype)
    logits = dot(q_a, tl.trans(keys_a), tl.zeros((q_a.shape[0], slots.shape[0]), tl.float32))
    logits = dot(q_b, tl.trans(keys_b), logits) * scale
    logits = tl.where(valid[None, :], logits, float("-inf"))
    before = maximum
    maximum = tl.maximum(before, tl.max(logits, 1))
    top = tl.where(maximum == float("-inf"), 0.0, maximum)
    decay = tl.exp(before - top)
    p = tl.exp(logits - top[:, None])
    total = total * decay + tl.sum(p, 1)
    weights = operand(p, dtype)
    acc_a = dot(weights, keys_a, acc_a * decay[:, None])
    acc_b = dot(weights, keys_b, acc_b * decay[:, None])
    return maximum, total, acc_a, acc_b


@triton.jit
def _attend(
    q, window_cache, entry_cache, indices, sink, o, lse, part_o, part_max, part_sum,
    q_token, q_head, window_stride, entry_stride, index_stride, heads, window, width, scale, per_split,
    WINDOW: tl.constexpr, ENTRY: tl.constexpr, SPLIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Program (token, block of M heads, split): keys of ``per_split`` blocks of N columns; window columns come first.

    Without a SPLIT the outputs are written, else float32 partial sums ``part_*`` of ``[token, split, head]``.
    """
    dtype: tl.constexpr = q.dtype.element_ty
    half: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * M + tl.arange(0, M)
    split = tl.program_id(2)
    real = head < heads
    q_row = q + token * q_token + head[:, None] * q_head + tl.arange(0, half)[None, :]
    q_a = load_operand(q_row, real[:, None])
    q_b = load_operand(q_row + half, real[:, None])
    maximum = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc_a = tl.zeros((M, half), tl.float32)
    acc_b = tl.zeros((M, half), tl.float32)
    list_start = indices + token * index_stride

    blocks = tl.cdiv(window, N)  # of the window's columns
    first = split * per_split
    for block in range(tl.minimum(first, blocks), tl.minimum(first + per_split, blocks)):
        column = block * N + tl.arange(0, N)
        slots = tl.load(list_start + column, column < window, other=-1)
        maximum, total, acc_a, acc_b = _step(
            q_a, q_b, window_cache, window_stride, slots, scale, maximum, total, acc_a, acc_b, WINDOW, dtype
        )
    if ENTRY is not None:
        last = tl.minimum(first + per_split, blocks + tl.cdiv(width - window, N))
        for block in range(tl.maximum(first, blocks), last):
            column = window + (block - blocks) * N + tl.arange(0, N)
            slots = tl.load(list_start + column, column < width, other=-1)
            maximum, total, acc_a, acc_b = _step(
                q_a, q_b, entry_cache, entry_stride, slots, scale, maximum, total, acc_a, acc_b, ENTRY, dtype
            )

    if SPLIT:
        place = (token * tl.num_programs(2) + split) * heads + head
        part = part_o + place[:, None] * D + tl.arange(0, half)[None, :]
        tl.store(part, acc_a, real[:, None])
        tl.store(part + half, acc_b, real[:, None])
        tl.store(part_max + place, maximum, real)
        tl.store(part_sum + place, total, real)
    else:
        place = token * heads + head
        denominator = _denominator(maximum, total, sink, head, real)
        row = o + place[:, None] * D + tl.arange(0, half)[None, :]
        _store_mean(row, acc_a, maximum, denominator, real)
        _store_mean(row + half, acc_b, maximum, denominator, real)
        tl.store(lse + place, maximum + tl.log(total), real)


@triton.jit
def _denominator(maximum, total, sink, head, real):
    """The sum of weights relative to ``maximum``, and the sink's once."""
    if sink is None:
        return total
    else:
        top = tl.where(maximum == float("-inf"), 0.0, maximum)
        return total + tl.exp(tl.load(sink + head, real, other=0.0) - top)


@triton.jit
def _store_mean(pointer, acc, maximum, denominator, real):
    """Divide once; rows without a key give 0."""
    mean = tl.where((maximum == float("-inf"))[:, None], 0.0, acc / denominator[:, None])
    tl.store(pointer, rounded(mean, pointer.dtype.element_ty), real[:, None])


@triton.jit
def _merge(part_o, part_max, part_sum, sink, o, lse, heads, splits, M: tl.constexpr, D: tl.constexpr):
    """Program (token, block of M heads): the splits' partial sums brought to one maximum and added in order."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * M + tl.arange(0, M)
    channel = tl.arange(0, D)[None, :]
    real = head < heads
    maximum = tl.full((M,), float("-inf"), tl.float32)
    for split in range(splits):
        place = (token * splits + split) * heads + head
        maximum = tl.maximum(maximum, tl.load(part_max + place, real, other=float("-inf")))
    top = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    for split in range(splits):
        place = (token * splits + split) * heads + head
        decay = tl.exp(tl.load(part_max + place, real, other=float("-inf")) - top)
        total += tl.load(part_sum + place, real, other=0.0) * decay
        acc += tl.load(part_o + place[:, None] * D + channel, real[:, None], other=0.0) * decay[:, None]
    place = token * heads + head
    _store_mean(o + place[:, None] * D + channel, acc, maximum, _denominator(maximum, total, sink, head, real), real)
    tl.store(lse + place, maximum + tl.log(total), real)


class Config(NamedTuple):
    """Launch parameters: heads and keys of a tile, warps, pipeline stages."""

    heads: int
    keys: int
    warps: int
    stages: int


def config(arch: str, dtype: torch.dtype, heads: int, fp8: bool) -> Config:
    """Tiles that fit LDS (64 KiB on gfx942 and RDNA, 227 KiB on Hopper) and that spill no register on AMD."""
    rows = max(16, triton.next_power_of_2(heads))
    if arch == "cpu":  # in the interpreter large tiles are cheap and many programs are not
        return Config(rows, 128, 4, 1)
    if dtype == torch.float32:
        return Config(16, 16, 4, 1)
    if arch.startswith("sm_"):
        return Config(min(rows, 64), 64, 8, 1 if fp8 else 2)
    if arch.startswith("gfx9"):
        return Config(min(rows, 32), 16 if fp8 else 32, 4, 1)
    return Config(16, 16, 8, 1)


def attend(
    q: torch.Tensor,
    window_cache: Cache,
    entry_cache: Cache | None,
    indices: torch.Tensor,
    sink: torch.Tensor | None,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sparse_mla_decode` on a device; the number of splits is chosen so that small batches fill it.

    Returns:
        o ``[token, head, channel]`` in q's dtype and lse float32 ``[token, head]``.
    """
    tokens, heads, channels = q.shape
    o, lse = torch.empty_like(q), torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if not tokens:
        return o, lse
    m, n, warps, stages = config(arch_of(q.device), q.dtype, heads, window_cache.layout.format == "fp8")
    width = indices.shape[1] if entry_cache is not None else window
    blocks = triton.cdiv(window, n) + triton.cdiv(width - window, n)
    head_blocks = triton.cdiv(heads, m)
    wanted = max(1, processors(q.device) // (tokens * head_blocks))
    per_split = triton.cdiv(max(1, blocks), wanted)
    splits = max(1, triton.cdiv(blocks, per_split))
    shape = (tokens, splits, heads)
    part_o = part_max = part_sum = None
    if splits > 1:
        part_o = torch.empty(*shape, channels, dtype=torch.float32, device=q.device)
        part_max, part_sum = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    entry = entry_cache or window_cache
    _attend[(tokens, head_blocks, splits)](
        q, window_cache.data, entry.data, indices, sink, o, lse, part_o, part_max, part_sum,
        q.stride(0), q.stride(1), window_cache.data.stride(0), entry.data.stride(0), indices.stride(0),
        heads, window, width, scale, per_split,
        WINDOW=Layout.of(window_cache), ENTRY=Layout.of(entry) if entry_cache else None,
        SPLIT=splits > 1, M=m, N=n, D=channels, num_warps=warps, num_stages=stages, enable_fp_fusion=False,
    )  # fmt: skip
    if splits > 1:
        rows = m if arch_of(q.device) == "cpu" else 4
        _merge[(tokens, triton.cdiv(heads, rows))](
            part_o, part_max, part_sum, sink, o, lse, heads, splits,
            M=rows, D=channels, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return o, lse


def unsupported(args: Mapping[str, Any], caches: tuple[str, ...]) -> str | None:
    """Why `attend` cannot serve these arguments, or None."""
    q = args["q"]
    if args["numerics"].attention != "flash":
        return f"attention={args['numerics'].attention} (it computes flash: unnormalised P rounded before PV)"
    if q.dtype not in ACT_DTYPES:
        return f"q is {q.dtype}"
    if q.shape[2] < 16 or q.shape[2] & (q.shape[2] - 1):
        return f"head_dim {q.shape[2]} is not a power of two"
    if q.numel() and (q.stride(2) != 1 or args["indices"].stride(1) != 1):
        return "q or indices are not contiguous along the last dim"
    for name in caches:
        cache = args[name]
        if cache is not None and (cache.data.stride(0) % 16 or cache.data.data_ptr() % 16 or cache.data.stride(1) != 1):
            return f"{name} has records at addresses that are no multiple of 16"
    return None
