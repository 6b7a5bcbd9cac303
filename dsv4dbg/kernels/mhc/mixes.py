"""What the mHC ops share: the mix GEMM on normalised streams, the weighted sum that collapses them, its bound."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from dsv4dbg.kernels.invariants import first
from dsv4dbg.kernels.numerics import Numerics


def mixes(streams: torch.Tensor, fn: torch.Tensor, norm_eps: float, numerics: Numerics) -> torch.Tensor:
    """``(flatten(streams) / rms) @ fn^T`` in float32: ``[token, stream, channel]`` to ``[token, mix]``.

    The rms is over all streams of a token. ``mhc_norm`` says whether its reciprocal multiplies the result of the
    GEMM ("after") or its input ("before").
    """
    x = streams.float().flatten(1)
    factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps)
    if numerics.mhc_norm == "before":
        return F.linear(x * factor, fn.float())
    return F.linear(x, fn.float()) * factor


def collapse(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``sum_j weights[:, j] * streams[:, j]`` in float32, streams in ascending order: ``[token, channel]``."""
    total = weights[:, 0, None] * streams[:, 0].float()
    for j in range(1, streams.shape[1]):
        total = total + weights[:, j, None] * streams[:, j].float()
    return total


def bounded_by(y: np.ndarray, terms: np.ndarray, name: str) -> str | None:
    """One sentence if ``|y|`` exceeds the sum of its terms' sizes by more than a few bf16 roundings."""
    bad = np.abs(y) > terms * (1 + 2.0**-5) + 1e-30
    if not bad.any():
        return None
    where = first(bad)
    return f"{name} is {y[where]} at {where}, its terms add up to at most {terms[where]}"
