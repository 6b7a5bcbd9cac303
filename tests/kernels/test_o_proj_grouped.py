"""o_proj_grouped: groups and scale blocks where they belong, one rounding of the weight, transformers' module."""

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear

from dsv4dbg.kernels.attention.o_proj_grouped import o_proj_grouped
from dsv4dbg.kernels.formats import E8M0_BIAS
from dsv4dbg.kernels.samples import activations, fp8_weight, normal

GROUPS, HEADS, CHANNELS, OUT = 4, 8, 128, 192  # 48 outputs a group: blocks of 128 rows span groups
INP = HEADS * CHANNELS // GROUPS


def ones(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(OUT, INP).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers(dtype: torch.dtype) -> None:
    """float32 within 1e-6 of the largest; bf16 equal but for rare flips by the order of sums."""
    rng = np.random.default_rng(0)
    module = DeepseekV4GroupedLinear(INP, OUT, GROUPS)
    module.weight.data = normal(rng, OUT, INP, scale=INP**-0.5).to(dtype)
    o = activations(rng, 63, HEADS, CHANNELS).to(dtype)
    with torch.no_grad():
        expected = module(o.reshape(63, GROUPS, INP)).flatten(1)
    z = o_proj_grouped(o, module.weight.data, groups=GROUPS)
    if dtype is torch.float32:
        torch.testing.assert_close(z, expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item())
    else:
        assert (z == expected).float().mean() > 0.99
        assert (z.float() - expected.float()).abs().max() <= 2**-7 * expected.float().abs().max()


def test_each_group_reads_its_own_heads_and_rows() -> None:
    """Consecutive heads; row g * out + r of the weight gives output g * out + r."""
    rng = np.random.default_rng(1)
    codes, scale = fp8_weight(rng, OUT, INP)
    o = activations(rng, 3, HEADS, CHANNELS)
    z = o_proj_grouped(o, codes, scale, groups=GROUPS)
    for head in range(HEADS):
        changed = o.clone()
        changed[:, head] += 1
        moved = (o_proj_grouped(changed, codes, scale, groups=GROUPS) != z).any(0).view(GROUPS, -1).any(1)
        assert moved.tolist() == [g == head // 2 for g in range(GROUPS)]


def test_scale_blocks_are_128_by_128_of_the_whole_weight() -> None:
    """All weights 1, inputs 1: output n is the sum over its scales' blocks, also where a block spans groups."""
    scale = torch.tensor([[0, 1], [2, 3]], dtype=torch.uint8) + E8M0_BIAS
    z = o_proj_grouped(torch.ones(1, HEADS, CHANNELS), *ones(scale), groups=GROUPS)
    assert z[0].tolist() == [128.0 * (1 + 2)] * 128 + [128.0 * (4 + 8)] * 64


def test_float32_scale_times_code_is_rounded_to_the_activations_dtype() -> None:
    """1 + 2^-9 becomes 1 in bf16 (as the published conversion does) and stays in float32: seen after taking 1 away."""
    scale = torch.tensor([[1 + 2**-9, 1.0], [1 + 2**-9, 1.0]])
    o = torch.zeros(1, HEADS, CHANNELS)
    o[0, ::2, 0], o[0, 1::2, 0] = 1, -1  # in every group one input under each column of scales
    assert (o_proj_grouped(o.bfloat16(), *ones(scale), groups=GROUPS) == 0).all()
    assert (o_proj_grouped(o, *ones(scale), groups=GROUPS) == 2**-9).all()


def test_activations_are_not_quantised() -> None:
    """Eight bits of mantissa pass; e4m3 would leave four."""
    o = torch.zeros(1, HEADS, CHANNELS, dtype=torch.bfloat16)
    o[0, 0, 0], o[0, 0, 1] = 1 + 2**-7, 448.0
    weight = torch.zeros(OUT, INP, dtype=torch.bfloat16)
    weight[5, 0] = 1
    assert o_proj_grouped(o, weight, groups=GROUPS)[0, 5].item() == 1 + 2**-7


def test_sum_is_rounded_once() -> None:
    """256 + 255 ones: bf16 partial sums would stop at 256."""
    o, weight = torch.ones(1, 4, 128, dtype=torch.bfloat16), torch.ones(1, 512, dtype=torch.bfloat16)
    weight[0, -1] = 0
    assert o_proj_grouped(o, weight, groups=1).item() == torch.tensor(511.0).bfloat16().item() == 512.0
    weight[0, -2:] = 0
    assert o_proj_grouped(o, weight, groups=1).item() == 510.0
