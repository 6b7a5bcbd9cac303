"""ModelConfig: every number the forward needs, read from any config.json that describes a DeepSeek-V4.

Three spellings are accepted: the published ``config.json``, the one transformers writes (``layer_types``,
``rope_parameters``, ``compress_rates``, ``mlp_layer_types``) and the one of the published inference code (``dim``,
``n_layers``, ...). Field names are those of the published file. Nothing is guessed for a key that differs between
models; a wrong or missing key is one sentence::

    config = ModelConfig.from_file("tiny/config.json")
    config.layer_kind(2), config.ratio(2), config.is_hash(0)      # ('csa', 4, True)
    config.dims                                                   # the sizes as the ops see them
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.model.config_keys import FIXED, HF_RATIO, PATHS, value_at

MAX_CONFIG_BYTES = 1 << 20
MAX_MTP_BLOCKS = 64
MAY_BE_ZERO = {"num_hash_layers", "num_nextn_predict_layers", "bos_token_id", "eos_token_id"}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one model. Construction checks them (`DbgError`), so `dataclasses.replace` does too.

    Attributes:
        compress_ratios: tokens per compressed entry, one number per main layer, then one per MTP block: 0 (sliding
            window only), `csa_ratio` (overlapping windows, with an indexer) or `hca_ratio`.
        rope_factor, rope_original_max_position, rope_beta_fast, rope_beta_slow: YaRN of the compressing layers.
        expert_dtype: what the file says, for display; the tensors' own dtypes decide.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    rope_theta: float
    compress_rope_theta: float
    rope_factor: float
    rope_original_max_position: int
    rope_beta_fast: float
    rope_beta_slow: float
    max_position_embeddings: int
    num_nextn_predict_layers: int = 0
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    bos_token_id: int = 0
    eos_token_id: int = 1
    csa_ratio: int = 4
    hca_ratio: int = 128
    expert_dtype: str | None = None

    def __post_init__(self) -> None:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        _check_types(values, str)
        _check_values(SimpleNamespace(**values), str)
        for f in fields(self):
            if f.type == "float":
                object.__setattr__(self, f.name, float(values[f.name]))

    @classmethod
    def from_file(cls, path: Path | str) -> ModelConfig:
        """Read a config.json.

        Raises:
            DbgError: unreadable, not JSON, another model, or a key that is missing, mistyped or impossible.
        """
        path = Path(path)
        try:
            with path.open("rb") as file:
                text = file.read(MAX_CONFIG_BYTES + 1)
        except OSError as e:
            raise DbgError(f"{path} cannot be read: {e.strerror}") from None
        if len(text) > MAX_CONFIG_BYTES:
            raise DbgError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes, no config.json is")
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise DbgError(f"{path} is not JSON: {e}") from None
        return cls.from_json(raw, str(path))

    @classmethod
    def from_json(cls, raw: Any, source: str = "config.json") -> ModelConfig:
        """Build from parsed JSON in any of the three spellings; ``source`` names the file in messages."""
        if not isinstance(raw, Mapping):
            raise DbgError(f"{source} holds {_kind(raw)}, wanted an object")
        _check_model(raw, source)
        found = {name: value_at(raw, paths) for name, paths in PATHS.items()}
        values = {name: value for name, (_, value) in found.items() if value is not None}
        names = {name: key for name, (key, _) in found.items()}
        if "model_type" not in raw:
            names |= {name: paths[-1] for name, paths in PATHS.items() if name not in values}
            values.setdefault("num_nextn_predict_layers", 1)  # the inference code's default, which its file leaves out

        def label(name: str) -> str:
            return f"{source}: {names.get(name, name)}"

        _fill_hash_layers(raw, values, source)
        _fill_ratios(raw, values, names, label)
        _check_types(values, label)
        if "max_position_embeddings" not in values and {"rope_factor", "rope_original_max_position"} <= values.keys():
            values["max_position_embeddings"] = int(values["rope_original_max_position"] * values["rope_factor"])
        defaults = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
        for f in fields(cls):
            if f.name not in values | defaults:
                raise DbgError(f"{source} has no key {names.get(f.name, f.name)}")
        _check_values(SimpleNamespace(**defaults | values), label)
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """The published spelling, plus ``compress_rates`` where the ratios are not 4 and 128; `from_json` reads it."""
        result: dict[str, Any] = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
        result |= {path: value for path, (_, value) in FIXED.items() if "." not in path}
        names = [f.name for f in fields(self) if not f.name.startswith(("rope_", "csa_", "hca_"))]
        result |= {name: getattr(self, name) for name in names}
        result["compress_ratios"] = list(self.compress_ratios)
        result["rope_theta"] = self.rope_theta
        result["rope_scaling"] = {
            "type": "yarn",
            "factor": self.rope_factor,
            "original_max_position_embeddings": self.rope_original_max_position,
            "beta_fast": self.rope_beta_fast,
            "beta_slow": self.rope_beta_slow,
        }
        if (self.csa_ratio, self.hca_ratio) != (4, 128):
            result["compress_rates"] = {HF_RATIO["csa"]: self.csa_ratio, HF_RATIO["hca"]: self.hca_ratio}
        return result

    @property
    def dims(self) -> Dims:
        """The sizes as the ops see them."""
        return Dims(
            hidden=self.hidden_size, heads=self.num_attention_heads, head_dim=self.head_dim,
            rope_dim=self.qk_rope_head_dim, q_lora=self.q_lora_rank, groups=self.o_groups, o_lora=self.o_lora_rank,
            experts=self.n_routed_experts, topk_experts=self.num_experts_per_tok,
            expert_inner=self.moe_intermediate_size, index_heads=self.index_n_heads, index_dim=self.index_head_dim,
            index_topk=self.index_topk, window=self.sliding_window, csa_ratio=self.csa_ratio,
            hca_ratio=self.hca_ratio, hc_mult=self.hc_mult, vocab=self.vocab_size,
        )  # fmt: skip

    def ratio(self, layer: int) -> int:
        """Tokens per compressed entry of main layer ``layer``; MTP block j is layer ``num_hidden_layers + j``."""
        return self.compress_ratios[layer]

    def layer_kind(self, layer: int) -> str:
        """``window`` (no compression), ``csa`` (overlapping windows and an indexer) or ``hca``."""
        ratio = self.ratio(layer)
        return "window" if ratio == 0 else "csa" if ratio == self.csa_ratio else "hca"

    def is_hash(self, layer: int) -> bool:
        """True where experts come from the token id (``tid2eid``) and not from the router's scores."""
        return layer < self.num_hash_layers


