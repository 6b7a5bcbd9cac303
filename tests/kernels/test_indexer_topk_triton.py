"""indexer_topk in Triton: rows that are read in parts, thresholds in the lowest bits, rows of one value."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from dsv4dbg.kernels.attention.indexer_topk import indexer_topk
from dsv4dbg.kernels.attention.indexer_topk_triton import BLOCK, indexer_topk_triton


def rows(width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(7, width, generator=generator)
    x[1] = x[1].to(torch.bfloat16).float()
    x[2] = 1.0
    x[3] = -(1 + torch.arange(width) % 5 * 2.0**-23)  # ties that only the lowest bits tell apart
    x[4, ::3] = torch.nan
    x[5] = torch.where(x[5] > 0, 0.0, -0.0)
    x[6] = -torch.inf
    x[6, -3:] = -3e38
    return x


@pytest.mark.parametrize(("width", "k"), [(300, 64), (BLOCK + 5, 512), (2 * BLOCK, 1000)])
def test_bits_of_the_reference(width, k):
    logits = rows(width)
    for length in (width, width - 1, width // 2 + 1, k + 1):
        lens = torch.full((7,), length, dtype=torch.int32)
        assert torch.equal(indexer_topk_triton(logits, lens, k=k), indexer_topk(logits, lens, k=k))


def test_views_and_lengths_beyond_the_row():
    logits = rows(300).T.contiguous().T
    lens = torch.tensor([[0, 1, 63, 64, 65, 299, 400], [0] * 7], dtype=torch.int32).T[:, 0]
    expected = indexer_topk(logits, lens, k=64)
    assert torch.equal(indexer_topk_triton(logits, lens, k=64), expected)
