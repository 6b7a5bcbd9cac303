"""inv_rope: undo the rotation that the attention output carries from its rows (spec 4.9)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dsv4dbg.compare import Dense
from dsv4dbg.kernels import formats
from dsv4dbg.kernels.attention.entries import rope_rows
from dsv4dbg.kernels.contract import Example, Invariant, op, table, tensor
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.invariants import finite, first
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.samples import TOKENS, activations, cos_sin


def _others_copied(call: Mapping[str, Any]) -> str | None:
    changed = (call["y"] != call["o"])[:, :, : call["o"].shape[2] - call["cos_sin"].shape[1]]
    return f"channel without rope changed at {first(changed)}" if changed.any() else None


@op(
    family="attention",
    args={
        "o": tensor("token head channel", "act"),
        "positions": tensor("token", "i64"),
        "cos_sin": table("position rope", "f32", "cosines, then sines"),
    },
    outputs={"y": tensor("token head channel", "act")},
    compare={"y": Dense(magnitude=("o",), row="token head", more={"rope_table=act": 1})},
    invariants=(Invariant("channels without rope unchanged", _others_copied), finite("y")),
    switches=("rope_table",),
)
def inv_rope(o: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, numerics: Numerics) -> torch.Tensor:
    """``(a, b) -> (a cos + b sin, b cos - a sin)`` for the pairs of the last r channels, at the query's position.

    Args:
        o: ``[token, head, channel]`` bf16 (or float32).
        positions: int64 ``[token]``.
        cos_sin: float32 ``[position, r]``: r/2 cosines, r/2 sines.
    Returns:
        o's shape and dtype: float32 inside, one rounding; the other channels are copied. rope_table "act" rounds cos
        and sin to o's dtype first.
    """
    return formats.rotate(o, rope_rows(cos_sin, positions, o.dtype, numerics), inverse=True)


@inv_rope.oracle
def _(o: np.ndarray, positions: np.ndarray, cos_sin: np.ndarray, *, numerics: Numerics) -> np.ndarray:
    half = cos_sin.shape[1] // 2
    turn = cos_sin[:, :half] - 1j * cos_sin[:, half:]
    start = o.shape[2] - 2 * half
    y = o.copy()
    for t, p in enumerate(positions):
        pairs = (o[t, :, start::2] + 1j * o[t, :, start + 1 :: 2]) * turn[p]
        y[t, :, start::2], y[t, :, start + 1 :: 2] = pairs.real, pairs.imag
    return y


@inv_rope.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    table = cos_sin(1024, dims.rope_dim)

    def case(name: str, positions: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> Example:
        o = activations(rng, len(positions), dims.heads, dims.head_dim).to(dtype)
        return Example(name, {"o": o, "positions": positions, "cos_sin": table})

    for tokens in TOKENS:
        yield case(f"{tokens} tokens", torch.from_numpy(rng.integers(0, len(table), tokens)))
    edges = torch.tensor([0, 1, 2, 3, 4, 126, 127, 128, 129, 1023])
    yield case("0 to 4, 126 to 129, the last position", edges)
    yield case("float32", edges, torch.float32)
    yield case("position 0 turns nothing", torch.zeros(3, dtype=torch.int64))
    zero = case("zero rows", edges)
    yield Example(zero.name, {**zero.args, "o": torch.zeros_like(zero.args["o"])})
    rope_only = case("rope channels only", edges)
    yield Example(rope_only.name, {**rope_only.args, "o": rope_only.args["o"][..., -dims.rope_dim :].contiguous()})
