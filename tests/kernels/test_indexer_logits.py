"""indexer_logits: the official roundings, what it may read, formats against each other, transformers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4IndexerScorer

from dsv4dbg.kernels import formats, paged, samples
from dsv4dbg.kernels.attention.indexer_logits import indexer_logits
from dsv4dbg.kernels.numerics import OFFICIAL, Numerics
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.pages import index_layout

HEADS, DIM, ENTRIES = 8, 128, 4
F32 = replace(OFFICIAL, index_score="f32")
FORMATS = [("fp4", ""), ("fp8", "ocp"), ("fp8", "fnuz"), ("bf16", ""), ("f32", "")]
formats_ = pytest.mark.parametrize(("fmt", "dialect"), FORMATS)


class Indexer:
    """Keys of some sequences in a cache that is ``fill`` everywhere else."""

    def __init__(self, keys: list[torch.Tensor], fmt: str, dialect: str = "", seed: int = 0, fill: int = 0xFF) -> None:
        layout = index_layout(fmt, dialect, DIM, ENTRIES, 576)
        lengths = [len(k) for k in keys]
        self.table, pages = samples.block_table(np.random.default_rng(seed), lengths, ENTRIES)
        self.cache = Cache("index", torch.full((pages, layout.page_bytes), fill, dtype=torch.uint8), layout)
        for s, rows in enumerate(keys):
            index = torch.arange(len(rows))
            paged.write(self.cache, samples.table_slots(self.table, torch.full_like(index, s), index, ENTRIES), rows)

    def encode(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layout = self.cache.layout
        if layout.format == "fp4":
            return formats.fp4_quantize(q)
        if layout.format == "fp8":
            return paged.index_fp8(q, layout.dialect)
        return q, torch.empty(*q.shape[:2], 0)

    def logits(
        self, q: torch.Tensor, weights: torch.Tensor, sequence, lens, width: int = 24, numerics: Numerics = OFFICIAL
    ) -> torch.Tensor:
        sequence, lens = torch.as_tensor(sequence, dtype=torch.int32), torch.as_tensor(lens, dtype=torch.int32)
        args = (*self.encode(q), weights, self.cache, self.table, sequence, lens)
        return indexer_logits(*args, width=width, numerics=numerics)


def whole(rng: np.random.Generator, *shape: int, limit: int = 3) -> torch.Tensor:
    """Small whole numbers: every product and sum is exact in float32, whatever the order."""
    return torch.from_numpy(rng.integers(-limit, limit + 1, shape).astype(np.float32))


SEQUENCE, LENS = [0, 0, 0, 1, 2, 2, 0, 3], [1, 20, 17, 9, 2, 3, 0, 0]


def batch(dtype: torch.dtype = torch.bfloat16, seed: int = 0):
    """Keys of four sequences, queries and weights of the eight tokens of SEQUENCE."""
    rng = np.random.default_rng(seed)
    keys = [whole(rng, n, DIM) for n in (20, 9, 3, 0)]
    return keys, whole(rng, 8, HEADS, DIM).to(dtype), samples.activations(rng, 8, HEADS).to(dtype)


# the official roundings


def official(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The official expression, evaluated by torch in bf16."""
    dot = torch.einsum("thd,wd->thw", q, keys.to(torch.bfloat16))
    return (dot.relu() * weights[..., None]).sum(1)


def test_official_scores_are_the_bf16_expression_bit_for_bit():
    keys, q, weights = batch()
    result = Indexer(keys, "bf16").logits(q, weights, SEQUENCE, LENS)
    for t, (s, length) in enumerate(zip(SEQUENCE, LENS, strict=True)):
        assert torch.equal(result[t, :length], official(q[t : t + 1], keys[s], weights[t : t + 1])[0, :length].float())
        assert torch.equal(result[t, length:], torch.full((24 - length,), -torch.inf))
    assert torch.equal(result, result.to(torch.bfloat16).float())


