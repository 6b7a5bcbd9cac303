"""indexer_topk: ties, short rows, garbage beyond the length, the whole indexer against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Indexer

from dsv4dbg.kernels import samples
from dsv4dbg.kernels.attention.compress_insert import compress_insert
from dsv4dbg.kernels.attention.indexer_logits import indexer_logits
from dsv4dbg.kernels.attention.indexer_q import indexer_q
from dsv4dbg.kernels.attention.indexer_topk import indexer_topk
from dsv4dbg.kernels.numerics import HF
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.pages import index_layout, state_layout

INF, NAN = float("inf"), float("nan")


def topk(rows: list[list[float]], lens: list[int], k: int) -> list[list[int]]:
    return indexer_topk(torch.tensor(rows, dtype=torch.float32), torch.tensor(lens, dtype=torch.int32), k=k).tolist()


def test_ties_go_to_the_lowest_index():
    assert topk([[1, 2, 2, 0, 2, 1]], [6], 4) == [[1, 2, 4, 0]]
    assert topk([[0.0, -0.0, 0.0, -0.0]], [4], 3) == [[0, 1, 2]]
    assert topk([[-INF, -INF, -INF]], [2], 3) == [[0, 1, -1]]
    assert topk([[7.0] * 5000], [5000], 600) == [list(range(600))]


def test_zero_is_not_a_neutral_score():
    assert topk([[-3, -1, -2, 0, 0]], [3], 5) == [[1, 2, 0, -1, -1]]


@pytest.mark.parametrize("beyond", [NAN, INF, -INF, 1e30])
def test_columns_beyond_the_length_do_not_matter(beyond):
    assert topk([[1, 3, beyond, beyond], [beyond] * 4, [4, 3, 2, 1]], [2, 0, 4], 3) == [
        [1, 0, -1], [-1, -1, -1], [0, 1, 2],
    ]  # fmt: skip


def test_k_against_available_entries():
    assert topk([[1, 2, 3]], [3], 3) == [[2, 1, 0]]
    assert topk([[1, 2, 3]], [3], 5) == [[2, 1, 0, -1, -1]]
    assert topk([[1, 2, 3]], [2], 1) == [[1]]
    assert topk([[1, 2, 3]], [3], 0) == [[]]
    empty = indexer_topk(torch.zeros(2, 0), torch.zeros(2, dtype=torch.int32), k=3)
    assert empty.tolist() == [[-1] * 3] * 2
    assert indexer_topk(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int32), k=3).shape == (0, 3)
    assert empty.dtype == torch.int32


def test_nan_counts_as_the_highest_and_minus_infinity_as_the_lowest():
    assert topk([[1, -INF, NAN, INF]], [4], 4) == [[2, 3, 0, 1]]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 80), st.integers(1, 40), st.integers(1, 6))
def test_against_torch_topk(seed, width, k, levels):
    """The scores chosen are torch's; among equal scores the indices rise."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.integers(-levels, levels, (5, width)).astype(np.float32))
    lens = torch.from_numpy(rng.integers(0, width + 1, 5).astype(np.int32))
    for row, length, chosen in zip(logits, lens.tolist(), indexer_topk(logits, lens, k=k), strict=True):
        count = min(k, length)
        index = chosen[:count].long()
        assert (chosen[count:] == -1).all()
        assert torch.equal(row[index], row[:length].topk(count).values)
        later = row[index[1:]] == row[index[:-1]] if count else torch.zeros(0, dtype=torch.bool)
        assert (index[1:] > index[:-1])[later].all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_laws(seed):
    """Rising transforms keep the choice; a smaller k is a prefix; moving columns moves the indices."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.permutation(300).reshape(5, 60).astype(np.float32))
    lens = torch.full((5,), 60, dtype=torch.int32)
    chosen = indexer_topk(logits, lens, k=20)
    assert torch.equal(chosen, indexer_topk(logits * 2 - 700, lens, k=20))
    assert torch.equal(chosen[:, :7], indexer_topk(logits, lens, k=7))
    order = torch.from_numpy(rng.permutation(60))
    assert torch.equal(chosen, order[indexer_topk(logits[:, order], lens, k=20).long()].int())


def test_the_whole_indexer_is_transformers():
    """Keys, queries, scores and choice of 60 tokens under the hf profile in float32."""
    heads, dim, k, tokens = 4, 128, 5, 60
    config = DeepseekV4Config(
        hidden_size=64, head_dim=128, partial_rotary_factor=0.5, q_lora_rank=32, index_n_heads=heads,
        index_head_dim=dim, index_topk=k, num_hidden_layers=1, layer_types=["compressed_sparse_attention"],
        mlp_layer_types=["moe"],
    )  # fmt: skip
    module, rng = DeepseekV4Indexer(config), np.random.default_rng(0)
    for parameter in module.parameters():
        parameter.data = samples.normal(rng, *parameter.shape, scale=0.3)
    hidden, residual = samples.normal(rng, 1, tokens, 64), samples.normal(rng, 1, tokens, 32)
    positions = torch.arange(tokens)
    with torch.no_grad():
        theirs = module(hidden, residual, positions[None], None, 0)[0]
        x = hidden[0]
        kv, gate, raw = module.kv_proj(x), module.gate_proj(x), module.scorer.weights_proj(x)
        q = module.q_b_proj(residual[0]).view(tokens, heads, dim)
        table = torch.cat(module.rotary_emb(x, positions[None], "compress"), -1)[0]
    state, index = state_layout(2 * dim, 4, 576), index_layout("f32", "", dim, 8, 576)
    state_cache = Cache("state", torch.full((20, state.page_bytes), 0xFF, dtype=torch.uint8), state)
    keys = Cache("index", torch.full((4, index.page_bytes), 0xFF, dtype=torch.uint8), index)
    state_table, index_table = torch.arange(20).flip(0).int()[None], torch.tensor([[2, 0]], dtype=torch.int32)
    sequence, lens = torch.zeros(tokens, dtype=torch.int32), ((positions + 1) // 4).int()
    slots = torch.where((positions + 1) % 4 == 0, samples.table_slots(index_table, sequence, positions // 4, 8), -1)
    compress_insert(
        kv, gate, module.position_bias.data, module.kv_norm.weight.data, positions, sequence, table, state_cache,
        samples.table_slots(state_table, sequence, positions, 4), state_table, keys, slots,
        ratio=4, eps=config.rms_norm_eps, act="f32", numerics=HF,
    )  # fmt: skip
    q, q_scale, weights = indexer_q(q, raw, positions, table, format="plain", numerics=HF)
    logits = indexer_logits(q, q_scale, weights, keys, index_table, sequence, lens, width=15, numerics=HF)
    ours = indexer_topk(logits, lens, k=k)
    found = [torch.where(i >= 0, logits.gather(1, i.clamp_min(0)), -torch.inf) for i in (ours.long(), theirs)]
    assert torch.equal(*found)
    untied = (logits[:, None] == found[0][..., None]).sum(-1) == 1  # transformers breaks ties between zeros as it likes
    assert torch.equal(ours[untied].long(), theirs[untied])
    assert untied.float().mean() > 0.7
    assert (ours >= 0).sum() == lens.clamp_max(k).sum()


@pytest.mark.parametrize(
    ("indices", "complaint"),
    [
        ([[2, 0, 1, -1]], None),
        ([[2, 0, 3, -1]], "outside"),
        ([[2, 0, -2, -1]], "outside"),
        ([[2, -1, 0, 1]], "-1 among them"),
        ([[2, 0, -1, -1]], "3 expected"),
        ([[2, 2, 1, -1]], "twice"),
        ([[0, 2, 1, -1]], "rises"),
    ],
)
def test_invariants_notice(indices, complaint):
    call = {"logits": np.array([[5.0, 1, 9, 99]]), "lens": np.array([3]), "k": 4, "indices": np.array(indices)}
    found = [message for message in (i.check(call) for i in indexer_topk.invariants) if message]
    assert not found if complaint is None else any(complaint in message for message in found)
