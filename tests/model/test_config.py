"""config.json in its three spellings, the sentences for bad ones, and the RoPE tables."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.dims import WIDE
from dsv4dbg.model.config import ModelConfig, cos_sin_table, inv_freq
from dsv4dbg.model.synthetic import wide_config

ROPE = {"beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536}
# DeepSeek-V4-Pro as published
PRO = {
    "architectures": ["DeepseekV4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 1, "expert_dtype": "fp4", "hc_eps": 1e-06, "hc_mult": 4, "hc_sinkhorn_iters": 20, "head_dim": 512,
    "hidden_act": "silu", "hidden_size": 7168, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 1024,
    "initializer_range": 0.02, "max_position_embeddings": 1048576, "model_type": "deepseek_v4",
    "moe_intermediate_size": 3072, "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_experts_per_tok": 6, "num_hidden_layers": 61, "num_hash_layers": 3,
    "num_key_value_heads": 1, "num_nextn_predict_layers": 1, "o_groups": 16, "o_lora_rank": 1024, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": ROPE | {"type": "yarn"}, "rope_theta": 10000,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
                            "weight_block_size": [128, 128]},
    "routed_scaling_factor": 2.5, "scoring_func": "sqrtsoftplus", "sliding_window": 128, "swiglu_limit": 10.0,
    "tie_word_embeddings": False, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True,
    "transformers_version": "4.57.1", "vocab_size": 129280, "compress_rope_theta": 160000,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}  # fmt: skip
# the same model as the inference code spells it
INFERENCE = {
    "vocab_size": 129280, "dim": 7168, "moe_inter_dim": 3072, "n_layers": 61, "n_hash_layers": 3, "n_heads": 128,
    "n_routed_experts": 384, "n_shared_experts": 1, "n_activated_experts": 6, "score_func": "sqrtsoftplus",
    "route_scale": 2.5, "swiglu_limit": 10.0, "q_lora_rank": 1536, "head_dim": 512, "rope_head_dim": 64,
    "o_groups": 16, "o_lora_rank": 1024, "window_size": 128, "original_seq_len": 65536, "rope_theta": 10000,
    "rope_factor": 16, "beta_fast": 32, "beta_slow": 1, "index_n_heads": 64, "index_head_dim": 128,
    "index_topk": 1024, "hc_mult": 4, "hc_sinkhorn_iters": 20, "compress_rope_theta": 160000, "dtype": "fp8",
    "scale_fmt": "ue8m0", "expert_dtype": "fp4", "compress_ratios": PRO["compress_ratios"],
}  # fmt: skip
KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
_DROPPED = ("compress_ratios", "num_hash_layers", "rope_scaling", "expert_dtype")
# and as transformers does
HF = {k: v for k, v in PRO.items() if k not in _DROPPED} | {
    "layer_types": [KINDS[r] for r in PRO["compress_ratios"][:-1]],
    "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 58,
    "compress_rates": {KINDS[4]: 4, KINDS[128]: 128},
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125},
        "compress": ROPE | {"rope_type": "yarn", "rope_theta": 160000.0, "attention_factor": 1.0},
    },
    "quantization_config": PRO["quantization_config"] | {"expert_dtype": "fp4"},
}


def sentence(error: pytest.ExceptionInfo[DbgError]) -> str:
    """The message, after checking that a person can read it in one go."""
    text = error.value.message
    assert "\n" not in text
    assert len(text) < 400
    return text


def test_published_spelling():
    c = ModelConfig.from_json(PRO)
    assert (c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.n_routed_experts) == (7168, 61, 128, 384)
    assert len(c.compress_ratios) == 62
    assert [c.layer_kind(i) for i in (0, 1, 2, 3, 60, 61)] == ["hca", "hca", "csa", "hca", "csa", "window"]
    assert [c.is_hash(i) for i in (2, 3, 61)] == [True, False, False]
    assert (c.rope_factor, c.rope_original_max_position, c.rope_theta) == (16, 65536, 10000)
    assert c.dims.experts == 384
    assert c.dims.rope_dim == 64


def test_three_spellings_agree():
    published = ModelConfig.from_json(PRO)
    assert ModelConfig.from_json(INFERENCE) == published
    # transformers has no MTP block
    without = replace(published, num_nextn_predict_layers=0, compress_ratios=published.compress_ratios[:61])
    assert ModelConfig.from_json(HF) == without


@pytest.mark.parametrize("raw", [PRO, HF, INFERENCE])
def test_to_json_reads_back(raw):
    c = ModelConfig.from_json(raw)
    assert ModelConfig.from_json(json.loads(json.dumps(c.to_json()))) == c


def test_scaled_ratios():
    c = replace(wide_config(), csa_ratio=2, hca_ratio=8, compress_ratios=(2, 8, 2, 0, 0))
    assert [c.layer_kind(i) for i in range(5)] == ["csa", "hca", "csa", "window", "window"]
    assert ModelConfig.from_json(c.to_json()) == c
    only_hca = ModelConfig.from_json(PRO | {"compress_ratios": [16] * 61 + [0]})
    assert (only_hca.hca_ratio, only_hca.layer_kind(0)) == (16, "hca")


def test_mtp_entries_may_be_left_out():
    ratios = PRO["compress_ratios"]
    assert ModelConfig.from_json(PRO | {"compress_ratios": ratios[:-1]}) == ModelConfig.from_json(PRO)
    dropped = ModelConfig.from_json(PRO | {"num_nextn_predict_layers": 0})
    assert dropped.compress_ratios == tuple(ratios[:-1])


def test_dims_of_wide():
    assert wide_config().dims == replace(WIDE, vocab=2048)


BAD = {
    "llama": ({"model_type": "llama"}, "is for model_type 'llama', not deepseek_v4"),
    "a list": ([1, 2], "holds a list, wanted an object"),
    "no model_type": ({"hidden_size": 3}, "no model_type"),
    "text": (PRO | {"hidden_size": "7168"}, "hidden_size is '7168' (text), wanted a whole number"),
    "float": (PRO | {"hidden_size": 7168.0}, "hidden_size is 7168.0 (a number), wanted a whole number"),
    "bool": (PRO | {"o_groups": True}, "o_groups is True (true or false)"),
    "negative": (PRO | {"sliding_window": -1}, "sliding_window is -1"),
    "zero": (PRO | {"index_topk": 0}, "index_topk is 0, wanted at least 1"),
    "nan": (PRO | {"rope_theta": float("nan")}, "rope_theta is nan"),
    "huge": (PRO | {"hidden_size": 10**30}, "hidden_size"),
    "missing": ({k: v for k, v in PRO.items() if k != "q_lora_rank"}, "has no key q_lora_rank"),
    "missing, inference": ({k: v for k, v in INFERENCE.items() if k != "n_heads"}, "has no key n_heads"),
    "no ratios": ({k: v for k, v in PRO.items() if k != "compress_ratios"}, "has no key compress_ratios"),
    "no yarn": ({k: v for k, v in PRO.items() if k != "rope_scaling"}, "has no key rope_scaling.factor"),
    "groups": (PRO | {"o_groups": 3}, "o_groups is 3, wanted a divisor of 128"),
    "inference groups": (INFERENCE | {"rope_head_dim": 63}, "rope_head_dim is 63, wanted an even number"),
    "rope too wide": (PRO | {"qk_rope_head_dim": 512}, "qk_rope_head_dim is 512, wanted less than head_dim 512"),
    "top-k": (PRO | {"num_experts_per_tok": 385}, "num_experts_per_tok is 385, wanted at most 384"),
    "hash layers": (PRO | {"num_hash_layers": 62}, "num_hash_layers is 62, wanted at most 61"),
    "index dim": (PRO | {"index_head_dim": 96}, "index_head_dim is 96, wanted a power of two"),
    "short ratios": (PRO | {"compress_ratios": [4, 128]}, "compress_ratios has 2 entries, wanted 62"),
    "long ratios": (PRO | {"compress_ratios": [4] * 70}, "compress_ratios has 70 entries, wanted 62"),
    "ratio 1": (PRO | {"compress_ratios": [1] * 61 + [0]}, "compress_ratios entry 0 is 1, wanted one of 0, 4, 128"),
    "third ratio": (PRO | {"compress_ratios": [7, *PRO["compress_ratios"][1:]]}, "compress_ratios entry 0 is 7"),
    "mtp ratio": (PRO | {"compress_ratios": [*PRO["compress_ratios"][:-1], 4]}, "entry 61 is 4, for an MTP block"),
    "ratios text": (PRO | {"compress_ratios": "4"}, "compress_ratios is '4', wanted a list"),
    "ratios nested": (PRO | {"compress_ratios": [[4]] * 62}, "compress_ratios is [[4]"),
    "many mtp": (PRO | {"num_nextn_predict_layers": 2**31 - 1}, "compress_ratios has 62 entries"),
    "scoring": (PRO | {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', supported is only 'sqrtsoftplus'"),
    "inference scoring": (INFERENCE | {"score_func": "softmax"}, "score_func is 'softmax'"),
    "tied": (PRO | {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    "rope type": (PRO | {"rope_scaling": ROPE | {"type": "linear"}}, "rope_scaling.type is 'linear'"),
    "nvfp4": (PRO | {"quantization_config": {"moe_quant_algo": "NVFP4"}}, "moe_quant_algo is 'NVFP4'"),
    "layer type": (HF | {"layer_types": ["full_attention"] * 61}, "layer_types is ['full_attention'"),
    "layer type list": (HF | {"layer_types": [[]]}, "layer_types is [[]]"),
    "layer types short": (HF | {"layer_types": HF["layer_types"][:5]}, "layer_types has 5 entries, wanted 61"),
    "dense layer": (HF | {"mlp_layer_types": ["dense"] * 61}, "mlp_layer_types is ['dense'"),
    "hash layer late": (HF | {"mlp_layer_types": ["moe", "hash_moe"] * 30 + ["moe"]}, "wanted a list of hash_moe"),
    "mlp types short": (HF | {"mlp_layer_types": ["moe"]}, "mlp_layer_types has 1 entries"),
    "bos": (PRO | {"bos_token_id": 129280}, "bos_token_id is 129280, wanted less than vocab_size"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_config_is_one_sentence(case):
    raw, wanted = BAD[case]
    with pytest.raises(DbgError) as error:
        ModelConfig.from_json(raw)
    assert wanted in sentence(error)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b" " * (1 << 20) + b"{}", "is larger than"),
        (b"null", "holds null"),
    ],
    ids=["empty", "cut", "not UTF-8", "deep", "long", "null"],
)
def test_bad_file_is_one_sentence(tmp_path, text, wanted):
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(DbgError) as error:
        ModelConfig.from_file(path)
    assert wanted in sentence(error)
    assert str(path) in sentence(error)


def test_absent_file():
    with pytest.raises(DbgError, match="cannot be read"):
        ModelConfig.from_file("/nowhere/config.json")


def test_every_key_with_every_wrong_type():
    for raw in (PRO, HF, INFERENCE):
        for key in raw:
            for value in ("x", -1, 1.5, [], {}, [None], {"a": 1}, 10**40, float("inf")):
                # anything but a DbgError fails the test
                with contextlib.suppress(DbgError):
                    ModelConfig.from_json(raw | {key: value})


# published values of the inference code: index -> frequency
COMPRESS = {
    0: 1.0, 1: 0.687656045, 14: 0.00528685655, 15: 0.00363553851, 16: 0.00226562493, 20: 2.96977785e-4,
    24: 1.95312532e-5, 25: 5.37231244e-6, 31: 5.6805294e-7,
}  # fmt: skip
PLAIN = {0: 1.0, 1: 0.749894202, 15: 0.0133352149, 31: 1.3335215e-4}


@pytest.mark.parametrize(("compress", "values"), [(True, COMPRESS), (False, PLAIN)])
def test_frequencies(compress, values):
    frequency = inv_freq(wide_config(), compress)
    assert frequency.dtype == np.float32
    assert frequency.shape == (32,)
    for i, value in values.items():
        assert f"{frequency[i]:.8e}" == f"{value:.8e}"


def test_frequencies_are_those_of_torch():
    c = wide_config()
    plain = 1.0 / (10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64))
    assert np.array_equal(inv_freq(c, False), plain.numpy())
    base = 1.0 / (160000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64))
    keep = 1 - ((torch.arange(32, dtype=torch.float32) - 15) / 10).clamp(0, 1)
    assert np.array_equal(inv_freq(c, True), (base / 16 * (1 - keep) + base * keep).numpy())


@pytest.mark.parametrize("compress", [True, False])
def test_cos_sin_table(compress):
    c = wide_config()
    table = cos_sin_table(c, compress, 70_000)
    assert table.dtype == torch.float32
    assert table.shape == (70_000, 64)
    assert table.device.type == "cpu"
    assert torch.equal(table[0], torch.tensor([1.0] * 32 + [0.0] * 32))
    # the complex exponential of the inference code, to one unit in the last place
    for p in (1, 127, 65_535, 65_536, 69_999):
        angle = torch.tensor(p, dtype=torch.float32) * torch.from_numpy(inv_freq(c, compress))
        wave = torch.polar(torch.ones(32), angle)
        np.testing.assert_array_max_ulp(table[p, :32].numpy(), wave.real.numpy(), maxulp=1)
        np.testing.assert_array_max_ulp(table[p, 32:].numpy(), wave.imag.numpy(), maxulp=1)


def test_cos_sin_table_uses_the_float32_angle():
    table = cos_sin_table(wide_config(), True, 300_001)
    angle = np.float32(300_000) * inv_freq(wide_config(), True)[1]
    exact = np.float64(300_000) * np.float64(inv_freq(wide_config(), True)[1])
    assert table[300_000, 1] == np.float32(np.cos(np.float64(angle)))
    # so the difference from exact angles is seen there
    assert abs(float(table[300_000, 1]) - np.cos(exact)) > 1e-4


def test_empty_table():
    assert cos_sin_table(wide_config(), False, 0).shape == (0, 64)
