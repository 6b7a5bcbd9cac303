"""Zoo cases of sparse attention: lists of slots, the softmax, and what follows it."""

from __future__ import annotations

import math
from typing import Any

import torch

from dsv4dbg.kernels.attention.build_indices import build_indices
from dsv4dbg.kernels.attention.inv_rope import inv_rope
from dsv4dbg.kernels.attention.o_proj_grouped import o_proj_grouped
from dsv4dbg.kernels.attention.sparse_mla_decode import sparse_mla_decode
from dsv4dbg.kernels.attention.sparse_mla_prefill import sparse_mla_prefill
from dsv4dbg.kernels.formats import rotate
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.zoo.caches import in_other_dialect
from dsv4dbg.kernels.zoo.case import case


@case("window-one-early", op="build_indices", kind="values", shows="every token: itself is missing")
def window_one_early(*, positions: torch.Tensor, **call: Any) -> torch.Tensor:
    """The window ends before the token; it includes it."""
    return build_indices(positions=positions - 1, **call)


@case("window-too-long", op="build_indices", kind="values", shows="prefill chunks, tokens past the window")
def window_too_long(*, positions: torch.Tensor, window: int, **call: Any) -> torch.Tensor:
    """The oldest position of the window is dropped: p - window + 1 is inside."""
    indices = build_indices(positions=positions, window=window, **call)
    indices[positions >= window - 1, 0] = -1
    return indices


@case("page-before-edge", op="build_indices", bug="D12", kind="values", shows="decode: the first position of a page")
def page_before_edge(*, window: int, window_block: int, **call: Any) -> torch.Tensor:
    """vllm-ascend#13980: off by one at a block edge: a page's first record is looked for in the page before it."""
    indices = build_indices(window=window, window_block=window_block, **call)
    recent = indices[:, :window]
    if window_block > 1:
        recent[(recent >= window_block) & (recent % window_block == 0)] -= window_block
    return indices


@case("other-group-table", op="build_indices", bug="D16", kind="values", shows="compressed entries behind a page edge")
def other_group_table(*, entry_table: torch.Tensor | None, **call: Any) -> torch.Tensor:
    """vllm#53982: the narrow table of the entries is indexed by block numbers of the full sequence."""
    if entry_table is not None and entry_table.shape[1]:
        column = torch.arange(entry_table.shape[1], device=entry_table.device)
        entry_table = entry_table[:, (4 * column).clamp_max(len(column) - 1)]
    return build_indices(entry_table=entry_table, **call)


@case("metadata-order", op="build_indices", bug="E07", kind="values", shows="steps with several sequences")
def metadata_order(*, sequence: torch.Tensor, **call: Any) -> torch.Tensor:
    """vllm#41836: metadata is in another order than the tokens: rows get the tables of other sequences."""
    return build_indices(sequence=sequence.flip(0), **call)


@case("no-sink", op="sparse_mla_prefill", kind="values", shows="every token, most where keys are few")
def no_sink(*, sink: torch.Tensor | None, **call: Any) -> Any:
    """The sink's term is missing in the softmax's denominator."""
    return sparse_mla_prefill(sink=None, **call)


@case("future-keys", op="sparse_mla_prefill", bug="B13", kind="values", shows="tokens with fewer keys than columns")
def future_keys(*, indices: torch.Tensor, **call: Any) -> Any:
    """transformers#45820: nothing is masked: where a list has no key, row 0 is taken for one."""
    return sparse_mla_prefill(indices=indices.clamp_min(0), **call)


@case("sink-twice", op="sparse_mla_decode", kind="values", shows="every token, most where keys are few")
def sink_twice(*, sink: torch.Tensor | None, **call: Any) -> Any:
    """The sink is counted in both parts of a split: its term stands twice in the denominator."""
    return sparse_mla_decode(sink=None if sink is None else sink + math.log(2), **call)


