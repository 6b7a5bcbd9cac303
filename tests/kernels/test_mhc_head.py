"""mhc_head: laws and transformers' module under the hf profile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dsv4dbg.kernels.mhc.inputs import mix_parameters
from dsv4dbg.kernels.mhc.mhc_head import mhc_head
from dsv4dbg.kernels.mhc.mhc_pre import mhc_pre
from dsv4dbg.kernels.numerics import HF, OFFICIAL
from dsv4dbg.kernels.oracle import to_numpy
from dsv4dbg.kernels.samples import activations

HC, D = 4, 64


def inputs(seed: int = 0, tokens: int = 5, dtype: torch.dtype = torch.bfloat16) -> dict:
    rng = np.random.default_rng(seed)
    fn, scale, base = mix_parameters(rng, HC, 1, HC * D)
    args = {"streams": activations(rng, tokens, HC, D).to(dtype), "fn": fn, "scale": scale, "base": base}
    return {**args, "norm_eps": 1e-6, "hc_eps": 1e-6, "numerics": OFFICIAL}


def test_is_mhc_pre_without_post_and_comb():
    args = {**inputs(dtype=torch.float32), "hc_eps": 0.125}
    rest = (2 + HC) * HC - HC
    wide = {
        "fn": torch.cat((args["fn"], torch.ones(rest, HC * D))),
        "scale": torch.cat((args["scale"], torch.ones(2))),
        "base": torch.cat((args["base"], torch.ones(rest))),
    }
    y = mhc_pre(**{**args, **wide}, iters=3)[0]
    assert torch.allclose(mhc_head(**args), y, rtol=1e-5, atol=1e-5)


def test_weights_by_hand():
    args = inputs()
    args |= {"fn": torch.zeros(HC, HC * D), "base": torch.tensor([200.0, -200.0, 0.0, -200.0]), "hc_eps": 0.25}
    x = args["streams"].float()
    expected = 1.25 * x[:, 0] + 0.25 * x[:, 1] + 0.75 * x[:, 2] + 0.25 * x[:, 3]
    assert torch.equal(mhc_head(**args), expected.to(torch.bfloat16))


def test_scale_multiplies_the_mix_and_not_the_base():
    args = inputs(tokens=64)
    assert torch.equal(mhc_head(**args), mhc_head(**{**args, "scale": args["scale"] * 2, "fn": args["fn"] / 2}))
    assert not torch.equal(mhc_head(**args), mhc_head(**{**args, "scale": args["scale"] * 2}))


def test_size_of_the_streams_scales_y_alone():
    args = {**inputs(), "norm_eps": 0.0}
    assert torch.equal(mhc_head(**{**args, "streams": args["streams"] * 2.0**-9}), mhc_head(**args) * 2.0**-9)


def test_where_the_norm_goes_changes_rounding_only():
    args = inputs(tokens=64, dtype=torch.float32)
    after, before = (mhc_head(**{**args, "numerics": replace(OFFICIAL, mhc_norm=n)}) for n in ("after", "before"))
    assert not torch.equal(after, before)
    assert torch.allclose(after, before, rtol=1e-4, atol=1e-4)


def test_no_tokens_and_a_bad_row():
    args = inputs()
    assert mhc_head(**{**args, "streams": args["streams"][:0]}).shape == (0, D)
    bad = args["streams"].clone()
    bad[2, 1, 3] = float("nan")
    assert mhc_head(**{**args, "streams": bad}).isnan().any(1).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers(dtype):
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    from transformers.models.deepseek_v4 import DeepseekV4Config

    module = modeling.DeepseekV4HyperHead(DeepseekV4Config(hidden_size=D, num_hidden_layers=1))
    args = {**inputs(3, tokens=40, dtype=dtype), "numerics": HF}
    module.load_state_dict({f"hc_{name}": args[name] for name in ("fn", "scale", "base")})
    with torch.no_grad():
        expected = module(args["streams"][None])[0]
    y = mhc_head(**args)
    assert torch.allclose(y.float(), expected.float(), rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=2e-6)
    if dtype == torch.bfloat16:
        assert (y != expected).float().mean() < 0.001


def test_invariants_notice():
    args = inputs()
    call = {n: to_numpy(v) for n, v in {**args, "y": mhc_head(**args)}.items()}
    assert [i.check(call) for i in mhc_head.invariants] == [None, None]
    assert [bool(i.check({**call, "y": call["y"] * 40})) for i in mhc_head.invariants] == [False, True]
    assert [bool(i.check({**call, "y": call["y"] * np.inf})) for i in mhc_head.invariants] == [True, True]
