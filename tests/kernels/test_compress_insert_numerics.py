"""compress_insert: the order of its reductions, each numerics switch, and transformers under the hf profile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from compressor_cases import EPS, EXACT, KINDS, C, Compressor, R, inputs, make
from transformers.cache_utils import DynamicCache
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACompressor, DeepseekV4HCACompressor

from dsv4dbg.kernels import formats, samples
from dsv4dbg.kernels.attention.compress_insert import pool, tree_sum
from dsv4dbg.kernels.numerics import HF, OFFICIAL, Numerics
from dsv4dbg.pages import index_layout, kv_layout

# reductions


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 128, 129])
def test_tree_sum_sums(rows):
    x = torch.from_numpy(np.random.default_rng(rows).integers(-99, 99, (5, rows, 16)).astype(np.float32))
    assert torch.equal(tree_sum(x), x.sum(1))


def test_pool_agrees_with_torch_softmax():
    rng = np.random.default_rng(0)
    kv, gate = samples.normal(rng, 5, 8, C), samples.normal(rng, 5, 8, C, scale=3.0)
    gate[0, :4] = -torch.inf
    expected = (kv * gate.softmax(1)).sum(1)
    assert torch.allclose(pool(kv, gate, torch.float32, OFFICIAL), expected, atol=1e-6)
    assert torch.equal(pool(kv, gate, torch.float32, HF), pool(kv, gate, torch.float32, OFFICIAL))


# switches


def differing(kind: str, numerics: Numerics, act: str = "bf16") -> tuple[bool, torch.Tensor]:
    """Whether state bytes change under ``numerics``, and which channels of the entries do."""
    a, b = make(kind, act=act), make(kind, act=act, numerics=numerics)
    kv, gate = inputs(a, 256)
    for compressor in (a, b):
        compressor.feed(kv, gate, torch.arange(256))
    count = 256 // a.ratio
    return not torch.equal(a.state.data, b.state.data), (a.rows(count) != b.rows(count)).any(0)


def test_pool_switch_changes_rounding_of_the_pooled_value():
    state, channels = differing("csa bf16", replace(OFFICIAL, compressor_pool="act", kv_quant=False))
    assert not state
    assert channels.all()
    state, channels = differing("csa bf16", replace(OFFICIAL, compressor_pool="act"), act="f32")
    assert not state
    assert not channels.any()


def test_rope_table_switch_changes_rope_channels_only():
    state, channels = differing("csa", replace(OFFICIAL, rope_table="act"))
    assert not state
    assert not channels[:-R].any()
    assert channels[-R:].any()


@pytest.mark.parametrize(("kind", "share"), [("csa", 0), ("hca", 0), ("index", 0), ("csa bf16", C - R)])
def test_kv_quant_switch_changes_plain_kv_caches_only(kind, share):
    state, channels = differing(kind, replace(OFFICIAL, kv_quant=False))
    assert not state
    assert channels.sum() == share
    assert not channels[-R:].any()


@pytest.mark.parametrize(("kind", "changes"), [("csa", False), ("index", True), ("index fp8", True)])
def test_hadamard_switch_changes_indexer_keys_only(kind, changes):
    state, channels = differing(kind, replace(OFFICIAL, index_hadamard=False))
    assert not state
    assert channels.any() == changes


def test_hadamard_and_fp4_are_the_last_steps():
    """With both switches on, a plain cache holds exactly what an FP4 cache decodes to."""
    layout = index_layout("bf16", "", C, 4, 576)
    runs = [
        Compressor(4, True, KINDS["index"][2]),
        Compressor(4, True, layout),
        Compressor(4, True, layout, numerics=EXACT),
    ]
    kv, gate = inputs(runs[0], 64)
    for compressor in runs:
        compressor.feed(kv, gate, torch.arange(64))
    packed, simulated, exact = (compressor.rows(16) for compressor in runs)
    assert torch.equal(packed, simulated)
    rotated = formats.hadamard(exact.to(torch.bfloat16))
    assert torch.equal(simulated, formats.fp4_dequantize(*formats.fp4_quantize(rotated)))


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_index_quant_switch_leaves_kv_alone(kind):
    state, channels = differing(kind, replace(OFFICIAL, index_quant=False))
    assert not state
    assert not channels.any()


# transformers


def hf_config() -> DeepseekV4Config:
    return DeepseekV4Config(
        hidden_size=64, head_dim=C, partial_rotary_factor=R / C, num_hidden_layers=2, q_lora_rank=32, index_n_heads=4,
        index_head_dim=C, index_topk=8, rms_norm_eps=EPS, num_attention_heads=4, o_groups=2,
        layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["moe", "moe"],
    )  # fmt: skip


@pytest.mark.parametrize(("dtype", "layer"), [(t, n) for t in (torch.float32, torch.bfloat16) for n in (0, 1)])
def test_hf_profile_is_transformers(dtype, layer):
    """Main compressors and the indexer's, prefill of 129 then 131 tokens; float32 to 1e-6, bf16 to two roundings."""
    config, rng = hf_config(), np.random.default_rng(layer)
    module = (DeepseekV4CSACompressor, DeepseekV4HCACompressor)[layer](config)
    branches = {"compressor": module} | ({"indexer": module.indexer} if layer == 0 else {})
    for parameter in module.parameters():
        parameter.data = samples.normal(rng, *parameter.shape, scale=0.3).to(parameter.dtype)
    for branch in branches.values():
        branch.kv_norm.weight.data += 1.0
    for linear in [m for m in module.modules() if isinstance(m, torch.nn.Linear)]:
        linear.to(dtype)
    hidden = samples.normal(rng, 1, 260, 64).to(dtype)
    residual = samples.normal(rng, 1, 260, 32).to(dtype)
    cache, fmt = DynamicCache(config=config), {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
    ours = {}
    for name, branch in branches.items():
        kv = kv_layout(fmt, "", C, R, 4) if name == "compressor" else index_layout(fmt, "", C, 4, 576)
        ours[name] = Compressor((4, 128)[layer], layer == 0, kv, act=fmt, numerics=HF)
        ours[name].ape, ours[name].weight = branch.position_bias.data, branch.kv_norm.weight.data
        ours[name].cos_sin = torch.cat(branch.rotary_emb(torch.zeros(1), torch.arange(300)[None], "compress"), -1)[0]
    with torch.no_grad():
        for part in (torch.arange(129), torch.arange(129, 260)):
            module(hidden[:, part], residual[:, part], part[None], cache, layer)
            for name, branch in branches.items():
                x = hidden[0, part]
                ours[name].feed(branch.kv_proj(x), branch.gate_proj(x), part)
    for name, compressor in ours.items():
        theirs = cache.layers[layer].compressed_kv[name][0].float()
        mine = compressor.rows(len(theirs))
        assert len(theirs) == 260 // compressor.ratio
        if dtype == torch.float32:
            assert torch.allclose(mine, theirs, atol=2e-6)
        else:
            assert (mine == theirs).float().mean() > 0.98
            assert torch.allclose(mine, theirs, atol=0.02, rtol=0.02)