@case("padding-is-slot-0", op="sparse_mla_decode", bug="E02", kind="values", shows="lists with -1: short contexts")
def padding_is_slot_0(*, indices: torch.Tensor, **call: Any) -> Any:
    """aiter#4245: an invalid index is folded to slot 0, whose record then counts as a key."""
    return sparse_mla_decode(indices=indices.clamp_min(0), **call)


@case("entry-dialect", op="sparse_mla_decode", bug="A04", kind="values", shows="as soon as there are entries")
def entry_dialect(*, entry_cache: Cache | None, **call: Any) -> Any:
    """vllm#45681: one switch for both caches; the entries are decoded in the window's dialect, not their own."""
    return sparse_mla_decode(entry_cache=in_other_dialect(entry_cache), **call)


@case("entries-ignored", op="sparse_mla_decode", bug="E11", kind="values", shows="as soon as there are entries")
def entries_ignored(*, indices: torch.Tensor, window: int, **call: Any) -> Any:
    """sglang#36390: a generic backend knows the window only; text is coherent for as long as it fits in."""
    indices = indices.clone()
    indices[:, window:] = -1
    return sparse_mla_decode(indices=indices, window=window, **call)


@case(
    "drafts-see-first-list", op="sparse_mla_decode", bug="H06", kind="values",
    shows="verify steps only: tokens after the first of their sequence",
)  # fmt: skip
def drafts_see_first_list(*, indices: torch.Tensor, window: int, **call: Any) -> Any:
    """sglang#30333: every token of a sequence in one step gets the list of its first token."""
    indices = indices.clone()
    for row in range(1, len(indices)):
        before = indices[row - 1, :window]
        older = before[before >= 0][1:]
        if len(older) and torch.isin(older, indices[row, :window]).all():  # the same sequence, one token later
            indices[row] = indices[row - 1]
    return sparse_mla_decode(indices=indices, window=window, **call)


@case(
    "upper-heads", op="sparse_mla_decode", kind="values", model="wide", shows="heads from 32 on",
    fingerprint="only heads from 32 on",
)  # fmt: skip
def upper_heads(*, q: torch.Tensor, **call: Any) -> Any:
    """A tile holds 32 heads; those behind it are computed from the queries of the first tile."""
    return sparse_mla_decode(q=q[:, torch.arange(q.shape[1], device=q.device) % 32], **call)


@case("rope-not-undone", op="inv_rope", kind="values", shows="every token but those at position 0")
def rope_not_undone(
    *, o: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, numerics: Numerics
) -> torch.Tensor:
    """The output is rotated once more instead of back: the sign of the sine is wrong."""
    return rotate(o, cos_sin[positions])


@case("key-positions", op="inv_rope", bug="H06", kind="values", shows="verify and prefill: tokens after the first")
def key_positions(*, positions: torch.Tensor, **call: Any) -> torch.Tensor:
    """sglang#30333: all tokens of a step are turned back by the position of the step's first one."""
    return inv_rope(positions=positions[:1].expand_as(positions), **call)


@case("interleaved-groups", op="o_proj_grouped", kind="values", shows="every token")
def interleaved_groups(*, o: torch.Tensor, groups: int, **call: Any) -> torch.Tensor:
    """Head h goes to group h % groups; groups are of consecutive heads."""
    return o_proj_grouped(o=o.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2), groups=groups, **call)


@case("scale-dropped", op="o_proj_grouped", bug="A09", kind="values", shows="every token", fingerprint="a scale is off")
def scale_dropped(*, scale: torch.Tensor | None, **call: Any) -> torch.Tensor:
    """ATOM#1793: the step that dequantises wo_a does not know the weight's dtype: codes are used without scales."""
    return o_proj_grouped(scale=None, **call)


@case("repacked-weight", op="o_proj_grouped", bug="A11", kind="values", shows="every token")
def repacked_weight(*, weight: torch.Tensor, **call: Any) -> torch.Tensor:
    """vllm#56119: the loader repacked wo_a for another kernel; the einsum reads it as it was."""
    tiles = weight.view(torch.uint8).unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).transpose(1, 2)
    return o_proj_grouped(weight=tiles.reshape(weight.shape).view(weight.dtype), **call)
