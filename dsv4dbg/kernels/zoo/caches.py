"""Zoo cases of the ops that write and gather cached rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dsv4dbg.kernels import paged
from dsv4dbg.kernels.attention.compress_insert import compress_insert
from dsv4dbg.kernels.attention.gather_kv import gather_kv
from dsv4dbg.kernels.attention.qnorm_rope_kv_insert import qnorm_rope_kv_insert
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.zoo.case import case

OTHER = {"ocp": "fnuz", "fnuz": "ocp", "": ""}
WRAP = 1 << 18  # bytes that an offset can address, where a 32-bit one would take a cache of gigabytes


def in_other_dialect(cache: Cache | None) -> Cache | None:
    """The same bytes, read in the other FP8 dialect."""
    return cache and replace(cache, layout=replace(cache.layout, dialect=OTHER[cache.layout.dialect]))


@case("wrong-dialect", op="gather_kv", bug="A03", kind="values", shows="every prefill that reads cached rows")
def wrong_dialect(*, window_cache: Cache, entry_cache: Cache | None, **call: Any) -> torch.Tensor:
    """vllm#42893: rows are decoded in the other FP8 dialect than they were encoded in: half or twice the value."""
    return gather_kv(
        window_cache=in_other_dialect(window_cache), entry_cache=in_other_dialect(entry_cache), **call
    )  # fmt: skip


@case("stale-row", op="gather_kv", bug="D09", kind="values", shows="the last row of every sequence's window")
def stale_row(*, window_slots: torch.Tensor, **call: Any) -> torch.Tensor:
    """ATOM#1417: a row is read from the slot that it does not have yet, where an older one still lies."""
    slots = window_slots.clone()
    slots[-1:] = window_slots[-2:-1] if len(slots) > 1 else -1
    return gather_kv(window_slots=slots, **call)


@case("entries-first", op="gather_kv", bug="E07", kind="values", shows="layers with compressed entries")
def entries_first(*, window_slots: torch.Tensor, entry_slots: torch.Tensor | None, **call: Any) -> torch.Tensor:
    """vllm#41836: rows come in another order than the metadata that numbers them: entries before the window."""
    rows = gather_kv(window_slots=window_slots, entry_slots=entry_slots, **call)
    return rows.roll(len(rows) - len(window_slots), 0)


@case("rope-table-ends", op="qnorm_rope_kv_insert", bug="I01", kind="values", shows="positions from 512 on")
def rope_table_ends(*, positions: torch.Tensor, **call: Any) -> torch.Tensor:
    """mlx-lm#1189: the rope table is the one of a shorter context; positions behind its end begin again at 0."""
    return qnorm_rope_kv_insert(positions=positions % 512, **call)


@case("q-keeps-all-channels", op="qnorm_rope_kv_insert", kind="values", shows="q, by the size of its rope channels")
def q_keeps_all_channels(*, q: torch.Tensor, eps: float, **call: Any) -> torch.Tensor:
    """The head norm divides by the size of the channels without rope; it is over all channels of a head."""
    rope = call["cos_sin"].shape[1]
    out = qnorm_rope_kv_insert(q=q, eps=eps, **call)
    whole, part = (x.float().square().mean(-1, keepdim=True) + eps for x in (q, q[..., :-rope]))
    return (out.float() * (whole / part).sqrt()).to(out.dtype)


@case("offset-wraps", op="qnorm_rope_kv_insert", bug="D15", kind="values", shows="pages behind the first 256 KiB")
def offset_wraps(*, window_cache: Cache, window_slots: torch.Tensor, **call: Any) -> torch.Tensor:
    """sglang#40351: the byte offset of a page wraps, so that rows of high pages overwrite those of low ones."""
    entries, stride = window_cache.layout.entries, window_cache.data.stride(0)
    page = window_slots // entries * stride % WRAP // stride
    slots = torch.where(window_slots < 0, -1, page * entries + window_slots % entries)
    return qnorm_rope_kv_insert(window_cache=window_cache, window_slots=slots, **call)


@case("two-rows-stored", op="qnorm_rope_kv_insert", bug="D01", kind="memory", shows="the slot after a token's own")
def two_rows_stored(*, window_cache: Cache, window_slots: torch.Tensor, **call: Any) -> torch.Tensor:
    """sglang#25898: a store goes to a slot that is not the token's; here a second one, to the slot behind its own."""
    out = qnorm_rope_kv_insert(window_cache=window_cache, window_slots=window_slots, **call)
    own = window_slots[window_slots >= 0]
    own = own[~torch.isin(own + 1, own) & (own + 1 < window_cache.num_slots)]
    paged.write_records(window_cache, own + 1, paged.read_records(window_cache, own))
    return out


