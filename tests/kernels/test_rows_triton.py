"""Triton kernels over rows: views with strides between rows have the bits of their copies; other views are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from dsv4dbg.kernels.numerics import OFFICIAL
from dsv4dbg.kernels.registry import registry
from dsv4dbg.kernels.rows import has_rows, row_piece

BF16 = torch.bfloat16


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


CASES: dict[str, dict[str, Any]] = {
    "rms_norm": {"x": random(5, 300).to(BF16)[:, 40:250], "weight": random(210).to(BF16), "eps": 1e-6},
    "silu_mul": {"gate": random(5, 96).to(BF16)[:, :48], "up": random(5, 96).to(BF16)[:, 48:], "limit": 10.0},
    "moe_combine": {"routed": random(5, 120)[::2, 20:], "shared": random(3, 100).to(BF16)},
    "inv_rope": {
        "o": random(3, 10, 80).to(BF16)[:, 1::3, 8:],
        "positions": torch.tensor([2, 0, 7]),
        "cos_sin": random(8, 96)[:, 32:],
    },
    "merge_attn_states": {
        "o_a": random(3, 6, 90).to(BF16)[:, ::2],
        "lse_a": random(3, 3),
        "o_b": random(3, 3, 120)[..., 30:],
        "lse_b": random(3, 3) - 1,
        "sink": None,
    },
    "mhc_post": {
        "y": random(3, 200).to(BF16)[:, 100:],
        "streams": random(3, 8, 100).to(BF16)[:, ::2],
        "post": random(3, 4),
        "comb": random(3, 4, 4),
    },
}


def call(op: str, args: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    numerics = {"numerics": OFFICIAL} if registry().op(op).reads_numerics else {}
    implementation = registry().implementation(op, "triton")
    assert implementation.why_not(torch.device("cpu"), "cpu", {**args, "numerics": OFFICIAL}) is None
    result = implementation.function(**args, **numerics)
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("op", CASES)
def test_views_are_read_by_their_strides(op):
    copies = {n: v.clone(memory_format=torch.contiguous_format) if isinstance(v, torch.Tensor) else v
              for n, v in CASES[op].items()}  # fmt: skip
    for a, b in zip(call(op, CASES[op]), call(op, copies), strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


@pytest.mark.parametrize("op", CASES)
def test_rows_that_are_not_contiguous_are_refused(op):
    name, first = next(iter(CASES[op].items()))
    args = {**CASES[op], name: first.mT.contiguous().mT, "numerics": OFFICIAL}
    reason = registry().implementation(op, "triton").why_not(torch.device("cpu"), "cpu", args)
    assert reason
    assert "contiguous" in reason


def test_empty_and_single_columns_have_rows():
    x = torch.zeros(4, 6)
    assert has_rows(x, x[:, 1:], x[::2])
    assert has_rows(x[:0].mT, x[:, ::6])
    assert not has_rows(x, x.mT)
    assert not has_rows(x[:, ::2])


@pytest.mark.parametrize("arch", ["cpu", "sm_90", "gfx942", "gfx950", "gfx1201"])
def test_row_pieces_are_powers_of_two(arch):
    for channels in (1, 3, 64, 1000, 1024, 4096, 7168):
        piece = row_piece(arch, channels)
        assert piece & (piece - 1) == 0
        assert piece <= 2048
        assert piece >= min(channels, 1024)
