"""qnorm_rope_kv_insert: per-head norm of q, rope on q and kv, kv stored in the window cache."""

from __future__ import annotations

import torch

from dsv4dbg.compare import Dense, Records
from dsv4dbg.kernels.attention.entries import rope_rows, store_kv
from dsv4dbg.kernels.contract import attr, cache, op, table, tensor
from dsv4dbg.kernels.formats import rotate
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.paged import Cache


def head_norm(q: torch.Tensor, eps: float, form: str) -> torch.Tensor:
    """``q * rsqrt(mean(q^2) + eps)`` over the last dim; ``form`` is a value of the switch ``head_norm``."""
    if form == "act":
        mean = q.square().float().mean(-1, keepdim=True).to(q.dtype)
        return q * torch.rsqrt((mean.float() + eps).to(q.dtype).float()).to(q.dtype)
    factor = torch.rsqrt(q.float().square().mean(-1, keepdim=True) + eps)
    return q.float() * factor if form == "f32" else q * factor.to(q.dtype)


@op(
    family="attention",
    args={
        "q": tensor("token head channel", "act"),
        "kv": tensor("token channel", "act", "after kv_norm"),
        "positions": tensor("token", "i64"),
        "cos_sin": table("position rope", "f32", "cosines, then sines"),
        "window_cache": cache("layout kind kv", slots="window_slots"),
        "window_slots": tensor("token", "i64", "-1: kv of this token is not stored"),
        "eps": attr("added to the mean square"),
    },
    outputs={"q_out": tensor("token head channel", "act")},
    compare={"q_out": Dense(terms="channel", roundings=6, row="token head"), "window_cache": Records(roundings=1)},
    switches=("head_norm", "rope_table", "kv_quant"),
)
def qnorm_rope_kv_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    window_cache: Cache,
    window_slots: torch.Tensor,
    *,
    eps: float,
    numerics: Numerics,
) -> torch.Tensor:
    """``q' = rope(head_norm(q))``; ``window_cache[slot] = encode(rope(kv))``.

    ``head_norm``: "act" rounds after every step (square, mean, + eps, rsqrt, product), "mixed" rounds the factor and
    the product, "f32" rounds once, after rope.
    """
    rows = rope_rows(cos_sin, positions, q.dtype, numerics)
    store_kv(window_cache, window_slots, rotate(kv, rows), numerics)
    return rotate(head_norm(q, eps, numerics.head_norm), rows).to(q.dtype)
