"""mhc_pre: collapse the residual streams into a sublayer's input and derive the weights that mhc_post mixes with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dsv4dbg.compare import Dense
from dsv4dbg.kernels.contract import Example, Invariant, attr, op, tensor, weight
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.invariants import finite, first
from dsv4dbg.kernels.mhc.inputs import mix_parameters, stream_cases
from dsv4dbg.kernels.mhc.mixes import bounded_by, collapse, mixes
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.samples import activations

CONVERGED = 10  # Sinkhorn iterations after which column sums are near 1 for any logits
COLUMN_TOLERANCE = 1e-4


def _post_range(call: Mapping[str, Any]) -> str | None:
    bad = (call["post"] < 0) | (call["post"] > 2)
    return f"post is {call['post'][bad][0]} at {first(bad)}" if bad.any() else None


def _columns(call: Mapping[str, Any]) -> str | None:
    comb = call["comb"]
    if (comb < 0).any():
        return f"comb is {comb[comb < 0][0]} at {first(comb < 0)}"
    sums = comb.sum(axis=1)  # over j, the first stream index
    bad = np.abs(sums - 1) > COLUMN_TOLERANCE
    if call["iters"] < CONVERGED or not bad.any():
        return None
    return f"column (token, k) = {first(bad)} of comb sums to {sums[bad][0]}"


def _weighted_sum(call: Mapping[str, Any]) -> str | None:
    return bounded_by(call["y"], np.abs(call["streams"]).sum(axis=1) * (1 + call["hc_eps"]), "y")


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
        "post": Dense(terms="stream channel", magnitude=("post.terms",), roundings=0),
        "comb": Dense(terms="stream channel", magnitude=("comb.terms",), roundings=0),
    },
    invariants=(
        finite("y", "post", "comb"),
        Invariant("0 <= post <= 2", _post_range),
        Invariant("comb >= 0, its columns sum to 1", _columns),
        Invariant("y within the sum of the streams' sizes", _weighted_sum),
    ),
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


@mhc_pre.oracle
def _(
    streams: np.ndarray,
    fn: np.ndarray,
    scale: np.ndarray,
    base: np.ndarray,
    *,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    numerics: Numerics,
) -> dict[str, np.ndarray]:
    hc = streams.shape[1]
    flat = streams.reshape(len(streams), fn.shape[1])
    normed = flat / np.sqrt((flat * flat).mean(axis=1, keepdims=True) + norm_eps)
    factors = np.repeat(scale, (hc, hc, hc * hc))
    logits = normed @ fn.T * factors + base
    # an error of the logits is of the size of their terms, and sigmoid and softmax turn it into a relative one
    size = np.sqrt(normed**2 @ fn.T**2) * np.abs(factors) + np.abs(base)
    sigmoid = np.exp(-np.logaddexp(0, -logits))
    pre, post = sigmoid[:, :hc] + hc_eps, 2 * sigmoid[:, hc : 2 * hc]
    comb = logits[:, 2 * hc :].reshape(-1, hc, hc)
    comb = np.exp(comb - comb.max(axis=2, keepdims=True))
    comb = comb / comb.sum(axis=2, keepdims=True) + hc_eps
    for i in range(iters):
        if i:
            comb = comb / (comb.sum(axis=2, keepdims=True) + hc_eps)
        comb = comb / (comb.sum(axis=1, keepdims=True) + hc_eps)
    y = np.einsum("tj,tjd->td", pre, streams)
    post_terms = post * (1 + (1 - post / 2) * size[:, hc : 2 * hc])
    comb_terms = comb * (1 + size[:, 2 * hc :].max(axis=1, initial=0.0)[:, None, None])
    return {"y": y, "post": post, "comb": comb, "post.terms": post_terms, "comb.terms": comb_terms}


@mhc_pre.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    def example(name: str, streams: torch.Tensor, stretch: float = 1.0, iters: int = 20) -> Example:
        hc, channels = streams.shape[1:]
        fn, scale, base = mix_parameters(rng, (2 + hc) * hc, 3, hc * channels)
        args = {"streams": streams, "fn": fn, "scale": scale * stretch, "base": base * stretch}
        return Example(name, {**args, "norm_eps": 1e-6, "hc_eps": 1e-6, "iters": iters})

    for name, streams in stream_cases(dims, rng):
        yield example(name, streams)
    streams = activations(rng, 64, dims.hc_mult, dims.hidden)
    yield example("wide logits, Sinkhorn not converged", streams, stretch=3)
    yield example("saturated logits", streams, stretch=40)
    yield example("one iteration", streams, iters=1)
