"""rms_norm: golden values, its one rounding, laws, transformers' module."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4dbg.kernels.norm.rms_norm import rms_norm
from dsv4dbg.kernels.samples import activations, norm_weight


def random(seed: int = 0, tokens: int = 9, channels: int = 192) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return activations(rng, tokens, channels), norm_weight(rng, channels)


def test_golden_values():
    x = torch.tensor([[3.0, -4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    y = rms_norm(x, torch.tensor([1.0, 2.0, 3.0, 4.0]), eps=0.0625)  # mean square 6.25
    assert y[0].tolist() == pytest.approx([3 / 6.3125**0.5, -8 / 6.3125**0.5, 0, 0], rel=1e-6)
    assert y[1].tolist() == [0, 0, 0, 0]


def test_one_rounding_after_the_weight():
    """Rounding the normalised value before the weight (as some engines do) gives other bits."""
    x, weight = random(tokens=200)
    y = rms_norm(x, weight, eps=1e-6)
    normed = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    once = (normed * weight).to(torch.bfloat16)
    twice = (normed.to(torch.bfloat16).double() * weight).to(torch.bfloat16)
    assert (y != once).float().mean() < 1e-3
    assert (y != twice).float().mean() > 0.1


def test_the_weight_may_be_either_dtype():
    x, weight = random()
    assert torch.equal(rms_norm(x, weight, eps=1e-6), rms_norm(x, weight.float(), eps=1e-6))
    assert rms_norm(x, weight.float(), eps=1e-6).dtype == torch.bfloat16
    assert rms_norm(x.float(), weight, eps=1e-6).dtype == torch.float32


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(-40, 40))
def test_size_of_a_row_does_not_matter(seed, exponent):
    x, weight = random(seed)
    assert torch.equal(rms_norm(x * 2.0**exponent, weight, eps=0.0), rms_norm(x, weight, eps=0.0))


def test_linear_in_the_weight():
    x, weight = random()
    assert torch.equal(rms_norm(x, -2 * weight, eps=1e-6), -2 * rms_norm(x, weight, eps=1e-6))


def test_rows_have_unit_mean_square():
    x, _ = random(tokens=50)
    y = rms_norm(x.float(), torch.ones(192), eps=0.0)
    assert torch.allclose(y.square().mean(-1), torch.ones(50), atol=1e-5)


def test_a_bad_row_stays_alone_and_no_tokens():
    x, weight = random()
    x[4, 7] = float("nan")
    assert rms_norm(x, weight, eps=1e-6).isnan().all(1).tolist() == [i == 4 for i in range(9)]
    assert rms_norm(x[:0], weight, eps=1e-6).shape == (0, 192)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers(dtype):
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    x, weight = random(3, tokens=50)
    module = modeling.DeepseekV4RMSNorm(192, eps=1e-6)
    module.load_state_dict({"weight": weight.float()})
    assert torch.equal(rms_norm(x.to(dtype), weight, eps=1e-6), module(x.to(dtype)).detach())
