"""mtp_input: what a multi-token-prediction block runs on, from the next token and the main model's streams."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from dsv4dbg.compare import Dense
from dsv4dbg.kernels import oracle
from dsv4dbg.kernels.contract import Example, attr, op, tensor, weight
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.invariants import finite
from dsv4dbg.kernels.linear.fp8_linear import fp8_linear
from dsv4dbg.kernels.linear.linear import linear
from dsv4dbg.kernels.norm.rms_norm import rms_norm
from dsv4dbg.kernels.samples import TOKENS, activations, fp8_weight, norm_weight, normal


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
    compare={"mixed": Dense("channel", ("mixed.terms",), 4, "token stream", inner="e_scale")},
    invariants=(finite("mixed"),),
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


@mtp_input.oracle
def _(
    ids: np.ndarray,
    streams: np.ndarray,
    embed_weight: np.ndarray,
    enorm: np.ndarray,
    hnorm: np.ndarray,
    e_proj: np.ndarray,
    e_scale: np.ndarray | None,
    h_proj: np.ndarray,
    h_scale: np.ndarray | None,
    *,
    eps: float,
) -> dict[str, np.ndarray]:
    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight

    def project(x: np.ndarray, weight: np.ndarray, scale: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        if scale is not None:
            x, weight = oracle.quantize(x, 128)[0], oracle.fp8_blocks(weight, scale)
        return x @ weight.T, x**2 @ weight.T**2

    e, e_squares = project(norm(embed_weight[ids], enorm), e_proj, e_scale)
    h, h_squares = project(norm(streams, hnorm), h_proj, h_scale)
    return {"mixed": e[:, None] + h, "mixed.terms": np.sqrt(e_squares[:, None] + h_squares)}


@mtp_input.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    d, hc = dims.hidden, dims.hc_mult
    table, enorm, hnorm = activations(rng, dims.vocab, d), norm_weight(rng, d), norm_weight(rng, d)
    table[0] = 0
    fp8, plain = ((*fp8_weight(rng, d, d), *fp8_weight(rng, d, d)), (_plain(rng, d), None, _plain(rng, d), None))

    def example(name: str, ids: torch.Tensor, streams: torch.Tensor, projections: tuple = fp8) -> Example:
        values = (ids, streams, table, enorm, hnorm, *projections, 1e-6)
        return Example(name, dict(zip(mtp_input.args, values, strict=True)))

    for tokens in TOKENS:
        ids = torch.from_numpy(rng.integers(0, dims.vocab, tokens))
        yield example(f"{tokens} tokens", ids, activations(rng, tokens, hc, d))
    ids = torch.tensor([0, 1, dims.vocab - 1])
    yield example("not quantised", ids, activations(rng, 3, hc, d), plain)
    yield example("one projection quantised", ids, activations(rng, 3, hc, d), fp8[:2] + plain[2:])
    yield example("float32", ids, normal(rng, 3, hc, d), plain)
    zero = activations(rng, 3, hc, d)
    zero[0], zero[1, 2] = 0, 0
    yield example("zero embedding and streams", ids, zero)
    unlike = torch.tensor([2.0 ** (5 - 6 * j) for j in range(hc)], dtype=torch.bfloat16)[:, None]
    yield example("streams of unlike size", ids, activations(rng, 3, hc, d) * unlike)


def _plain(rng: np.random.Generator, d: int) -> torch.Tensor:
    return normal(rng, d, d, scale=d**-0.5).to(torch.bfloat16)
