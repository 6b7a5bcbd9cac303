"""Synthetic weights: the same bytes on every machine, from integer hashes of tensor name and index.

The storage formats are the published ones (FP8 with E8M0 scales per 128 x 128, MXFP4 experts, bf16, float32), with
scales that differ from block to block, so that a kernel that takes the wrong one is seen. Spreads keep activations near
1 and leave router and indexer with real choices::

    source = Synthetic(wide_config(), "wide")
    source.read("layers.0.attn.wq_b.weight")        # float8_e4m3fn [32768, 256]

`wide_config` is the model ``wide``: four layers and an MTP block with the real inner sizes and a small hidden size.
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist

import numpy as np
import torch
import xxhash

from dsv4dbg.kernels.dims import WIDE
from dsv4dbg.model.checkpoint_files import Info
from dsv4dbg.model.checkpoint_schema import Expected, full_schema, scale_key, scale_of
from dsv4dbg.model.config import ModelConfig

# bf16 and float32 tensors by the end of their key, the first match counts: mean and standard deviation;
# "rows": the deviation is divided by the square root of the last dim (a linear whose input has unit variance)
SPREADS: tuple[tuple[str, float, float, str], ...] = (
    ("norm.weight", 1.0, 0.1, ""),
    ("embed.weight", 0.0, 0.5, ""),
    ("head.weight", 0.0, 2.0, "rows"),
    ("gate.weight", 0.0, 1.5, "rows"),
    ("gate.bias", 0.0, 0.05, ""),
    (".weight", 0.0, 1.0, "rows"),
    ("attn_sink", 0.0, 1.0, ""),
    ("ape", 0.0, 0.5, ""),
    ("_fn", 0.0, 1.0, "rows"),
    ("_scale", 0.5, 0.05, ""),
)
# FP8 codes are quantiles of a normal distribution with this deviation (the largest is 432 of 448)
FP8_SPREAD = 100.0
# root mean square of the 16 e2m1 codes
FP4_SPREAD = 2.93
# exponents of a tensor's scales, relative to the one that gives unit variance
EXPONENT_OFFSETS = np.array([-2, -1, 0, 1])


def wide_config() -> ModelConfig:
    """The model ``wide``: CSA and HCA with hash routing, CSA and window-only with scored routing, one MTP block."""
    return ModelConfig(
        vocab_size=2048, hidden_size=WIDE.hidden, num_hidden_layers=4, num_attention_heads=WIDE.heads,
        head_dim=WIDE.head_dim, qk_rope_head_dim=WIDE.rope_dim, q_lora_rank=WIDE.q_lora, o_groups=WIDE.groups,
        o_lora_rank=WIDE.o_lora, sliding_window=WIDE.window,
        compress_ratios=(WIDE.csa_ratio, WIDE.hca_ratio, WIDE.csa_ratio, 0, 0), index_n_heads=WIDE.index_heads,
        index_head_dim=WIDE.index_dim, index_topk=WIDE.index_topk, moe_intermediate_size=WIDE.expert_inner,
        n_routed_experts=WIDE.experts, num_experts_per_tok=WIDE.topk_experts, num_hash_layers=2,
        routed_scaling_factor=1.5, swiglu_limit=10.0, hc_mult=WIDE.hc_mult, hc_sinkhorn_iters=20, rope_theta=10000.0,
        compress_rope_theta=160000.0, rope_factor=16.0, rope_original_max_position=65536, rope_beta_fast=32.0,
        rope_beta_slow=1.0, max_position_embeddings=1048576, num_nextn_predict_layers=1, csa_ratio=WIDE.csa_ratio,
        hca_ratio=WIDE.hca_ratio, expert_dtype="fp4",
    )  # fmt: skip


class Synthetic:
    """A source (see `dsv4dbg.model.checkpoint_files`) that makes its tensors when they are read, experts stacked.

    Args:
        seed: another seed gives other weights.
        keep: hold on to every tensor once it is made; for models that fit in memory.
    """

    def __init__(self, config: ModelConfig, seed: str, keep: bool = False) -> None:
        self.problems: list[str] = []
        self.tensors: dict[str, Info] = {}
        self._config = config
        self._seed = seed
        self._kept: dict[str, torch.Tensor] | None = {} if keep else None
        self._schema = full_schema(config)
        for key, e in self._schema.items():
            dtype, shape = _format(e)
            self.tensors[key] = Info(dtype, shape)
            if scale := scale_of(e, dtype):
                self.tensors[scale_key(key)] = Info("U8", scale[1])

    def read(self, name: str) -> torch.Tensor:
        if self._kept is None:
            return self._make(name)
        if name not in self._kept:
            self._kept[name] = self._make(name)
        return self._kept[name]

    def _make(self, name: str) -> torch.Tensor:
        shape = self.tensors[name].shape
        if name.endswith(".scale"):
            weight = self._schema[name.removesuffix(".scale") + ".weight"]
            unit = (FP8_SPREAD if weight.form == "linear" else FP4_SPREAD) * weight.shape[-1] ** 0.5
            base = 127 - round(np.log2(unit))
            offsets = EXPONENT_OFFSETS[self._bytes(name, shape) & 3]
            return torch.from_numpy((base + offsets).astype(np.uint8))
        form = self._schema[name].form
        if form == "linear":
            return torch.from_numpy(_fp8_codes()[self._shorts(name, shape)]).view(torch.float8_e4m3fn)
        if form == "experts":
            return torch.from_numpy(self._bytes(name, shape))
        if form == "ids":
            return self._routes(name, shape)
        values = self._head_mix(name, shape) if name.endswith("_base") else self._normal(name, shape)
        return values.to(torch.bfloat16) if form == "plain" else values

    def _words(self, name: str, count: int) -> np.ndarray:
        """``count`` uint64 words: splitmix64 in counter mode, seeded with the name."""
        z = np.arange(1, count + 1, dtype=np.uint64)
        z *= np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64(xxhash.xxh3_64_intdigest(f"{self._seed}/{name}".encode()))
        z ^= z >> np.uint64(30)
        z *= np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
        z *= np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        return z.astype("<u8", copy=False)

    def _bytes(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        count = int(np.prod(shape))
        return self._words(name, -(-count // 8)).view(np.uint8)[:count].reshape(shape)

    def _shorts(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        count = int(np.prod(shape))
        return self._words(name, -(-count // 4)).view("<u2")[:count].reshape(shape)

    def _normal(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """float32, nearly normal: the sum of four 16-bit numbers, so that only exact and IEEE operations occur."""
        _, mean, spread, rule = next(entry for entry in SPREADS if name.endswith(entry[0]))
        parts = self._shorts(name, (*shape, 4))
        centred = (parts.sum(-1, dtype=np.int64) - 2 * 65535).astype(np.float32)
        unit = np.float32(spread / (65536 / 3**0.5) / (shape[-1] ** 0.5 if rule == "rows" else 1.0))
        return torch.from_numpy(centred * unit + np.float32(mean))

    def _head_mix(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """mHC biases that keep the streams apart: staggered pre and post, a stream mix near the identity."""
        streams, layer = self._config.hc_mult, self._words(name, 1)[0] % np.uint64(self._config.hc_mult)
        pre = np.linspace(-1, 0, streams)
        if shape == (streams,):
            return torch.from_numpy(pre.astype(np.float32))
        post = np.roll(np.linspace(0.7, -0.7, streams), int(layer))
        return torch.from_numpy(np.concatenate((pre, post, 2 * np.eye(streams).ravel())).astype(np.float32))

    def _routes(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Distinct experts per token id: the first of a random order."""
        keys = self._words(name, shape[0] * self._config.n_routed_experts).reshape(shape[0], -1)
        return torch.from_numpy(np.argsort(keys, axis=1, kind="stable")[:, : shape[1]].astype(np.int64))


def _format(e: Expected) -> tuple[str, tuple[int, ...]]:
    if e.form == "experts":
        return "U8", (*e.shape[:-1], e.shape[-1] // 2)
    return {"linear": "F8_E4M3", "plain": "BF16", "float32": "F32", "ids": "I64"}[e.form], e.shape


@cache
def _fp8_codes() -> np.ndarray:
    """e4m3fn code for each 16-bit number: normal quantiles, and among the smallest every code that they skip."""
    normal = NormalDist(sigma=FP8_SPREAD)
    positive = torch.tensor([normal.inv_cdf(0.5 + (i + 0.5) / 65536) for i in range(32768)])
    codes = positive.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    codes[:32] = range(32)
    return np.concatenate((codes, codes | 0x80))
