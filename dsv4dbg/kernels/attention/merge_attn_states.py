"""merge_attn_states: attention over two disjoint sets of keys, merged by their lse, the sink added once (spec 9)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dsv4dbg.compare import Dense
from dsv4dbg.kernels.contract import Example, Invariant, op, tensor, weight
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.invariants import first
from dsv4dbg.kernels.samples import TOKENS, activations, normal


def _lse_bounds(call: Mapping[str, Any]) -> str | None:
    """The merged lse lies between the larger one and that plus ln 2."""
    largest = np.maximum(call["lse_a"], call["lse_b"])
    room = np.where(largest == -np.inf, 0.0, 1e-6 * np.abs(largest) + 1e-6)
    wrong = ~((call["lse"] >= largest - room) & (call["lse"] <= largest + np.log(2) + room))
    return (
        f"lse is {call['lse'][first(wrong)]} at {first(wrong)}, larger side {largest[first(wrong)]}"
        if wrong.any()
        else None
    )


def _both_empty(call: Mapping[str, Any]) -> str | None:
    empty = np.maximum(call["lse_a"], call["lse_b"]) == -np.inf
    wrong = empty[:, :, None] & (call["o"] != 0)
    return f"o is {call['o'][first(wrong)]} at {first(wrong)}, both sides empty" if wrong.any() else None


def _no_nan(call: Mapping[str, Any]) -> str | None:
    bad = ~np.isfinite(call["o"]).all(axis=2)
    for side in ("a", "b"):
        bad &= np.isfinite(call[f"o_{side}"]).all(axis=2) | (call[f"lse_{side}"] == -np.inf)
    return f"o is not finite at token, head {first(bad)}, though both sides are finite or empty" if bad.any() else None


@op(
    family="attention",
    args={
        "o_a": tensor("token head channel", "act f32", "computed without a sink"),
        "lse_a": tensor("token head", "f32"),
        "o_b": tensor("token head channel", "act f32", "computed without a sink"),
        "lse_b": tensor("token head", "f32"),
        "sink": weight("head", "f32", "logit in the denominator only", optional=True),
    },
    outputs={"o": tensor("token head channel", "act f32"), "lse": tensor("token head", "f32")},
    compare={
        "o": Dense(magnitude=("o.terms",), row="token head"),
        "lse": Dense(magnitude=("lse.terms",), roundings=0, row="token head"),
    },
    invariants=(
        Invariant("largest <= lse <= largest + ln 2", _lse_bounds),
        Invariant("both sides empty: o = 0", _both_empty),
        Invariant("o finite", _no_nan),
    ),
)
def merge_attn_states(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``o = (e^lse_a o_a + e^lse_b o_b) / (e^lse_a + e^lse_b + e^sink)``, ``lse = ln(e^lse_a + e^lse_b)``.

    Args:
        o_a, o_b: ``[token, head, channel]`` bf16 or float32, each divided by its own sum without the sink.
        lse_a, lse_b: float32 ``[token, head]``, natural logarithm; -inf for a side without keys, whose o counts
            for nothing whatever it holds.
        sink: float32 ``[head]`` or None.
    Returns:
        ``o`` in o_a's dtype, float32 inside and one rounding; ``lse`` float32, without the sink. Where both sides
        are empty, o = 0 and lse = -inf.
    """
    maximum = torch.maximum(lse_a, lse_b)
    top = torch.where(maximum == -torch.inf, 0, maximum)
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = weight_a + weight_b
    denominator = total if sink is None else total + torch.exp(sink.float() - top)
    o = _weighted(o_a, weight_a, lse_a) + _weighted(o_b, weight_b, lse_b)
    o = torch.where((maximum == -torch.inf)[..., None], 0, o / denominator[..., None])
    return o.to(o_a.dtype), maximum + torch.log(total)


