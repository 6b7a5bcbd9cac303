"""indexer_logits: score of every visible compressed entry for every token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dsv4dbg.compare import Dense
from dsv4dbg.kernels import formats, oracle, paged, samples
from dsv4dbg.kernels.attention.ragged import MIXED, Ragged, paged_cache
from dsv4dbg.kernels.contract import Example, Invariant, Pointer, attr, cache, op, tensor
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.invariants import first
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.oracle import OracleCache
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.pages import FP4_GROUP, index_layout, kv_data_bytes

KEYS = 64  # entries that are scored at a time
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


def _padded(keys: torch.Tensor) -> torch.Tensor:
    """Filled up with zeros to KEYS rows, so that a score's bits do not depend on how many keys are scored with it."""
    return F.pad(keys, (0, 0) * (keys.dim() - 1) + (0, KEYS - len(keys)))


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


def _causal(call: Mapping[str, Any]) -> str | None:
    logits = call["logits"]
    visible = np.arange(logits.shape[1]) < call["lens"][:, None]
    if (bad := visible & ~np.isfinite(logits)).any():
        return f"logits is {logits[bad][0]} at {first(bad)}, an entry that the token sees"
    if (bad := ~visible & (logits != -np.inf)).any():
        return f"logits is {logits[bad][0]} at {first(bad)}, beyond the {call['lens'][first(bad)[0]]} visible entries"
    return None


