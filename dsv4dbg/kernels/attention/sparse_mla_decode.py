"""sparse_mla_decode: attention over listed records of the paged window and entry caches (spec 4.8, 9)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dsv4dbg.compare import Dense
from dsv4dbg.kernels.attention import sparse_oracle
from dsv4dbg.kernels.attention.sparse_core import attend, read_rows
from dsv4dbg.kernels.attention.sparse_samples import (
    STARTS,
    WINDOW_BLOCK,
    index_lists,
    paged_rows,
    queries,
    ragged,
    sinks,
)
from dsv4dbg.kernels.contract import Example, Invariant, Pointer, attr, cache, op, tensor, weight
from dsv4dbg.kernels.dims import TINY, Dims
from dsv4dbg.kernels.invariants import finite, first
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.oracle import OracleCache
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.samples import TOKENS
from dsv4dbg.pages import kv_layout


def _slots_in_pool(call: Mapping[str, Any]) -> str | None:
    recent, entries = np.split(call["indices"], [call["window"]], axis=1)
    for name, slots in (("window_cache", recent), ("entry_cache", entries)):
        cache = call[name]
        count = 0 if cache is None else cache.data.shape[0] * cache.layout.entries
        bad = (slots < -1) | (slots >= count)
        if bad.any():
            return f"slot {slots[bad][0]} at {first(bad)} is not one of the {count} of {name}"
    return None


@op(
    family="attention",
    args={
        "q": tensor("token head channel", "act"),
        "window_cache": cache("recent tokens", Pointer("indices", until="window")),
        "entry_cache": cache("compressed entries", Pointer("indices", first="window"), optional=True),
        "indices": tensor("token key", "i32", "slots, -1 for no key: window columns first, then entries"),
        "sink": weight("head", "f32", "logit in the denominator only", optional=True),
        "window": attr("leading columns of indices that are slots of window_cache"),
        "scale": attr("factor of the dot product"),
    },
    outputs={"o": tensor("token head channel", "act"), "lse": tensor("token head", "f32")},
    compare={
        "o": Dense("key channel", ("o.terms",), roundings=2, row="token head", more={"attention=eager": 1}),
        "lse": Dense("channel", ("lse.terms",), roundings=0, row="token head", more={"attention=eager": 2}),
    },
    invariants=(
        Invariant("-1 <= slot < slots of the pool", _slots_in_pool),
        sparse_oracle.no_keys,
        finite("o"),
    ),
    switches=("attention",),
)
def sparse_mla_decode(
    q: torch.Tensor,
    window_cache: Cache,
    entry_cache: Cache | None,
    indices: torch.Tensor,
    sink: torch.Tensor | None = None,
    *,
    window: int,
    scale: float,
    numerics: Numerics,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sparse_mla_prefill` over records read from pages: each record is decoded and rounded to q's dtype first.

    One row per token, so any number of tokens per sequence; what a token may see is in its list alone. Records that
    no list names are never used.

    Args:
        q: ``[token, head, channel]`` bf16 (or float32).
        indices: int32 ``[token, key]``: slots of window_cache in the first ``window`` columns, of entry_cache in the
            others (all -1 there when entry_cache is None); -1 is no key, wherever it stands.
        sink: float32 ``[head]`` or None.
    Returns:
        ``o``, q's dtype, and ``lse`` float32 ``[token, head]``; see `sparse_mla_prefill`.
    """

    def fetch(block: torch.Tensor, column: int) -> torch.Tensor:
        split = max(0, window - column)
        recent = read_rows(window_cache, block[:, :split], q.dtype)
        if entry_cache is None:
            return torch.cat((recent, recent.new_zeros(*block[:, split:].shape, q.shape[2])), 1)
        return torch.cat((recent, read_rows(entry_cache, block[:, split:], q.dtype)), 1)

    return attend(q, indices, sink, fetch, scale, numerics)


