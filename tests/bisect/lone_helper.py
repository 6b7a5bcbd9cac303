"""Stands beside the plug-in of reproducers' tests."""

from __future__ import annotations

import torch


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (weight.float() * wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype)
