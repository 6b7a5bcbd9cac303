"""mhc_post: the direction of the mix, its switch, and a whole transformers layer around mhc_pre and mhc_post."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from dsv4dbg.kernels.mhc.mhc_post import mhc_post
from dsv4dbg.kernels.mhc.mhc_pre import mhc_pre
from dsv4dbg.kernels.norm.rms_norm import rms_norm
from dsv4dbg.kernels.numerics import HF, OFFICIAL
from dsv4dbg.kernels.oracle import to_numpy
from dsv4dbg.kernels.samples import activations, norm_weight, normal

T, HC, D = 6, 4, 64


def inputs(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "y": activations(rng, T, D).to(dtype),
        "streams": activations(rng, T, HC, D).to(dtype),
        "post": 2 * torch.sigmoid(normal(rng, T, HC)),
        "comb": torch.softmax(normal(rng, T, HC, HC), dim=1),
        "numerics": OFFICIAL,
    }


@pytest.mark.parametrize("profile", [OFFICIAL, HF])
def test_comb_acts_transposed(profile):
    args = inputs()
    move = torch.zeros(T, HC, HC)
    move[:, 1, 3] = 1  # stream 1 goes to stream 3
    mixed = mhc_post(**{**args, "comb": move, "post": torch.zeros(T, HC), "numerics": profile})
    assert torch.equal(mixed[:, 3], args["streams"][:, 1])
    assert mixed[:, :3].abs().max() == 0


def test_post_weighs_the_sublayer_per_stream():
    args = inputs()
    mixed = mhc_post(
        **{**args, "comb": torch.zeros(T, HC, HC), "post": torch.tensor([0.0, 1.0, 2.0, 0.5]).expand(T, HC)}
    )
    for k, factor in enumerate((0, 1, 2, 0.5)):
        assert torch.equal(mixed[:, k], args["y"] * factor)


def test_rows_that_sum_to_one_keep_the_sum_of_streams():
    args = {**inputs(dtype=torch.float32), "post": torch.zeros(T, HC)}
    args["comb"] = torch.softmax(normal(np.random.default_rng(1), T, HC, HC), dim=2)
    assert torch.allclose(mhc_post(**args).sum(1), args["streams"].sum(1), atol=1e-4)


def test_one_rounding_or_many():
    args = inputs()
    exact = torch.einsum("tk,td->tkd", args["post"].double(), args["y"].double())
    exact += torch.einsum("tjk,tjd->tkd", args["comb"].double(), args["streams"].double())
    once, many = (mhc_post(**{**args, "numerics": replace(OFFICIAL, mhc_mix=mix)}) for mix in ("f32", "act"))
    assert (once == exact.to(torch.bfloat16)).float().mean() > 0.999
    assert (many != exact.to(torch.bfloat16)).float().mean() > 0.2
    error = (many.double() - exact).abs() / exact.abs().amax(-1, keepdim=True)
    assert error.max() < 4 * 2.0**-8


def test_switch_is_nothing_in_float32():
    args = inputs(dtype=torch.float32)
    assert torch.equal(mhc_post(**args), mhc_post(**{**args, "numerics": replace(OFFICIAL, mhc_mix="act")}))


def test_post_cancelling_the_mix_gives_zero():
    args = inputs()
    shift = torch.eye(HC).roll(1, dims=1).expand(T, HC, HC)
    mixed = mhc_post(**{**args, "y": args["streams"][:, 0], "post": -shift[:, 0], "comb": shift})
    assert mixed[:, 1].abs().max() == 0


def test_invariants_notice():
    args = inputs()
    call = {n: to_numpy(v) for n, v in {**args, "mixed": mhc_post(**args)}.items()}
    assert [i.check(call) for i in mhc_post.invariants] == [None, None]
    finite, bound = mhc_post.invariants
    assert "(0, 0, 0)" in bound.check({**call, "mixed": call["mixed"] * 100})
    assert "nan at (2, 1, 5)" in finite.check({**call, "mixed": with_nan(call["mixed"], (2, 1, 5))})


def with_nan(x: np.ndarray, where: tuple[int, ...]) -> np.ndarray:
    x = x.copy()
    x[where] = np.nan
    return x


class Echo(nn.Module):
    """Stands for a sublayer: a fixed linear map of its input."""

    def __init__(self, factor: float, pair: bool) -> None:
        super().__init__()
        self.factor, self.pair = factor, pair

    def forward(self, x: torch.Tensor, **_) -> torch.Tensor | tuple[torch.Tensor, None]:
        y = x.flip(-1) * self.factor
        return (y, None) if self.pair else y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_equals_transformers(dtype):
    """The whole residual path of a decoder layer, with stubs for attention and MoE."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    from transformers.models.deepseek_v4 import DeepseekV4Config

    config = DeepseekV4Config(
        hidden_size=D, num_hidden_layers=1, num_attention_heads=2, head_dim=64, qk_rope_head_dim=32, q_lora_rank=32,
        o_groups=1, o_lora_rank=16, n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, vocab_size=16,
        index_n_heads=2, index_head_dim=64, layer_types=["sliding_attention"], mlp_layer_types=["moe"],
    )  # fmt: skip
    layer = modeling.DeepseekV4DecoderLayer(config, 0)
    layer.self_attn, layer.mlp = Echo(0.5, pair=True), Echo(-1.5, pair=False)
    rng = np.random.default_rng(2)
    weights = {}
    for norm, hc in (("input_layernorm", "attn_hc"), ("post_attention_layernorm", "ffn_hc")):
        weights[f"{norm}.weight"] = norm_weight(rng, D).float()
        weights[f"{hc}.fn"] = normal(rng, 24, HC * D, scale=0.06)
        weights[f"{hc}.scale"], weights[f"{hc}.base"] = 1 + normal(rng, 3, scale=0.3), normal(rng, 24)
    layer.load_state_dict(weights)
    streams = activations(rng, 33, HC, D).to(dtype)
    with torch.no_grad():
        expected = layer(streams[None])[0]

    x = streams
    for norm, hc, factor in (("input_layernorm", "attn_hc", 0.5), ("post_attention_layernorm", "ffn_hc", -1.5)):
        mix = [weights[f"{hc}.{name}"] for name in ("fn", "scale", "base")]
        y, post, comb = mhc_pre(x, *mix, norm_eps=1e-6, hc_eps=1e-6, iters=20, numerics=HF)
        y = rms_norm(y, weights[f"{norm}.weight"], eps=1e-6).flip(-1) * factor
        x = mhc_post(y, x, post, comb, numerics=HF)
    scale = expected.float().abs().amax((1, 2), keepdim=True)
    assert ((x - expected).abs() / scale).max() < (1e-6 if dtype == torch.float32 else 2.0**-7)
    if dtype == torch.bfloat16:
        assert (x != expected).float().mean() < 0.005
