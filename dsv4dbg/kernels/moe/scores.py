"""Router scores and the weights of chosen experts, shared by the learned and the hash router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dsv4dbg.kernels.contract import Invariant
from dsv4dbg.kernels.invariants import first
from dsv4dbg.kernels.numerics import Numerics


def router_scores(logits: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """``sqrt(softplus(z))`` ``[token, expert]`` (softplus is z above 20): float32, or rounded to the logits' dtype."""
    z = logits if numerics.router == "act" else logits.float()
    return F.softplus(z).sqrt()


def chosen_weights(scores: torch.Tensor, ids: torch.Tensor, scale: float, numerics: Numerics) -> torch.Tensor:
    """``scores[ids] / (sum(scores[ids]) + eps) * scale``, every step in the scores' dtype; result as float32."""
    chosen = scores.gather(1, ids)
    return (chosen / (chosen.sum(-1, keepdim=True) + numerics.router_eps) * scale).float()


def sums_to_scale(call: Mapping[str, Any]) -> str | None:
    """Within what four bf16 roundings may leave (``router="act"``), in rows of finite logits."""
    total, scale = call["weights"].astype(np.float64).sum(axis=-1), call["scale"]
    bad = np.isfinite(call["logits"]).all(axis=-1) & ~(np.abs(total - scale) <= 2**-6 * scale)
    return f"weights of token {first(bad)[0]} sum to {total[bad][0]:g}, not {scale:g}" if bad.any() else None


def within_range(call: Mapping[str, Any]) -> str | None:
    bad = (call["ids"] < 0) | (call["ids"] >= call["logits"].shape[1])
    return f"id {call['ids'][bad][0]} at {first(bad)} is no expert" if bad.any() else None


def no_duplicates(call: Mapping[str, Any]) -> str | None:
    bad = (np.diff(np.sort(call["ids"], axis=-1), axis=-1) == 0).any(axis=-1)
    return f"token {first(bad)[0]} chooses an expert twice" if bad.any() else None


ROUTING_INVARIANTS = (
    Invariant("weights sum to the scale", sums_to_scale),
    Invariant("ids are experts", within_range),
    Invariant("no expert twice", no_duplicates),
)
