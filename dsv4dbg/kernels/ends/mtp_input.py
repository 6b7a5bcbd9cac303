"""mtp_input: what a multi-token-prediction block runs on, from the next token and the main model's streams."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsv4dbg.compare import Dense
from dsv4dbg.kernels.contract import attr, op, tensor, weight
from dsv4dbg.kernels.linear.fp8_linear import fp8_linear
from dsv4dbg.kernels.linear.linear import linear
from dsv4dbg.kernels.norm.rms_norm import rms_norm


@op(
    family="ends",
    args={
        "ids": tensor("token", "i64", "token t + 1 for row t"),
        "streams": tensor("token stream channel", "act", "of the main model, before mhc_head"),
        "embed_weight": weight("vocab channel", "bf16 f32"),
        "enorm": weight("channel", "bf16 f32"),
        "hnorm": weight("channel", "bf16 f32"),
        "e_proj": weight("out channel", "e4m3fn bf16 f32"),
        "e_scale": weight("block block_in", "u8 f32", "None: e_proj is not quantised", optional=True),
        "h_proj": weight("out channel", "e4m3fn bf16 f32"),
        "h_scale": weight("block block_in", "u8 f32", "None: h_proj is not quantised", optional=True),
        "eps": attr("of both norms"),
    },
    outputs={"mixed": tensor("token stream channel", "act")},
    compare={"mixed": Dense(terms="channel", roundings=3, row="token stream")},
)
def mtp_input(
    ids: torch.Tensor,
    streams: torch.Tensor,
    embed_weight: torch.Tensor,
    enorm: torch.Tensor,
    hnorm: torch.Tensor,
    e_proj: torch.Tensor,
    e_scale: torch.Tensor | None,
    h_proj: torch.Tensor,
    h_scale: torch.Tensor | None,
    *,
    eps: float,
) -> torch.Tensor:
    """``X'_j = round(e_proj(rms_norm(embed[ids])) + h_proj(rms_norm(X_j)))``.

    Norms, both projections (`fp8_linear` where a scale is given, else `linear`) and the sum each round to the dtype
    of ``streams``. Row 0 of a sequence is not special.

    Args:
        ids: int64 ``[token]`` in ``[0, vocab)``. streams: ``X [token, stream, D]`` bf16 (or float32).
        embed_weight: ``[vocab, D]``. enorm, hnorm: ``[D]``. e_proj, h_proj: ``[D, D]``. Scales: ``[D/128, D/128]``.
    Returns:
        ``[token, stream, D]`` like streams.
    """
    tokens = F.embedding(ids, embed_weight).to(streams.dtype)
    e = _project(rms_norm(tokens, enorm, eps=eps), e_proj, e_scale)
    h = _project(rms_norm(streams.flatten(0, 1), hnorm, eps=eps), h_proj, h_scale)
    return e[:, None] + h.unflatten(0, streams.shape[:2])


def _project(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return linear(x, weight, out="act") if scale is None else fp8_linear(x, weight, scale)