def inv_freq(config: ModelConfig, compress: bool) -> np.ndarray:
    """RoPE frequencies, radians per position: float32 ``[rope_dim / 2]``.

    ``f_i = 1 / theta^(2i / rope_dim)``; the compressing layers (CSA, HCA) use ``compress_rope_theta`` and YaRN, by
    parts and without attention factor: ``f / factor * ramp + f * (1 - ramp)``, the ramp rising from the dim that turns
    ``beta_fast`` times within the original length to the one that turns ``beta_slow`` times. Every step is rounded to
    float32 as in the official inference code; the power is rounded from float64, so that it is the same everywhere.
    """
    half = config.qk_rope_head_dim // 2
    theta = config.compress_rope_theta if compress else config.rope_theta
    exponent = np.arange(0, 2 * half, 2, dtype=np.float32) / np.float32(2 * half)
    frequency = np.float32(1) / np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)
    if not compress:
        return frequency

    def dim_turning(rotations: float) -> float:
        turns = config.rope_original_max_position / (rotations * 2 * math.pi)
        return half * math.log(turns) / math.log(theta)

    low = max(math.floor(dim_turning(config.rope_beta_fast)), 0)
    high = min(math.ceil(dim_turning(config.rope_beta_slow)), 2 * half - 1)
    ramp = (np.arange(half, dtype=np.float32) - np.float32(low)) / np.float32(max(high - low, 1e-3))
    keep = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    return frequency / np.float32(config.rope_factor) * (np.float32(1) - keep) + frequency * keep