def test_dot_product_weighting_and_head_sum_round_one_by_one():
    keys = torch.zeros(1, DIM)
    keys[0, 0] = 257.0 / 256  # rounds to 1 in the cache
    keys[0, 1] = 1 / 256
    q, weights = torch.zeros(3, HEADS, DIM, dtype=torch.bfloat16), torch.zeros(3, HEADS, dtype=torch.bfloat16)
    q[0, 0, 0], q[0, 0, 1] = 1.0, 1.0  # 1 + 1/256 rounds to 1
    weights[0, 0] = 1.0
    q[1, 0, 0] = weights[1, 0] = 1 + 2**-7  # the square rounds from 1.0157 to 1.0156
    q[2, :2, 0], weights[2, 0], weights[2, 1] = 1.0, 1.0, 2**-8  # the sum rounds to 1
    assert Indexer([keys], "bf16").logits(q, weights, [0, 0, 0], [1, 1, 1], 1).flatten().tolist() == [1, 1.015625, 1]
    exact = Indexer([keys], "bf16").logits(q, weights, [0, 0, 0], [1, 1, 1], 1, F32).flatten() * DIM**0.5
    assert torch.allclose(exact, torch.tensor([1 + 2**-8, (1 + 2**-7) ** 2, 1 + 2**-8]), rtol=1e-6)


def test_negative_dot_products_count_nothing_and_negative_weights_count():
    keys = torch.eye(DIM)[:2]
    q, weights = torch.zeros(1, HEADS, DIM, dtype=torch.bfloat16), torch.ones(1, HEADS, dtype=torch.bfloat16)
    q[0, 0, 0], q[0, 1, 0], q[0, 2, 1] = -5.0, 2.0, 3.0
    weights[0, 2] = -1.0
    assert Indexer([keys], "bf16").logits(q, weights, [0], [2], 2).tolist() == [[2.0, -3.0]]


# what it may read


