"""indexer_logits: score of every visible compressed entry for every token."""

from __future__ import annotations

import torch

from dsv4dbg.compare import Dense
from dsv4dbg.kernels import formats, paged
from dsv4dbg.kernels.contract import attr, cache, op, tensor
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.paged import Cache

PRODUCTS_AT_ONCE = 1 << 24  # elements of token x head x entry held at a time


def decode_q(q: torch.Tensor, q_scale: torch.Tensor, layout_dialect: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries as float32 ``[token, head, channel]``, and the factor of their dot products (fp8 only)."""
    if q.dtype != torch.uint8:
        return q.float(), None
    if q_scale.dtype == torch.uint8:
        return formats.fp4_dequantize(q, q_scale), None
    return formats.fp8_decode(q, layout_dialect), q_scale


def read_keys(index_cache: Cache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys at ``slots`` as float32 ``[n, channel]``, and the factor of their dot products ``[n]`` (fp8 only)."""
    layout = index_cache.layout
    if layout.format != "fp8":
        return paged.read(index_cache, slots, torch.float32), None
    codes, scale = paged.read_records(index_cache, slots)
    return formats.fp8_decode(codes, layout.dialect), scale.contiguous().view(torch.float32).squeeze(-1)


def score(
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    keys: torch.Tensor,
    key_scale: torch.Tensor | None,
    weights: torch.Tensor,
    numerics: Numerics,
) -> torch.Tensor:
    """``sum_h relu(q_h . k) w_h`` as float32 ``[token, entry]``."""
    dot = q @ keys.T
    if q_scale is not None:
        dot = dot * q_scale
    if key_scale is not None:
        dot = dot * key_scale
    if numerics.index_score == "f32":
        return (torch.relu(dot) * q.shape[-1] ** -0.5 * weights.float()[..., None]).sum(1)
    products = torch.relu(dot.to(weights.dtype)) * weights[..., None]
    return products.float().sum(1).to(weights.dtype).float()


@op(
    family="attention",
    args={
        "q": tensor("token head channel", "u8 act", "as indexer_q yields it, in the format of the cache"),
        "q_scale": tensor("token head group", "u8 f32"),
        "weights": tensor("token head", "act f32"),
        "index_cache": cache("layout kind index"),
        "index_table": tensor("sequence block", "i32"),
        "sequence": tensor("token", "i32"),
        "lens": tensor("token", "i32", "entries that the token may see"),
        "width": attr("columns of the result"),
    },
    outputs={"logits": tensor("token entry", "f32")},
    compare={"logits": Dense(terms="head channel", roundings=3)},
    switches=("index_score",),
)
def indexer_logits(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    weights: torch.Tensor,
    index_cache: Cache,
    index_table: torch.Tensor,
    sequence: torch.Tensor,
    lens: torch.Tensor,
    *,
    width: int,
    numerics: Numerics,
) -> torch.Tensor:
    """``logits[t, w] = sum_h relu(q[t, h] . k[w]) * weights[t, h]`` for ``w < lens[t]``, else -inf."""
    values, factor = decode_q(q, q_scale, index_cache.layout.dialect)
    logits = torch.full((q.shape[0], width), -torch.inf, device=q.device)
    columns = torch.arange(width, device=q.device)
    entries = index_cache.layout.entries
    for row in sequence.unique().tolist():
        tokens = (sequence == row).nonzero().squeeze(-1)
        count = min(int(lens[tokens].max()), width)
        if row < 0 or count <= 0:
            continue
        seen = columns[:count]
        slots = index_table[row, seen // entries].long() * entries + seen % entries
        keys, key_factor = read_keys(index_cache, slots)
        for part in tokens.split(max(1, PRODUCTS_AT_ONCE // (count * q.shape[1]))):
            scores = score(
                values[part], None if factor is None else factor[part], keys, key_factor, weights[part], numerics
            )
            logits[part, :count] = torch.where(seen < lens[part, None], scores, -torch.inf)
    return logits