@op(
    family="attention",
    args={
        "q": tensor("token head channel", "u8 act", "as indexer_q yields it, in the format of the cache"),
        "q_scale": tensor("token head group", "u8 f32"),
        "weights": tensor("token head", "act f32"),
        "index_cache": cache("layout kind index", Pointer("index_table", "page")),
        "index_table": tensor("sequence block", "i32"),
        "sequence": tensor("token", "i32"),
        "lens": tensor("token", "i32", "entries that the token may see"),
        "width": attr("columns of the result"),
    },
    outputs={"logits": tensor("token entry", "f32")},
    compare={"logits": Dense(terms="head channel", magnitude=("logits.terms",), roundings=3)},
    invariants=(Invariant("finite for visible entries, -inf beyond", _causal),),
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
    """``logits[t, w] = sum_h relu(q[t, h] . k[w]) * weights[t, h]`` for ``w < lens[t]``, -inf for the others.

    Args:
        q, q_scale: as `indexer_q` yields them, in the format of the cache.
        weights: ``[token, head]``.
        index_cache: keys; the record of entry w of sequence s is at
            ``index_table[s, w // entries] * entries + w % entries``.
        index_table: int32 ``[sequence, block]``, -1 where a sequence has no page.
        sequence: int32 ``[token]``.
        lens: int32 ``[token]``; no record at or beyond the largest of a sequence is read.
        width: columns of the result, at least the largest of lens.
    Returns:
        float32 ``[token, width]``. A NaN in a visible key or in q reaches that column or that token.

    Dot products accumulate in float32 on decoded codes (fp8: its float32 scales multiply the dot product).
    index_score "act": dot product, product with the weight and sum over heads (float32 inside) are rounded to
    weights' dtype each. "f32": ``sum_h relu(dot) * di^-0.5 * weights``, nothing rounded.
    """
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
        for part in tokens.split(max(1, PRODUCTS_AT_ONCE // (KEYS * q.shape[1]))):
            for start in range(0, count, KEYS):
                block = (
                    _padded(keys[start : start + KEYS]),
                    None if key_factor is None else _padded(key_factor[start : start + KEYS]),
                )
                scores = score(values[part], None if factor is None else factor[part], *block, weights[part], numerics)
                stop = min(start + KEYS, count)
                logits[part, start:stop] = torch.where(
                    seen[start:stop] < lens[part, None], scores[:, : stop - start], -torch.inf
                )
    return logits


@indexer_logits.oracle
def _(
    q: np.ndarray,
    q_scale: np.ndarray,
    weights: np.ndarray,
    index_cache: OracleCache,
    index_table: np.ndarray,
    sequence: np.ndarray,
    lens: np.ndarray,
    *,
    width: int,
    numerics: Numerics,
) -> dict[str, np.ndarray]:
    if q.dtype == np.uint8:
        fp4 = q_scale.dtype == np.uint8
        q = oracle.mx(q, q_scale) if fp4 else oracle.fp8(q, index_cache.layout.dialect) * q_scale
    if numerics.index_score == "f32":
        weights = weights / np.sqrt(q.shape[-1])
    logits, terms = np.full((len(q), width), -np.inf), np.zeros((len(q), width))
    entries = index_cache.layout.entries
    for t, (s, count) in enumerate(zip(sequence, lens, strict=True)):
        seen = np.arange(count)
        keys = index_cache.rows(index_table[s, seen // entries] * entries + seen % entries)
        scores = np.maximum(q[t] @ keys.T, 0.0)
        # a dot that cancels has the error of its terms: of the size |q| |k| / sqrt(channels), as a random dot
        dots = np.outer(np.linalg.norm(q[t], axis=1), np.linalg.norm(keys, axis=1)) / np.sqrt(q.shape[-1])
        logits[t, :count] = weights[t] @ scores
        terms[t, :count] = np.sqrt(weights[t] ** 2 @ (scores**2 + dots**2))
    return {"logits": logits, "logits.terms": terms}


@indexer_logits.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    heads, channels, ratio = dims.index_heads, dims.index_dim, dims.csa_ratio
    formats_ = (("fp4", ""), ("fp8", "ocp"), ("fp8", "fnuz"), ("bf16", ""))

    def example(
        name: str, spans: tuple[tuple[int, int], ...], fmt: str, dialect: str, spare: int = 0, gap: int = 0
    ) -> Example:
        batch = Ragged(spans)
        layout = index_layout(fmt, dialect, channels, 16, kv_data_bytes(dims.head_dim, dims.rope_dim))
        lengths = [end // ratio for end in batch.ends]
        keys, block_table = paged_cache(rng, "index", layout, lengths, gap)
        for s, length in enumerate(lengths):
            slots = samples.table_slots(block_table, torch.full((length,), s), torch.arange(length), 16)
            paged.write(keys, slots, samples.activations(rng, length, channels).float())
        q = samples.activations(rng, len(batch), heads, channels)
        q_scale = torch.empty(len(batch), heads, 0)
        weights = samples.activations(rng, len(batch), heads, scale=(heads * channels) ** -0.5)
        if fmt == "fp4":
            q, q_scale = formats.fp4_quantize(q, FP4_GROUP)
        elif fmt == "fp8":
            q, q_scale = paged.index_fp8(q, dialect)
        elif fmt == "f32":
            q, weights = q.float() * 1.001, weights.float() * 1.001
        lens = ((batch.positions + 1) // ratio).int()
        return Example(
            f"{name}, {fmt} {dialect}".strip(),
            {
                "q": q, "q_scale": q_scale, "weights": weights, "index_cache": keys, "index_table": block_table,
                "sequence": batch.sequence, "lens": lens, "width": int(lens.max()) + spare if len(lens) else spare,
            },
        )  # fmt: skip

    for i, tokens in enumerate(samples.TOKENS):
        yield example(f"{tokens} tokens", ((0, tokens),), *formats_[i % 4])
    for fmt, dialect in (*formats_, ("f32", "")):
        yield example("ragged", MIXED, fmt, dialect, spare=5, gap=32)
        edge = example("zeros and negative weights", ((60, 5), (0, 3)), fmt, dialect)
        edge.args["q"][0] = 0
        edge.args["weights"][1] = 0
        edge.args["weights"][2] = -edge.args["weights"][2].abs()
        yield edge
    yield example("long", ((1500, 2), (0, 4)), *formats_[0])
