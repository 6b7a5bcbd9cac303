"""indexer_q: rope, Hadamard rotation and quantisation of the indexer's queries; scaling of its head weights."""

from __future__ import annotations

import torch

from dsv4dbg.compare import Codes, Dense, Scales
from dsv4dbg.kernels import formats, paged
from dsv4dbg.kernels.attention.entries import rope_rows, rotate_index, sim_quant_index
from dsv4dbg.kernels.contract import attr, op, table, tensor
from dsv4dbg.kernels.numerics import Numerics
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
    """``q' = quantise(hadamard(rope(q)))``; ``weights' = round(weights * (di^-0.5 * Hi^-0.5))``."""
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
