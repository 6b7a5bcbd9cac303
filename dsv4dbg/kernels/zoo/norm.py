"""Zoo cases of RMSNorm."""

from __future__ import annotations

from typing import Any

import torch

from dsv4dbg.kernels.norm.rms_norm import rms_norm
from dsv4dbg.kernels.zoo.case import case

TILE = 64  # rows


@case(
    "neighbour-factor", op="rms_norm", bug="E13", kind="values", shows="rows that begin a tile of 64",
)  # fmt: skip
def neighbour_factor(*, x: torch.Tensor, **call: Any) -> torch.Tensor:
    """aiter#4163: a pipelined loop uses the tile before; here the first row of a tile gets its predecessor's factor."""
    y = rms_norm(x=x, **call)
    size = x.float().square().mean(1, keepdim=True).sqrt()
    y[TILE::TILE] = (y[TILE::TILE] * size[TILE::TILE] / size[TILE - 1 : -1 : TILE]).to(y.dtype)
    return y


@case("float32-out", op="rms_norm", bug="A09", kind="values", shows="dtype of every result")
def float32_out(*, x: torch.Tensor, **call: Any) -> torch.Tensor:
    """ATOM#1793: a dtype test misses a dialect, and the result comes in a dtype that its reader does not expect."""
    return rms_norm(x=x.float(), **call)


@case("one-row-too-many", op="rms_norm", bug="G17", kind="values", shows="shape of every result")
def one_row_too_many(*, x: torch.Tensor, **call: Any) -> torch.Tensor:
    """aiter#4530: rows that only pad the last block are not masked; the result has one row more than x."""
    return rms_norm(x=torch.cat((x, x[-1:])), **call)


_seen: dict[tuple[int, ...], torch.Tensor] = {}


@case("first-input-again", op="rms_norm", bug="H05", kind="state", shows="every call but the first of a shape")
def first_input_again(*, x: torch.Tensor, **call: Any) -> torch.Tensor:
    """sglang#27664: a graph's input buffer is never filled again, so replays compute on what was there at capture."""
    return rms_norm(x=_seen.setdefault((*x.shape,), x.clone()), **call)
