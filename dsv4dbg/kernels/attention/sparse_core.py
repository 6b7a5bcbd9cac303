"""What the sparse attention ops share: rows of a cache by slot, and the softmax over a list of keys.

Prefill and decode differ only in where rows come from, so both hand `attend` a function that fetches the rows of
some columns of the index lists; equal rows give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from dsv4dbg.kernels import paged
from dsv4dbg.kernels.numerics import Numerics

Fetch = Callable[[torch.Tensor, int], torch.Tensor]
"""``fetch(indices [t, k], column) -> rows [t, k, channel]``: rows of the lists' columns from ``column`` on; -1: 0."""

KEYS = 64  # keys per step of the running softmax, as in the official kernel
TOKENS = 64  # tokens per step, which bounds memory


def read_rows(cache: paged.Cache, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decoded rows ``[..., channel]`` of the records at ``slots`` (any integer shape); -1 gives a row of zeros."""
    shape = (*slots.shape, cache.layout.channels)
    if cache.num_slots == 0:
        return torch.zeros(shape, dtype=dtype, device=slots.device)
    rows = paged.read(cache, slots.flatten().clamp_min(0), dtype).view(shape)
    return torch.where((slots >= 0)[..., None], rows, 0)


def attend(
    q: torch.Tensor, indices: torch.Tensor, sink: torch.Tensor | None, fetch: Fetch, scale: float, numerics: Numerics
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every token over the keys of its list, in list order; K and V are the same rows.

    Args:
        q: ``[token, head, channel]``.
        indices: ``[token, key]``, -1 where the list has no key.
        sink: float32 ``[head]``, one logit in the denominator, or None.
    Returns:
        ``o [token, head, channel]`` in q's dtype and ``lse`` float32 ``[token, head]`` (without the sink).
    """
    softmax = _eager if numerics.attention == "eager" else _flash
    indices = F.pad(indices, (0, -indices.shape[1] % KEYS), value=-1)
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    for start in range(0, len(q), TOKENS):
        part = slice(start, start + TOKENS)
        o[part], lse[part] = softmax(q[part], indices[part], sink, fetch, scale)
    return o, lse


def _scores(q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Dot products float32 ``[token, head, key]``."""
    return torch.bmm(q.float(), rows.float().transpose(1, 2))


def _finite(maximum: torch.Tensor) -> torch.Tensor:
    """The maximum of scores, 0 where there was no score (so that differences from it are never NaN)."""
    return torch.where(maximum == -torch.inf, 0, maximum)


def _flash(
    q: torch.Tensor, indices: torch.Tensor, sink: torch.Tensor | None, fetch: Fetch, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Official: running maximum over blocks of 64 keys, P rounded to act for PV but not for the sum, one division."""
    maximum = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    total = torch.zeros_like(maximum)
    acc = torch.zeros_like(q, dtype=torch.float32)
    for column in range(0, indices.shape[1], KEYS):
        block = indices[:, column : column + KEYS]
        rows = fetch(block, column)
        logits = (_scores(q, rows) * scale).masked_fill((block < 0)[:, None], -torch.inf)
        before, maximum = maximum, torch.maximum(maximum, logits.amax(-1))
        decay = torch.exp(before - _finite(maximum))
        p = torch.exp(logits - _finite(maximum)[..., None])
        total = total * decay + p.sum(-1)
        acc = acc * decay[..., None] + torch.bmm(p.to(q.dtype).float(), rows.float())
    lse = maximum + torch.log(total)
    denominator = total if sink is None else total + torch.exp(sink.float() - _finite(maximum))
    o = torch.where((maximum == -torch.inf)[..., None], 0, acc / denominator[..., None])
    return o.to(q.dtype), lse


def _eager(
    q: torch.Tensor, indices: torch.Tensor, sink: torch.Tensor | None, fetch: Fetch, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers: dot and scaled dot rounded to act, softmax with the sink in float32, P rounded to act."""
    act, rows = q.dtype, fetch(indices, 0)
    logits = (_scores(q, rows).to(act).float() * scale).to(act).float()
    logits = logits.masked_fill((indices < 0)[:, None], -torch.inf)
    lse = torch.logsumexp(logits, -1)
    if sink is not None:
        column = sink.float().view(1, -1, 1).expand(len(q), -1, 1)
        logits = torch.cat((logits, column), -1)
    p = torch.softmax(logits - _finite(logits.amax(-1, keepdim=True)), -1)[..., : indices.shape[1]]
    p = torch.where((lse == -torch.inf)[..., None], 0, p)
    return torch.bmm(p.to(act).float(), rows.float()).to(act), lse
