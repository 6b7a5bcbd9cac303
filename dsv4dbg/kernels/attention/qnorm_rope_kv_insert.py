"""qnorm_rope_kv_insert: per-head norm of q, rope on q and kv, kv stored in the window cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dsv4dbg.compare import Dense, Records
from dsv4dbg.kernels.attention import entries_oracle
from dsv4dbg.kernels.attention.entries import rope_rows, store_kv, stored_finite
from dsv4dbg.kernels.attention.ragged import MIXED, Ragged, own_slots, paged_cache
from dsv4dbg.kernels.contract import Example, Invariant, attr, cache, op, table, tensor
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.formats import rotate
from dsv4dbg.kernels.invariants import finite, first
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.oracle import OracleCache
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.samples import TOKENS, activations, cos_sin
from dsv4dbg.pages import KV_GROUP, kv_layout


def head_norm(q: torch.Tensor, eps: float, form: str) -> torch.Tensor:
    """``q * rsqrt(mean(q^2) + eps)`` over the last dim; ``form`` is a value of the switch ``head_norm``."""
    if form == "act":
        mean = q.square().float().mean(-1, keepdim=True).to(q.dtype)
        return q * torch.rsqrt((mean.float() + eps).to(q.dtype).float()).to(q.dtype)
    factor = torch.rsqrt(q.float().square().mean(-1, keepdim=True) + eps)
    return q.float() * factor if form == "f32" else q * factor.to(q.dtype)


def _unit_heads(call: Mapping[str, Any]) -> str | None:
    size = np.sqrt(np.mean(np.square(call["q_out"], dtype=np.float64), axis=-1))
    bad = size > 1.02
    return f"head has root mean square {size[bad][0]:.4f} at {first(bad)}, at most 1 expected" if bad.any() else None


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
    invariants=(
        finite("q_out"),
        Invariant("heads have at most unit root mean square", _unit_heads),
        stored_finite("window_cache", "window_slots"),
    ),
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
    """``q_out = rope(head_norm(q))`` and ``window_cache[slot] = encode(rope(kv))``.

    ``head_norm(q) = q * rsqrt(mean(q^2) + eps)`` per head, without a weight. Rope turns the last r channels, pairs
    interleaved.

    Args:
        q: ``[token, head, channel]`` bf16 (or float32).
        kv: ``[token, channel]``, q's dtype.
        positions: int64 ``[token]``.
        cos_sin: float32 ``[position, r]``: r/2 cosines, r/2 sines.
        window_cache: records of layout kind ``kv``: fp8 in either dialect (the last r channels bf16), bf16 or float32.
        window_slots: int64 ``[token]``; at -1 nothing is stored, q is computed all the same.
    Returns:
        q's shape and dtype. A zero head gives zeros; a NaN stays in its head.

    Sums run in float32. head_norm "act": square, mean, mean + eps, rsqrt, product and rope are rounded to q's dtype
    each; "mixed": factor, product and rope; "f32": once, after rope. Kv is rounded to its dtype after rope, then
    encoded; a bf16 or float32 cache gets its other channels rounded to FP8 (OCP, groups of 64) if kv_quant is set.
    rope_table "act" rounds cos and sin to q's dtype first.
    """
    rows = rope_rows(cos_sin, positions, q.dtype, numerics)
    store_kv(window_cache, window_slots, rotate(kv, rows), numerics)
    return rotate(head_norm(q, eps, numerics.head_norm), rows).to(q.dtype)


@qnorm_rope_kv_insert.oracle
def _(
    q: np.ndarray,
    kv: np.ndarray,
    positions: np.ndarray,
    cos_sin: np.ndarray,
    window_cache: OracleCache,
    window_slots: np.ndarray,
    *,
    eps: float,
    numerics: Numerics,
) -> dict[str, np.ndarray]:
    turn, layout = cos_sin[positions], window_cache.layout
    q = entries_oracle.rope(q / np.sqrt(np.mean(q * q, axis=-1, keepdims=True) + eps), turn)
    stored = entries_oracle.stored("window_cache", entries_oracle.rope(kv, turn)[window_slots >= 0], layout, numerics)
    return {"q_out": q, **stored}


def _edges(x: torch.Tensor, rope_dim: int) -> torch.Tensor:
    """Rows of ``x [token, ..., channel]`` (at least 6) with zeros, extreme sizes, exponent edges and ties."""
    x = x.clone()
    x[0] = 0
    x[1] *= 1e-6  # below the floor of amax
    x[2] *= 1e4
    x[3, ..., ::KV_GROUP] = 448.0 * 2.0 ** torch.arange(-4, x.shape[-1] // KV_GROUP - 4)  # amax = 448 * 2^k
    x[4, ..., :-rope_dim] = -0.0
    x[4, ..., 0] = 1.0  # scale 2^-8: multiples of 2^-8 step 1/16 are ties between e4m3 codes
    x[4, ..., 1:33] = torch.arange(32) / 32 + 1 / 64
    x[5, ..., :-rope_dim] *= 1e-4 / x[5, ..., :-rope_dim].abs().amax().clamp_min(1e-9)
    return x


@qnorm_rope_kv_insert.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    d, r = dims.head_dim, dims.rope_dim
    rope_table = cos_sin(256, r)
    formats = (("fp8", "ocp"), ("fp8", "fnuz"), ("bf16", ""), ("f32", ""))

    def example(name: str, spans: tuple[tuple[int, int], ...], fmt: str, dialect: str, gap: int = 0) -> Example:
        batch = Ragged(spans)
        layout = kv_layout(fmt, dialect, d, r, min(64, dims.window))
        window_cache, block_table = paged_cache(rng, "window", layout, batch.ends, gap)
        q, kv = activations(rng, len(batch), dims.heads, d), activations(rng, len(batch), d)
        if fmt == "f32":
            q, kv = q.float() * 1.001, kv.float() * 1.001
        return Example(
            f"{name}, {fmt} {dialect}".strip(),
            {
                "q": q, "kv": kv, "positions": batch.positions, "cos_sin": rope_table, "window_cache": window_cache,
                "window_slots": own_slots(batch, block_table, layout.entries), "eps": 1e-6,
            },
        )  # fmt: skip

    for i, tokens in enumerate(TOKENS):
        yield example(f"{tokens} tokens", ((0, tokens),), *formats[i % 2])
    for fmt, dialect in formats:
        yield example("ragged", MIXED, fmt, dialect, gap=96)
        edge = example("edges", ((3, 6), (127, 3)), fmt, dialect)
        edge.args["q"][:] = _edges(edge.args["q"], r)
        edge.args["kv"][:] = _edges(edge.args["kv"], r)
        edge.args["window_slots"][-2:] = -1
        yield edge