def cos_sin_table(config: ModelConfig, compress: bool, max_position: int) -> torch.Tensor:
    """RoPE table, float32 ``[max_position, rope_dim]`` on the CPU: rope_dim/2 cosines, then as many sines.

    The angle is the float32 product of position and frequency: near position 10^6 its rounding (up to 0.03 rad) is part
    of the definition. Its cosine and sine are rounded from float64, so that they are the same on every machine.
    """
    frequency = inv_freq(config, compress)
    half = len(frequency)
    table = np.empty((max_position, 2 * half), dtype=np.float32)
    for start in range(0, max_position, 1 << 16):
        position = np.arange(start, min(start + (1 << 16), max_position), dtype=np.float32)
        angle = (position[:, None] * frequency).astype(np.float64)
        rows = table[start : start + len(position)]
        rows[:, :half], rows[:, half:] = np.cos(angle), np.sin(angle)
    return torch.from_numpy(table)


def _check_model(raw: Mapping[str, Any], source: str) -> None:
    model_type = raw.get("model_type")
    if model_type is None and not {"dim", "n_layers"} <= raw.keys():
        raise DbgError(f"{source} has no model_type, wanted 'deepseek_v4'")
    if model_type is not None and model_type != "deepseek_v4":
        raise DbgError(f"{source} is for model_type {_short(model_type)}, not deepseek_v4")
    for spelling, wanted in FIXED.values():
        label, value = value_at(raw, spelling)
        if value is not None and value != wanted:
            raise DbgError(f"{source}: {label} is {_short(value)}, supported is only {_short(wanted)}")


def _fill_hash_layers(raw: Mapping[str, Any], values: dict[str, Any], source: str) -> None:
    """``num_hash_layers`` from transformers' list ``mlp_layer_types``."""
    kinds = raw.get("mlp_layer_types")
    if kinds is None or "num_hash_layers" in values:
        return
    count = kinds.count("hash_moe") if isinstance(kinds, list) else 0
    wanted = ["hash_moe"] * count + ["moe"] * (len(kinds) - count) if isinstance(kinds, list) else None
    if kinds != wanted:
        raise DbgError(f"{source}: mlp_layer_types is {_short(kinds)}, wanted a list of hash_moe, then moe")
    if len(kinds) != values.get("num_hidden_layers"):
        raise DbgError(f"{source}: mlp_layer_types has {len(kinds)} entries, num_hidden_layers differs")
    values["num_hash_layers"] = count


def _fill_ratios(
    raw: Mapping[str, Any], values: dict[str, Any], names: dict[str, str], label: Callable[[str], str]
) -> None:
    """``compress_ratios`` (also from transformers' ``layer_types``) with MTP entries, and ``hca_ratio`` from it."""
    layer_types, ratios = raw.get("layer_types"), values.get("compress_ratios")
    if ratios is None and layer_types is not None:
        names["compress_ratios"] = "layer_types"
        # transformers drops the MTP blocks, in this list and in the weights it writes
        values["num_nextn_predict_layers"] = 0
        rates = {"sliding_attention": 0, HF_RATIO["csa"]: values.get("csa_ratio", 4)}
        rates[HF_RATIO["hca"]] = values.get("hca_ratio", 128)
        if not isinstance(layer_types, list) or not all(isinstance(k, str) and k in rates for k in layer_types):
            raise DbgError(f"{label('compress_ratios')} is {_short(layer_types)}, wanted a list of {', '.join(rates)}")
        ratios = [rates[k] for k in layer_types]
    if ratios is None:
        return
    if not isinstance(ratios, list) or not all(type(r) is int and r >= 0 for r in ratios):
        raise DbgError(f"{label('compress_ratios')} is {_short(ratios)}, wanted a list of whole numbers >= 0")
    layers, blocks = values.get("num_hidden_layers"), values.setdefault("num_nextn_predict_layers", 0)
    if type(layers) is int and type(blocks) is int:
        # vLLM and transformers know lists without the MTP entries, which are 0 (no compression) in every release
        missing = layers + blocks - len(ratios)
        if 0 < missing <= min(blocks, MAX_MTP_BLOCKS):
            ratios = [*ratios, *[0] * missing]
        elif missing < 0 and not any(ratios[missing:]):
            ratios = ratios[:missing]
    values["compress_ratios"] = tuple(ratios)
    # 1 is vLLM's code for "no compression", not a ratio
    other = {r for r in ratios if r not in (0, 1, values.get("csa_ratio", 4))}
    if "hca_ratio" not in values and len(other) == 1:
        values["hca_ratio"] = other.pop()


