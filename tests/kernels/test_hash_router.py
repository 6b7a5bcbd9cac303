"""hash_router: against transformers and against moe_router, whose weights it shares."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter

from dsv4dbg.kernels.moe.hash_router import hash_router
from dsv4dbg.kernels.moe.moe_router import moe_router
from dsv4dbg.kernels.numerics import HF, OFFICIAL
from dsv4dbg.kernels.samples import normal

EXPERTS, TOPK, VOCAB = 32, 6, 97


def table(seed: int) -> torch.Tensor:
    order = np.random.default_rng(seed).random((VOCAB, EXPERTS)).argsort(axis=-1)
    return torch.from_numpy(order[:, :TOPK].copy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers(dtype: torch.dtype) -> None:
    """float32 within 1e-6; bf16 bit for bit."""
    torch.manual_seed(0)
    config = DeepseekV4Config(
        hidden_size=64, n_routed_experts=EXPERTS, num_experts_per_tok=TOPK, routed_scaling_factor=2.5, vocab_size=VOCAB
    )
    module = DeepseekV4HashRouter(config)
    module.weight.data = (torch.randn(EXPERTS, 64) * 0.2).to(dtype)
    module.tid2eid = table(1)
    x, token_ids = torch.randn(129, 64).to(dtype), torch.randint(0, VOCAB, (129,))
    with torch.no_grad():
        _, hf_weights, hf_ids = module(x, token_ids)
        logits = F.linear(x, module.weight)
    weights, ids = hash_router(logits, module.tid2eid, token_ids, scale=2.5, numerics=HF)
    assert torch.equal(ids, hf_ids.int())
    tolerance = 1e-6 if dtype is torch.float32 else 0.0
    torch.testing.assert_close(weights, hf_weights.float(), rtol=tolerance, atol=tolerance)


def test_ids_are_the_tables_rows_whatever_the_logits() -> None:
    rng = np.random.default_rng(2)
    token_ids = torch.tensor([0, VOCAB - 1, 5, 5, 0])
    for logits in (normal(rng, 5, EXPERTS), torch.zeros(5, EXPERTS)):
        weights, ids = hash_router(logits, table(3), token_ids, scale=1.5, numerics=OFFICIAL)
        assert torch.equal(ids, table(3)[token_ids].int())
        assert ids.dtype == torch.int32
    torch.testing.assert_close(weights, torch.full((5, TOPK), 1.5 / TOPK))  # equal scores weigh the same


def test_equals_moe_router_when_the_table_says_what_it_would_choose() -> None:
    logits = normal(np.random.default_rng(4), VOCAB, EXPERTS, scale=3.0)
    weights, ids = moe_router(logits, torch.zeros(EXPERTS), topk=TOPK, scale=1.5, numerics=OFFICIAL)
    hashed, hashed_ids = hash_router(logits, ids.long(), torch.arange(VOCAB), scale=1.5, numerics=OFFICIAL)
    assert torch.equal(hashed, weights)
    assert torch.equal(hashed_ids, ids)


def test_switches_change_what_they_say() -> None:
    """router rounds the scores of bf16 logits and nothing else; router_eps acts only on tiny scores."""
    rng = np.random.default_rng(5)
    token_ids = torch.arange(9)

    def weights(logits: torch.Tensor, **switches: object) -> torch.Tensor:
        return hash_router(logits, table(6), token_ids, scale=1.5, numerics=replace(OFFICIAL, **switches))[0]

    logits = normal(rng, 9, EXPERTS)
    rounded = logits.to(torch.bfloat16)
    assert torch.equal(weights(logits), weights(logits, router="act"))
    assert not torch.equal(weights(rounded), weights(rounded, router="act"))
    assert torch.equal(weights(logits), weights(logits, router_eps=1e-20))
    low = logits - 90
    assert not torch.equal(weights(low), weights(low, router_eps=1e-20))
