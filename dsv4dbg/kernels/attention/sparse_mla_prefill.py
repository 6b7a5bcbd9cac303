"""sparse_mla_prefill: attention over listed rows of a workspace, with a sink (spec 4.8)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dsv4dbg.compare import Dense
from dsv4dbg.kernels.attention import sparse_oracle
from dsv4dbg.kernels.attention.sparse_core import attend
from dsv4dbg.kernels.attention.sparse_samples import index_lists, queries, ragged, rows, sinks, workspace_rows
from dsv4dbg.kernels.contract import Example, Invariant, attr, op, tensor, weight
from dsv4dbg.kernels.dims import TINY, Dims
from dsv4dbg.kernels.invariants import finite, first
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.samples import TOKENS


def _indices_in_range(call: Mapping[str, Any]) -> str | None:
    indices, count = call["indices"], len(call["kv"])
    bad = (indices < -1) | (indices >= count)
    return f"index {indices[bad][0]} at {first(bad)} is not a row of {count}" if bad.any() else None


def _inside_hull(call: Mapping[str, Any]) -> str | None:
    """The output is a mean of the listed rows, so no channel exceeds their largest."""
    largest = np.append(np.abs(call["kv"]).max(axis=1, initial=0.0), 0.0)  # index -1 takes the last
    bound = largest[call["indices"]].max(axis=1, initial=0.0)
    over = np.abs(call["o"]).max(axis=2, initial=0.0) > bound[:, None] * (1 + 2**-6)
    return f"o exceeds every listed row at token, head {first(over)}" if over.any() else None


@op(
    family="attention",
    args={
        "q": tensor("token head channel", "act"),
        "kv": tensor("entry channel", "act", "rows that are keys and values at once"),
        "indices": tensor("token key", "i32", "rows of kv, -1 for no key"),
        "sink": weight("head", "f32", "logit in the denominator only", optional=True),
        "scale": attr("factor of the dot product"),
    },
    outputs={"o": tensor("token head channel", "act"), "lse": tensor("token head", "f32")},
    compare={
        "o": Dense("key channel", ("o.terms",), roundings=2, row="token head", more={"attention=eager": 1}),
        "lse": Dense("channel", ("lse.terms",), roundings=0, row="token head", more={"attention=eager": 2}),
    },
    invariants=(
        Invariant("-1 <= index < rows", _indices_in_range),
        sparse_oracle.no_keys,
        Invariant("o within the listed rows", _inside_hull),
        finite("o"),
    ),
    switches=("attention",),
)
def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sink: torch.Tensor | None = None,
    *,
    scale: float,
    numerics: Numerics,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``o = sum_j e^(l_j) kv_j / (sum_j e^(l_j) + e^sink)`` with ``l_j = scale * (q . kv_j)`` over a token's list.

    Args:
        q: ``[token, head, channel]`` bf16 (or float32).
        kv: ``[entry, channel]``, q's dtype.
        indices: int32 ``[token, key]``; -1 is no key, wherever it stands. A row named twice counts twice.
        sink: float32 ``[head]`` or None.
    Returns:
        ``o``, q's dtype; ``lse`` float32 ``[token, head] = ln sum_j e^(l_j)``, without the sink. A token without
        any key has o = 0 and lse = -inf. A NaN in a listed row reaches all of that token, and no other token.

    Official ("flash"): dots, scaling, maximum, exponentials and sums in float32, in list order, 64 keys at a time with
    a running maximum (which the sink does not join); P is rounded to q's dtype for PV and not for the sum; PV
    accumulates in float32; one division; one rounding. "eager" rounds dots, scaled dots and normalised P to q's
    dtype, as transformers.
    """
    padded = torch.cat((kv, kv.new_zeros(1, kv.shape[1])))  # index -1 is the row of zeros
    return attend(q, indices, sink, lambda block, _: padded[block.long()], scale, numerics)


@sparse_mla_prefill.oracle
def _(
    q: np.ndarray, kv: np.ndarray, indices: np.ndarray, sink: np.ndarray | None, *, scale: float, numerics: Numerics
) -> dict[str, np.ndarray]:
    return sparse_oracle.attention(q, indices, sink, scale, lambda _, chosen: kv[chosen], numerics)


@sparse_mla_prefill.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    scale, ratio = dims.head_dim**-0.5, dims.csa_ratio

    def case(name: str, count: int, ratio: int = ratio, width: int = dims.index_topk, **changed: Any) -> Example:
        tokens = ragged(count)
        recent, entries = workspace_rows(rng, tokens.lengths, tokens.entries(ratio))
        kv = rows(rng, sum(tokens.lengths) + sum(tokens.entries(ratio)), dims.head_dim)
        args = {
            "q": queries(rng, count, dims.heads, dims.head_dim),
            "kv": kv,
            "indices": index_lists(rng, tokens, recent, entries, dims.window, ratio, width),
            "sink": sinks(rng, dims.heads),
            "scale": scale,
        }
        return Example(name, {**args, **{key: change(args[key]) for key, change in changed.items()}})

    for count in TOKENS if dims == TINY else (0, 1, 3, 129):
        yield case(f"{count} tokens, {dims.index_topk} of the entries", count)
    yield case("all entries of ratio 128", 63, dims.hca_ratio, 3)
    yield case("window only", 7, width=0)
    yield case("no sink", 7, sink=lambda sink: None)
    yield case("float32", 7, q=torch.Tensor.float, kv=torch.Tensor.float)
    yield case("large logits, no sink", 7, q=lambda q: q * 256, sink=lambda sink: None)
    yield case("sink far above the logits", 3, sink=lambda sink: sink + 60)
    yield case(
        "sink of -inf in every other head",
        3,
        sink=lambda sink: sink.masked_fill(torch.arange(dims.heads) % 2 == 1, -torch.inf),
    )
    yield case("zero queries", 3, q=torch.zeros_like)
    yield case("equal keys", 3, kv=lambda kv: kv[:1].expand_as(kv).contiguous())
    yield case("a token without keys", 3, indices=lambda i: i.index_fill(0, torch.tensor([1]), -1))
    yield case("no token has keys", 3, indices=lambda i: torch.full_like(i, -1))
    yield case("no columns", 3, indices=lambda i: i[:, :0])
    yield case("no rows", 3, kv=lambda kv: kv[:0], indices=lambda i: torch.full_like(i, -1))
    yield case("entries only", 3, indices=lambda i: i.index_fill(1, torch.arange(dims.window), -1))
    holes = torch.from_numpy(rng.random(dims.window + dims.index_topk) < 0.5)
    yield case("holes in the lists", 7, indices=lambda i: i.masked_fill(holes, -1))
    yield case("a key named twice", 3, indices=lambda i: torch.cat((i, i[:, :3]), 1))
    unlisted = case("unlisted rows are NaN", 3)
    kv = unlisted.args["kv"].clone()
    kv[~torch.isin(torch.arange(len(kv)), unlisted.args["indices"])] = torch.nan
    yield Example(unlisted.name, {**unlisted.args, "kv": kv})
