"""indexer_q: rope, Hadamard rotation and quantisation of the indexer's queries; scaling of its head weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from dsv4dbg.compare import Codes, Dense, Scales
from dsv4dbg.kernels import formats, oracle, paged
from dsv4dbg.kernels.attention import entries_oracle
from dsv4dbg.kernels.attention.entries import rope_rows, rotate_index, sim_quant_index
from dsv4dbg.kernels.attention.ragged import MIXED, Ragged
from dsv4dbg.kernels.contract import Example, attr, op, table, tensor
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.invariants import finite
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.samples import TOKENS, activations, cos_sin
from dsv4dbg.pages import FP4_GROUP


@op(
    family="attention",
    args={
        "q": tensor("token head channel", "act"),
        "weights": tensor("token head", "act", "output of weights_proj"),
        "positions": tensor("token", "i64"),
        "cos_sin": table("position rope", "f32", "cosines, then sines"),
        "format": attr("fp4, fp8_ocp, fp8_fnuz or plain"),
    },
    outputs={
        "q_out": tensor("token head channel", "u8 act", "fp4: two channels per byte"),
        "q_scale": tensor("token head group", "u8 f32", "fp4: E8M0 per 32; fp8: one float32; plain: none"),
        "weights_out": tensor("token head", "act f32"),
    },
    compare={
        "q_out": Codes(scale="q_scale", format="format", group=FP4_GROUP, roundings=2),
        "q_scale": Scales(codes="q_out"),
        "weights_out": Dense(roundings=1),
    },
    invariants=(finite("weights_out"),),
    switches=("rope_table", "index_hadamard", "index_quant", "index_score"),
)
def indexer_q(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    format: str,
    numerics: Numerics,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``q_out = quantise(hadamard(rope(q)))``; ``weights_out = round(weights * (di^-0.5 * Hi^-0.5))``.

    Args:
        q: ``[token, head, channel]`` bf16 (or float32), Hi heads of di channels. There is no norm.
        weights: ``[token, head]``, q's dtype.
        positions: int64 ``[token]``.
        cos_sin: float32 ``[position, r]``: r/2 cosines, r/2 sines; turns the last r channels.
        format: as the cache of keys: "fp4", "fp8_ocp", "fp8_fnuz" or "plain" (bf16 or float32).
    Returns:
        q_out and q_scale. fp4: uint8 ``[token, head, di/2]`` (low nibble first), E8M0 bytes ``[token, head, di/32]``;
        fp8: uint8 ``[token, head, di]``, float32 ``[token, head, 1] = max(amax, 1e-4) / M``, M = 448 (ocp) or 224;
        plain: q's dtype ``[token, head, di]`` (rounded to FP4 values if index_quant), float32 ``[token, head, 0]``.
        weights_out: ``[token, head]`` in weights' dtype; index_score "f32": float32 ``weights * Hi^-0.5``
        (indexer_logits multiplies by di^-0.5 then).

    Rope and Hadamard run in float32 with one rounding to q's dtype each. A zero row gives zero codes.
    """
    heads, channels = q.shape[1:]
    values = rotate_index(formats.rotate(q, rope_rows(cos_sin, positions, q.dtype, numerics)), numerics)
    if numerics.index_score == "f32":
        scaled = weights.float() * heads**-0.5
    else:
        scaled = (weights.float() * (channels**-0.5 * heads**-0.5)).to(weights.dtype)
    if format == "fp4":
        return *formats.fp4_quantize(values, FP4_GROUP), scaled
    if format != "plain":
        return *paged.index_fp8(values, format.removeprefix("fp8_")), scaled
    if numerics.index_quant:
        values = sim_quant_index(values)
    return values, torch.empty(*q.shape[:2], 0, device=q.device), scaled


@indexer_q.oracle
def _(
    q: np.ndarray, weights: np.ndarray, positions: np.ndarray, cos_sin: np.ndarray, *, format: str, numerics: Numerics
) -> dict[str, np.ndarray]:
    heads, channels = q.shape[1:]
    values = entries_oracle.rope(q, cos_sin[positions])
    if numerics.index_hadamard:
        values = entries_oracle.hadamard(values)
    weights = weights / np.sqrt(heads)
    if numerics.index_score == "act":
        weights = weights / np.sqrt(channels)
    result = {"q_out": values, "q_scale": np.zeros((*q.shape[:2], 0)), "weights_out": weights}
    if format == "fp4":
        result["q_scale"] = oracle.quantize(values, FP4_GROUP, "fp4")[1]
    elif format != "plain":
        amax = np.abs(values).max(axis=-1, keepdims=True)
        result["q_scale"] = np.maximum(amax, 1e-4) / {"fp8_ocp": 448.0, "fp8_fnuz": 224.0}[format]
    elif numerics.index_quant:
        result |= {"q_out": entries_oracle.quantize_index(values), "q_out.unquantized": values}
    return result


@indexer_q.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    heads, channels = dims.index_heads, dims.index_dim
    rope_table = cos_sin(256, dims.rope_dim, 160000.0)
    formats = ("fp4", "fp8_ocp", "fp8_fnuz", "plain")

    def example(name: str, spans: tuple[tuple[int, int], ...], format: str) -> Example:
        batch = Ragged(spans)
        q, weights = activations(rng, len(batch), heads, channels), activations(rng, len(batch), heads)
        args = {"q": q, "weights": weights, "positions": batch.positions, "cos_sin": rope_table, "format": format}
        return Example(f"{name}, {format}", args)

    for i, tokens in enumerate(TOKENS):
        yield example(f"{tokens} tokens", ((0, tokens),), formats[i % 4])
    for format in formats:
        yield example("ragged", MIXED, format)
        edge = example("edges", ((0, 5),), format)
        q, weights = edge.args["q"], edge.args["weights"]
        q[0], weights[0] = 0, 0
        q[1] *= 1e-5
        q[2] *= 1e4
        q[3] = 0
        q[3, ..., 0] = 1.0  # after the rotation all channels alike: each is the largest
        q[4] = torch.arange(channels) % 13 / 4  # without it: ties between codes
        yield edge
    single = example("float32", MIXED, "plain")
    yield Example(
        "float32, plain", {**single.args, "q": single.args["q"].float(), "weights": single.args["weights"].float()}
    )
