"""moe_router: against transformers, at the ends of softplus, ties, and what bias may and may not do."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter

from dsv4dbg.kernels.dims import WIDE
from dsv4dbg.kernels.moe.moe_router import moe_router
from dsv4dbg.kernels.moe.scores import ROUTING_INVARIANTS
from dsv4dbg.kernels.numerics import HF, OFFICIAL
from dsv4dbg.kernels.samples import normal

EXPERTS, TOPK = 32, 6


def logits_and_bias(seed: int, tokens: int = 129) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return normal(rng, tokens, EXPERTS, scale=2.0), normal(rng, EXPERTS, scale=0.3)


def by_expert(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Weights ``[token, expert]``, zero where an expert is not chosen."""
    return torch.zeros(len(ids), EXPERTS).scatter_(1, ids.long(), weights.float())


def transformers_router(dtype: torch.dtype, seed: int) -> tuple[DeepseekV4TopKRouter, torch.Tensor]:
    torch.manual_seed(seed)
    config = DeepseekV4Config(
        hidden_size=64, n_routed_experts=EXPERTS, num_experts_per_tok=TOPK, routed_scaling_factor=2.5
    )
    module = DeepseekV4TopKRouter(config)
    module.weight.data = (torch.randn(EXPERTS, 64) * 0.2).to(dtype)
    module.e_score_correction_bias = torch.randn(EXPERTS) * 0.3
    return module, torch.randn(257, 64).to(dtype)


def test_float32_equals_transformers() -> None:
    module, x = transformers_router(torch.float32, seed=0)
    with torch.no_grad():
        _, hf_weights, hf_ids = module(x)
        logits = F.linear(x, module.weight)
    weights, ids = moe_router(logits, module.e_score_correction_bias, topk=TOPK, scale=2.5, numerics=HF)
    assert torch.equal(ids.sort().values, hf_ids.int().sort().values)
    torch.testing.assert_close(by_expert(weights, ids), by_expert(hf_weights, hf_ids), rtol=1e-6, atol=1e-6)


def test_bf16_is_bit_equal_to_transformers() -> None:
    module, x = transformers_router(torch.bfloat16, seed=1)
    with torch.no_grad():
        hf_logits, hf_weights, hf_ids = module(x)
    bias = module.e_score_correction_bias
    weights, ids = moe_router(hf_logits, bias, topk=TOPK, scale=2.5, numerics=HF)
    ranked = F.softplus(hf_logits).sqrt() + bias
    same_set = (ids.sort().values == hf_ids.sort().values).all(1)
    chosen, hf_chosen = (ranked.gather(1, i.long()).sort().values for i in (ids, hf_ids))
    assert torch.equal(chosen, hf_chosen), "other experts than transformers, and not for a tie"
    assert same_set.sum() > 200
    assert torch.equal(by_expert(weights, ids)[same_set], by_expert(hf_weights, hf_ids)[same_set])
    official, _ = moe_router(hf_logits, bias, topk=TOPK, scale=2.5, numerics=OFFICIAL)
    assert not torch.equal(official, weights)


@pytest.mark.parametrize("z", [-87.0, -40.0, -17.0, -1.0, 0.0, 1.0, 17.0, 19.999, 20.0, 20.001, 88.0, 90.0, 200.0])
def test_score_is_the_root_of_softplus(z: float) -> None:
    """Two experts with logits 0 and z: the quotient of the weights is the quotient of the scores."""
    weights, ids = moe_router(torch.tensor([[0.0, z]]), torch.zeros(2), topk=2, scale=1.5, numerics=OFFICIAL)
    at_zero, at_z = weights[0].double()[ids[0].argsort()].tolist()
    softplus = z if z > 30 else math.log1p(math.exp(z))
    assert at_z / at_zero == pytest.approx(math.sqrt(softplus / math.log(2)), rel=1e-6)


def test_underflow_beside_a_score_weighs_nothing() -> None:
    weights, ids = moe_router(torch.tensor([[-104.0, -2.0]]), torch.zeros(2), topk=2, scale=1.5, numerics=OFFICIAL)
    assert ids.tolist() == [[1, 0]]
    assert weights[0, 0] == 1.5
    assert 0 <= weights[0, 1] < 1e-20


def test_weights_sum_to_the_scale_in_float32() -> None:
    for example in moe_router.examples_function(WIDE, np.random.default_rng(5)):
        weights, _ = moe_router(**example.args, numerics=OFFICIAL)
        total = weights.double().sum(-1)
        torch.testing.assert_close(total, torch.full_like(total, example.args["scale"]), rtol=4e-7, atol=0)