@formats_
@pytest.mark.parametrize("numerics", [OFFICIAL, F32], ids=["official", "f32"])
def test_unused_pages_and_later_entries_never_reach_a_score(fmt, dialect, numerics):
    """0xFF in every byte that holds no visible entry gives the same bits as other bytes there."""
    keys, q, weights = batch(torch.float32 if fmt == "f32" else torch.bfloat16)
    longest = [max(n for s, n in zip(SEQUENCE, LENS, strict=True) if s == row) for row in range(4)]
    visible = [k[:n] for k, n in zip(keys, longest, strict=True)]
    results = [
        Indexer(visible, fmt, dialect, fill=fill).logits(q, weights, SEQUENCE, LENS, numerics=numerics)
        for fill in (0x00, 0x7F, 0xFF)
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert (results[0].isfinite().sum(1) == torch.tensor(LENS)).all()


def test_a_later_entry_of_the_same_step_is_hidden_from_earlier_tokens():
    """NaN keys that only the last token may see stay in its row."""
    keys, q, weights = batch()
    indexer = Indexer(keys, "bf16")
    slot = samples.table_slots(indexer.table, torch.tensor([0]), torch.tensor([19]), ENTRIES)
    paged.write(indexer.cache, slot, torch.full((1, DIM), torch.nan))
    result = indexer.logits(q, weights, SEQUENCE, LENS)
    assert result.isnan().nonzero().tolist() == [[1, 19]]


@formats_
def test_each_row_alone_equals_the_row_in_the_batch(fmt, dialect):
    keys, q, weights = batch(torch.float32 if fmt == "f32" else torch.bfloat16)
    indexer = Indexer(keys, fmt, dialect)
    result = indexer.logits(q, weights, SEQUENCE, LENS)
    for t in range(8):
        alone = indexer.logits(q[t : t + 1], weights[t : t + 1], SEQUENCE[t : t + 1], LENS[t : t + 1])
        assert torch.equal(alone[0], result[t])


@formats_
def test_physical_pages_do_not_matter(fmt, dialect):
    keys, q, weights = batch(torch.float32 if fmt == "f32" else torch.bfloat16)
    results = [Indexer(keys, fmt, dialect, seed=s).logits(q, weights, SEQUENCE, LENS) for s in (0, 1)]
    assert torch.equal(*results)


def test_width_only_adds_columns():
    keys, q, weights = batch()
    indexer = Indexer(keys, "fp4")
    narrow, wide = (indexer.logits(q, weights, SEQUENCE, LENS, width) for width in (20, 31))
    assert torch.equal(narrow, wide[:, :20])
    assert (wide[:, 20:] == -torch.inf).all()
    nothing = torch.zeros(8, dtype=torch.int32)
    assert indexer.logits(q, weights, SEQUENCE, nothing, 0).shape == (8, 0)
    assert (indexer.logits(q, weights, SEQUENCE, nothing, 3) == -torch.inf).all()


def test_pieces_of_a_long_batch_do_not_matter(monkeypatch):
    keys, q, weights = batch()
    indexer = Indexer(keys, "fp8", "ocp")
    before = indexer.logits(q, weights, SEQUENCE, LENS)
    monkeypatch.setattr("dsv4dbg.kernels.attention.indexer_logits.PRODUCTS_AT_ONCE", 1)
    assert torch.equal(before, indexer.logits(q, weights, SEQUENCE, LENS))


# formats


def test_whole_numbers_score_alike_in_every_format_that_holds_them():
    """With one channel at the format's maximum, FP4 and both FP8 dialects hold -3 .. 3 exactly, as bf16 does."""
    keys, q, weights = batch()
    for x in (*keys, q):
        x[..., ::32] = 6.0
    plain = Indexer(keys, "bf16").logits(q, weights, SEQUENCE, LENS)
    assert torch.equal(plain, Indexer(keys, "fp4").logits(q, weights, SEQUENCE, LENS))
    for x in (*keys, q):
        x[..., 0] = 448.0
    plain = Indexer(keys, "bf16").logits(q, weights, SEQUENCE, LENS)
    for dialect in ("ocp", "fnuz"):
        assert torch.equal(plain, Indexer(keys, "fp8", dialect).logits(q, weights, SEQUENCE, LENS))


def test_dialects_score_alike():
    rng = np.random.default_rng(5)
    keys, q = [samples.normal(rng, 20, DIM)], samples.normal(rng, 6, HEADS, DIM)
    weights = samples.activations(rng, 6, HEADS)
    results = [Indexer(keys, "fp8", d).logits(q, weights, [0] * 6, [20] * 6, numerics=F32) for d in ("ocp", "fnuz")]
    assert torch.equal(*results)


# switch and transformers


def test_index_score_switch_changes_scores_by_roundings_and_the_factor():
    keys, q, weights = batch()
    indexer = Indexer(keys, "bf16")
    a = indexer.logits(q, weights, SEQUENCE, LENS)
    b = indexer.logits(q, weights, SEQUENCE, LENS, numerics=F32) * DIM**0.5
    seen = a.isfinite()
    assert torch.equal(seen, b.isfinite())
    assert (a[seen] != b[seen]).float().mean() > 0.8
    assert torch.allclose(a[seen], b[seen], atol=0.02 * float(b[seen].abs().max()))


def test_f32_scores_are_transformers():
    config = DeepseekV4Config(hidden_size=HEADS, index_n_heads=HEADS, index_head_dim=DIM)
    scorer, rng = DeepseekV4IndexerScorer(config), np.random.default_rng(8)
    scorer.weights_proj.weight.data = torch.eye(HEADS)
    q, keys, raw = samples.normal(rng, 6, HEADS, DIM), samples.normal(rng, 20, DIM), samples.normal(rng, 6, HEADS)
    with torch.no_grad():
        theirs = scorer(q[None], keys[None], raw[None])[0]
    ours = Indexer([keys], "f32").logits(q, raw * HEADS**-0.5, [0] * 6, [20] * 6, 20, F32)
    assert torch.allclose(ours, theirs, atol=1e-6, rtol=1e-6)


def test_invariant_notices_scores_beyond_the_length_and_missing_ones():
    (invariant,) = indexer_logits.invariants
    good = np.array([[1.0, -np.inf], [2.0, -1.0]])
    assert invariant.check({"logits": good, "lens": np.array([1, 2])}) is None
    assert "beyond the 0" in invariant.check({"logits": good, "lens": np.array([0, 2])})
    assert "sees" in invariant.check({"logits": good, "lens": np.array([2, 2])})