def _check_types(values: Mapping[str, Any], label: Callable[[str], str]) -> None:
    for f in fields(ModelConfig):
        if f.name not in values:
            continue
        value = values[f.name]
        if f.type == "int" and not (type(value) is int and 0 <= value < 2**31):
            raise DbgError(f"{label(f.name)} is {_short(value)} ({_kind(value)}), wanted a whole number >= 0")
        if f.type == "float" and not (type(value) in (int, float) and 0 < value < 1e30):
            raise DbgError(f"{label(f.name)} is {_short(value)} ({_kind(value)}), wanted a number above 0")
        if f.type == "str | None" and not isinstance(value, str | None):
            raise DbgError(f"{label(f.name)} is {_short(value)} ({_kind(value)}), wanted text")


def _check_values(c: SimpleNamespace, label: Callable[[str], str]) -> None:
    for f in fields(ModelConfig):
        if f.type == "int" and f.name not in MAY_BE_ZERO and getattr(c, f.name) == 0:
            raise DbgError(f"{label(f.name)} is 0, wanted at least 1")

    def need(name: str, ok: bool, wanted: str) -> None:
        if not ok:
            raise DbgError(f"{label(name)} is {_short(getattr(c, name))}, wanted {wanted}")

    need("o_groups", c.num_attention_heads % c.o_groups == 0, f"a divisor of {c.num_attention_heads} attention heads")
    need("qk_rope_head_dim", c.qk_rope_head_dim % 2 == 0, "an even number")
    need("qk_rope_head_dim", c.qk_rope_head_dim < c.head_dim, f"less than head_dim {c.head_dim}")
    need("qk_rope_head_dim", c.qk_rope_head_dim <= c.index_head_dim, f"at most index_head_dim {c.index_head_dim}")
    need("index_head_dim", c.index_head_dim & (c.index_head_dim - 1) == 0, "a power of two (Hadamard rotation)")
    need("num_experts_per_tok", c.num_experts_per_tok <= c.n_routed_experts, f"at most {c.n_routed_experts} experts")
    need("num_hash_layers", c.num_hash_layers <= c.num_hidden_layers, f"at most {c.num_hidden_layers} layers")
    need("bos_token_id", c.bos_token_id < c.vocab_size, f"less than vocab_size {c.vocab_size}")
    need("eos_token_id", c.eos_token_id < c.vocab_size, f"less than vocab_size {c.vocab_size}")
    need("rope_factor", c.rope_factor >= 1, "at least 1")
    need("rope_theta", c.rope_theta > 1, "more than 1")
    need("compress_rope_theta", c.compress_rope_theta > 1, "more than 1")
    need("rope_beta_slow", c.rope_beta_slow < c.rope_beta_fast, f"less than beta_fast {c.rope_beta_fast}")
    need("csa_ratio", c.csa_ratio > 1, "at least 2")
    need("hca_ratio", c.hca_ratio not in (1, c.csa_ratio), f"at least 2 and not the CSA ratio {c.csa_ratio}")
    layers, blocks = c.num_hidden_layers, c.num_nextn_predict_layers
    if len(c.compress_ratios) != layers + blocks:
        raise DbgError(
            f"{label('compress_ratios')} has {len(c.compress_ratios)} entries, wanted {layers + blocks} "
            f"({layers} layers and {blocks} MTP blocks)"
        )
    for i, ratio in enumerate(c.compress_ratios):
        allowed = (0, c.csa_ratio, c.hca_ratio) if i < layers else (0,)
        if ratio not in allowed:
            what = "for an MTP block, wanted 0" if i >= layers else f"wanted one of {', '.join(map(str, allowed))}"
            raise DbgError(f"{label('compress_ratios')} entry {i} is {ratio}, {what}")


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
