"""silu_mul: against transformers' MLP, the clamp's sides and its place, the rounding switch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4MLP

from dsv4dbg.kernels.moe.silu_mul import silu_mul
from dsv4dbg.kernels.numerics import HF, OFFICIAL
from dsv4dbg.kernels.samples import activations

LIMIT = 10.0


def value(gate: float, up: float, dtype: torch.dtype = torch.float32) -> float:
    pair = torch.tensor([[[gate]], [[up]]], dtype=dtype)
    return silu_mul(pair[0], pair[1], limit=LIMIT, numerics=OFFICIAL).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers_mlp(dtype: torch.dtype) -> None:
    """float32 within 1e-6, bf16 bit for bit; half of the values lie beyond the limit."""
    torch.manual_seed(0)
    module = DeepseekV4MLP(DeepseekV4Config(hidden_size=64, moe_intermediate_size=96, swiglu_limit=LIMIT)).to(dtype)
    for projection in (module.gate_proj, module.up_proj):
        projection.weight.data *= 120
    x = torch.randn(129, 64).to(dtype)
    with torch.no_grad():
        gate, up = module.gate_proj(x), module.up_proj(x)
        expected = module(x)
        y = module.down_proj(silu_mul(gate, up, limit=LIMIT, numerics=HF))
    assert 0.2 < (up.abs() > LIMIT).float().mean() < 0.9
    tolerance = 1e-6 if dtype is torch.float32 else 0.0
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)


def test_gate_is_clamped_from_above_only_and_before_silu() -> None:
    silu_of_limit = 10 / (1 + np.exp(-10.0))  # 9.99955; SiLU first and clamp then would give 10
    assert value(11.0, 1.0) == pytest.approx(silu_of_limit, rel=1e-6)
    assert value(3e38, 1.0) == pytest.approx(silu_of_limit, rel=1e-6)
    assert value(-20.0, 1.0) == pytest.approx(-20 / (1 + np.exp(20.0)), rel=1e-6)
    assert value(-3e38, 1.0) == 0.0


def test_up_is_clamped_on_both_sides() -> None:
    one = value(1.0, 1.0)
    assert value(1.0, 11.0) == value(1.0, 10.0) == pytest.approx(10 * one)
    assert value(1.0, -3e38) == value(1.0, -10.0) == pytest.approx(-10 * one)


def test_nan_passes_the_clamp() -> None:
    assert np.isnan(value(float("nan"), 1.0))
    assert np.isnan(value(1.0, float("nan")))


def test_odd_in_up() -> None:
    rng = np.random.default_rng(1)
    gate, up = activations(rng, 7, 128, scale=6.0), activations(rng, 7, 128, scale=6.0)
    y = silu_mul(gate, up, limit=LIMIT, numerics=OFFICIAL)
    assert torch.equal(silu_mul(gate, -up, limit=LIMIT, numerics=OFFICIAL), -y)


def test_experts_switch_adds_a_rounding_of_silu_and_nothing_else() -> None:
    rng = np.random.default_rng(2)
    gate, up = activations(rng, 63, 128, scale=3.0), activations(rng, 63, 128, scale=3.0)
    official = silu_mul(gate, up, limit=LIMIT, numerics=OFFICIAL)
    rounded = silu_mul(gate, up, limit=LIMIT, numerics=replace(OFFICIAL, experts="act"))
    assert not torch.equal(official, rounded)
    silu = F.silu(gate.float().clamp(max=LIMIT)).bfloat16()
    assert torch.equal(rounded, (silu.float() * up.float().clamp(-LIMIT, LIMIT)).bfloat16())
    wide = [t.float() for t in (gate, up)]
    a, b = (silu_mul(*wide, limit=LIMIT, numerics=n) for n in (OFFICIAL, replace(OFFICIAL, experts="act")))
    assert torch.equal(a, b)


def test_invariant_catches_a_missing_clamp() -> None:
    (bounded,) = silu_mul.invariants
    gate = up = torch.full((2, 4), 30.0)
    call = {"gate": gate.numpy(), "up": up.numpy(), "limit": LIMIT}
    assert bounded.check(call | {"y": silu_mul(gate, up, limit=LIMIT, numerics=OFFICIAL).numpy()}) is None
    assert bounded.check(call | {"y": (F.silu(gate) * up).numpy()})