@case(
    "draft-layer-compact", op="qnorm_rope_kv_insert", bug="D11", kind="values",
    shows="the draft layer only; text stays right, acceptance falls", fingerprint="1 row earlier",
)  # fmt: skip
def draft_layer_compact(*, kv: torch.Tensor, window_cache: Cache, **call: Any) -> torch.Tensor:
    """ik_llama.cpp#2309: one layer's rows are stored at other places than they are read from."""
    shift = 1 if window_cache.name.startswith("mtp0.") else 0
    return qnorm_rope_kv_insert(kv=kv.roll(shift, 0), window_cache=window_cache, **call)


@case("one-layer", op="qnorm_rope_kv_insert", bug="H08", kind="values", shows="layer 3 only", fingerprint="ratio 1.25")
def one_layer(*, kv: torch.Tensor, window_cache: Cache, **call: Any) -> torch.Tensor:
    """ds4#411: one layer runs with another's parameters; here the scale of its KV rows."""
    factor = 1.25 if window_cache.name.startswith("L3.") else 1
    return qnorm_rope_kv_insert(kv=kv * factor, window_cache=window_cache, **call)


@case("entry-position", op="compress_insert", bug="D05", kind="values", shows="entries after the first of a sequence")
def entry_position(*, cos_sin: torch.Tensor, ratio: int, **call: Any) -> None:
    """ds4@c9dd949: entry i is rotated at position i; its position is that of its window's first token, i * ratio."""
    rows = cos_sin.clone()
    rows[::ratio] = cos_sin[: len(rows[::ratio])]
    compress_insert(cos_sin=rows, ratio=ratio, **call)


@case("entry-without-rope", op="compress_insert", bug="I01", kind="values", shows="entries after the first")
def entry_without_rope(*, cos_sin: torch.Tensor, **call: Any) -> None:
    """mlx-lm#1189: compressed keys are never rotated."""
    compress_insert(cos_sin=cos_sin[:1].expand_as(cos_sin), **call)


@case("chunk-forgets", op="compress_insert", bug="D06", kind="values", shows="entries of windows that cross calls")
def chunk_forgets(*, state_cache: Cache, state_slots: torch.Tensor, **call: Any) -> None:
    """llama.cpp#26471: rows of a window that came in an earlier chunk are not pooled."""
    blank = Cache(state_cache.name, torch.zeros_like(state_cache.data), state_cache.layout)
    values = torch.zeros(blank.num_slots, blank.layout.channels, device=blank.data.device)
    values[:, blank.layout.channels // 2 :] = -torch.inf
    paged.write(blank, torch.arange(blank.num_slots, device=blank.data.device), values)
    compress_insert(state_cache=blank, state_slots=state_slots, **call)
    own = state_slots[state_slots >= 0]
    paged.write_records(state_cache, own, paged.read_records(blank, own))


@case(
    "state-of-last-window", op="compress_insert", bug="D02", kind="values",
    shows="state rows, where a call crosses a window; answers only after a rejected draft",
)  # fmt: skip
def state_of_last_window(
    *, positions: torch.Tensor, sequence: torch.Tensor, state_cache: Cache, state_slots: torch.Tensor, ratio: int,
    **call: Any,
) -> None:  # fmt: skip
    """vllm-ascend#9111: only the state of the last window is kept; a rejected draft needs that of the one before."""
    before = Cache(state_cache.name, state_cache.data.clone(), state_cache.layout)
    compress_insert(
        positions=positions, sequence=sequence, state_cache=state_cache, state_slots=state_slots, ratio=ratio, **call
    )
    window, row = positions // ratio, sequence.long()
    last = torch.full((int(row.max()) + 1 if len(row) else 0,), -1, device=row.device)
    last.scatter_reduce_(0, row, window, "amax")
    lost = state_slots[(window < last[row]) & (state_slots >= 0)]
    paged.write_records(state_cache, lost, paged.read_records(before, lost))


@case("padded-length", op="compress_insert", bug="D03", kind="values", shows="ragged batches: all but one sequence")
def padded_length(*, gate: torch.Tensor, positions: torch.Tensor, ratio: int, **call: Any) -> None:
    """vllm-ascend#76: lengths are not passed, so rows count from the batch's begin: phases of the bias are wrong."""
    ape = call["ape"]
    row = torch.arange(len(gate), device=gate.device)
    wrong = ape[row % ratio] - ape[positions % ratio]
    compress_insert(gate=gate.float() + wrong, positions=positions, ratio=ratio, **call)
