"""mhc_pre's Triton GEMM: the parts of fn add up to fn exactly, and no part is shortened on the way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from dsv4dbg.kernels.mhc.mixes_triton import parts_of
from dsv4dbg.kernels.numerics import OFFICIAL
from dsv4dbg.kernels.registry import registry


def test_parts_are_bf16_and_add_up_exactly():
    bits = np.random.default_rng(0).integers(0, 2**32, (24, 4096), dtype=np.uint32)
    fn = torch.from_numpy(bits.view(np.float32)).clone()
    fn[~fn.isfinite() | (fn.abs() < 2.0**-100)] = 0  # parts below float32's smallest normal are not asked for
    fn[0, :4] = torch.tensor([1 + 2.0**-23, -1 - 2.0**-23, 1 - 2.0**-24, 3.4e38])
    parts = parts_of(fn)
    assert parts.dtype == torch.bfloat16
    assert parts.shape == (3, 32, 4096)
    assert torch.equal(parts.double().sum(0)[:24], fn.double())
    assert not parts[:, 24:].any()
    assert (parts[2].float().abs() >= parts[1].float().abs()).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("channels", [16, 72, 256])
def test_last_bits_of_fn_count(device, channels):
    """X is 1 in its first and -1 in its last column, fn is 1 there but for multiples of 2^-23, which alone remain."""
    op, rng = registry().op("mhc_pre"), np.random.default_rng(1)
    streams = torch.zeros(3, 4, channels, dtype=torch.bfloat16)
    streams[:, 0, 0], streams[:, 3, -1] = 1, -1
    fn = torch.ones(24, 4 * channels)
    fn[:, 0] += torch.from_numpy(rng.integers(0, 40, 24).astype(np.float32)) * 2.0**-23
    scale = torch.full((3,), 2.0**19 / channels**0.5)
    weights = {"fn": fn, "scale": scale, "base": torch.linspace(-2, 2, 24)}
    values = {"norm_eps": 1e-6, "hc_eps": 1e-6, "iters": 20, "numerics": OFFICIAL}
    expected = op.reference(streams, **weights, **values)
    implementation = registry().implementation("mhc_pre", "triton")
    assert implementation.prepare
    there = {n: v.to(device) for n, v in weights.items()}
    got = implementation.function(streams.to(device), **there, **values, prepared=implementation.prepare(**there))
    plain = op.reference(streams, **{**weights, "fn": torch.ones_like(fn)}, **values)
    assert (expected[1] - plain[1]).abs().max() > 0.1
    for a, b in zip(got[1:], expected[1:], strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-6)