def test_router_eps_acts_only_where_all_scores_are_tiny() -> None:
    """Without it, a token whose chosen scores all underflow gets NaN."""
    logits, bias = logits_and_bias(2)
    logits[3] = -200.0
    args = {"logits": logits, "bias": bias, "topk": TOPK, "scale": 1.5}
    official, ids = moe_router(**args, numerics=OFFICIAL)
    with_eps, ids_eps = moe_router(**args, numerics=replace(OFFICIAL, router_eps=1e-20))
    others = torch.arange(len(logits)) != 3
    assert official[3].isnan().all()
    assert (with_eps[3] == 0).all()
    assert torch.equal(official[others], with_eps[others])
    assert torch.equal(ids, ids_eps)


def test_router_switch_leaves_float32_logits_alone() -> None:
    logits, bias = logits_and_bias(3)
    for a, b in zip(
        moe_router(logits, bias, topk=TOPK, scale=1.5, numerics=OFFICIAL),
        moe_router(logits, bias, topk=TOPK, scale=1.5, numerics=replace(OFFICIAL, router="act")),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_official_scores_of_bf16_logits_are_float32() -> None:
    logits, bias = logits_and_bias(4)
    rounded = logits.to(torch.bfloat16)
    of_bf16 = moe_router(rounded, bias, topk=TOPK, scale=1.5, numerics=OFFICIAL)
    of_f32 = moe_router(rounded.float(), bias, topk=TOPK, scale=1.5, numerics=OFFICIAL)
    assert all(torch.equal(a, b) for a, b in zip(of_bf16, of_f32, strict=True))


def test_bias_chooses_and_does_not_weigh() -> None:
    logits, bias = logits_and_bias(6)
    favoured = bias.clone()
    favoured[7] += 100
    weights, ids = moe_router(logits, favoured, topk=TOPK, scale=1.5, numerics=OFFICIAL)
    assert (ids[:, 0] == 7).all()
    scores = F.softplus(logits.double()).sqrt()
    expected = scores[:, 7] / scores.gather(1, ids.long()).sum(1) * 1.5
    torch.testing.assert_close(weights[:, 0].double(), expected, rtol=1e-6, atol=0)


def test_ids_descend_by_biased_score_and_ties_go_to_the_lowest_id() -> None:
    logits, bias = logits_and_bias(7)
    _, ids = moe_router(logits, bias, topk=TOPK, scale=1.5, numerics=OFFICIAL)
    ranked = (F.softplus(logits).sqrt() + bias).gather(1, ids.long())
    assert (ranked.diff() <= 0).all()
    flat = torch.full((2, EXPERTS), 0.5)
    flat[1, [9, 20]] = 3.0
    _, ids = moe_router(flat, torch.zeros(EXPERTS), topk=TOPK, scale=1.5, numerics=OFFICIAL)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5], [9, 20, 0, 1, 2, 3]]


def test_relabelled_experts_are_chosen_with_the_same_weights() -> None:
    logits, bias = logits_and_bias(8)
    weights, ids = moe_router(logits, bias, topk=TOPK, scale=1.5, numerics=OFFICIAL)
    order = torch.from_numpy(np.random.default_rng(9).permutation(EXPERTS))
    permuted, labels = moe_router(logits[:, order], bias[order], topk=TOPK, scale=1.5, numerics=OFFICIAL)
    assert torch.equal(order[labels.long()].int(), ids)
    assert torch.equal(permuted, weights)


@pytest.mark.parametrize(
    ("fault", "caught"),
    [
        ({"weights": lambda w: w / 1.5}, "weights sum to the scale"),
        ({"weights": lambda w: w * np.nan}, "weights sum to the scale"),
        ({"ids": lambda i: i + EXPERTS - i.min()}, "ids are experts"),
        ({"ids": lambda i: i * 0 + i[:, :1]}, "no expert twice"),
    ],
)
def test_invariants_catch(fault: dict, caught: str) -> None:
    logits, bias = logits_and_bias(10)
    weights, ids = moe_router(logits, bias, topk=TOPK, scale=1.5, numerics=OFFICIAL)
    call = {"logits": logits.numpy(), "scale": 1.5, "weights": weights.numpy(), "ids": ids.numpy()}
    assert [i.name for i in ROUTING_INVARIANTS if i.check(call)] == []
    broken = call | {name: change(call[name]) for name, change in fault.items()}
    assert [i.name for i in ROUTING_INVARIANTS if i.check(broken)] == [caught]
