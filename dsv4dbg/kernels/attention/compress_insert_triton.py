"""compress_insert in Triton: state rows first, then the entries of completed windows, read back through the table.

* `_state` stores ``[kv | gate + ape]``: a program takes some columns of some tokens.
* `_pool` pools windows: a program takes the tokens of a chunk that complete one (in long calls a chunk is as long as a
  window, so that as a rule it completes one), one after the other, for a block of channels. It needs rows that other
  programs of `_state` wrote, and so is a launch of its own.
* `_finish` (norm, rope, rotation, encoding) needs all channels of an entry. Short windows are pooled by one program for
  all channels, which finishes at once; long ones are pooled by many into a scratch buffer, and a third launch finishes.

An entry is computed from its own rows in a fixed order, whatever else is in the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4dbg.kernels.attention.entries_triton import (
    cos_sin_rows,
    hadamard,
    near,
    reciprocal_root,
    store_index,
    store_kv,
    turned,
    unsupported,
)
from dsv4dbg.kernels.attention.sparse_triton import Layout
from dsv4dbg.kernels.contract import ACT_DTYPES
from dsv4dbg.kernels.numerics import OFFICIAL, Numerics
from dsv4dbg.kernels.paged import DTYPES, Cache
from dsv4dbg.kernels.triton_codes import field_offset, rounded, widened
from dsv4dbg.kernels.triton_run import arch_of, triton_implements
from dsv4dbg.pages import PageLayout, index_layout, kv_layout, state_layout

TILE = 8192  # values of a window that one program holds
PER_WARP = 1024  # of them
LONG_PART = 32  # channels of a long window that one program holds
SHORT_CALL = 1024  # tokens up to which every token has a program of its own


@triton.jit
def _state(
    kv, gate, ape, positions, slots, state, tokens, kv_token, gate_token, page_stride,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    token = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    slot = tl.load(slots + token, token < tokens, other=-1)
    phase = tl.load(positions + token, slot >= 0, other=0) % RATIO
    mask = (slot >= 0)[:, None] & (column < WIDTH)
    values = widened(tl.load(kv + token[:, None] * kv_token + column, mask, other=0.0))
    gates = widened(tl.load(gate + token[:, None] * gate_token + column, mask, other=0.0))
    gates += tl.load(ape + phase[:, None] * WIDTH + column, mask, other=0.0)
    row = (state + field_offset(slot, page_stride, ENTRIES, 0, 8 * WIDTH)).to(tl.pointer_type(tl.float32))[:, None]
    tl.store(row + column, values, mask)
    tl.store(row + WIDTH + column, gates, mask)


@triton.jit
def _emitting(slots, first, tokens, CHUNK: tl.constexpr):
    """Tokens of a chunk; for each its number, from 1, among those that complete a window, or 0; how many those are."""
    token = first + tl.arange(0, CHUNK)
    emits = (tl.load(slots + token, token < tokens, other=-1) >= 0).to(tl.int32)
    return token, tl.cumsum(emits, 0) * emits, tl.sum(emits, 0)


@triton.jit
def _window(
    state, state_table, table_stride, pages, page_stride, sequence, last, channel,
    RATIO: tl.constexpr, OVERLAP: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr, CHANNELS: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Kv and gate ``[row, channel]`` of the window that ends at position ``last``; 0 and -inf where there is no row."""
    row = tl.arange(0, COUNT)
    rows: tl.constexpr = 2 * RATIO if OVERLAP else RATIO
    position = last - (rows - 1) + row
    block = position // ENTRIES
    exists = (row < rows) & (position >= 0) & (block < pages)
    page = tl.load(state_table + sequence.to(tl.int64) * table_stride + block, exists, other=-1)
    mask = (exists & (page >= 0))[:, None]
    place = state + page.to(tl.int64) * page_stride + (position % ENTRIES) * (8 * WIDTH)
    place = place.to(tl.pointer_type(tl.float32))
    if OVERLAP:  # first halves belong to the next window's entry, second halves to their own window's
        place += tl.where(row < RATIO, 0, CHANNELS)
    place = place[:, None] + channel[None, :]
    return tl.load(place, mask, other=0.0), tl.load(place + WIDTH, mask, other=float("-inf"))


