"""gather_kv: decoded rows of window and entry caches in one workspace, for prefill over earlier chunks."""

from __future__ import annotations

import torch

from dsv4dbg.compare import Exact
from dsv4dbg.kernels.attention.sparse_core import read_rows
from dsv4dbg.kernels.contract import attr, cache, op, tensor
from dsv4dbg.kernels.paged import DTYPES, Cache


@op(
    family="attention",
    args={
        "window_cache": cache("recent tokens"),
        "window_slots": tensor("window_row", "i64"),
        "entry_cache": cache("compressed entries", optional=True),
        "entry_slots": tensor("entry_row", "i64", optional=True),
        "act": attr("dtype of activations: bf16 or f32"),
    },
    outputs={"kv": tensor("entry channel", "act")},
    compare={"kv": Exact()},
)
def gather_kv(
    window_cache: Cache,
    window_slots: torch.Tensor,
    entry_cache: Cache | None = None,
    entry_slots: torch.Tensor | None = None,
    *,
    act: str,
) -> torch.Tensor:
    """``kv = [window_cache[window_slots]; entry_cache[entry_slots]]``: rows decoded to the activation dtype.

    Args:
        window_slots: int64 ``[n]``; -1 gives a row of zeros.
        entry_slots: int64 ``[m]``, with ``entry_cache``.
    Returns:
        ``[n + m, channel]`` bf16 or float32. FP8 codes times power-of-two scales are exact in both.
    """
    parts = [read_rows(window_cache, window_slots, DTYPES[act])]
    if entry_cache is not None and entry_slots is not None:
        parts.append(read_rows(entry_cache, entry_slots, DTYPES[act]))
    return torch.cat(parts)
