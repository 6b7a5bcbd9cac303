"""Zoo cases of the sparse indexer: its queries, logits and choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dsv4dbg.kernels.attention.indexer_logits import indexer_logits
from dsv4dbg.kernels.attention.indexer_q import indexer_q
from dsv4dbg.kernels.attention.indexer_topk import indexer_topk
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.zoo.case import case

WRAP = 1 << 15  # bytes that an offset can address
TILE = 64  # entries that a program scores at a time


@case("half-split-pairs", op="indexer_q", bug="B15", kind="values", shows="every token but those at position 0")
def half_split_pairs(*, q: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, **call: Any) -> Any:
    """sglang#13530: rope turns the pairs (i, i + r/2); here neighbours are pairs."""
    cos, sin = (part[:, None] for part in cos_sin[positions].chunk(2, dim=-1))
    rest, a, b = q.float().split((q.shape[-1] - cos_sin.shape[1], cos.shape[-1], cos.shape[-1]), dim=-1)
    turned = torch.cat((rest, a * cos - b * sin, a * sin + b * cos), dim=-1).to(q.dtype)
    return indexer_q(q=turned, positions=torch.zeros_like(positions), cos_sin=cos_sin, **call)


@case("q-not-rotated", op="indexer_q", bug="A14", kind="values", shows="every token; the keys are rotated")
def q_not_rotated(*, numerics: Numerics, **call: Any) -> Any:
    """llama.cpp#26423: the Hadamard rotation is applied to one operand of the product only."""
    return indexer_q(numerics=replace(numerics, index_hadamard=False), **call)


@case("interleaved-scales", op="indexer_logits", bug="B06", kind="values", shows="entries after the first of a page")
def interleaved_scales(*, index_cache: Cache, **call: Any) -> torch.Tensor:
    """vllm#40991: a page holds all values, then all scales; it is read as if each scale followed its values."""
    layout, data = index_cache.layout, index_cache.data
    records = data[:, : layout.entries * layout.record_bytes].unflatten(1, (layout.entries, layout.record_bytes))
    moved = data.clone()
    moved[:, : layout.entries * layout.record_bytes] = torch.cat(
        [field.flatten(1) for field in records.split(layout.fields, dim=2)], 1
    )
    return indexer_logits(index_cache=replace(index_cache, data=moved), **call)


@case(
    "reads-zero-past-range", op="indexer_logits", bug="B02", kind="values",
    shows="entries in pages behind the first 32 KiB, whose logits are 0",
)  # fmt: skip
def reads_zero_past_range(*, index_cache: Cache, **call: Any) -> torch.Tensor:
    """aiter#4774: the offset of a page leaves the range of a buffer descriptor, and what is read there is 0."""
    beyond = torch.arange(len(index_cache.data), device=index_cache.data.device) * index_cache.data.stride(0) >= WRAP
    return indexer_logits(index_cache=replace(index_cache, data=index_cache.data * ~beyond[:, None]), **call)


@case("tiles-after-first", op="indexer_logits", bug="B04", kind="values", shows="contexts of more than 64 entries")
def tiles_after_first(*, lens: torch.Tensor, **call: Any) -> torch.Tensor:
    """vllm#39303: as soon as a context crosses a tile, all tiles get the scores of the first one."""
    logits = indexer_logits(lens=lens, **call)
    column = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(column < lens[:, None], logits[:, column % TILE], -torch.inf)


@case("future-entries", op="indexer_logits", bug="B13", kind="values", shows="prefill and verify, all but last tokens")
def future_entries(*, sequence: torch.Tensor, lens: torch.Tensor, **call: Any) -> torch.Tensor:
    """transformers#45820: no causal mask: a token sees all entries that its sequence has after the step."""
    most = torch.zeros(int(sequence.max()) + 1 if len(sequence) else 0, dtype=lens.dtype, device=lens.device)
    most.scatter_reduce_(0, sequence.long(), lens, "amax")
    return indexer_logits(sequence=sequence, lens=most[sequence.long()], **call)


@case("unsigned-weights", op="indexer_logits", kind="values", shows="tokens with a head of negative weight")
def unsigned_weights(*, weights: torch.Tensor, **call: Any) -> torch.Tensor:
    """The heads' weights lose their sign; only the dot products are cut off at 0, before they are weighted."""
    return indexer_logits(weights=weights.abs(), **call)


@case("topk-past-length", op="indexer_topk", bug="C06", kind="values", shows="tokens with fewer than k entries")
def topk_past_length(*, lens: torch.Tensor, k: int, **call: Any) -> torch.Tensor:
    """aiter#1567: a row with fewer than k entries is filled up with whatever follows, where -1 has to stand."""
    return indexer_topk(lens=lens.clamp_min(k), k=k, **call)


@case("topk-short", op="indexer_topk", bug="C05", kind="values", shows="contexts of more than k entries")
def topk_short(*, logits: torch.Tensor, lens: torch.Tensor, k: int) -> torch.Tensor:
    """vllm#52149: a buffer of candidates is full too early; entries behind column 2k are not considered."""
    return indexer_topk(logits=logits[:, : 2 * k], lens=lens.clamp_max(2 * k), k=k)


@case("topk-duplicate", op="indexer_topk", bug="C09", kind="values", shows="tokens with at least k entries")
def topk_duplicate(*, lens: torch.Tensor, k: int, **call: Any) -> torch.Tensor:
    """sglang-glm53-flash-sm120#4: a second pass reuses the counter of the first, and an entry is chosen twice."""
    chosen = indexer_topk(lens=lens, k=k, **call)
    chosen[:, -1] = torch.where(lens >= k, chosen[:, 0], chosen[:, -1])
    return chosen


@case("topk-tail-unwritten", op="indexer_topk", bug="C07", kind="memory", shows="tokens with fewer than k entries")
def topk_tail_unwritten(*, lens: torch.Tensor, k: int, **call: Any) -> torch.Tensor:
    """llama.cpp#25436: columns behind a short row's entries are returned as the allocator left them."""
    chosen = indexer_topk(lens=lens, k=k, **call)
    result = torch.empty_like(chosen)
    written = torch.arange(k, device=lens.device) < lens[:, None]
    result[written] = chosen[written]
    return result


_lens: dict[tuple[int, int], torch.Tensor] = {}


@case("lengths-of-last-step", op="indexer_topk", bug="H02", kind="state", shows="every step but the first of its size")
def lengths_of_last_step(*, logits: torch.Tensor, lens: torch.Tensor, k: int) -> torch.Tensor:
    """hip#3902: a replayed graph sees the lengths of the step before; new entries are invisible for one step."""
    before = _lens.get((len(lens), k), lens)
    _lens[len(lens), k] = lens.clone()
    return indexer_topk(logits=logits, lens=before.clamp_max(logits.shape[1]), k=k)
