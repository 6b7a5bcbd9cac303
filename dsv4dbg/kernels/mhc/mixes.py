"""What the mHC ops share: the mix GEMM on normalised streams, and the weighted sum that collapses them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

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
