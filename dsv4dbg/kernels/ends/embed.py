"""embed: token ids to residual streams."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsv4dbg.compare import Exact
from dsv4dbg.kernels.contract import attr, op, tensor, weight


@op(
    family="ends",
    args={
        "ids": tensor("token", "i64"),
        "weight": weight("vocab channel", "bf16 f32"),
        "hc_mult": attr("number of streams"),
    },
    outputs={"streams": tensor("token stream channel", "act")},
    compare={"streams": Exact()},
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
