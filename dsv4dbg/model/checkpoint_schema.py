"""The tensors that a configuration implies: key, shape and the storage formats that are accepted.

The formats are those of the published checkpoints and their relatives; which one a file uses is read off its tensors'
dtypes, never off the configuration:

======== ================================================= =====================================================
form     dtype of ``.weight``                              ``.scale`` beside it
======== ================================================= =====================================================
linear   F8_E4M3 ``[out, in]``                             E8M0 or F32 ``[ceil(out/128), ceil(in/128)]``
linear   BF16, F32                                         none
experts  I8 ``[expert, out, in/2]`` (two e2m1 per byte)    E8M0 ``[expert, out, in/32]``
experts  F8_E4M3, BF16, F32 ``[expert, out, in]``          as for linear
plain    BF16, F32                                         none
float32  F32 (BF16 is widened)                             none
ids      I64 (I32 is widened)                              none
======== ================================================= =====================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4dbg.model.config import ModelConfig

BLOCK = 128  # FP8 weights have one scale per 128 x 128
GROUP = 32  # MXFP4 weights have one scale per 32 input channels

FP8, FLOATS, E8M0, PACKED = {"F8_E4M3"}, {"BF16", "F32"}, {"F8_E8M0", "U8"}, {"I8", "U8"}
DTYPES = {
    "linear": FP8 | FLOATS,
    "experts": FP8 | FLOATS | PACKED,
    "plain": FLOATS,
    "float32": FLOATS,
    "ids": {"I64", "I32"},
}


@dataclass(frozen=True)
class Expected:
    """Form and logical shape (in values, not in packed bytes) of one tensor."""

    form: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """Dtype (safetensors' name) and shape of a tensor as it is stored, experts already stacked.

    Attributes:
        problem: why the stored pieces do not make one tensor, if so.
    """

    dtype: str
    shape: tuple[int, ...]
    problem: str = ""


def ends_schema(c: ModelConfig) -> dict[str, Expected]:
    """Tensors outside the layers."""
    return {
        "embed.weight": Expected("plain", (c.vocab_size, c.hidden_size)),
        "head.weight": Expected("plain", (c.vocab_size, c.hidden_size)),
        "norm.weight": Expected("plain", (c.hidden_size,)),
        **_hc_head(c),
    }


def layer_schema(c: ModelConfig, layer: int) -> dict[str, Expected]:
    """Tensors of main layer ``layer`` (or of the block of MTP ``layer - num_hidden_layers``), without its prefix."""
    hidden, q_lora, o_lora = c.hidden_size, c.q_lora_rank, c.o_groups * c.o_lora_rank
    heads, experts, inner = c.num_attention_heads * c.head_dim, c.n_routed_experts, c.moe_intermediate_size
    schema = {
        "attn_norm.weight": Expected("plain", (hidden,)),
        "ffn_norm.weight": Expected("plain", (hidden,)),
        "attn.attn_sink": Expected("float32", (c.num_attention_heads,)),
        "attn.q_norm.weight": Expected("plain", (q_lora,)),
        "attn.kv_norm.weight": Expected("plain", (c.head_dim,)),
        "attn.wq_a.weight": Expected("linear", (q_lora, hidden)),
        "attn.wq_b.weight": Expected("linear", (heads, q_lora)),
        "attn.wkv.weight": Expected("linear", (c.head_dim, hidden)),
        "attn.wo_a.weight": Expected("linear", (o_lora, heads // c.o_groups)),
        "attn.wo_b.weight": Expected("linear", (hidden, o_lora)),
        "ffn.gate.weight": Expected("plain", (experts, hidden)),
        "ffn.experts.w1.weight": Expected("experts", (experts, inner, hidden)),
        "ffn.experts.w2.weight": Expected("experts", (experts, hidden, inner)),
        "ffn.experts.w3.weight": Expected("experts", (experts, inner, hidden)),
        "ffn.shared_experts.w1.weight": Expected("linear", (inner, hidden)),
        "ffn.shared_experts.w2.weight": Expected("linear", (hidden, inner)),
        "ffn.shared_experts.w3.weight": Expected("linear", (inner, hidden)),
    }
    mixes = (2 + c.hc_mult) * c.hc_mult
    for part in ("attn", "ffn"):
        schema[f"hc_{part}_fn"] = Expected("float32", (mixes, c.hc_mult * hidden))
        schema[f"hc_{part}_base"] = Expected("float32", (mixes,))
        schema[f"hc_{part}_scale"] = Expected("float32", (3,))
    if c.is_hash(layer):
        schema["ffn.gate.tid2eid"] = Expected("ids", (c.vocab_size, c.num_experts_per_tok))
    else:
        schema["ffn.gate.bias"] = Expected("float32", (experts,))
    kind, ratio = c.layer_kind(layer), c.ratio(layer)
    if kind != "window":
        schema |= _compressor(c, "attn.compressor", ratio, c.head_dim * (2 if kind == "csa" else 1), c.head_dim)
    if kind == "csa":
        schema["attn.indexer.wq_b.weight"] = Expected("linear", (c.index_n_heads * c.index_head_dim, q_lora))
        schema["attn.indexer.weights_proj.weight"] = Expected("plain", (c.index_n_heads, hidden))
        schema |= _compressor(c, "attn.indexer.compressor", ratio, 2 * c.index_head_dim, c.index_head_dim)
    return schema


def mtp_schema(c: ModelConfig, block: int) -> dict[str, Expected]:
    """Tensors of MTP block ``block``, without its prefix: a layer, its input projections, its own head mix and norm."""
    hidden = c.hidden_size
    return {
        **layer_schema(c, c.num_hidden_layers + block),
        "e_proj.weight": Expected("linear", (hidden, hidden)),
        "h_proj.weight": Expected("linear", (hidden, hidden)),
        "enorm.weight": Expected("plain", (hidden,)),
        "hnorm.weight": Expected("plain", (hidden,)),
        "norm.weight": Expected("plain", (hidden,)),
        **_hc_head(c),
    }


def full_schema(c: ModelConfig) -> dict[str, Expected]:
    """Every tensor of the model by its full key, without scales."""
    schema = dict(ends_schema(c))
    for i in range(c.num_hidden_layers):
        schema |= {f"layers.{i}.{name}": e for name, e in layer_schema(c, i).items()}
    for i in range(c.num_nextn_predict_layers):
        schema |= {f"mtp.{i}.{name}": e for name, e in mtp_schema(c, i).items()}
    return schema


def scale_key(key: str) -> str:
    """The key of the scales that belong to a weight."""
    return key.removesuffix(".weight") + ".scale"


def scale_of(e: Expected, dtype: str) -> tuple[set[str], tuple[int, ...]] | None:
    """Accepted dtypes and shape of the scales of a weight stored as ``dtype``; None where it has none."""
    if e.form == "experts" and dtype in PACKED:
        return E8M0, (*e.shape[:-1], -(-e.shape[-1] // GROUP))
    if e.form in ("linear", "experts") and dtype in FP8:
        return E8M0 | {"F32"}, (*e.shape[:-2], -(-e.shape[-2] // BLOCK), -(-e.shape[-1] // BLOCK))
    return None


def find_problems(schema: dict[str, Expected], found: dict[str, Stored], missing: bool = True) -> list[str]:
    """Every way in which ``found`` is not what ``schema`` says, one phrase each; ``missing``: absent tensors too."""
    problems, known = [], set()
    for key, e in schema.items():
        known.add(key)
        stored = found.get(key)
        if stored is None or stored.problem or stored.dtype not in DTYPES[e.form]:
            known.add(scale_key(key))
            if stored is not None:
                wanted = f"is {stored.dtype}, wanted {_either(DTYPES[e.form])}"
                problems.append(f"{key} {stored.problem or wanted}")
            elif missing:
                problems.append(f"{key} is missing")
            continue
        packed = e.form == "experts" and stored.dtype in PACKED
        problems += _shape(key, stored.shape, (*e.shape[:-1], -(-e.shape[-1] // 2)) if packed else e.shape)
        wanted = scale_of(e, stored.dtype)
        if wanted is None:
            continue
        key = scale_key(key)
        known.add(key)
        scale = found.get(key)
        if scale is None:
            problems += [f"{key} is missing ({stored.dtype} weights need it)"] if missing else []
        elif scale.problem or scale.dtype not in wanted[0]:
            problems.append(f"{key} {scale.problem or f'is {scale.dtype}, wanted {_either(wanted[0])}'}")
        else:
            problems += _shape(key, scale.shape, wanted[1])
    return problems + [f"{key} does not belong to this model" for key in sorted(found.keys() - known)]


def _shape(key: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> list[str]:
    return [] if shape == wanted else [f"{key} has shape {list(shape)}, wanted {list(wanted)}"]


def _either(dtypes: set[str]) -> str:
    return " or ".join(sorted(dtypes))


def _hc_head(c: ModelConfig) -> dict[str, Expected]:
    return {
        "hc_head_fn": Expected("float32", (c.hc_mult, c.hc_mult * c.hidden_size)),
        "hc_head_base": Expected("float32", (c.hc_mult,)),
        "hc_head_scale": Expected("float32", (1,)),
    }


def _compressor(c: ModelConfig, prefix: str, ratio: int, width: int, channels: int) -> dict[str, Expected]:
    return {
        f"{prefix}.ape": Expected("float32", (ratio, width)),
        f"{prefix}.wkv.weight": Expected("plain", (width, c.hidden_size)),
        f"{prefix}.wgate.weight": Expected("plain", (width, c.hidden_size)),
        f"{prefix}.norm.weight": Expected("plain", (channels,)),
    }
