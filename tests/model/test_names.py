"""Published and transformers' tensor names."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dsv4dbg.model.checkpoint_files import DTYPE_BYTES
from dsv4dbg.model.checkpoint_schema import full_schema, scale_key
from dsv4dbg.model.names import Part, expert_names, hf_name, parts
from dsv4dbg.model.synthetic import Synthetic, wide_config

SAMPLES = [
    ("model.embed_tokens.weight", "embed.weight"),
    ("lm_head.weight", "head.weight"),
    ("model.norm.weight", "norm.weight"),
    ("model.hc_head.hc_fn", "hc_head_fn"),
    ("model.layers.3.input_layernorm.weight", "layers.3.attn_norm.weight"),
    ("model.layers.3.ffn_hc.scale", "layers.3.hc_ffn_scale"),
    ("model.layers.3.self_attn.sinks", "layers.3.attn.attn_sink"),
    ("model.layers.10.self_attn.q_a_proj.weight_scale_inv", "layers.10.attn.wq_a.scale"),
    ("model.layers.3.self_attn.compressor.kv_norm.weight", "layers.3.attn.compressor.norm.weight"),
    ("model.layers.3.self_attn.compressor.indexer.q_b_proj.weight", "layers.3.attn.indexer.wq_b.weight"),
    ("model.layers.3.self_attn.compressor.indexer.scorer.weights_proj.weight",
     "layers.3.attn.indexer.weights_proj.weight"),
    ("model.layers.3.self_attn.compressor.indexer.kv_norm.weight", "layers.3.attn.indexer.compressor.norm.weight"),
    ("model.layers.3.self_attn.compressor.indexer.position_bias", "layers.3.attn.indexer.compressor.ape"),
    ("model.layers.3.mlp.gate.e_score_correction_bias", "layers.3.ffn.gate.bias"),
    ("model.layers.0.mlp.gate.tid2eid", "layers.0.ffn.gate.tid2eid"),
    ("model.layers.3.mlp.shared_experts.up_proj.weight", "layers.3.ffn.shared_experts.w3.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("hf", "official"), SAMPLES)
def test_single_tensors_both_ways(hf, official):
    assert parts(hf) == (Part(official),)
    assert parts(official) == (Part(official),)
    assert hf_name(official) == (hf, None)


def test_experts_are_stacked_and_split():
    assert parts("layers.3.ffn.experts.17.w2.scale") == (Part("layers.3.ffn.experts.w2.scale", expert=17),)
    assert parts("model.layers.3.mlp.experts.17.up_proj.weight") == (Part("layers.3.ffn.experts.w3.weight", expert=17),)
    assert parts("model.layers.3.mlp.experts.gate_up_proj") == (
        Part("layers.3.ffn.experts.w1.weight", half=0),
        Part("layers.3.ffn.experts.w3.weight", half=1),
    )
    assert parts("model.layers.3.mlp.experts.down_proj_scale_inv") == (Part("layers.3.ffn.experts.w2.scale"),)
    assert hf_name("layers.3.ffn.experts.w3.weight") == ("model.layers.3.mlp.experts.gate_up_proj", 1)
    assert hf_name("layers.3.ffn.experts.w2.weight") == ("model.layers.3.mlp.experts.down_proj", None)
    assert expert_names("mtp.0.ffn.experts.w1.scale", 2) == [
        "mtp.0.ffn.experts.0.w1.scale",
        "mtp.0.ffn.experts.1.w1.scale",
    ]
    assert expert_names("layers.0.attn.wkv.weight", 2) is None


def test_names_of_other_writers():
    assert parts("layers.0.self_attn.wq_a.weight_scale_inv") == (Part("layers.0.attn.wq_a.scale"),)
    assert parts("layers.0.mlp.gate.e_score_correction_bias") == (Part("layers.0.ffn.gate.bias"),)
    assert parts("layers.0.surprise") == (Part("layers.0.surprise"),)
    assert parts("") == (Part(""),)


@pytest.mark.parametrize(
    "name",
    [
        "mtp.0.emb.tok_emb.weight",
        "mtp.0.head.weight",
        "model.rotary_emb.main_inv_freq",
        "model.layers.0.a.rotary_emb.x",
    ],
)
def test_tensors_that_no_forward_needs(name):
    assert parts(name) == ()


def test_every_key_survives_the_round_trip():
    schema = full_schema(wide_config())
    for key in [*schema, *map(scale_key, schema)]:
        assert parts(key) == (Part(key),)
        hf = hf_name(key)
        if key.startswith("mtp."):
            assert hf is None
        elif hf is not None:
            name, half = hf
            assert Part(key, half=half) in parts(name)
    assert all(
        hf_name(key)
        for key in full_schema(replace(wide_config(), num_nextn_predict_layers=0, compress_ratios=(4, 128, 4, 0)))
    )


def test_transformers_state_dict_is_covered():
    transformers = pytest.importorskip("transformers")
    import torch

    from dsv4dbg.model.checkpoint import Checkpoint
    from dsv4dbg.model.config import ModelConfig

    hf_config = transformers.DeepseekV4Config(
        vocab_size=64, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, head_dim=32, qk_rope_head_dim=16,
        partial_rotary_factor=0.5, q_lora_rank=32, o_groups=2, o_lora_rank=16, sliding_window=8,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["hash_moe", "moe", "moe"], index_n_heads=2, index_head_dim=32, index_topk=4,
        moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, hc_mult=4, bos_token_id=0, eos_token_id=1,
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 8}, pad_token_id=2,
        rope_scaling={"type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32,
                      "beta_slow": 1},
    )  # fmt: skip
    config = ModelConfig.from_json(hf_config.to_dict())
    assert (config.csa_ratio, config.hca_ratio, config.num_hash_layers) == (2, 8, 1)
    model = transformers.DeepseekV4ForCausalLM(hf_config)
    state = model.state_dict()
    loaded = Checkpoint.from_state_dict(config, state)
    gate_up = state["model.layers.1.mlp.experts.gate_up_proj"]
    layer = loaded.layer(1)
    assert torch.equal(layer["ffn.experts.w1.weight"], gate_up[:, :32])
    assert torch.equal(layer["ffn.experts.w3.weight"], gate_up[:, 32:])
    assert torch.equal(
        layer["attn.indexer.compressor.wkv.weight"], state["model.layers.1.self_attn.compressor.indexer.kv_proj.weight"]
    )
    # nothing of the model is left over
    assert len(loaded.keys) == len(state) + 3


def test_schema_counts_the_tensors_and_bytes_of_the_published_flash():
    """DeepSeek-V4-Flash's index: 69,187 tensors, total_size 159,609,485,896."""
    ratios = (0, 0, *(4, 128) * 20, 4, 0)
    config = replace(
        wide_config(), vocab_size=129280, hidden_size=4096, num_hidden_layers=43, num_attention_heads=64, head_dim=512,
        q_lora_rank=1024, o_groups=8, o_lora_rank=1024, compress_ratios=ratios, index_n_heads=64, index_head_dim=128,
        moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=6, num_hash_layers=3,
    )  # fmt: skip
    source = Synthetic(config, "sizes only")
    sizes = {key: math.prod(i.shape) * DTYPE_BYTES[i.dtype] for key, i in source.tensors.items()}
    assert sum(len(expert_names(key, 256) or [key]) for key in sizes) == 69_187
    assert sum(sizes.values()) == 159_609_485_896
