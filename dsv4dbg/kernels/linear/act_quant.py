"""act_quant: activations to FP8 with one E8M0 scale per group of channels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dsv4dbg.compare import Codes, Scales
from dsv4dbg.kernels import oracle
from dsv4dbg.kernels.contract import Example, Invariant, attr, op, tensor
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.formats import fp8_quantize
from dsv4dbg.kernels.invariants import first
from dsv4dbg.kernels.samples import TOKENS, activations, normal

MAXIMUM = {"ocp": 448.0, "fnuz": 224.0}
SMALLEST_SCALE = {"ocp": 2.0**-22, "fnuz": 2.0**-21}  # of a group whose amax is at the floor of 1e-4


def _decoded(call: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Values of the codes ``[token, group, channel]`` and scales ``[token, group, 1]``."""
    scale = oracle.e8m0(call["scale"])[..., None]
    return oracle.fp8(call["codes"], call["dialect"]).reshape(*scale.shape[:2], call["group"]), scale


def _no_nan(call: Mapping[str, Any]) -> str | None:
    bad = np.isnan(oracle.fp8(call["codes"], call["dialect"]))
    if not np.isfinite(call["x"]).all() or not bad.any():
        return None
    return f"code {call['codes'][bad][0]:#04x} at {first(bad)} is NaN in {call['dialect']}"


def _scale_fits(call: Mapping[str, Any]) -> str | None:
    values, scale = _decoded(call)
    floor, maximum = SMALLEST_SCALE[call["dialect"]], MAXIMUM[call["dialect"]]
    largest = np.abs(values).max(axis=2, keepdims=True, initial=0.0)
    bad = (scale < floor) | ((scale > floor) & (largest < maximum / 2)) | (largest > maximum)
    if not np.isfinite(call["x"]).all() or not bad.any():
        return None
    return f"group {first(bad)[:2]} has scale {scale[bad][0]} and a largest code of {largest[bad][0]}"


def _round_trip(call: Mapping[str, Any]) -> str | None:
    values, scale = _decoded(call)
    smallest = 2.0**-9 if call["dialect"] == "ocp" else 2.0**-10
    x = call["x"].reshape(values.shape)
    bad = np.abs(values * scale - x) > np.maximum(np.abs(x) * 2.0**-4, smallest / 2 * scale)
    return f"value {x[bad][0]} at {first(bad)} became {(values * scale)[bad][0]}" if bad.any() else None


@op(
    family="linear",
    args={
        "x": tensor("token channel", "act"),
        "group": attr("channels that share a scale"),
        "dialect": attr("ocp (e4m3fn) or fnuz (e4m3fnuz)"),
    },
    outputs={"codes": tensor("token channel", "u8"), "scale": tensor("token group", "u8", "E8M0")},
    compare={
        "codes": Codes(scale="scale", format="fp8", group="group", dialect="dialect"),
        "scale": Scales(codes="codes"),
    },
    invariants=(
        Invariant("no NaN codes", _no_nan),
        Invariant("the scale is the smallest that fits, at least the floor's", _scale_fits),
        Invariant("values survive within half a step", _round_trip),
    ),
)
def act_quant(x: torch.Tensor, *, group: int, dialect: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Per group: ``s = 2^ceil(log2(max(amax, 1e-4) / M))``, codes ``e4m3(clamp(x / s, -M, M))``, ties to even.

    ``M`` is 448 (ocp) or 224 (fnuz); fnuz never emits 0x80.

    Args:
        x: ``[token, channel]`` bf16 (or float32), channels a multiple of ``group``.
    Returns:
        codes ``uint8 [token, channel]``, scale ``uint8 [token, channel / group]``: the value is ``2^(byte - 127)``.
    """
    return fp8_quantize(x, group, dialect)


@act_quant.oracle
def _(x: np.ndarray, *, group: int, dialect: str) -> tuple[np.ndarray, np.ndarray]:
    return x, oracle.quantize(x, group, "fp8", dialect)[1]


@act_quant.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    for dialect in MAXIMUM:
        for group in (64, 128):
            for name, x in _inputs(dims, rng, group):
                yield Example(f"{name}, groups of {group}, {dialect}", {"x": x, "group": group, "dialect": dialect})


def _inputs(dims: Dims, rng: np.random.Generator, group: int) -> Iterator[tuple[str, torch.Tensor]]:
    for tokens in TOKENS:
        yield f"{tokens} tokens", activations(rng, tokens, dims.hidden)
    unlike = torch.from_numpy(np.exp2(rng.integers(-60, 60, (5, dims.hidden // group, 1)))).to(torch.bfloat16)
    yield "groups of unlike size", (activations(rng, 5, dims.hidden // group, group) * unlike).flatten(1)
    wide = activations(rng, 5, dims.hidden) * torch.exp2(normal(rng, 5, dims.hidden, scale=8)).to(torch.bfloat16)
    yield "wide range inside groups, underflow of both signs", wide
    yield "ties", _ties(group)
    yield "amax around powers of two", _amax_edges(group)
    small = activations(rng, 4, dims.hidden) * torch.tensor([[0.0], [1e-38], [1e-6], [1e-4]], dtype=torch.bfloat16)
    yield "zero, subnormal and sub-floor rows", small
    yield "largest values", activations(rng, 2, dims.hidden).sign() * torch.finfo(torch.bfloat16).max
    yield "float32", normal(rng, 5, dims.hidden)


def _ties(group: int) -> torch.Tensor:
    """Rows of midpoints between neighbouring codes, of both signs, for several scales; every group holds its amax."""
    codes = oracle.fp8(np.arange(0x7F, dtype=np.uint8))
    midpoints = (codes[1:] + codes[:-1]) / 2
    midpoints = midpoints[: len(midpoints) // (group - 1) * (group - 1)].reshape(-1, group - 1)
    rows = np.concatenate((np.full((len(midpoints), 1), 448.0), midpoints), axis=1)
    rows = np.concatenate((rows, -rows))
    return torch.from_numpy(np.concatenate([rows * 2.0**e for e in (-20, -3, 0, 40)])).to(torch.bfloat16)


def _amax_edges(group: int) -> torch.Tensor:
    """Groups whose amax is just below, at and just above 448 * 2^k."""
    steps = 1 + torch.tensor([-2.0, -1, 0, 1, 2]) / 128  # a bf16 step of 448 is 2
    amax = torch.outer(torch.exp2(torch.arange(-12.0, 13)), 448 * steps).reshape(-1, 1)
    return (amax * torch.linspace(-1, 1, group)).to(torch.bfloat16)
