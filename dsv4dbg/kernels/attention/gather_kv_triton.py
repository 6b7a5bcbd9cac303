"""gather_kv in one Triton launch.

The output is a sequence of units of 64 channels, the groups that share a scale. A program decodes some units that
follow one another: the first programs those of the window cache, the others those of the entry cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4dbg.kernels.attention.sparse_triton import Layout
from dsv4dbg.kernels.paged import DTYPES, Cache
from dsv4dbg.kernels.triton_codes import e8m0_decode, field_offset, fp8_decode, rounded, widened
from dsv4dbg.kernels.triton_run import arch_of, triton_implements
from dsv4dbg.pages import KV_GROUP, kv_layout


@triton.jit
def _decode(
    cache, page_stride, slots, rows, out, program,
    LAYOUT: tl.constexpr, UNITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Units ``program * UNITS ...`` of the records at ``slots [rows]``, decoded to ``out [rows, channel]``."""
    FORMAT: tl.constexpr = LAYOUT[0]
    DIALECT: tl.constexpr = LAYOUT[1]
    ENTRIES: tl.constexpr = LAYOUT[2]
    PER_ROW: tl.constexpr = LAYOUT[3] // GROUP
    NOPE: tl.constexpr = (LAYOUT[3] - LAYOUT[4]) // GROUP  # units of FP8
    DATA: tl.constexpr = LAYOUT[5]
    unit = program.to(tl.int64) * UNITS + tl.arange(0, UNITS)
    row, group = unit // PER_ROW, (unit % PER_ROW).to(tl.int32)
    inside = row < rows
    slot = tl.load(slots + row, inside, other=-1)
    here, lane = slot >= 0, tl.arange(0, GROUP)[None, :]
    record = cache + field_offset(slot, page_stride, ENTRIES, 0, DATA)
    if FORMAT == "fp8":
        coded = here & (group < NOPE)
        code = tl.load((record + group * GROUP)[:, None] + lane, coded[:, None], other=0)
        scales = cache + field_offset(slot, page_stride, ENTRIES, ENTRIES * DATA, LAYOUT[6])
        scale = e8m0_decode(tl.load(scales + group, coded, other=127))
        rope = (record + NOPE * GROUP + (group - NOPE) * (2 * GROUP)).to(tl.pointer_type(tl.bfloat16))
        rope = widened(tl.load(rope[:, None] + lane, (here & (group >= NOPE))[:, None], other=0.0))
        value = tl.where((group < NOPE)[:, None], fp8_decode(code, DIALECT) * scale[:, None], rope)
    else:
        kind: tl.constexpr = tl.bfloat16 if FORMAT == "bf16" else tl.float32
        values = record.to(tl.pointer_type(kind)) + group * GROUP
        value = widened(tl.load(values[:, None] + lane, here[:, None], other=0.0))
    tl.store((out + unit * GROUP)[:, None] + lane, rounded(value, out.dtype.element_ty), inside[:, None])


@triton.jit
def _gather(
    window, window_stride, window_slots, window_rows, entry, entry_stride, entry_slots, entry_rows, out,
    WINDOW: tl.constexpr, ENTRY: tl.constexpr, UNITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = tl.cdiv(window_rows * (WINDOW[3] // GROUP), UNITS)
    if program < first:
        _decode(window, window_stride, window_slots, window_rows, out, program, WINDOW, UNITS, GROUP)
    else:
        rest = out + tl.cast(window_rows, tl.int64) * WINDOW[3]
        _decode(entry, entry_stride, entry_slots, entry_rows, rest, program - first, ENTRY, UNITS, GROUP)


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    caches = {name: args[name] for name in ("window_cache", "entry_cache") if args[name] is not None}
    for name, cache in caches.items():
        data, layout = cache.data, cache.layout
        if layout.kind != "kv" or layout.channels % KV_GROUP or layout.rope_channels % KV_GROUP:
            return f"{name}: needs kv records whose channels and rope channels are multiples of {KV_GROUP}"
        if layout.channels != caches["window_cache"].layout.channels:
            return "the caches differ in channels"
        if data.stride(1) != 1 or data.stride(0) % 4 or data.data_ptr() % 4:
            return f"{name} has records at addresses that are no multiple of 4"
    return None


def _shapes() -> Iterator[Mapping[str, Any]]:
    for rows, (window, entries) in ((8192, ("ocp", "ocp")), (8192, ("fnuz", "fnuz")), (8192, ("fnuz", "ocp"))):
        layouts = kv_layout("fp8", window, 512, 64, 64), kv_layout("fp8", entries, 512, 64, 64)
        caches = [Cache("", torch.empty(256, p.page_bytes, dtype=torch.uint8, device="meta"), p) for p in layouts]
        slots = torch.empty(rows, dtype=torch.int64, device="meta")
        yield {
            "window_cache": caches[0], "window_slots": slots, "entry_cache": caches[1],
            "entry_slots": slots[: rows // 4], "act": "bf16",
        }  # fmt: skip


@triton_implements("gather_kv", supports=_supports, shapes=_shapes)
def gather_kv_triton(
    window_cache: Cache,
    window_slots: torch.Tensor,
    entry_cache: Cache | None = None,
    entry_slots: torch.Tensor | None = None,
    *,
    act: str,
) -> torch.Tensor:
    """See the reference."""
    if entry_cache is None or entry_slots is None:
        entry_cache, entry_slots = window_cache, window_slots[:0]
    channels, rows, entries = window_cache.layout.channels, len(window_slots), len(entry_slots)
    out = torch.empty(rows + entries, channels, dtype=DTYPES[act], device=window_slots.device)
    if not len(out):
        return out
    units = 2048 if arch_of(out.device) == "cpu" else 64
    programs = sum(triton.cdiv(n * (channels // KV_GROUP), units) for n in (rows, entries))
    _gather[(programs,)](
        window_cache.data, window_cache.data.stride(0), window_slots.contiguous(), rows,
        entry_cache.data, entry_cache.data.stride(0), entry_slots.contiguous(), entries, out,
        WINDOW=Layout.of(window_cache), ENTRY=Layout.of(entry_cache), UNITS=units, GROUP=KV_GROUP,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
