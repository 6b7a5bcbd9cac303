"""inv_rope: undo the rotation that the attention output carries from its rows (spec 4.9)."""

from __future__ import annotations

import torch

from dsv4dbg.compare import Dense
from dsv4dbg.kernels import formats
from dsv4dbg.kernels.contract import op, table, tensor
from dsv4dbg.kernels.numerics import Numerics


@op(
    family="attention",
    args={
        "o": tensor("token head channel", "act"),
        "positions": tensor("token", "i64"),
        "cos_sin": table("position rope", "f32", "cosines, then sines"),
    },
    outputs={"y": tensor("token head channel", "act")},
    compare={"y": Dense(row="token head")},
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
    table = cos_sin[positions]
    if numerics.rope_table == "act":
        table = table.to(o.dtype)
    return formats.rotate(o, table, inverse=True)
