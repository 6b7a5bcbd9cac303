"""indexer_topk: the entries with the highest scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dsv4dbg.compare import IndexSet
from dsv4dbg.kernels.contract import Example, Invariant, attr, op, tensor
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.invariants import first
from dsv4dbg.kernels.samples import TOKENS, normal


def _in_range(call: Mapping[str, Any]) -> str | None:
    indices, lens = call["indices"], call["lens"][:, None]
    if (bad := (indices < -1) | (indices >= lens)).any():
        t, c = first(bad)
        return f"index {indices[t, c]} at {(t, c)} is outside -1 .. {lens[t, 0] - 1}"
    return None


def _complete(call: Mapping[str, Any]) -> str | None:
    indices = call["indices"]
    expected = np.clip(call["lens"], 0, min(indices.shape[1], call["logits"].shape[1]))
    if (bad := (indices >= 0) != (np.arange(indices.shape[1]) < expected[:, None])).any():
        t = first(bad)[0]
        return f"row {t} has {(indices[t] >= 0).sum()} entries, or -1 among them; {expected[t]} expected, then -1"
    for t, row in enumerate(indices):
        if len(np.unique(row[row >= 0])) < (row >= 0).sum():
            return f"row {t} holds an entry twice"
    return None


def _best_first(call: Mapping[str, Any]) -> str | None:
    indices, logits = call["indices"], call["logits"]
    if not logits.size:
        return None
    scores = np.take_along_axis(logits, np.maximum(indices, 0), axis=1)
    rising = (scores[:, 1:] > scores[:, :-1]) & (indices[:, 1:] >= 0)
    return f"score rises at {first(rising)}" if rising.any() else None


@op(
    family="attention",
    args={
        "logits": tensor("token entry", "f32"),
        "lens": tensor("token", "i32", "columns that count"),
        "k": attr("entries chosen"),
    },
    outputs={"indices": tensor("token choice", "i32")},
    compare={"indices": IndexSet(scores="logits", lengths="lens")},
    invariants=(
        Invariant("-1 <= index < length", _in_range),
        Invariant("min(k, length) entries, none twice, -1 at the end", _complete),
        Invariant("descending scores", _best_first),
    ),
)
def indexer_topk(logits: torch.Tensor, lens: torch.Tensor, *, k: int) -> torch.Tensor:
    """Numbers of the ``k`` entries with the highest logits of each token, best first, ties to the lowest number.

    Args:
        logits: float32 ``[token, entry]``; what lies at or beyond ``lens[t]`` does not matter, NaN included.
        lens: int32 ``[token]``.
        k: columns of the result; may exceed the number of entries.
    Returns:
        int32 ``[token, k]``; row t has ``min(k, lens[t])`` entries, then -1. An entry whose logit is -inf may be
        chosen; a NaN counts as the highest logit.
    """
    tokens, width = logits.shape
    valid = torch.arange(width, device=logits.device) < lens[:, None]
    order = torch.where(valid, logits, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = torch.full((tokens, k), -1, dtype=torch.int32, device=logits.device)
    rank = torch.arange(order.shape[1], device=logits.device)
    chosen[:, : order.shape[1]] = torch.where(rank < lens[:, None], order, -1)
    return chosen


@indexer_topk.oracle
def _(logits: np.ndarray, lens: np.ndarray, *, k: int) -> np.ndarray:
    chosen = np.full((len(logits), k), -1, dtype=np.int64)
    for t, length in enumerate(lens):
        best = sorted(range(length), key=lambda w, row=logits[t]: (-row[w], w))[:k]
        chosen[t, : len(best)] = best
    return chosen


@indexer_topk.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    def example(name: str, logits: torch.Tensor, lens: torch.Tensor, k: int) -> Example:
        beyond = torch.arange(logits.shape[1]) >= lens[:, None]
        return Example(name, {"logits": torch.where(beyond, -torch.inf, logits), "lens": lens.int(), "k": k})

    def lengths(tokens: int, width: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, width + 1, tokens))

    k = dims.index_topk
    for tokens in TOKENS:
        width = 3 * k
        rounded = normal(rng, tokens, width).to(torch.bfloat16).float()
        yield example(f"{tokens} tokens", rounded, lengths(tokens, width), k)
    for entries in (0, 1, k - 1, k, k + 1):
        yield example(f"{entries} entries", normal(rng, 4, entries), torch.full((4,), entries), k)
    ties = torch.from_numpy(rng.integers(-2, 3, (9, 4 * k)).astype(np.float32))
    ties[0] = 0.0
    ties[1] = -0.0
    ties[1, ::2] = 0.0
    ties[2] = -torch.inf
    yield example("ties", ties, lengths(9, 4 * k) // 2 + 2 * k, k)
    lens = torch.tensor([0, 1, 3, k, k + 1, 2 * k - 1, 2 * k])
    noise = example("NaN beyond the length", normal(rng, 7, 2 * k), lens, k)
    for t, length in enumerate(noise.args["lens"].tolist()):
        noise.args["logits"][t, length:] = torch.nan if t % 2 else torch.inf
    yield noise