def _weighted(o: torch.Tensor, factor: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return torch.where((lse == -torch.inf)[..., None], 0, o.float() * factor[..., None])


@merge_attn_states.oracle
def _(
    o_a: np.ndarray, lse_a: np.ndarray, o_b: np.ndarray, lse_b: np.ndarray, sink: np.ndarray | None
) -> dict[str, np.ndarray]:
    lse = np.logaddexp(lse_a, lse_b)
    total = lse if sink is None else np.logaddexp(lse, sink)
    o, terms = np.zeros_like(o_a), np.zeros_like(o_a)
    for part, part_lse in ((o_a, lse_a), (o_b, lse_b)):
        seen = part_lse != -np.inf
        weighted = part[seen] * np.exp(part_lse[seen] - total[seen])[:, None]
        o[seen] += weighted
        terms[seen] += np.abs(weighted)
    sizes = [np.where(np.isfinite(part), np.abs(part), 0) for part in (lse_a, lse_b)]
    return {"o": o, "lse": lse, "o.terms": terms, "lse.terms": 1 + np.maximum(*sizes)}


@merge_attn_states.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    heads = torch.arange(dims.heads)

    def case(name: str, tokens: int, **changed: Any) -> Example:
        shape = (tokens, dims.heads)
        args = {
            "o_a": activations(rng, *shape, dims.head_dim),
            "lse_a": normal(rng, *shape, scale=3),
            "o_b": activations(rng, *shape, dims.head_dim),
            "lse_b": normal(rng, *shape, scale=3) + 1,
            "sink": normal(rng, dims.heads),
        }
        return Example(name, {**args, **{key: change(args[key]) for key, change in changed.items()}})

    def empty(lse: torch.Tensor) -> torch.Tensor:
        return torch.full_like(lse, -torch.inf)

    for tokens in TOKENS:
        yield case(f"{tokens} tokens", tokens)
    yield case("no sink", 3, sink=lambda sink: None)
    yield case("float32", 3, o_a=torch.Tensor.float, o_b=torch.Tensor.float)
    yield case("float32 partials, bf16 other side", 3, o_a=torch.Tensor.float)
    yield case("first side empty", 3, lse_a=empty, o_a=torch.zeros_like)
    yield case("second side empty", 3, lse_b=empty, o_b=torch.zeros_like)
    yield case("both sides empty", 3, lse_a=empty, lse_b=empty, o_a=torch.zeros_like, o_b=torch.zeros_like)
    yield case(
        "both sides empty, no sink",
        3,
        lse_a=empty,
        lse_b=empty,
        o_a=torch.zeros_like,
        o_b=torch.zeros_like,
        sink=lambda sink: None,
    )
    some = {
        "lse_a": lambda lse: lse.masked_fill(heads % 4 >= 2, -torch.inf),
        "lse_b": lambda lse: lse.masked_fill(heads % 2 == 1, -torch.inf),
    }
    yield case(
        "some heads empty, their o is NaN",
        3,
        **some,
        o_a=lambda o: o.masked_fill((heads % 4 >= 2)[:, None], torch.nan),
        o_b=lambda o: o.masked_fill((heads % 2 == 1)[:, None], torch.nan),
    )
    yield case("equal lse", 3, lse_a=torch.zeros_like, lse_b=torch.zeros_like)
    yield case("lse of thousands", 3, lse_a=lambda lse: lse + 5000, lse_b=lambda lse: lse + 5000)
    yield case(
        "lse of minus thousands, no sink",
        3,
        lse_a=lambda lse: lse - 5000,
        lse_b=lambda lse: lse - 5000,
        sink=lambda sink: None,
    )
    yield case("one side far above", 3, lse_a=lambda lse: lse + 200)
    yield case("sink far above", 3, sink=lambda sink: sink + 60)
    yield case("sink of -inf", 3, sink=lambda sink: torch.full_like(sink, -torch.inf))
    yield case("opposite sides", 3, o_b=lambda o: o.neg(), lse_b=torch.zeros_like, lse_a=torch.zeros_like)
