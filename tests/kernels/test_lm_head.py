"""lm_head: its switch, large vocabularies, ties, torch's own layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from dsv4dbg.kernels.ends.lm_head import ROWS, lm_head
from dsv4dbg.kernels.numerics import HF, OFFICIAL
from dsv4dbg.kernels.samples import activations, normal

ACT = replace(OFFICIAL, logits="act")


def random(
    vocab: int = 300, channels: int = 128, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    return activations(rng, 6, channels).to(dtype), normal(rng, vocab, channels, scale=0.1).to(dtype)


def test_switch_rounds_the_logits_and_nothing_else():
    y, weight = random()
    exact = y.double() @ weight.double().T
    wide, act = (lm_head(y, weight, numerics=n) for n in (OFFICIAL, ACT))
    assert (wide.dtype, act.dtype) == (torch.float32, torch.float32)
    assert (wide - exact).abs().max() < 1e-6 * exact.abs().max()
    assert torch.equal(act, wide.to(torch.bfloat16).float())
    assert not torch.equal(act, wide)
    assert torch.equal(lm_head(y.float(), weight, numerics=ACT), wide)  # act is float32 there


def test_a_vocabulary_of_several_chunks_has_no_seam():
    vocab = 2 * ROWS + 5
    weight = (torch.arange(vocab)[:, None] % 251 + torch.arange(2)).to(torch.bfloat16)  # integers: exact
    y = torch.tensor([[1.0, 0.0], [2.0, -1.0]], dtype=torch.bfloat16)
    expected = torch.stack((weight[:, 0].float(), 2 * weight[:, 0].float() - weight[:, 1].float()))
    assert torch.equal(lm_head(y, weight, numerics=OFFICIAL), expected)


def test_rounding_ties_logits_that_differ():
    """Why the switch matters: bf16 logits lose the argmax."""
    weight = torch.tensor([[256.0, 0.0], [256.0, 1.0], [256.0, 2.0]], dtype=torch.bfloat16)
    y = torch.tensor([[1.0, 0.5]], dtype=torch.bfloat16)
    assert lm_head(y, weight, numerics=OFFICIAL).tolist() == [[256, 256.5, 257]]
    assert lm_head(y, weight, numerics=ACT).tolist() == [[256, 256, 256]]


def test_no_tokens():
    y, weight = random()
    assert lm_head(y[:0], weight, numerics=OFFICIAL).shape == (0, 300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_layer_of_transformers(dtype):
    """transformers' lm_head is an nn.Linear in the dtype of the activations."""
    y, weight = random(dtype=dtype)
    layer = nn.Linear(128, 300, bias=False, dtype=dtype)
    layer.load_state_dict({"weight": weight})
    expected, logits = layer(y).detach().float(), lm_head(y, weight, numerics=HF)
    assert (logits - expected).abs().max() <= (1e-6 if dtype == torch.float32 else 2.0**-8) * expected.abs().max()
    if dtype == torch.bfloat16:
        assert (logits != expected).float().mean() < 0.01