@sparse_mla_decode.oracle
def _(
    q: np.ndarray,
    window_cache: OracleCache,
    entry_cache: OracleCache | None,
    indices: np.ndarray,
    sink: np.ndarray | None,
    *,
    window: int,
    scale: float,
    numerics: Numerics,
) -> dict[str, np.ndarray]:
    def rows(columns: np.ndarray, slots: np.ndarray) -> np.ndarray:
        recent = window_cache.rows(slots[columns < window])
        entries = slots[columns >= window]
        return np.concatenate((recent, entry_cache.rows(entries))) if entry_cache is not None else recent

    return sparse_oracle.attention(q, indices, sink, scale, rows, numerics)


@sparse_mla_decode.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    fp8, fnuz, bf16, f32 = ("fp8", "ocp"), ("fp8", "fnuz"), ("bf16", ""), ("f32", "")

    def case(
        name: str,
        count: int,
        formats: tuple[tuple[str, str], tuple[str, str]] = (fp8, fp8),
        starts: tuple[int, ...] = STARTS,
        ratio: int = dims.csa_ratio,
        width: int = dims.index_topk,
        entry_block: int = 16,
        **changed: Any,
    ) -> Example:
        tokens = ragged(count, starts)
        window_layout = kv_layout(*formats[0], dims.head_dim, dims.rope_dim, WINDOW_BLOCK)
        entry_layout = kv_layout(*formats[1], dims.head_dim, dims.rope_dim, entry_block)
        window_cache, recent, _ = paged_rows(rng, "window", window_layout, tokens.lengths)
        entry_cache, entries, _ = paged_rows(rng, "entries", entry_layout, tokens.entries(ratio))
        args = {
            "q": queries(rng, count, dims.heads, dims.head_dim),
            "window_cache": window_cache,
            "entry_cache": entry_cache,
            "indices": index_lists(rng, tokens, recent, entries, dims.window, ratio, width),
            "sink": sinks(rng, dims.heads),
            "window": dims.window,
            "scale": dims.head_dim**-0.5,
        }
        return Example(name, {**args, **{key: change(args[key]) for key, change in changed.items()}})

    for count in TOKENS if dims == TINY else (0, 1, 3, 127):
        yield case(f"{count} tokens, {dims.index_topk} of the entries", count)
    yield case("one token each at 124 to 131", 8, starts=tuple(range(124, 132)))
    yield case("four tokens of one sequence across 128", 4, starts=(126,))
    yield case(
        "all entries of ratio 128, two a page",
        8,
        starts=(127, 255, 383, 90),
        ratio=dims.hca_ratio,
        width=3,
        entry_block=2,
    )
    yield case("window fnuz, entries ocp", 5, (fnuz, fp8))
    yield case("both fnuz", 5, (fnuz, fnuz))
    yield case("bf16 caches", 5, (bf16, bf16))
    yield case("float32", 5, (f32, f32), q=torch.Tensor.float)
    yield case("float32 over fp8", 5, q=torch.Tensor.float)
    yield case("no entry cache", 5, width=0, entry_cache=lambda cache: None)
    yield case(
        "no entry cache, columns left",
        5,
        entry_cache=lambda cache: None,
        indices=lambda i: i.index_fill(1, torch.arange(dims.window, i.shape[1]), -1),
    )
    yield case("no sink", 5, sink=lambda sink: None)
    yield case("sink far above the logits", 3, sink=lambda sink: sink + 60)
    yield case("large logits, no sink", 3, q=lambda q: q * 256, sink=lambda sink: None)
    yield case("a token without keys", 3, indices=lambda i: i.index_fill(0, torch.tensor([1]), -1))
    yield case("no token has keys", 3, indices=lambda i: torch.full_like(i, -1))
    yield case("entries only", 4, starts=(126, 257), indices=lambda i: i.index_fill(1, torch.arange(dims.window), -1))
    holes = torch.from_numpy(rng.random(dims.window + dims.index_topk) < 0.5)
    yield case("holes in the lists", 5, indices=lambda i: i.masked_fill(holes, -1))
