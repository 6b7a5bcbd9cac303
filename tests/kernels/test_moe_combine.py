"""moe_combine: where the sum is rounded; and the whole sparse block against transformers."""

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4SparseMoeBlock

from dsv4dbg.kernels.moe.moe_combine import moe_combine
from dsv4dbg.kernels.moe.moe_experts import moe_experts
from dsv4dbg.kernels.moe.moe_router import moe_router
from dsv4dbg.kernels.moe.silu_mul import silu_mul
from dsv4dbg.kernels.numerics import HF, OFFICIAL, Numerics, differences
from dsv4dbg.kernels.samples import activations, normal


def test_one_rounding_after_the_sum() -> None:
    """1 + 2^-8 is halfway between bf16 values; what lies below bf16's last bit of routed decides."""
    routed = torch.tensor([[2**-8 + 2**-20, 2**-8, 3 * 2**-8]])
    shared = torch.ones(1, 3, dtype=torch.bfloat16)
    assert moe_combine(routed, shared, numerics=OFFICIAL).tolist() == [[1 + 2**-7, 1.0, 1 + 2**-6]]
    assert moe_combine(routed, shared, numerics=HF).tolist() == [[1.0, 1.0, 1 + 2**-6]]


def test_switch_changes_nothing_where_routed_is_bf16_or_shared_is_float32() -> None:
    rng = np.random.default_rng(0)
    routed, shared = normal(rng, 63, 256), activations(rng, 63, 256)
    for r, s in ((routed.bfloat16().float(), shared), (routed, shared.float())):
        assert torch.equal(moe_combine(r, s, numerics=OFFICIAL), moe_combine(r, s, numerics=HF))
    assert not torch.equal(moe_combine(routed, shared, numerics=OFFICIAL), moe_combine(routed, shared, numerics=HF))


def test_zero_on_either_side_is_neutral() -> None:
    rng = np.random.default_rng(1)
    routed, shared = normal(rng, 7, 256), activations(rng, 7, 256)
    assert torch.equal(moe_combine(torch.zeros_like(routed), shared, numerics=OFFICIAL), shared)
    assert torch.equal(moe_combine(routed, torch.zeros_like(shared), numerics=OFFICIAL), routed.bfloat16())


def sparse_block(dtype: torch.dtype) -> tuple[DeepseekV4SparseMoeBlock, torch.Tensor]:
    torch.manual_seed(3)
    config = DeepseekV4Config(
        hidden_size=64, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=3, num_hidden_layers=4,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    block = DeepseekV4SparseMoeBlock(config, 3)
    for parameter in block.parameters():
        parameter.data = torch.randn(parameter.shape).mul(0.2).to(dtype)
    block.gate.e_score_correction_bias = torch.randn(8) * 0.2
    return block, torch.randn(257, 64).to(dtype)


@torch.no_grad()
def by_ops(block: DeepseekV4SparseMoeBlock, x: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """The block in terms of moe_router, moe_experts, silu_mul and moe_combine."""
    limit, mlp = block.experts.limit, block.shared_experts
    logits = F.linear(x, block.gate.weight)
    weights, ids = moe_router(logits, block.gate.e_score_correction_bias, topk=3, scale=2.5, numerics=numerics)
    w1, w3 = block.experts.gate_up_proj.chunk(2, dim=1)
    w2 = block.experts.down_proj
    routed = moe_experts(x, ids, weights, w1, None, w3, None, w2, None, limit=limit, numerics=numerics)
    inner = silu_mul(mlp.gate_proj(x), mlp.up_proj(x), limit=limit, numerics=numerics)
    return moe_combine(routed, mlp.down_proj(inner), numerics=numerics)


def test_sparse_block_equals_transformers() -> None:
    block, x = sparse_block(torch.float32)
    with torch.no_grad():
        expected = block(x[None])[0]
    torch.testing.assert_close(by_ops(block, x, HF), expected, rtol=1e-6, atol=1e-6)


def test_sparse_block_has_the_bits_of_transformers_in_bf16() -> None:
    """Nearly everywhere: the order of sums inside a GEMM is the library's. Without the switches it does not."""
    block, x = sparse_block(torch.bfloat16)
    with torch.no_grad():
        expected = block(x[None])[0]
    assert (by_ops(block, x, HF) == expected).float().mean() > 0.98
    for switch, official in differences(HF, OFFICIAL).items():
        if switch in ("router", "experts", "routing_weight", "combine"):
            changed = by_ops(block, x, replace(HF, **{switch: official[1]}))
            assert (changed == expected).float().mean() < 0.9, switch
