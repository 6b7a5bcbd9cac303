"""indexer_q: golden exponents, Hadamard laws, formats against each other, switches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from dsv4dbg.kernels import formats, samples
from dsv4dbg.kernels.attention.indexer_q import indexer_q
from dsv4dbg.kernels.numerics import HF, OFFICIAL, Numerics

HEADS, DIM, R = 64, 128, 64
TABLE = samples.cos_sin(300, R, 160000.0)
PLAIN = replace(OFFICIAL, index_hadamard=False, index_quant=False)
FORMATS = ("fp4", "fp8_ocp", "fp8_fnuz", "plain")


def inputs(tokens: int = 12, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    positions = torch.from_numpy(rng.integers(0, 300, tokens))
    return samples.activations(rng, tokens, HEADS, DIM), samples.activations(rng, tokens, HEADS), positions


def run(q, weights, positions, format: str, numerics: Numerics = OFFICIAL):
    return indexer_q(q, weights, positions, TABLE, format=format, numerics=numerics)


def decoded(q: torch.Tensor, scale: torch.Tensor, format: str) -> torch.Tensor:
    if format == "plain":
        return q.float()
    if format == "fp4":
        return formats.fp4_dequantize(q, scale)
    return formats.fp8_decode(q, format.removeprefix("fp8_")) * scale


def test_golden_fp4_exponents():
    """log2 of the scale for amax 0, 0.75, 1, 1.5, 1.5078125, 6, 6.03125 (spec 7.3), one per group of 32."""
    amax, exponents = (0, 0.75, 1, 1.5, 1.5078125, 6, 6.03125, 0), (-126, -3, -2, -2, -1, 0, 1, -126)
    q = torch.zeros(2, HEADS, DIM, dtype=torch.bfloat16)
    q[:, :, ::32] = torch.tensor(amax).view(2, 1, 4)
    numerics = replace(OFFICIAL, index_hadamard=False)
    _, scale, _ = run(q, torch.ones(2, HEADS), torch.zeros(2, dtype=torch.int64), "fp4", numerics)
    assert (scale.int() - 127)[:, 0].flatten().tolist() == list(exponents)
    assert (scale == scale[:, :1]).all()


def test_shapes_and_dtypes():
    q, weights, positions = inputs()
    expected = {
        "fp4": ((12, HEADS, 64), torch.uint8, (12, HEADS, 4), torch.uint8),
        "fp8_ocp": ((12, HEADS, 128), torch.uint8, (12, HEADS, 1), torch.float32),
        "fp8_fnuz": ((12, HEADS, 128), torch.uint8, (12, HEADS, 1), torch.float32),
        "plain": ((12, HEADS, 128), torch.bfloat16, (12, HEADS, 0), torch.float32),
    }
    for format, (q_shape, q_dtype, scale_shape, scale_dtype) in expected.items():
        codes, scale, scaled = run(q, weights, positions, format)
        assert (tuple(codes.shape), codes.dtype, tuple(scale.shape), scale.dtype) == (
            q_shape, q_dtype, scale_shape, scale_dtype,
        )  # fmt: skip
        assert scaled.dtype == torch.bfloat16


def test_weights_carry_the_combined_scale_with_one_rounding():
    q, weights, positions = inputs()
    _, _, scaled = run(q, weights, positions, "fp4")
    assert torch.equal(scaled, (weights.double() * 0.011048543456039806).to(torch.bfloat16))


def test_no_norm_on_q():
    q, weights, positions = inputs()
    once, twice = (run(factor * q, weights, positions, "plain", PLAIN)[0] for factor in (1, 2))
    assert torch.equal(2 * once, twice)


def test_hadamard_keeps_dot_products_and_spreads_loud_channels():
    q, weights, positions = inputs()
    rotated = run(q.float(), weights.float(), positions, "plain", replace(PLAIN, index_hadamard=True))[0]
    as_is = run(q.float(), weights.float(), positions, "plain", PLAIN)[0]
    products = [torch.einsum("thd,shd->hts", x, x) for x in (rotated, as_is)]
    assert torch.allclose(*products, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(rotated, as_is, atol=1.0)
    crest = [(x.abs().amax(-1) / x.square().mean(-1).sqrt()).mean() for x in (rotated, as_is)]
    assert crest[0] < 0.75 * crest[1]


def test_hadamard_of_a_unit_vector_is_a_row_of_signs():
    q = torch.zeros(1, HEADS, DIM)
    q[0, :, 5] = 1.0
    out = run(q, torch.ones(1, HEADS), torch.zeros(1, dtype=torch.int64), "plain", replace(PLAIN, index_hadamard=True))[
        0
    ]
    signs = torch.tensor([(-1.0) ** bin(i & 5).count("1") for i in range(DIM)])
    assert torch.equal(out[0, 0], signs * DIM**-0.5)


def test_simulated_fp4_equals_real_fp4():
    q, weights, positions = inputs()
    codes, scale, _ = run(q, weights, positions, "fp4")
    simulated, _, _ = run(q, weights, positions, "plain")
    assert torch.equal(decoded(codes, scale, "fp4"), simulated.float())


def test_dialects_hold_the_same_values():
    q, weights, positions = inputs(60)
    (ocp, ocp_scale, _), (fnuz, fnuz_scale, _) = (run(q, weights, positions, f"fp8_{d}") for d in ("ocp", "fnuz"))
    assert torch.equal(fnuz_scale, 2 * ocp_scale)
    assert torch.equal(torch.where(ocp == 0x80, 0, ocp), fnuz)
    assert torch.equal(decoded(ocp, ocp_scale, "fp8_ocp") + 0.0, decoded(fnuz, fnuz_scale, "fp8_fnuz") + 0.0)


@pytest.mark.parametrize(("format", "bound"), [("fp4", 0.25), ("fp8_ocp", 2**-4), ("fp8_fnuz", 2**-4)])
def test_codes_decode_to_the_plain_values(format, bound):
    q, weights, positions = inputs()
    exact = run(q, weights, positions, "plain", replace(OFFICIAL, index_quant=False))[0].float()
    codes, scale, _ = run(q, weights, positions, format)
    group = exact.unflatten(-1, (-1, 32 if format == "fp4" else DIM)).abs().amax(-1, keepdim=True)
    error = (decoded(codes, scale, format) - exact).abs().unflatten(-1, (group.shape[-2], -1))
    assert (error <= bound * group).all()
    assert error.max() > 0


@pytest.mark.parametrize("format", FORMATS)
def test_each_row_alone_equals_the_row_in_the_batch(format):
    q, weights, positions = inputs()
    batch = run(q, weights, positions, format)
    for t in range(0, 12, 5):
        one = run(q[t : t + 1], weights[t : t + 1], positions[t : t + 1], format)
        assert all(torch.equal(a[0], b[t]) for a, b in zip(one, batch, strict=True))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("switch", "value", "q_changes", "weights_change"),
    [
        ("index_quant", False, ("plain",), False),
        ("index_hadamard", False, FORMATS, False),
        ("rope_table", "act", FORMATS, False),
        ("index_score", "f32", (), True),
        ("kv_quant", False, (), False),
    ],
)
def test_switches_change_what_they_say(format, switch, value, q_changes, weights_change):
    q, weights, positions = inputs()
    a = run(q, weights, positions, format)
    b = run(q, weights, positions, format, replace(OFFICIAL, **{switch: value}))
    assert torch.equal(a[0], b[0]) == (format not in q_changes)
    assert (a[2].dtype == b[2].dtype and torch.equal(a[2], b[2])) != weights_change
    if switch == "index_score":
        assert torch.equal(b[2], weights.float() * HEADS**-0.5)


def test_rope_table_switch_without_rotation_changes_rope_channels_only():
    q, weights, positions = inputs()
    a, b = (run(q, weights, positions + 1, "plain", replace(PLAIN, rope_table=t))[0] for t in ("f32", "act"))
    changed = (a != b).any(0).any(0)
    assert not changed[:-R].any()
    assert changed[-R:].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hf_profile_is_transformers_bit_for_bit(dtype):
    q, weights, positions = inputs()
    out, _, scaled = run(q.to(dtype), weights.to(dtype), positions, "plain", HF)
    cos, sin = TABLE[positions].to(dtype)[None].split(R // 2, -1)
    theirs = apply_rotary_pos_emb(q.to(dtype)[None].transpose(1, 2), cos, sin)[0].transpose(0, 1)
    assert torch.equal(out, theirs)
    assert torch.equal(scaled, weights.float() * HEADS**-0.5)
