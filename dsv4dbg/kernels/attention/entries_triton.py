"""Last steps of KV and indexer rows in Triton, the device-side twin of `entries`: rope, Hadamard, sim-quant, store.

Rows are float32 tiles ``[row, channel]`` whose values are activations, that is, exact in ``act`` (bf16 or float32).
Channels are a power of two; ``LAYOUT`` is the cache's `Layout`, ``slots [row]`` are -1 for rows that are not stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4dbg.kernels.triton_codes import (
    INTERPRETED,
    amax,
    at_least,
    e8m0_decode,
    field_offset,
    fp4_decode,
    fp4_encode,
    fp4_scale,
    fp8_decode,
    fp8_encode,
    fp8_scale,
    rounded,
    widened,
)
from dsv4dbg.pages import FP4_GROUP, KV_GROUP

_KV_GROUP, _FP4_GROUP = tl.constexpr(KV_GROUP), tl.constexpr(FP4_GROUP)


@triton.jit
def near(x, act: tl.constexpr):
    """float32 rounded to ``act``, in float32."""
    if INTERPRETED:
        return widened(rounded(x, act))
    else:
        return x.to(act).to(tl.float32)


@triton.jit
def reciprocal_root(x):
    """``1 / sqrt(x)`` in float32, both rounded to nearest: the same bits on every device."""
    return tl.div_rn(1.0, tl.sqrt_rn(x))


@triton.jit
def cos_sin_rows(table, row_stride, position, valid, PAIRS: tl.constexpr, SKIP: tl.constexpr, HALF: tl.constexpr):
    """Cosines and sines float32 ``[row, pair]`` at ``position [row]``; 1 and 0 for the first ``SKIP`` pairs."""
    pair = tl.arange(0, PAIRS)[None, :] - SKIP
    mask = valid[:, None] & (pair >= 0)
    place = table + position.to(tl.int64)[:, None] * row_stride + pair
    return tl.load(place, mask, other=1.0), tl.load(place + HALF, mask, other=0.0)


@triton.jit
def turned(x, cos, sin, SKIP: tl.constexpr):
    """Pairs of channels of ``x [row, channel]`` rotated, but for the first ``SKIP`` pairs; not rounded."""
    pairs: tl.constexpr = x.shape[1] // 2
    a, b = tl.split(tl.reshape(x, (x.shape[0], pairs, 2)))
    first, second = a * cos - b * sin, a * sin + b * cos
    if SKIP > 0:
        skipped = tl.arange(0, pairs)[None, :] < SKIP
        first, second = tl.where(skipped, a, first), tl.where(skipped, b, second)
    return tl.reshape(tl.join(first, second), (x.shape[0], x.shape[1]))


@triton.jit
def hadamard(x):
    """Sylvester-order Hadamard transform of one row ``[1, n]`` (n up to 1024), not scaled: bit after bit."""
    n: tl.constexpr = x.shape[1]
    for bit in tl.static_range(10):
        if (1 << bit) < n:
            a, b = tl.split(tl.reshape(x, (n // 2, 2)))
            x = tl.reshape(tl.trans(tl.join(a + b, a - b)), (1, n))  # the lowest bit, now done, becomes the highest
    return x


@triton.jit
def store_kv(x, cache, page_stride, slots, LAYOUT: tl.constexpr, SIM: tl.constexpr, act: tl.constexpr):
    """Store rows in records of kind kv; a plain cache gets values rounded to FP8 and back if ``SIM``."""
    FORMAT: tl.constexpr = LAYOUT[0]
    DIALECT: tl.constexpr = LAYOUT[1] if FORMAT == "fp8" else "ocp"
    ENTRIES: tl.constexpr = LAYOUT[2]
    ROWS: tl.constexpr = x.shape[0]
    CHANNELS: tl.constexpr = x.shape[1]
    NOPE: tl.constexpr = CHANNELS - LAYOUT[4]
    GROUPS: tl.constexpr = CHANNELS // _KV_GROUP
    stored, channel = (slots >= 0)[:, None], tl.arange(0, CHANNELS)[None, :]
    record = (cache + field_offset(slots, page_stride, ENTRIES, 0, LAYOUT[5]))[:, None]
    if FORMAT == "fp8" or SIM:
        grouped = tl.reshape(x, (ROWS, GROUPS, _KV_GROUP))
        reciprocal, byte = fp8_scale(amax(grouped, 2), DIALECT)
        code = fp8_encode(grouped * reciprocal[:, :, None], DIALECT)
    if FORMAT == "fp8":
        tl.store(record + channel, tl.reshape(code, (ROWS, CHANNELS)), stored & (channel < NOPE))
        rope = (record + NOPE).to(tl.pointer_type(tl.bfloat16)) + (channel - NOPE)
        tl.store(rope, rounded(x, tl.bfloat16), stored & (channel >= NOPE))
        scales = (cache + field_offset(slots, page_stride, ENTRIES, ENTRIES * LAYOUT[5], LAYOUT[6]))[:, None]
        group = tl.arange(0, GROUPS)[None, :]
        tl.store(scales + group, byte, stored & (group < NOPE // _KV_GROUP))
        padding = NOPE // _KV_GROUP + tl.arange(0, 8)[None, :]
        tl.store(scales + padding, tl.zeros((ROWS, 8), tl.uint8), stored & (padding < LAYOUT[6]))
    else:
        if SIM:
            again = tl.reshape(fp8_decode(code, DIALECT) * e8m0_decode(byte)[:, :, None], (ROWS, CHANNELS))
            x = tl.where(channel < NOPE, near(again, act), x)
        _store_plain(x, record, channel, stored, FORMAT)


@triton.jit
def store_index(x, cache, page_stride, slots, LAYOUT: tl.constexpr, SIM: tl.constexpr, act: tl.constexpr):
    """Store rows in records of kind index; a plain cache gets values rounded to FP4 and back if ``SIM``."""
    FORMAT: tl.constexpr = LAYOUT[0]
    DIALECT: tl.constexpr = LAYOUT[1]
    ENTRIES: tl.constexpr = LAYOUT[2]
    ROWS: tl.constexpr = x.shape[0]
    CHANNELS: tl.constexpr = x.shape[1]
    GROUPS: tl.constexpr = CHANNELS // _FP4_GROUP
    stored, channel = (slots >= 0)[:, None], tl.arange(0, CHANNELS)[None, :]
    record = (cache + field_offset(slots, page_stride, ENTRIES, 0, LAYOUT[5]))[:, None]
    scales = cache + field_offset(slots, page_stride, ENTRIES, ENTRIES * LAYOUT[5], LAYOUT[6])
    if FORMAT == "fp8":
        limit: tl.constexpr = 224.0 if DIALECT == "fnuz" else 448.0
        scale = tl.div_rn(at_least(amax(x, 1), 1e-4), limit)
        code = fp8_encode(tl.div_rn(x, tl.broadcast_to(scale[:, None], (ROWS, CHANNELS))), DIALECT)
        tl.store(record + channel, code, stored)
        tl.store(scales.to(tl.pointer_type(tl.float32)), scale, slots >= 0)
    else:
        if FORMAT == "fp4" or SIM:
            grouped = tl.reshape(x, (ROWS, GROUPS, _FP4_GROUP))
            reciprocal, byte = fp4_scale(amax(grouped, 2))
            code = fp4_encode(grouped * reciprocal[:, :, None])
        if FORMAT == "fp4":
            low, high = tl.split(tl.reshape(code, (ROWS, CHANNELS // 2, 2)))
            tl.store(record + tl.arange(0, CHANNELS // 2)[None, :], low | (high << 4), stored)
            tl.store(scales[:, None] + tl.arange(0, GROUPS)[None, :], byte, stored)
        else:
            if SIM:
                again = tl.reshape(fp4_decode(code) * e8m0_decode(byte)[:, :, None], (ROWS, CHANNELS))
                x = near(again, act)
            _store_plain(x, record, channel, stored, FORMAT)


@triton.jit
def _store_plain(x, record, channel, stored, FORMAT: tl.constexpr):
    kind: tl.constexpr = tl.bfloat16 if FORMAT == "bf16" else tl.float32
    tl.store(record.to(tl.pointer_type(kind)) + channel, rounded(x, kind), stored)


def unsupported(args: Mapping[str, Any], cache: str) -> str | None:
    """Why the records of argument ``cache`` cannot be stored, or None."""
    data, layout = args[cache].data, args[cache].layout
    channels, rope = layout.channels, args["cos_sin"].shape[1]
    if channels < KV_GROUP or channels & (channels - 1):
        return f"{channels} channels: no power of two from {KV_GROUP} on"
    if layout.kind == "kv" and (layout.rope_channels % KV_GROUP or layout.rope_channels >= channels):
        return f"{layout.rope_channels} of {channels} channels are not quantised: no multiple of {KV_GROUP} below that"
    if rope % 2 or not 0 < rope <= channels:
        return f"rope on {rope} of {channels} channels"
    if args["cos_sin"].dtype != torch.float32 or args["cos_sin"].stride(1) != 1:
        return "cos_sin is not float32 with contiguous rows"
    if data.stride(1) != 1 or data.stride(0) % 4 or data.data_ptr() % 4:
        return f"{cache} has records at addresses that are no multiple of 4"
    return None
