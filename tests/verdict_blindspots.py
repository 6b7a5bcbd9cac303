"""Eight faults that global distances and cosine pass, and two harmless changes that they fail; 1024 x 8 x 64."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import torch
from verdict_variants import Case, Outputs, case

from dsv4dbg.kernels.registry import registry
from dsv4dbg.kernels.samples import cos_sin, normal

BF16 = ml_dtypes.bfloat16
Change = Callable[[Case], Outputs]


def blind_spot_case() -> Case:
    """inv_rope: 1024 tokens, 8 heads, 64 channels in bf16."""
    rng = np.random.default_rng(0)
    o = normal(rng, 1024, 8, 64).to(torch.bfloat16)
    return case(registry().op("inv_rope"), {"o": o, "positions": torch.arange(1024), "cos_sin": cos_sin(1024, 64)})


def index_case() -> Case:
    """indexer_topk: 32 of 512 for 1024 tokens."""
    rng = np.random.default_rng(0)
    args = {"logits": normal(rng, 1024, 512), "lens": torch.full((1024,), 512, dtype=torch.int32), "k": 32}
    return case(registry().op("indexer_topk"), args)


def _dense(change: Callable[[np.ndarray, np.random.Generator], np.ndarray]) -> Change:
    def candidate(c: Case) -> Outputs:
        y = change(c.reference["y"].astype(np.float64), np.random.default_rng(1))
        return {"y": y.astype(BF16)}

    return candidate


def _garbage(y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    y[-1] = rng.standard_normal(y[-1].shape)
    return y


def _tile(y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    y[512:520, 3] = 0
    return y


def _head(y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    y[:, 5] *= 1.06
    return y


def _one_wrong(c: Case) -> Outputs:
    ids = c.reference["indices"].copy()
    worst = np.argsort(c.arrays["logits"], axis=1)[:, 0]
    ids[:, 31] = worst
    return {"indices": ids}


FAULTS: dict[str, Change] = {
    "last token all garbage": _dense(_garbage),
    "one head zero on an 8-token tile": _dense(_tile),
    "one head x 1.06 everywhere": _dense(_head),
    "all x 1.04": _dense(lambda y, rng: y * 1.04),
    "4 % white noise": _dense(lambda y, rng: y * (1 + 0.04 * rng.standard_normal(y.shape))),
    "all x 448/240": _dense(lambda y, rng: y * (448 / 240)),
    "one index of 32 wrong in every row": _one_wrong,
    "truncation instead of rounding": lambda c: {
        "y": (c.oracle["y"].astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(BF16)
    },
}
HARMLESS: dict[str, Change] = {
    "same top-32 sets, other order": lambda c: {"indices": np.ascontiguousarray(c.reference["indices"][:, ::-1])},
    "another last bit where values lie between": lambda c: {"y": c.oracle["y"].astype(np.float32).astype(BF16)},
}
