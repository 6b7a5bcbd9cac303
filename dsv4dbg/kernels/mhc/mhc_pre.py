"""mhc_pre: collapse the residual streams into a sublayer's input and derive the weights that mhc_post mixes with."""

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
        "fn": weight("mix flat", "f32", "mix GEMM: rows are pre, post, comb (row-major); columns stream-major"),
        "scale": weight("part", "f32", "of pre, post, comb"),
        "base": weight("mix", "f32"),
        "norm_eps": attr("added to the mean square"),
        "hc_eps": attr("added to pre, to the softmax and to every Sinkhorn denominator"),
        "iters": attr("Sinkhorn iterations; the first normalises columns only"),
    },
    outputs={
        "y": tensor("token channel", "act"),
        "post": tensor("token stream", "f32"),
        "comb": tensor("token stream target", "f32"),
    },
    compare={
        "y": Dense(terms="stream channel", magnitude=("streams",)),
        "post": Dense(terms="stream channel", roundings=0),
        "comb": Dense(terms="stream channel", roundings=0),
    },
    switches=("mhc_norm",),
)
def mhc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    numerics: Numerics,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``mix = flatten(X) @ fn^T * rsqrt(mean(X^2) + norm_eps)``, then, with ``l = mix * scale + base``::

        pre = sigmoid(l_pre) + hc_eps;  post = 2 sigmoid(l_post);  comb = sinkhorn(softmax_k(l_comb[j, k]) + hc_eps)
        y = round(sum_j pre_j X_j)

    Sinkhorn divides by column sums (over j) once, then ``iters - 1`` times by row sums (over k) and column sums,
    ``hc_eps`` added to each. Everything is float32; only y is rounded, once, to the dtype of ``streams``. A row of
    zeros gives y = 0 and the weights of ``base``; NaN in a row spreads over that row alone.

    Args:
        streams: ``X [token, stream, channel]`` bf16 (or float32).
        fn: ``[(2 + hc) hc, hc * channel]`` float32. scale: ``[3]``. base: ``[(2 + hc) hc]``.
    Returns:
        y ``[token, channel]`` like streams, post ``[token, hc]`` and comb ``[token, hc, hc]`` float32.
    """
    hc = streams.shape[1]
    mix_pre, mix_post, mix_comb = mixes(streams, fn, norm_eps, numerics).split((hc, hc, hc * hc), dim=-1)
    base_pre, base_post, base_comb = base.split((hc, hc, hc * hc))
    pre = torch.sigmoid(mix_pre * scale[0] + base_pre) + hc_eps
    post = 2 * torch.sigmoid(mix_post * scale[1] + base_post)
    comb = sinkhorn((mix_comb * scale[2] + base_comb).unflatten(-1, (hc, hc)), hc_eps, iters)
    return collapse(streams, pre).to(streams.dtype), post, comb


def sinkhorn(logits: torch.Tensor, eps: float, iters: int) -> torch.Tensor:
    """Softmax over the last dim plus eps, then alternating division by column and row sums, ending on columns."""
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb
