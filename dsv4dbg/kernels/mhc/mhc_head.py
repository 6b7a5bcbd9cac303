"""mhc_head: collapse the residual streams before the final norm (of the model, and of each MTP block)."""

from __future__ import annotations

import torch

from dsv4dbg.compare import Dense
from dsv4dbg.kernels.contract import attr, op, tensor, weight
from dsv4dbg.kernels.mhc.mixes import collapse, mixes
from dsv4dbg.kernels.numerics import Numerics


@op(
    family="mhc",
    args={
        "streams": tensor("token stream channel", "act"),
        "fn": weight("mix flat", "f32", "mix GEMM, columns stream-major"),
        "scale": weight("part", "f32"),
        "base": weight("mix", "f32"),
        "norm_eps": attr("added to the mean square"),
        "hc_eps": attr("added to the weights"),
    },
    outputs={"y": tensor("token channel", "act")},
    compare={"y": Dense(terms="stream channel", magnitude=("streams",))},
    switches=("mhc_norm",),
)
def mhc_head(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    numerics: Numerics,
) -> torch.Tensor:
    """``y = round(sum_j (sigmoid(mix_j * scale + base_j) + hc_eps) * X_j)`` with mhc_pre's mix, no Sinkhorn.

    Float32 inside, streams in ascending order, one rounding to the dtype of ``streams``.

    Args:
        streams: ``X [token, stream, channel]`` bf16 (or float32).
        fn: ``[hc, hc * channel]`` float32. scale: ``[1]``. base: ``[hc]``.
    Returns:
        ``[token, channel]`` like streams.
    """
    weights = torch.sigmoid(mixes(streams, fn, norm_eps, numerics) * scale + base) + hc_eps
    return collapse(streams, weights).to(streams.dtype)
