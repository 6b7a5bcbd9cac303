"""embed: token ids to residual streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dsv4dbg.compare import Exact
from dsv4dbg.kernels.contract import Example, Invariant, attr, op, tensor, weight
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.invariants import finite, first
from dsv4dbg.kernels.samples import TOKENS, activations


def _equal_streams(call: Mapping[str, Any]) -> str | None:
    bad = call["streams"] != call["streams"][:, :1]
    return f"streams differ from stream 0 at {first(bad)}" if bad.any() else None


@op(
    family="ends",
    args={
        "ids": tensor("token", "i64"),
        "weight": weight("vocab channel", "bf16 f32"),
        "hc_mult": attr("number of streams"),
    },
    outputs={"streams": tensor("token stream channel", "act")},
    compare={"streams": Exact()},
    invariants=(finite("streams"), Invariant("all streams are equal", _equal_streams)),
)
def embed(ids: torch.Tensor, weight: torch.Tensor, *, hc_mult: int) -> torch.Tensor:
    """``X[t, j] = weight[ids[t]]`` for every stream j: a copy, no scale, no rounding.

    Args:
        ids: int64 ``[token]`` in ``[0, vocab)``; anything else is an error, never a wrap-around.
        weight: ``[vocab, channel]`` bf16 or float32.
    Returns:
        ``[token, hc_mult, channel]`` of weight's dtype, contiguous.
    """
    return F.embedding(ids, weight)[:, None].repeat(1, hc_mult, 1)


@embed.oracle
def _(ids: np.ndarray, weight: np.ndarray, *, hc_mult: int) -> np.ndarray:
    return np.stack([weight[ids]] * hc_mult, axis=1)


@embed.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    weight = activations(rng, dims.vocab, dims.hidden)
    for tokens in TOKENS:
        ids = torch.from_numpy(rng.integers(0, dims.vocab, tokens))
        yield Example(f"{tokens} tokens", {"ids": ids, "weight": weight, "hc_mult": dims.hc_mult})
    ends = torch.tensor([0, dims.vocab - 1, 0, 1, dims.vocab - 1])
    yield Example("first and last id, repeated", {"ids": ends, "weight": weight, "hc_mult": dims.hc_mult})
    yield Example("float32, one stream", {"ids": ends, "weight": weight.float() / 3, "hc_mult": 1})
