"""compress_insert: state rows of the compressor, and the compressed entries of the windows that these rows complete."""

from __future__ import annotations

import torch

from dsv4dbg.compare import Records
from dsv4dbg.kernels import paged
from dsv4dbg.kernels.attention.entries import rope_rows, store_index, store_kv
from dsv4dbg.kernels.contract import attr, cache, op, table, tensor, weight
from dsv4dbg.kernels.formats import rotate
from dsv4dbg.kernels.norm.rms_norm import rms_norm
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.paged import Cache

ROWS_AT_ONCE = 1024  # state rows gathered at a time


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over dim 1 in a fixed order (halves added pairwise), so that no other row of a batch changes the result."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = torch.cat((x[:, :half] + x[:, half : 2 * half], x[:, 2 * half :]), dim=1)
    return x[:, 0]


def pool(kv: torch.Tensor, gate: torch.Tensor, act: torch.dtype, numerics: Numerics) -> torch.Tensor:
    """``sum_i softmax(gate)_i kv_i`` over dim 1 per channel: float32 ``[entry, row, c]`` to ``act`` ``[entry, c]``."""
    exponentials = torch.exp(gate - gate.amax(1, keepdim=True))
    probabilities = exponentials / tree_sum(exponentials)[:, None]
    if numerics.compressor_pool == "act":
        return tree_sum((kv.to(act) * probabilities.to(act)).float()).to(act)
    return tree_sum(kv * probabilities).to(act)


def window_rows(
    state_cache: Cache, state_table: torch.Tensor, sequence: torch.Tensor, last: torch.Tensor, ratio: int, overlap: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the entry of the window that ends at position ``last`` is pooled from.

    Returns:
        kv and gate, float32 ``[entry, row, c]``, oldest row first; rows before position 0 have kv 0 and gate -inf.
    """
    count = 2 * ratio if overlap else ratio
    positions = last[:, None] + torch.arange(1 - count, 1, device=last.device)
    exists, positions = (positions >= 0)[..., None], positions.clamp_min(0)
    entries = state_cache.layout.entries
    pages = state_table[sequence.long()[:, None], positions // entries].long()
    slots = pages * entries + positions % entries
    rows = paged.read(state_cache, slots.flatten(), torch.float32).unflatten(0, slots.shape)
    kv, gate = rows.chunk(2, dim=-1)
    if overlap:  # first halves belong to the next window's entry, second halves to their own window's
        c = kv.shape[-1] // 2
        kv = torch.cat((kv[:, :ratio, :c], kv[:, ratio:, c:]), dim=1)
        gate = torch.cat((gate[:, :ratio, :c], gate[:, ratio:, c:]), dim=1)
    return torch.where(exists, kv, 0.0), torch.where(exists, gate, -torch.inf)


@op(
    family="attention",
    args={
        "kv": tensor("token width", "f32 act"),
        "gate": tensor("token width", "f32 act"),
        "ape": weight("phase width", "f32", "added to the gate of a token at position p: row p % ratio"),
        "norm_weight": weight("channel", "bf16 f32"),
        "positions": tensor("token", "i64"),
        "sequence": tensor("token", "i32"),
        "cos_sin": table("position rope", "f32", "cosines, then sines"),
        "state_cache": cache("layout kind state: [kv | gate + ape] of one token", slots="state_slots"),
        "state_slots": tensor("token", "i64"),
        "state_table": tensor("sequence block", "i32", "page of the state rows of positions block * entries ..."),
        "cache": cache("compressed entries: layout kind kv or index", slots="slots"),
        "slots": tensor("token", "i64", "slot of entry p // ratio for tokens that complete a window, else -1"),
        "ratio": attr("tokens per entry"),
        "eps": attr("added to the mean square"),
        "act": attr("dtype of activations: bf16 or f32"),
    },
    compare={"state_cache": Records(roundings=0), "cache": Records(roundings=3, terms="channel")},
    switches=("rope_table", "kv_quant", "compressor_pool", "index_hadamard", "index_quant"),
)
def compress_insert(
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
    numerics: Numerics,
) -> None:
    """``entry = encode(rope(rms_norm(round(sum_i softmax(gate)_i kv_i))))`` at the position of its first token."""
    biased = gate.float() + ape[positions.long() % ratio]
    paged.write(state_cache, state_slots, torch.cat((kv.float(), biased), dim=-1))

    dtype = paged.DTYPES[act]
    overlap = kv.shape[-1] == 2 * norm_weight.shape[0]
    store = store_index if cache.layout.kind == "index" else store_kv
    emitting = (slots >= 0).nonzero().squeeze(-1)
    for tokens in emitting.split(max(1, ROWS_AT_ONCE // (2 * ratio))):
        last = positions.long()[tokens]
        rows = window_rows(state_cache, state_table, sequence[tokens], last, ratio, overlap)
        entry = rms_norm(pool(*rows, dtype, numerics), norm_weight, eps=eps)
        entry = rotate(entry, rope_rows(cos_sin, last // ratio * ratio, dtype, numerics))
        store(cache, slots[tokens], entry, numerics)
