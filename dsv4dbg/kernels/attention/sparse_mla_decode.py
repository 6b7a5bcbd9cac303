"""sparse_mla_decode: attention over listed records of the paged window and entry caches (spec 4.8, 9)."""

from __future__ import annotations

import torch

from dsv4dbg.compare import Dense
from dsv4dbg.kernels.attention.sparse_core import attend, read_rows
from dsv4dbg.kernels.contract import attr, cache, op, tensor, weight
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.paged import Cache


@op(
    family="attention",
    args={
        "q": tensor("token head channel", "act"),
        "window_cache": cache("recent tokens"),
        "entry_cache": cache("compressed entries", optional=True),
        "indices": tensor("token key", "i32", "slots, -1 for no key: window columns first, then entries"),
        "sink": weight("head", "f32", "logit in the denominator only", optional=True),
        "window": attr("leading columns of indices that are slots of window_cache"),
        "scale": attr("factor of the dot product"),
    },
    outputs={"o": tensor("token head channel", "act"), "lse": tensor("token head", "f32")},
    compare={
        "o": Dense(terms="key", roundings=2, row="token head"),
        "lse": Dense(terms="channel", roundings=0, row="token head"),
    },
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
