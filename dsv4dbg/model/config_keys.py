"""Where each field of `ModelConfig` stands in the three spellings of config.json: data, and one look-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HF_RATIO = {"csa": "compressed_sparse_attention", "hca": "heavily_compressed_attention"}

# field -> dotted paths, the first that is present counts; the last is the spelling of the inference code's config
PATHS: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_heads"),
    "head_dim": ("head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim", "rope_head_dim"),
    "q_lora_rank": ("q_lora_rank",),
    "o_groups": ("o_groups",),
    "o_lora_rank": ("o_lora_rank",),
    "sliding_window": ("sliding_window", "window_size"),
    "compress_ratios": ("compress_ratios",),
    "index_n_heads": ("index_n_heads",),
    "index_head_dim": ("index_head_dim",),
    "index_topk": ("index_topk",),
    "moe_intermediate_size": ("moe_intermediate_size", "moe_inter_dim"),
    "n_routed_experts": ("n_routed_experts",),
    "num_experts_per_tok": ("num_experts_per_tok", "n_activated_experts"),
    "num_hash_layers": ("num_hash_layers", "n_hash_layers"),
    "routed_scaling_factor": ("routed_scaling_factor", "route_scale"),
    "swiglu_limit": ("swiglu_limit",),
    "hc_mult": ("hc_mult",),
    "hc_sinkhorn_iters": ("hc_sinkhorn_iters",),
    "hc_eps": ("hc_eps",),
    "rms_norm_eps": ("rms_norm_eps", "norm_eps"),
    "rope_theta": ("rope_parameters.main.rope_theta", "rope_theta"),
    "compress_rope_theta": ("rope_parameters.compress.rope_theta", "compress_rope_theta"),
    "rope_factor": ("rope_scaling.factor", "rope_parameters.compress.factor", "rope_factor"),
    "rope_original_max_position": (
        "rope_scaling.original_max_position_embeddings",
        "rope_parameters.compress.original_max_position_embeddings",
        "original_seq_len",
    ),
    "rope_beta_fast": ("rope_scaling.beta_fast", "rope_parameters.compress.beta_fast", "beta_fast"),
    "rope_beta_slow": ("rope_scaling.beta_slow", "rope_parameters.compress.beta_slow", "beta_slow"),
    "max_position_embeddings": ("max_position_embeddings",),
    "num_nextn_predict_layers": ("num_nextn_predict_layers", "n_mtp_layers"),
    "bos_token_id": ("bos_token_id",),
    "eos_token_id": ("eos_token_id",),
    "expert_dtype": ("expert_dtype", "quantization_config.expert_dtype"),
    "csa_ratio": (f"compress_rates.{HF_RATIO['csa']}",),
    "hca_ratio": (f"compress_rates.{HF_RATIO['hca']}",),
}

# key -> (spellings, the only value that the forward implements); a key that is absent is fine
FIXED: dict[str, tuple[tuple[str, ...], Any]] = {
    "hidden_act": (("hidden_act",), "silu"),
    "scoring_func": (("scoring_func", "score_func"), "sqrtsoftplus"),
    "topk_method": (("topk_method",), "noaux_tc"),
    "norm_topk_prob": (("norm_topk_prob",), True),
    "n_shared_experts": (("n_shared_experts",), 1),
    "num_key_value_heads": (("num_key_value_heads",), 1),
    "attention_bias": (("attention_bias",), False),
    "tie_word_embeddings": (("tie_word_embeddings",), False),
    "mlp_bias": (("mlp_bias",), False),
    "rope_scaling.type": (("rope_scaling.type", "rope_scaling.rope_type"), "yarn"),
    "rope_parameters.main.rope_type": (("rope_parameters.main.rope_type",), "default"),
    "rope_parameters.compress.rope_type": (("rope_parameters.compress.rope_type",), "yarn"),
    "rope_parameters.compress.attention_factor": (("rope_parameters.compress.attention_factor",), 1.0),
    "quantization_config.quant_method": (("quantization_config.quant_method",), "fp8"),
    "quantization_config.weight_block_size": (("quantization_config.weight_block_size",), [128, 128]),
    "quantization_config.moe_quant_algo": (("quantization_config.moe_quant_algo",), None),
}


def value_at(raw: Mapping[str, Any], paths: tuple[str, ...]) -> tuple[str, Any]:
    """The first of the dotted ``paths`` that is present and not null, and its value; else the first path and None."""
    for path in paths:
        node: Any = raw
        for key in path.split("."):
            node = node.get(key) if isinstance(node, Mapping) else None
        if node is not None:
            return path, node
    return paths[0], None
