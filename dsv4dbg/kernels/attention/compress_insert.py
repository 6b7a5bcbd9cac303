"""compress_insert: state rows of the compressor, and the compressed entries of the windows that these rows complete."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from dsv4dbg.compare import Records
from dsv4dbg.kernels import paged, samples
from dsv4dbg.kernels.attention import entries_oracle
from dsv4dbg.kernels.attention.entries import rope_rows, store_index, store_kv, stored_finite
from dsv4dbg.kernels.attention.ragged import MIXED, Ragged, own_slots, paged_cache
from dsv4dbg.kernels.contract import Example, Pointer, attr, cache, op, table, tensor, weight
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.formats import rotate
from dsv4dbg.kernels.norm.rms_norm import rms_norm
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.oracle import OracleCache
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.pages import PageLayout, index_layout, kv_data_bytes, kv_layout, state_layout

ROWS_AT_ONCE = 1024  # state rows gathered at a time


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over dim 1 in a fixed order (halves added pairwise), so that no other row of a batch changes the result."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = torch.cat((x[:, :half] + x[:, half : 2 * half], x[:, 2 * half :]), dim=1)
    return x[:, 0]


def pool(kv: torch.Tensor, gate: torch.Tensor, act: torch.dtype, numerics: Numerics) -> torch.Tensor:
    """``sum_i softmax(gate)_i kv_i`` over dim 1 per channel: float32 ``[entry, row, c]`` to ``act`` ``[entry, c]``."""
    exponentials = torch.exp(gate - gate.amax(1, keepdim=True))
    probabilities = exponentials / tree_sum(exponentials)[:, None]
    if numerics.compressor_pool == "act":
        return tree_sum((kv.to(act) * probabilities.to(act)).float()).to(act)
    return tree_sum(kv * probabilities).to(act)


def window_rows(
    state_cache: Cache, state_table: torch.Tensor, sequence: torch.Tensor, last: torch.Tensor, ratio: int, overlap: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the entry of the window that ends at position ``last`` is pooled from.

    Returns:
        kv and gate, float32 ``[entry, row, c]``, oldest row first; rows before position 0 have kv 0 and gate -inf.
    """
    count = 2 * ratio if overlap else ratio
    positions = last[:, None] + torch.arange(1 - count, 1, device=last.device)
    exists, positions = (positions >= 0)[..., None], positions.clamp_min(0)
    entries = state_cache.layout.entries
    pages = state_table[sequence.long()[:, None], positions // entries].long()
    slots = pages * entries + positions % entries
    rows = paged.read(state_cache, slots.flatten(), torch.float32).unflatten(0, slots.shape)
    kv, gate = rows.chunk(2, dim=-1)
    if overlap:  # first halves belong to the next window's entry, second halves to their own window's
        c = kv.shape[-1] // 2
        kv = torch.cat((kv[:, :ratio, :c], kv[:, ratio:, c:]), dim=1)
        gate = torch.cat((gate[:, :ratio, :c], gate[:, ratio:, c:]), dim=1)
    return torch.where(exists, kv, 0.0), torch.where(exists, gate, -torch.inf)


@op(
    family="attention",
    args={
        "kv": tensor("token width", "f32 act"),
        "gate": tensor("token width", "f32 act"),
        "ape": weight("phase width", "f32", "added to the gate of a token at position p: row p % ratio"),
        "norm_weight": weight("channel", "bf16 f32"),
        "positions": tensor("token", "i64"),
        "sequence": tensor("token", "i32"),
        "cos_sin": table("position rope", "f32", "cosines, then sines"),
        "state_cache": cache(
            "layout kind state: [kv | gate + ape] of one token", Pointer("state_table", "page"), slots="state_slots"
        ),
        "state_slots": tensor("token", "i64"),
        "state_table": tensor("sequence block", "i32", "page of the state rows of positions block * entries ..."),
        "cache": cache("compressed entries: layout kind kv or index", slots="slots"),
        "slots": tensor("token", "i64", "slot of entry p // ratio for tokens that complete a window, else -1"),
        "ratio": attr("tokens per entry"),
        "eps": attr("added to the mean square"),
        "act": attr("dtype of activations: bf16 or f32"),
    },
    compare={"state_cache": Records(roundings=0), "cache": Records(roundings=4, terms="channel")},
    invariants=(stored_finite("state_cache", "state_slots"), stored_finite("cache", "slots")),
    switches=("rope_table", "kv_quant", "compressor_pool", "index_hadamard", "index_quant"),
)
def compress_insert(
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    positions: torch.Tensor,
    sequence: torch.Tensor,
    cos_sin: torch.Tensor,
    state_cache: Cache,
    state_slots: torch.Tensor,
    state_table: torch.Tensor,
    cache: Cache,
    slots: torch.Tensor,
    *,
    ratio: int,
    eps: float,
    act: str,
    numerics: Numerics,
) -> None:
    """``state[t] = [kv | gate + ape[p % m]]``; ``entry = encode(rope(norm(sum_i softmax_i(gate_i) kv_i)))``, m = ratio.

    First the rows of all tokens are stored, then each entry is pooled from the state cache, so a call sees rows of
    earlier calls and any split into calls gives the same bytes. The entry of the window that a token at p completes
    pools rows p-m+1 .. p. With overlap (width = 2 c) it pools the last c columns of these and the first c columns of
    rows p-2m+1 .. p-m; rows before position 0 count as kv 0, gate -inf.

    Args:
        kv, gate: ``[token, width]`` float32 or activations; width is c or 2 c.
        ape: float32 ``[m, width]``.
        norm_weight: ``[c]`` bf16 or float32.
        positions: int64 ``[token]``; sequence: int32 ``[token]``, row of state_table.
        cos_sin: float32 ``[position, r]``; an entry is rotated at ``p // m * m``, the first token of its window.
        state_cache: float32 records ``[kv | gate + ape]`` of 2 width values.
        state_slots: int64 ``[token]``, -1: not stored (padding).
        state_table: int32 ``[sequence, block]``: page of the rows of positions block * entries ...; pages that no
            window needs any more may be -1.
        cache: records of c channels, layout kind ``kv`` (fp8, bf16, f32) or ``index`` (fp4, fp8, bf16, f32).
        slots: int64 ``[token]``: where the entry goes if (p + 1) % m == 0, else -1.
        act: rounding of the pooled value, of the norm and of rope.

    Softmax (per channel), product and sum run in float32 in a fixed order; then one rounding, RMSNorm (one rounding),
    rope on the last r channels (one rounding). Kind ``index``: Hadamard rotation over all channels (one rounding) if
    index_hadamard. A bf16 or float32 cache gets values rounded to FP8 (kind kv, all but the last r channels, if
    kv_quant) or FP4 (kind index, if index_quant) first. compressor_pool "act" rounds probabilities and products to
    the dtype of activations. A NaN in a window row makes its channel's pooled value, and so the whole entry, NaN.
    """
    biased = gate.float() + ape[positions.long() % ratio]
    paged.write(state_cache, state_slots, torch.cat((kv.float(), biased), dim=-1))

    dtype = paged.DTYPES[act]
    overlap = kv.shape[-1] == 2 * norm_weight.shape[0]
    store = store_index if cache.layout.kind == "index" else store_kv
    emitting = (slots >= 0).nonzero().squeeze(-1)
    for tokens in emitting.split(max(1, ROWS_AT_ONCE // (2 * ratio))):
        last = positions.long()[tokens]
        rows = window_rows(state_cache, state_table, sequence[tokens], last, ratio, overlap)
        entry = rms_norm(pool(*rows, dtype, numerics), norm_weight, eps=eps)
        entry = rotate(entry, rope_rows(cos_sin, last // ratio * ratio, dtype, numerics))
        store(cache, slots[tokens], entry, numerics)


@compress_insert.oracle
def _(
    kv: np.ndarray,
    gate: np.ndarray,
    ape: np.ndarray,
    norm_weight: np.ndarray,
    positions: np.ndarray,
    sequence: np.ndarray,
    cos_sin: np.ndarray,
    state_cache: OracleCache,
    state_slots: np.ndarray,
    state_table: np.ndarray,
    cache: OracleCache,
    slots: np.ndarray,
    *,
    ratio: int,
    eps: float,
    act: str,
    numerics: Numerics,
) -> dict[str, np.ndarray]:
    fresh = {
        (s, p): np.concatenate((kv[t], gate[t] + ape[p % ratio]))
        for t, (s, p) in enumerate(zip(sequence.tolist(), positions.tolist(), strict=True))
    }

    def row(s: int, p: int) -> np.ndarray:
        if (s, p) in fresh:
            return fresh[s, p]
        block, offset = divmod(p, state_cache.layout.entries)
        return state_cache.rows(np.array([state_table[s, block] * state_cache.layout.entries + offset]))[0]

    width, c = kv.shape[1], len(norm_weight)
    entries = [np.zeros((0, c))]
    for t in np.flatnonzero(slots >= 0):
        s, p = int(sequence[t]), int(positions[t])
        terms = [(q, width - c) for q in range(p - ratio + 1, p + 1)]
        if width > c:
            terms += [(q, 0) for q in range(max(0, p - 2 * ratio + 1), p - ratio + 1)]
        values = np.stack([row(s, q)[start : start + c] for q, start in terms])
        gates = np.stack([row(s, q)[width + start : width + start + c] for q, start in terms])
        chance = np.exp(gates - gates.max(axis=0))
        pooled = (chance * values).sum(axis=0) / chance.sum(axis=0)
        normed = norm_weight * pooled / np.sqrt(np.mean(pooled**2) + eps)
        entries.append(entries_oracle.rope(normed[None], cos_sin[None, p - ratio + 1]))
    result = np.concatenate(entries)
    if cache.layout.kind == "index" and numerics.index_hadamard:
        result = entries_oracle.hadamard(result)
    state = [np.zeros((0, 2 * width))] + [
        fresh[s, p][None] for s, p, slot in zip(sequence, positions, state_slots, strict=True) if slot >= 0
    ]
    return {"state_cache": np.concatenate(state), **entries_oracle.stored("cache", result, cache.layout, numerics)}


def compressor_example(
    rng: np.random.Generator,
    name: str,
    spans: tuple[tuple[int, int], ...],
    layout: PageLayout,
    rope_dim: int,
    ratio: int,
    overlap: bool,
    act: str = "bf16",
    gap: int = 0,
) -> Example:
    """A call for new tokens at ``spans``, with the state rows of earlier tokens in place where a window needs them."""
    c = layout.channels
    width = 2 * c if overlap else c
    state = state_layout(width, max(1, 4096 // width), kv_data_bytes(c, rope_dim))
    batch, entries = Ragged(spans), state.entries
    state_cache, state_table = paged_cache(rng, "state", state, batch.ends, gap)
    for s, (start, _) in enumerate(spans):
        oldest = max(0, start - (2 if overlap else 1) * ratio + 1)
        state_table[s, : oldest // entries] = -1
        earlier = torch.arange(oldest, start)
        slots = samples.table_slots(state_table, torch.full_like(earlier, s), earlier, entries)
        if len(earlier):
            paged.write(state_cache, slots, samples.normal(rng, len(earlier), 2 * width, scale=2.0))
    target, target_table = paged_cache(rng, "entries", layout, [end // ratio for end in batch.ends], gap)
    return Example(
        f"{name}, {layout.format} {layout.dialect}".strip(),
        {
            "kv": samples.normal(rng, len(batch), width), "gate": samples.normal(rng, len(batch), width, scale=2.0),
            "ape": samples.normal(rng, ratio, width), "norm_weight": samples.norm_weight(rng, c),
            "positions": batch.positions, "sequence": batch.sequence,
            "cos_sin": samples.cos_sin(max(batch.ends) + 1, rope_dim, 160000.0),
            "state_cache": state_cache, "state_slots": own_slots(batch, state_table, entries),
            "state_table": state_table,
            "cache": target, "slots": own_slots(batch, target_table, layout.entries, ratio),
            "ratio": ratio, "eps": 1e-6, "act": act,
        },
    )  # fmt: skip


@compress_insert.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    d, r, align = dims.head_dim, dims.rope_dim, kv_data_bytes(dims.head_dim, dims.rope_dim)
    formats = (("fp8", "ocp"), ("fp8", "fnuz"), ("bf16", ""))
    compressors = {"csa": (dims.csa_ratio, True), "hca": (dims.hca_ratio, False), "index": (dims.csa_ratio, True)}

    def layout(name: str, fmt: str, dialect: str) -> PageLayout:
        entries = max(1, 256 // compressors[name][0])
        if name == "index":
            return index_layout(fmt, dialect, dims.index_dim, entries, align)
        return kv_layout(fmt, dialect, d, r, entries)

    for name, (ratio, overlap) in compressors.items():
        for i, tokens in enumerate(samples.TOKENS):
            fmt = formats[i % len(formats)]
            yield compressor_example(rng, f"{name} {tokens}", ((0, tokens),), layout(name, *fmt), r, ratio, overlap)
        for fmt in (*formats, ("f32", ""), *((("fp4", ""),) if name == "index" else ())):
            act = "f32" if fmt[0] == "f32" else "bf16"
            yield compressor_example(rng, f"{name} ragged", MIXED, layout(name, *fmt), r, ratio, overlap, act, gap=64)
        late = ((ratio - 1, 1), (2 * ratio - 2, 3), (4 * ratio - 1, 1), (3 * ratio, ratio))
        first = layout(name, *formats[0])
        yield compressor_example(rng, f"{name} emissions", late, first, r, ratio, overlap)
        args = compressor_example(rng, "", late, first, r, ratio, overlap).args
        halves = {key: args[key].to(torch.bfloat16) for key in ("kv", "gate")}
        yield Example(f"{name} bf16 inputs", {**args, **halves})
        odd = compressor_example(rng, f"{name} odd rows", ((0, 2 * ratio), (0, 2 * ratio)), first, r, ratio, overlap)
        odd.args["kv"][:ratio] = 0  # an entry of zeros
        odd.args["gate"][ratio : 2 * ratio] *= 50  # one row takes all
        odd.args["gate"][2 * ratio : 3 * ratio] = 7.5 - odd.args["ape"]  # all rows alike
        odd.args["kv"][3 * ratio :] *= 1e4
        odd.args["state_slots"][-1] = odd.args["slots"][-1] = -1  # padding
        yield odd
