"""mhc_post: expand a sublayer's output over the residual streams and mix the streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dsv4dbg.compare import Dense
from dsv4dbg.kernels.contract import Example, Invariant, op, tensor
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.invariants import finite
from dsv4dbg.kernels.mhc.inputs import stream_cases
from dsv4dbg.kernels.mhc.mixes import bounded_by
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.samples import activations, normal


def _bound(call: Mapping[str, Any]) -> str | None:
    expanded = np.abs(call["post"])[:, :, None] * np.abs(call["y"])[:, None]
    mix = np.einsum("tjk,tjd->tkd", np.abs(call["comb"]), np.abs(call["streams"]))
    return bounded_by(call["mixed"], expanded + mix, "mixed")


@op(
    family="mhc",
    args={
        "y": tensor("token channel", "act", "the sublayer's output"),
        "streams": tensor("token stream channel", "act", "as they were before mhc_pre"),
        "post": tensor("token stream", "f32"),
        "comb": tensor("token stream target", "f32", "the sum runs over the first stream dim"),
    },
    outputs={"mixed": tensor("token stream channel", "act")},
    compare={"mixed": Dense(terms="stream", magnitude=("mixed.terms",), row="token stream", more={"mhc_mix=act": 4})},
    invariants=(finite("mixed"), Invariant("mixed within the sum of its terms' sizes", _bound)),
    switches=("mhc_mix",),
)
def mhc_post(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, *, numerics: Numerics
) -> torch.Tensor:
    """``Y_k = round(post_k * y + sum_j comb[j, k] * X_j)``: float32 inside, one rounding to the dtype of streams.

    The sum runs over the FIRST index of comb, streams in ascending order: comb acts transposed. With ``mhc_mix``
    "act", post and comb are rounded first, and the product, the mix and their sum are each rounded.

    Args:
        y: ``[token, channel]`` bf16 (or float32). streams: ``X [token, stream, channel]`` like y.
        post: ``[token, stream]`` float32. comb: ``[token, stream, stream]`` float32.
    Returns:
        ``[token, stream, channel]`` like streams.
    """
    act = streams.dtype
    if numerics.mhc_mix == "act":
        post, comb = post.to(act).float(), comb.to(act).float()
    expanded = post[:, :, None] * y[:, None].float()
    mix = comb[:, 0, :, None] * streams[:, 0, None].float()
    for j in range(1, streams.shape[1]):
        mix = mix + comb[:, j, :, None] * streams[:, j, None].float()
    if numerics.mhc_mix == "act":
        expanded, mix = expanded.to(act), mix.to(act)
    return (expanded + mix).to(act)


@mhc_post.oracle
def _(
    y: np.ndarray, streams: np.ndarray, post: np.ndarray, comb: np.ndarray, *, numerics: Numerics
) -> dict[str, np.ndarray]:
    def mix(post: np.ndarray, y: np.ndarray, comb: np.ndarray, streams: np.ndarray) -> np.ndarray:
        return np.einsum("tk,td->tkd", post, y) + np.einsum("tjk,tjd->tkd", comb, streams)

    terms = mix(*map(np.abs, (post, y, comb, streams)))
    return {"mixed": mix(post, y, comb, streams), "mixed.terms": terms}


@mhc_post.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    for name, streams in stream_cases(dims, rng):
        tokens, hc, channels = streams.shape
        y = activations(rng, tokens, channels).to(streams.dtype)
        comb = torch.softmax(normal(rng, tokens, hc, hc, scale=2), dim=1)  # columns sum to 1, not symmetric
        post = 2 * torch.sigmoid(normal(rng, tokens, hc))
        yield Example(name, {"y": y, "streams": streams, "post": post, "comb": comb})
    streams, y = activations(rng, 3, dims.hc_mult, dims.hidden), activations(rng, 3, dims.hidden)
    shift = torch.eye(dims.hc_mult).roll(1, dims=1).repeat(3, 1, 1)
    post = torch.tensor([[0.0], [1.0], [2.0]]).repeat(1, dims.hc_mult)
    yield Example("streams moved by one", {"y": y, "streams": streams, "post": post, "comb": shift})
    undone = {"y": streams[:, 0].clone(), "streams": streams, "post": -shift[:, 0], "comb": shift}
    yield Example("post cancels the mix", undone)