@triton.jit
def _pool(
    positions, sequence, state, state_table, slots, scratch, norm_weight, cos_sin, cache,
    tokens, table_stride, pages, state_stride, cos_sin_row, page_stride, eps,
    RATIO: tl.constexpr, OVERLAP: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr, POOL_ACT: tl.constexpr,
    LAYOUT: tl.constexpr, KIND: tl.constexpr, ROPE: tl.constexpr, ROUND_TABLE: tl.constexpr, HADAMARD: tl.constexpr,
    SIM: tl.constexpr, CHUNK: tl.constexpr, COUNT: tl.constexpr, PART: tl.constexpr, act: tl.constexpr,
):  # fmt: skip
    CHANNELS: tl.constexpr = LAYOUT[3]
    parts: tl.constexpr = CHANNELS // PART
    channel = (tl.program_id(0) % parts) * PART + tl.arange(0, PART)
    token, number, count = _emitting(slots, (tl.program_id(0) // parts).to(tl.int64) * CHUNK, tokens, CHUNK)
    for which in range(1, count + 1):
        t = tl.sum(tl.where(number == which, token, 0), 0)
        last = tl.load(positions + t)
        kv, gate = _window(
            state, state_table, table_stride, pages, state_stride, tl.load(sequence + t), last, channel,
            RATIO, OVERLAP, WIDTH, ENTRIES, CHANNELS, COUNT,
        )  # fmt: skip
        chance = tl.exp(gate - tl.max(gate, 0)[None, :])
        chance = chance / tl.sum(chance, 0)[None, :]
        if POOL_ACT:
            pooled = near(tl.sum(near(near(kv, act) * near(chance, act), act), 0), act)
        else:
            pooled = near(tl.sum(kv * chance, 0), act)
        if parts == 1:
            _store(
                pooled, t, last, slots, norm_weight, cos_sin, cache, cos_sin_row, page_stride, eps,
                RATIO, LAYOUT, KIND, ROPE, ROUND_TABLE, HADAMARD, SIM, act,
            )  # fmt: skip
        else:
            tl.store(scratch + t * CHANNELS + channel, rounded(pooled, act))


@triton.jit
def _finish(
    positions, slots, scratch, norm_weight, cos_sin, cache, tokens, cos_sin_row, page_stride, eps,
    RATIO: tl.constexpr, LAYOUT: tl.constexpr, KIND: tl.constexpr, ROPE: tl.constexpr, ROUND_TABLE: tl.constexpr,
    HADAMARD: tl.constexpr, SIM: tl.constexpr, CHUNK: tl.constexpr, act: tl.constexpr,
):  # fmt: skip
    CHANNELS: tl.constexpr = LAYOUT[3]
    token, number, count = _emitting(slots, tl.program_id(0).to(tl.int64) * CHUNK, tokens, CHUNK)
    for which in range(1, count + 1):
        t = tl.sum(tl.where(number == which, token, 0), 0)
        pooled = widened(tl.load(scratch + t * CHANNELS + tl.arange(0, CHANNELS)))
        _store(
            pooled, t, tl.load(positions + t), slots, norm_weight, cos_sin, cache, cos_sin_row, page_stride, eps,
            RATIO, LAYOUT, KIND, ROPE, ROUND_TABLE, HADAMARD, SIM, act,
        )  # fmt: skip


@triton.jit
def _store(
    pooled, token, last, slots, norm_weight, cos_sin, cache, cos_sin_row, page_stride, eps,
    RATIO: tl.constexpr, LAYOUT: tl.constexpr, KIND: tl.constexpr, ROPE: tl.constexpr, ROUND_TABLE: tl.constexpr,
    HADAMARD: tl.constexpr, SIM: tl.constexpr, act: tl.constexpr,
):  # fmt: skip
    """The pooled value ``[channel]`` of the window that ends with ``token`` at position ``last``, to its record."""
    CHANNELS: tl.constexpr = LAYOUT[3]
    SKIP: tl.constexpr = (CHANNELS - ROPE) // 2
    x = tl.reshape(pooled, (1, CHANNELS))
    slot = tl.load(slots + token + tl.arange(0, 1))
    weight = widened(tl.load(norm_weight + tl.arange(0, CHANNELS)))
    x = x * reciprocal_root(tl.sum(x * x, 1) / CHANNELS + eps)[:, None]
    x = near(weight[None, :] * x, act)
    first = last - last % RATIO + tl.zeros((1,), tl.int64)
    cos, sin = cos_sin_rows(cos_sin, cos_sin_row, first, first >= 0, CHANNELS // 2, SKIP, ROPE // 2)
    if ROUND_TABLE:
        cos, sin = near(cos, act), near(sin, act)
    x = near(turned(x, cos, sin, SKIP), act)
    if KIND == "index":
        if HADAMARD:
            x = near(hadamard(x) * CHANNELS**-0.5, act)
        store_index(x, cache, page_stride, slot, LAYOUT, SIM, act)
    else:
        store_kv(x, cache, page_stride, slot, LAYOUT, SIM, act)


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    kv, gate, state, channels = args["kv"], args["gate"], args["state_cache"], args["norm_weight"].shape[0]
    if any(args[name].dtype not in ACT_DTYPES for name in ("kv", "gate", "norm_weight")):
        return f"kv is {kv.dtype}, gate {gate.dtype}, norm_weight {args['norm_weight'].dtype}"
    if kv.shape[1] not in (channels, 2 * channels) or args["cache"].layout.channels != channels:
        return f"rows of {kv.shape[1]} values for entries of {args['cache'].layout.channels} channels"
    if kv.numel() and (kv.stride(1) != 1 or gate.stride(1) != 1):
        return "kv or gate is not contiguous along the last dim"
    if args["state_table"].shape[1] > 1 and args["state_table"].stride(1) != 1:
        return "state_table has rows that are not contiguous"
    if state.layout.kind != "state" or state.layout.channels != 2 * kv.shape[1]:
        return f"state records of kind {state.layout.kind} with {state.layout.channels} values"
    if state.data.stride(1) != 1 or state.data.stride(0) % 4 or state.data.data_ptr() % 4:
        return "state_cache has records at addresses that are no multiple of 4"
    if triton.next_power_of_2(args["ratio"] * kv.shape[1] // channels) * LONG_PART > TILE:
        return f"windows of {args['ratio']} tokens"
    return unsupported(args, "cache")


def _shapes() -> Iterator[dict[str, Any]]:
    """CSA, HCA and indexer of Flash and Pro, prefill and decode."""
    main = {ratio: kv_layout("fp8", "ocp", 512, 64, 256 // ratio) for ratio in (4, 128)}
    index: dict[str, PageLayout] = {fmt: index_layout(fmt, "fnuz", 128, 64, 576) for fmt in ("fp4", "fp8", "bf16")}
    for tokens in (8192, 64):
        yield _shape(tokens, 4, True, main[4])
        yield _shape(tokens, 128, False, main[128])
        yield _shape(tokens, 4, True, kv_layout("fp8", "fnuz", 512, 64, 64))
        for layout in index.values():
            yield _shape(tokens, 4, True, layout)


def _shape(tokens: int, ratio: int, overlap: bool, layout: PageLayout) -> dict[str, Any]:
    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def pool(layout: PageLayout) -> Cache:
        return Cache("", meta(1000, layout.page_bytes, dtype=torch.uint8), layout)

    width = layout.channels * (2 if overlap else 1)
    return {
        "kv": meta(tokens, width), "gate": meta(tokens, width), "ape": meta(ratio, width),
        "norm_weight": meta(layout.channels, dtype=torch.bfloat16), "positions": meta(tokens, dtype=torch.int64),
        "sequence": meta(tokens, dtype=torch.int32), "cos_sin": meta(1 << 20, 64),
        "state_cache": pool(state_layout(width, max(1, 4096 // width), 576)),
        "state_slots": meta(tokens, dtype=torch.int64), "state_table": meta(64, 2048, dtype=torch.int32),
        "cache": pool(layout), "slots": meta(tokens, dtype=torch.int64), "ratio": ratio, "eps": 1e-6, "act": "bf16",
    }  # fmt: skip


@triton_implements("compress_insert", supports=_supports, shapes=_shapes)
def compress_insert_triton(
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    positions: torch.Tensor,
    sequence: torch.Tensor,
    cos_sin: torch.Tensor,
    state_cache: Cache,
    state_slots: torch.Tensor,
    state_table: torch.Tensor,
    cache: Cache,
    slots: torch.Tensor,
    *,
    ratio: int,
    eps: float,
    act: str,
    numerics: Numerics = OFFICIAL,
) -> None:
    """See the reference. Two launches for short windows, three for long ones."""
    tokens, width = kv.shape
    if not tokens:
        return
    positions, slots, state = positions.contiguous(), slots.contiguous(), state_cache.data
    on_cpu = arch_of(kv.device) == "cpu"
    rows, columns = (64 if on_cpu else 4), min(1024, triton.next_power_of_2(width))
    entries = state_cache.layout.entries
    _state[(triton.cdiv(tokens, rows) * triton.cdiv(width, columns),)](
        kv, gate, ape.contiguous(), positions, state_slots.contiguous(), state,
        tokens, kv.stride(0), gate.stride(0), state.stride(0),
        RATIO=ratio, WIDTH=width, ENTRIES=entries, ROWS=rows, COLUMNS=columns, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip

    channels, overlap, dtype = len(norm_weight), width == 2 * len(norm_weight), DTYPES[act]
    count = triton.next_power_of_2(2 * ratio if overlap else ratio)
    part = channels if count * channels <= TILE else LONG_PART
    chunk = 1 if tokens <= SHORT_CALL and not on_cpu else triton.next_power_of_2(ratio)
    programs = triton.cdiv(tokens, chunk)
    scratch = torch.empty(0 if part == channels else tokens, channels, dtype=dtype, device=kv.device)
    weight, kind = norm_weight.contiguous(), cache.layout.kind
    last_steps = {
        "RATIO": ratio, "LAYOUT": Layout.of(cache), "KIND": kind, "ROPE": cos_sin.shape[1],
        "ROUND_TABLE": numerics.rope_table == "act", "HADAMARD": numerics.index_hadamard,
        "SIM": numerics.index_quant if kind == "index" else numerics.kv_quant, "CHUNK": chunk,
        "act": tl.bfloat16 if act == "bf16" else tl.float32,
    }  # fmt: skip
    _pool[(programs * (channels // part),)](
        positions, sequence.contiguous(), state, state_table, slots, scratch, weight, cos_sin, cache.data,
        tokens, state_table.stride(0), state_table.shape[1], state.stride(0), cos_sin.stride(0), cache.data.stride(0),
        eps,
        OVERLAP=overlap, WIDTH=width, ENTRIES=entries, POOL_ACT=numerics.compressor_pool == "act", COUNT=count,
        PART=part, **last_steps, num_warps=min(8, max(1, count * part // PER_WARP)), enable_fp_fusion=False,
    )  # fmt: skip
    if part < channels:
        _finish[(programs,)](
            positions, slots, scratch, weight, cos_sin, cache.data, tokens, cos_sin.stride(0), cache.data.stride(0),
            eps, **last_steps, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
