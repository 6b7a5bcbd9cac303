"""linear: dtype of the result, exact cases, torch's own layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from dsv4dbg.kernels.linear.linear import linear
from dsv4dbg.kernels.samples import activations, normal


def random(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return activations(rng, 9, 192).to(dtype), normal(rng, 70, 192, scale=0.1).to(dtype)


@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_dtype_of_the_result(x_dtype, weight_dtype):
    x, weight = random()
    x, weight = x.to(x_dtype), weight.to(weight_dtype)
    wide, act = linear(x, weight, out="f32"), linear(x, weight, out="act")
    assert (wide.dtype, act.dtype) == (torch.float32, x_dtype)
    assert torch.equal(act, wide.to(x_dtype))


def test_float32_result_is_not_rounded_on_the_way():
    x, weight = random()
    exact = x.double() @ weight.double().T
    wide, act = linear(x, weight, out="f32"), linear(x, weight, out="act")
    assert (wide - exact).abs().max() < 1e-6 * exact.abs().max()
    assert (act - exact).abs().max() > 1e-4 * exact.abs().max()


def test_integers_are_exact():
    rng = np.random.default_rng(1)
    x, weight = (torch.from_numpy(rng.integers(-64, 65, (5, 300))).to(torch.bfloat16) for _ in range(2))
    assert torch.equal(linear(x, weight, out="f32").long(), x.long() @ weight.long().T)


def test_basis_vectors_read_columns_of_the_weight():
    _, weight = random()
    assert torch.equal(linear(torch.eye(192), weight, out="f32"), weight.T.float())


def test_no_tokens():
    x, weight = random()
    assert linear(x[:0], weight, out="act").shape == (0, 70)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_a_torch_layer(dtype):
    """The hf profile's linears are nn.Linear in the dtype of the activations."""
    x, weight = random(2, dtype)
    layer = nn.Linear(192, 70, bias=False, dtype=dtype)
    layer.load_state_dict({"weight": weight})
    expected, y = layer(x).detach(), linear(x, weight, out="act")
    assert (y - expected).abs().max() <= (1e-6 if dtype == torch.float32 else 2.0**-8) * expected.abs().max()
