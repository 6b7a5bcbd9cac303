"""mhc_head: collapse the residual streams before the final norm (of the model, and of each MTP block)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dsv4dbg.compare import Dense
from dsv4dbg.kernels.contract import Example, Invariant, attr, op, tensor, weight
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.invariants import finite
from dsv4dbg.kernels.mhc.inputs import mix_parameters, stream_cases
from dsv4dbg.kernels.mhc.mixes import bounded_by, collapse, mixes
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.samples import activations


def _weighted_sum(call: Mapping[str, Any]) -> str | None:
    return bounded_by(call["y"], np.abs(call["streams"]).sum(axis=1) * (1 + call["hc_eps"]), "y")


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
    invariants=(finite("y"), Invariant("y within the sum of the streams' sizes", _weighted_sum)),
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


@mhc_head.oracle
def _(
    streams: np.ndarray,
    fn: np.ndarray,
    scale: np.ndarray,
    base: np.ndarray,
    *,
    norm_eps: float,
    hc_eps: float,
    numerics: Numerics,
) -> np.ndarray:
    flat = streams.reshape(len(streams), fn.shape[1])
    rms = np.sqrt((flat * flat).mean(axis=1, keepdims=True) + norm_eps)
    weights = np.exp(-np.logaddexp(0, -(flat / rms @ fn.T * scale + base))) + hc_eps
    return np.einsum("tj,tjd->td", weights, streams)


@mhc_head.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    def example(name: str, streams: torch.Tensor, stretch: float = 1.0) -> Example:
        hc, channels = streams.shape[1:]
        fn, scale, base = mix_parameters(rng, hc, 1, hc * channels)
        args = {"streams": streams, "fn": fn, "scale": scale * stretch, "base": base * stretch}
        return Example(name, {**args, "norm_eps": 1e-6, "hc_eps": 1e-6})

    for name, streams in stream_cases(dims, rng):
        yield example(name, streams)
    yield example("saturated weights", activations(rng, 64, dims.hc_mult, dims.hidden), stretch=40)
