"""Router scores and the weights of chosen experts, shared by the learned and the hash router."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsv4dbg.kernels.numerics import Numerics


def router_scores(logits: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """``sqrt(softplus(z))`` ``[token, expert]`` (softplus is z above 20): float32, or rounded to the logits' dtype."""
    z = logits if numerics.router == "act" else logits.float()
    return F.softplus(z).sqrt()


def chosen_weights(scores: torch.Tensor, ids: torch.Tensor, scale: float, numerics: Numerics) -> torch.Tensor:
    """``scores[ids] / (sum(scores[ids]) + eps) * scale``, every step in the scores' dtype; result as float32."""
    chosen = scores.gather(1, ids)
    return (chosen / (chosen.sum(-1, keepdim=True) + numerics.router_eps) * scale).float()
