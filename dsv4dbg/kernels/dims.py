"""Sizes that the ops need, and the two shapes on which everything is proved.

`TINY` has one scale group per row and four heads; `WIDE` has the real inner sizes of DeepSeek-V4 (head_dim 512,
64 heads, 64 x 128 indexer), where faults of layout show.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dims:
    """Model sizes as the ops see them; names follow config.json where it has one."""

    hidden: int
    heads: int
    head_dim: int
    rope_dim: int
    q_lora: int
    groups: int
    o_lora: int
    experts: int
    topk_experts: int
    expert_inner: int
    index_heads: int
    index_dim: int
    index_topk: int
    window: int
    csa_ratio: int = 4
    hca_ratio: int = 128
    hc_mult: int = 4
    vocab: int = 512


TINY = Dims(
    hidden=256, heads=4, head_dim=128, rope_dim=64, q_lora=128, groups=2, o_lora=64, experts=8, topk_experts=2,
    expert_inner=128, index_heads=4, index_dim=128, index_topk=64, window=128,
)  # fmt: skip
WIDE = Dims(
    hidden=256, heads=64, head_dim=512, rope_dim=64, q_lora=256, groups=8, o_lora=128, experts=32, topk_experts=6,
    expert_inner=256, index_heads=64, index_dim=128, index_topk=32, window=128,
)  # fmt: skip
PRESETS = {"tiny": TINY, "wide": WIDE}
