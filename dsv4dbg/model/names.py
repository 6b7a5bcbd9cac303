"""Tensor names: what a checkpoint calls its tensors, and the one key that we know each of them by.

A **key** is the published (official) name, with the experts of a layer stacked into one tensor:
``layers.3.ffn.experts.w1.weight`` ``[expert, out, in]``. Accepted names are the published ones (one tensor per
expert) and those of transformers, which stacks experts and joins gate and up::

    parts("layers.3.ffn.experts.17.w1.weight")
        # (Part("layers.3.ffn.experts.w1.weight", expert=17),)
    parts("model.layers.3.mlp.experts.gate_up_proj")
        # (Part("layers.3.ffn.experts.w1.weight", half=0), Part("layers.3.ffn.experts.w3.weight", half=1))
    hf_name("layers.3.ffn.experts.w3.weight")        # ("model.layers.3.mlp.experts.gate_up_proj", 1)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# transformers -> official, modules of a layer whose tensors are `.weight` and, for FP8, a scale
MODULES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attn.wq_a",
    "self_attn.q_b_proj": "attn.wq_b",
    "self_attn.kv_proj": "attn.wkv",
    "self_attn.o_a_proj": "attn.wo_a",
    "self_attn.o_b_proj": "attn.wo_b",
    "self_attn.q_a_norm": "attn.q_norm",
    "self_attn.kv_norm": "attn.kv_norm",
    "self_attn.compressor.kv_proj": "attn.compressor.wkv",
    "self_attn.compressor.gate_proj": "attn.compressor.wgate",
    "self_attn.compressor.kv_norm": "attn.compressor.norm",
    "self_attn.compressor.indexer.q_b_proj": "attn.indexer.wq_b",
    "self_attn.compressor.indexer.scorer.weights_proj": "attn.indexer.weights_proj",
    "self_attn.compressor.indexer.kv_proj": "attn.indexer.compressor.wkv",
    "self_attn.compressor.indexer.gate_proj": "attn.indexer.compressor.wgate",
    "self_attn.compressor.indexer.kv_norm": "attn.indexer.compressor.norm",
    "mlp.gate": "ffn.gate",
    "mlp.shared_experts.gate_proj": "ffn.shared_experts.w1",
    "mlp.shared_experts.up_proj": "ffn.shared_experts.w3",
    "mlp.shared_experts.down_proj": "ffn.shared_experts.w2",
}
# transformers -> official, single tensors of a layer
TENSORS = {
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.compressor.position_bias": "attn.compressor.ape",
    "self_attn.compressor.indexer.position_bias": "attn.indexer.compressor.ape",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    **{f"{part}_hc.{leaf}": f"hc_{part}_{leaf}" for part in ("attn", "ffn") for leaf in ("fn", "base", "scale")},
}
# transformers -> official, tensors outside the layers
ENDS = {
    "embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "norm.weight": "norm.weight",
    **{f"hc_head.hc_{leaf}": f"hc_head_{leaf}" for leaf in ("fn", "base", "scale")},
}
# transformers' stacked experts -> official; two names share the rows, first half and second half
STACKS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
# official and transformers' names of one expert's matrices
EXPERT = {"w1": "w1", "w2": "w2", "w3": "w3", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
LEAVES = {"weight": "weight", "scale": "scale", "weight_scale_inv": "scale"}

_LAYER = {f"{hf}.{leaf}": f"{name}.{LEAVES[leaf]}" for hf, name in MODULES.items() for leaf in LEAVES} | TENSORS
_SCOPE = re.compile(r"((?:layers|mtp)\.\d+)\.(.+)")
_STACKED = re.compile(r"(?:ffn|mlp)\.experts\.(gate_up_proj|down_proj)(_scale_inv)?")
_ONE_EXPERT = re.compile(r"(?:ffn|mlp)\.experts\.(\d{1,6})\.(\w+)\.(\w+)")
# copies of embedding and head inside MTP blocks, which share the model's; buffers that are computed
_IGNORED = re.compile(r"(?:.*\.)?(?:mtp\.\d+\.(?:emb|head|embed_tokens|lm_head)|rotary_emb)\.")


@dataclass(frozen=True)
class Part:
    """A stored tensor's place in the tensor of a key: all of it, expert ``expert``, or one ``half`` of its source.

    Attributes:
        half: 0 or 1 when only that half of the stored tensor's rows (dim -2) belongs to the key.
    """

    key: str
    expert: int | None = None
    half: int | None = None


def parts(name: str) -> tuple[Part, ...]:
    """Where a stored tensor belongs; empty for tensors that no forward needs. An unknown name is its own key."""
    if _IGNORED.match(name):
        return ()
    bare = name.removeprefix("model.")
    scope = _SCOPE.fullmatch(bare)
    if not scope:
        return (Part(ENDS.get(bare, bare)),)
    layer, rest = scope.groups()
    if rest in _LAYER:
        return (Part(f"{layer}.{_LAYER[rest]}"),)
    if stacked := _STACKED.fullmatch(rest):
        names, leaf = STACKS[stacked[1]], "scale" if stacked[2] else "weight"
        halves = range(len(names)) if len(names) > 1 else (None,)
        return tuple(Part(f"{layer}.ffn.experts.{w}.{leaf}", half=h) for w, h in zip(names, halves, strict=True))
    one = _ONE_EXPERT.fullmatch(rest)
    if one and one[2] in EXPERT and one[3] in LEAVES:
        return (Part(f"{layer}.ffn.experts.{EXPERT[one[2]]}.{LEAVES[one[3]]}", expert=int(one[1])),)
    # names that DeepSeek's converter also accepts: official leaves under transformers' module names
    rest = re.sub(r"^self_attn\.", "attn.", re.sub(r"^mlp\.", "ffn.", rest))
    rest = re.sub(r"\.weight_scale_inv$", ".scale", re.sub(r"\.e_score_correction_bias$", ".bias", rest))
    return (Part(f"{layer}.{rest}"),)


_HF_LAYER = {f"{name}.weight": f"{hf}.weight" for hf, name in MODULES.items()}
_HF_LAYER |= {f"{name}.scale": f"{hf}.weight_scale_inv" for hf, name in MODULES.items()}
_HF_LAYER |= {name: hf for hf, name in TENSORS.items()}
for _hf, _names in STACKS.items():
    _HF_LAYER |= {f"ffn.experts.{w}.weight": f"mlp.experts.{_hf}" for w in _names}
    _HF_LAYER |= {f"ffn.experts.{w}.scale": f"mlp.experts.{_hf}_scale_inv" for w in _names}
_HF_ENDS = {name: hf for hf, name in ENDS.items()}


def hf_name(key: str) -> tuple[str, int | None] | None:
    """The transformers name of a key and which half of that tensor it is; None where transformers has none."""
    scope = _SCOPE.fullmatch(key)
    rest = _HF_LAYER.get(scope[2]) if scope else _HF_ENDS.get(key)
    if rest is None or key.startswith("mtp."):
        return None
    half = {"w1": 0, "w3": 1}.get(key.split(".")[-2]) if ".ffn.experts." in key else None
    full = f"{scope[1]}.{rest}" if scope else rest
    return (full if full == "lm_head.weight" else f"model.{full}"), half


def expert_names(key: str, experts: int) -> list[str] | None:
    """The published names of a stacked key's tensors, in order of the expert; None when ``key`` is not stacked."""
    head, found, tail = key.partition(".ffn.experts.")
    return [f"{head}.ffn.experts.{j}.{tail}" for j in range(experts)] if found else None
