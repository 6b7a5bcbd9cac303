"""mhc_pre: golden Sinkhorn, laws of the mix, transformers' module under the hf profile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4dbg.kernels.dims import TINY
from dsv4dbg.kernels.mhc.inputs import mix_parameters
from dsv4dbg.kernels.mhc.mhc_pre import mhc_pre
from dsv4dbg.kernels.numerics import HF, OFFICIAL
from dsv4dbg.kernels.oracle import to_numpy
from dsv4dbg.kernels.samples import activations, normal

GOLDEN_LOGITS = [[-1.5, 0.5, 2.5, -0.5], [1.5, -1.5, 0.5, 2.5], [-0.5, 1.5, -1.5, 0.5], [2.5, -0.5, 1.5, -1.5]]
GOLDEN_ROWS = [
    [0.016894635, 0.205805779, 0.718333125, 0.058965359],
    [0.205806941, 0.016894890, 0.058965188, 0.718332052],
]
HC, D = 4, 64


def inputs(seed: int = 0, tokens: int = 5, dtype: torch.dtype = torch.bfloat16) -> dict:
    rng = np.random.default_rng(seed)
    fn, scale, base = mix_parameters(rng, (2 + HC) * HC, 3, HC * D)
    streams = activations(rng, tokens, HC, D).to(dtype)
    args = {"streams": streams, "fn": fn, "scale": scale, "base": base}
    return {**args, "norm_eps": 1e-6, "hc_eps": 1e-6, "iters": 20, "numerics": OFFICIAL}


def constant_logits(base: torch.Tensor, **changes) -> dict:
    """Inputs whose mixes are zero, so that the logits are ``base``."""
    return {**inputs(tokens=1), "fn": torch.zeros(base.numel(), HC * D), "base": base, **changes}


def test_golden_sinkhorn():
    base = torch.cat((torch.zeros(2 * HC), torch.tensor(GOLDEN_LOGITS).flatten()))
    _, _, comb = mhc_pre(**constant_logits(base))
    assert comb[0, :2].tolist() == pytest.approx(np.array(GOLDEN_ROWS), abs=1e-7)
    assert comb[0].sum(0).tolist() == pytest.approx([0.999999] * HC, abs=5e-7)


def test_order_of_pre_post_comb_and_where_hc_eps_goes():
    base = torch.full(((2 + HC) * HC,), -200.0)  # sigmoid is zero
    base[1], base[HC + 2] = 200.0, 200.0  # pre of stream 1, post of stream 2
    base[2 * HC :] = -200 * (1 - torch.eye(HC).roll(1, dims=1)).flatten()  # comb[j, j + 1]
    args = constant_logits(base, hc_eps=2.0**-4, iters=1)
    y, post, comb = mhc_pre(**args)
    x = args["streams"].float()
    assert torch.equal(y, (x[:, 1] + 2.0**-4 * x.sum(1)).to(torch.bfloat16))
    assert post.tolist() == [[0, 0, 2, 0]]  # no eps here
    # one softmax + eps, then division by the column sum 1 + 4 eps, + eps once more
    expected = (torch.eye(HC).roll(1, dims=1) + 2.0**-4) / (1 + 5 * 2.0**-4)
    assert torch.allclose(comb[0], expected, rtol=1e-6)


def test_each_part_has_its_own_scale():
    args = inputs()
    plain = mhc_pre(**args)
    for part in range(3):
        scale = args["scale"].clone()
        scale[part] *= 1.5
        changed = mhc_pre(**{**args, "scale": scale})
        assert [not torch.equal(a, b) for a, b in zip(plain, changed, strict=True)] == [i == part for i in range(3)]


def test_mix_is_stream_major():
    args = inputs(tokens=3)
    fn = torch.zeros_like(args["fn"])
    fn[HC, 2 * D + 7] = 1.0  # post of stream 0 looks at channel 7 of stream 2
    args |= {"fn": fn, "base": torch.zeros_like(args["base"]), "scale": torch.ones(3)}
    x = args["streams"].float()
    factor = x.square().mean((1, 2)).add(1e-6).rsqrt()
    assert torch.allclose(mhc_pre(**args)[1][:, 0], 2 * torch.sigmoid(x[:, 2, 7] * factor), rtol=1e-6)


def test_norm_eps_is_added_to_the_mean_square():
    args = inputs(tokens=2)
    args["streams"] *= 1e-3
    x = args["streams"].float()
    rms = {eps: x.square().mean((1, 2)).add(eps).sqrt()[:, None] for eps in (0.0, 1e-6)}
    post = {eps: mhc_pre(**{**args, "norm_eps": eps, "hc_eps": 0.25})[1] for eps in (0.0, 1e-6)}
    logits = {eps: (torch.logit(p.double() / 2) - args["base"][HC : 2 * HC]) for eps, p in post.items()}
    assert torch.allclose(logits[1e-6] * rms[1e-6], logits[0.0] * rms[0.0], rtol=1e-3, atol=1e-7)
    assert not torch.allclose(post[1e-6], post[0.0], rtol=1e-3)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(-20, 20))
def test_size_of_the_streams_scales_y_alone(seed, exponent):
    args = {**inputs(seed), "norm_eps": 0.0}
    y, post, comb = mhc_pre(**args)
    scaled = mhc_pre(**{**args, "streams": args["streams"] * 2.0**exponent})
    assert torch.equal(scaled[0], y * 2.0**exponent)
    assert torch.equal(scaled[1], post)
    assert torch.equal(scaled[2], comb)


def test_renaming_streams_renames_the_weights():
    args = inputs()
    order = torch.tensor([2, 0, 3, 1])
    rows = torch.cat((order, HC + order, 2 * HC + (order[:, None] * HC + order).flatten()))
    renamed = {
        **args,
        "streams": args["streams"][:, order],
        "fn": args["fn"][rows].unflatten(1, (HC, D))[:, order].flatten(1),
        "base": args["base"][rows],
    }
    (y, post, comb), (y2, post2, comb2) = mhc_pre(**args), mhc_pre(**renamed)
    assert torch.allclose(y2.float(), y.float(), rtol=2e-2, atol=1e-2)
    assert torch.allclose(post2, post[:, order], atol=1e-5)
    assert torch.allclose(comb2, comb[:, order][:, :, order], atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.1, 1.0, 3.0, 30.0, 300.0]))
def test_columns_sum_to_one_for_any_logits_and_rows_need_not(seed, stretch):
    logits = normal(np.random.default_rng(seed), (2 + HC) * HC, scale=stretch)
    _, _, comb = mhc_pre(**constant_logits(logits))
    assert torch.allclose(comb.sum(1), torch.ones(1, HC), atol=1e-4)
    assert (comb >= 0).all()


def test_twenty_iterations_do_not_always_converge():
    rng = np.random.default_rng(1)
    rows = torch.cat([mhc_pre(**constant_logits(normal(rng, 24, scale=3)))[2].sum(2) for _ in range(300)])
    assert 0.003 < (rows - 1).abs().max() < 0.2


def test_a_bad_row_stays_alone():
    args = inputs()
    clean = mhc_pre(**args)
    args["streams"] = args["streams"].clone()
    args["streams"][2, 1, 3] = float("nan")
    for before, after in zip(clean, mhc_pre(**args), strict=True):
        assert after[2].isnan().any()
        assert torch.allclose(after[[0, 1, 3, 4]].float(), before[[0, 1, 3, 4]].float(), atol=1e-6)


def test_no_tokens():
    args = inputs()
    y, post, comb = mhc_pre(**{**args, "streams": args["streams"][:0]})
    assert (y.shape, post.shape, comb.shape) == ((0, D), (0, HC), (0, HC, HC))
    assert (y.dtype, post.dtype, comb.dtype) == (torch.bfloat16, torch.float32, torch.float32)


def test_where_the_norm_goes_changes_rounding_only():
    after, before = (
        mhc_pre(**{**inputs(tokens=64), "numerics": n}) for n in (OFFICIAL, replace(OFFICIAL, mhc_norm="before"))
    )
    for a, b in zip(after[1:], before[1:], strict=True):
        assert not torch.equal(a, b)
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers(dtype):
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    from transformers.models.deepseek_v4 import DeepseekV4Config

    module = modeling.DeepseekV4HyperConnection(DeepseekV4Config(hidden_size=D, num_hidden_layers=1))
    args = {**inputs(3, tokens=40, dtype=dtype), "numerics": HF}
    module.load_state_dict({name: args[name] for name in ("fn", "scale", "base")})
    with torch.no_grad():
        post, comb, collapsed = module(args["streams"][None])
    y, *weights = mhc_pre(**args)
    assert torch.allclose(y.float(), collapsed[0].float(), rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=1e-6)
    if dtype == torch.bfloat16:
        assert (y != collapsed[0]).float().mean() < 0.001
    for ours, theirs in zip(weights, (post, comb), strict=True):
        assert torch.allclose(ours, theirs[0], atol=1e-6)


def broken(call: dict, **outputs) -> list[str]:
    call = {**call, **outputs}
    return [i.name for i in mhc_pre.invariants if i.check(call)]


def test_invariants_notice():
    args = next(e for e in mhc_pre.examples_function(TINY, np.random.default_rng(0)) if "converged" in e.name).args
    y, post, comb = mhc_pre(**args, numerics=OFFICIAL)
    call = {n: to_numpy(v) for n, v in {**args, "y": y, "post": post, "comb": comb}.items()}
    assert broken(call) == []
    assert broken(call, comb=call["comb"].swapaxes(1, 2)) == ["comb >= 0, its columns sum to 1"]
    assert broken(call, post=call["post"] * 2) == ["0 <= post <= 2"]
    assert broken(call, y=call["y"] * 40) == ["y within the sum of the streams' sizes"]
    nan = call["y"].copy()
    nan[1, 2] = np.nan
    assert broken(call, y=nan) == ["y and post and comb finite"]
    assert broken(call, y=nan, streams=np.full_like(call["streams"], np.inf)) == []  # inputs were not finite
