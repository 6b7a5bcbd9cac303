"""mhc_post: expand a sublayer's output over the residual streams and mix the streams."""

from __future__ import annotations

import torch

from dsv4dbg.compare import Dense
from dsv4dbg.kernels.contract import op, tensor
from dsv4dbg.kernels.numerics import Numerics


@op(
    family="mhc",
    args={
        "y": tensor("token channel", "act", "the sublayer's output"),
        "streams": tensor("token stream channel", "act", "as they were before mhc_pre"),
        "post": tensor("token stream", "f32"),
        "comb": tensor("token stream target", "f32", "the sum runs over the first stream dim"),
    },
    outputs={"mixed": tensor("token stream channel", "act")},
    compare={"mixed": Dense(terms="stream", magnitude=("y", "streams"), row="token stream")},
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
