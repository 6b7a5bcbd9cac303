"""indexer_logits in Triton: sequences in any order within a block of tokens, several blocks of keys, places of NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from dsv4dbg.kernels import paged, samples
from dsv4dbg.kernels.attention.indexer_logits import indexer_logits
from dsv4dbg.kernels.attention.indexer_logits_triton import indexer_logits_triton
from dsv4dbg.kernels.attention.ragged import paged_cache
from dsv4dbg.kernels.numerics import OFFICIAL
from dsv4dbg.pages import index_layout

HEADS, CHANNELS = 4, 32


def call(sequence: list[int], lens: list[int], lengths: list[int]) -> dict:
    """Arguments on a bf16 cache whose sequences hold ``lengths`` keys; small integers, so that every sum is exact."""
    rng = np.random.default_rng(3)
    layout = index_layout("bf16", "", CHANNELS, 16, 192)
    cache, table = paged_cache(rng, "index", layout, lengths)
    for s, length in enumerate(lengths):
        slots = samples.table_slots(table, torch.full((length,), s), torch.arange(length), 16)
        paged.write(cache, slots, torch.from_numpy(rng.integers(-1, 2, (length, CHANNELS))).float())
    tokens = len(sequence)
    return {
        "q": torch.from_numpy(rng.integers(-1, 2, (tokens, HEADS, CHANNELS))).bfloat16(),
        "q_scale": torch.empty(tokens, HEADS, 0),
        "weights": torch.from_numpy(rng.integers(-2, 3, (tokens, HEADS))).bfloat16(),
        "index_cache": cache,
        "index_table": table,
        "sequence": torch.tensor(sequence, dtype=torch.int32),
        "lens": torch.tensor(lens, dtype=torch.int32),
        "width": 600,
        "numerics": OFFICIAL,
    }


def test_sequences_in_any_order():
    args = call([2, 0, 0, 2, -1, 1, 0, 2, 2], [5, 1, 590, 0, 7, 3, 300, 40, 41], [590, 3, 41])
    assert torch.equal(indexer_logits_triton(**args), indexer_logits(**args))


def test_nan_stays_in_its_column_and_its_token():
    args = call([0, 0, 0], [40, 20, 40], [40])
    page, entry = int(args["index_table"][0, 30 // 16]), 30 % 16
    args["index_cache"].data[page, entry * 2 * CHANNELS : entry * 2 * CHANNELS + 2] = 0xFF
    args["q"][0, 0, 0] = torch.nan
    found = indexer_logits_triton(**args).isnan()
    assert found[0, :40].all()
    assert not found[0, 40:].any()
    assert not found[1].any()
    assert found[2].nonzero().flatten().tolist() == [30]
