"""fp8_linear: which scale belongs to which block, the quantiser inside, exactness laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4dbg.kernels import oracle
from dsv4dbg.kernels.formats import e8m0_decode
from dsv4dbg.kernels.linear.act_quant import act_quant
from dsv4dbg.kernels.linear.fp8_linear import fp8_linear
from dsv4dbg.kernels.samples import activations, fp8_weight

ONE = 0x38  # 1.0 in e4m3fn


def ones(out: int, inp: int) -> torch.Tensor:
    return torch.full((out, inp), ONE, dtype=torch.uint8).view(torch.float8_e4m3fn)


def random(
    seed: int, tokens: int = 7, out: int = 200, inp: int = 384
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return activations(rng, tokens, inp), *fp8_weight(rng, out, inp)


def test_every_block_takes_its_own_scale_and_multiplies_by_it():
    scale = torch.tensor([[127, 129, 131], [133, 135, 137]], dtype=torch.uint8)  # 1, 4, 16; 64, 256, 1024
    x = torch.zeros(3, 384, dtype=torch.bfloat16)
    x[0, 127], x[1, 128], x[2, 383] = 1, 1, 1
    y = fp8_linear(x, ones(130, 384), scale)
    expected = [[1.0] * 128 + [64.0] * 2, [4.0] * 128 + [256.0] * 2, [16.0] * 128 + [1024.0] * 2]
    assert y.tolist() == expected
    assert torch.equal(y, fp8_linear(x, ones(130, 384), e8m0_decode(scale)))


def test_basis_vectors_read_columns_of_the_weight():
    _, weight, scale = random(0)
    dense = oracle.fp8_blocks(weight.view(torch.uint8).numpy(), scale.numpy())
    y = fp8_linear(torch.eye(384, dtype=torch.bfloat16), weight, scale)
    assert np.array_equal(y.double().numpy(), dense.T)  # four bits times a power of two fits bf16


def test_activations_are_rounded_to_fp8_with_ties_to_even():
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    x[0, 0], x[0, 1] = 448, 17
    assert fp8_linear(x, ones(1, 128), torch.tensor([[127]], dtype=torch.uint8)).item() == 448 + 16
    x[0, 1] = 19
    assert fp8_linear(x.float(), ones(1, 128), torch.tensor([[127]], dtype=torch.uint8)).item() == 448 + 20


def test_activation_groups_do_not_share_a_scale():
    x = torch.zeros(1, 256, dtype=torch.bfloat16)
    x[0, 0], x[0, 128:] = 2.0**20, 2.0**-20
    scale = torch.tensor([[127 - 20, 127 + 20]], dtype=torch.uint8)
    assert fp8_linear(x, ones(1, 256), scale).item() == 1 + 128


def test_activation_groups_are_128_wide():
    """One exponent too many is visible only where a small value underflows beside a large one."""
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    x[0, 0], x[0, 127] = 448, 2.0**-10
    unit = torch.tensor([[127]], dtype=torch.uint8)
    assert fp8_linear(x.float(), ones(1, 128), unit).item() == 448
    x[0, 0] = 1
    assert fp8_linear(x.float(), ones(1, 128), unit).item() == 1 + 2.0**-10


def test_float32_scales_are_not_rounded():
    """Nor is the weight: both of these factors are 1 in bf16."""
    x = torch.zeros(1, 256, dtype=torch.bfloat16)
    x[0, 0], x[0, 128] = -1, 1
    y = fp8_linear(x, ones(1, 256), torch.tensor([[1.001, 1.002]]))
    assert y.item() == pytest.approx(0.001, rel=2**-8)


def test_is_act_quant_times_the_weight():
    x, weight, scale = random(1)
    codes, exponents = act_quant(x, group=128, dialect="ocp")
    values = oracle.fp8(codes.numpy()) * np.repeat(oracle.e8m0(exponents.numpy()), 128, axis=1)
    dense = oracle.fp8_blocks(weight.view(torch.uint8).numpy(), scale.numpy())
    exact, unquantized = values @ dense.T, x.double().numpy() @ dense.T
    error = np.abs(fp8_linear(x.float(), weight, scale).numpy() - exact).max()
    assert error < 1e-5 * np.abs(exact).max()
    assert error < 1e-3 * np.abs(exact - unquantized).max()  # the quantiser is no detail


def test_per_block_accumulation_of_the_official_kernel_is_the_same_up_to_order():
    """acc += partial(128) * (activation scale * weight scale), in float32."""
    x, weight, scale = random(2)
    codes, exponents = act_quant(x, group=128, dialect="ocp")
    a, w = torch.from_numpy(oracle.fp8(codes.numpy())).float(), weight.float()
    row_scale, block_scale = e8m0_decode(exponents), e8m0_decode(scale).repeat_interleave(128, 0)[: len(weight)]
    acc = torch.zeros(len(x), len(weight))
    for b in range(3):
        part = a[:, b * 128 : b * 128 + 128] @ w[:, b * 128 : b * 128 + 128].T
        acc += part * (row_scale[:, b : b + 1] * block_scale[None, :, b])
    y = fp8_linear(x.float(), weight, scale)
    assert torch.allclose(y, acc, rtol=1e-5, atol=1e-5 * acc.abs().max().item())


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(-10, 30))
def test_a_power_of_two_in_the_input_comes_out_again(seed, exponent):
    x, weight, scale = random(seed, tokens=3)
    x[:, ::128] = 3.0  # well above the floor
    assert torch.equal(fp8_linear(x * 2.0**exponent, weight, scale), fp8_linear(x, weight, scale) * 2.0**exponent)


def test_a_power_of_two_in_the_scale_comes_out_again():
    x, weight, scale = random(3)
    assert torch.equal(fp8_linear(x, weight, scale + 5), fp8_linear(x, weight, scale) * 32)


def test_result_has_the_dtype_of_x_with_one_rounding():
    x, weight, scale = random(4)
    wide, narrow = fp8_linear(x.float(), weight, scale), fp8_linear(x, weight, scale)
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(narrow, wide.to(torch.bfloat16))


def test_odd_cases():
    x, weight, scale = random(5)
    assert fp8_linear(x[:0], weight, scale).shape == (0, 200)
    assert fp8_linear(torch.zeros_like(x), weight, scale).abs().max() == 0
    bad = x.clone()
    bad[3, 200] = float("inf")
    assert fp8_linear(bad, weight, scale).isnan().all(1).tolist() == [i == 3 for i in range(7)]
    with pytest.raises(RuntimeError):
        fp8_linear(x[:, :200], weight[:, :200], scale[:, :2])


def test_zero_row_invariant_notices():
    x = np.ones((3, 4))
    x[1] = 0
    y = np.zeros((3, 2))
    (law,) = (i for i in fp8_linear.invariants if "zero rows" in i.name)
    assert law.check({"x": x, "y": y}) is None
    y[1, 1] = 1e-9
    assert "row 1" in law.check({"x": x, "y": y})
