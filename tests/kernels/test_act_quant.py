"""act_quant: codes against ml_dtypes, golden scales, laws of the quantiser."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4dbg.kernels import oracle
from dsv4dbg.kernels.dims import TINY
from dsv4dbg.kernels.linear.act_quant import MAXIMUM, act_quant
from dsv4dbg.kernels.oracle import to_numpy

TYPE = {"ocp": ml_dtypes.float8_e4m3fn, "fnuz": ml_dtypes.float8_e4m3fnuz}
DIALECTS = tuple(TYPE)


def sample(seed: int, rows: int = 500, spread: float = 4.0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 256)) * np.exp2(rng.normal(0, spread, (rows, 256)) + rng.uniform(-9, 9, (rows, 1)))
    return torch.from_numpy(x).to(torch.bfloat16)


def values(codes: torch.Tensor, scale: torch.Tensor, dialect: str) -> np.ndarray:
    decoded = oracle.fp8(codes.numpy(), dialect)
    return decoded * np.repeat(oracle.e8m0(scale.numpy()), codes.shape[1] // scale.shape[1], axis=1)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_codes_are_ml_dtypes_of_the_scaled_value(group, dialect):
    x = sample(0)
    codes, scale = act_quant(x, group=group, dialect=dialect)
    grouped = x.double().numpy().reshape(len(x), -1, group)
    exponent = np.ceil(np.log2(np.maximum(np.abs(grouped).max(-1), 1e-4) / MAXIMUM[dialect]))
    assert np.array_equal(scale.numpy(), exponent + 127)
    scaled = (grouped / np.exp2(exponent)[..., None]).reshape(x.shape).astype(np.float32)  # exact
    expected = scaled.astype(TYPE[dialect]).view(np.uint8)
    assert np.array_equal(codes.numpy(), np.where((expected == 0x80) & (dialect == "fnuz"), 0, expected))


@pytest.mark.parametrize(
    ("amax", "exponent"),
    [(0, -22), (1e-4, -22), (0.5, -9), (1, -8), (3.5, -7), (7, -6), (7.03125, -5), (448, 0), (450, 1)],
)
def test_golden_exponents_per_group(amax, exponent):
    x = torch.zeros(2, 256, dtype=torch.bfloat16)
    x[1, 200] = -amax
    _, scale = act_quant(x, group=128, dialect="ocp")
    assert scale.tolist() == [[105, 105], [105, exponent + 127]]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_ties_go_to_the_even_code(dialect):
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, :7] = torch.tensor([448, 17, 19, -17, 2.0**-10, 3 * 2.0**-10, -(2.0**-10)])
    kept = values(*act_quant(x, group=64, dialect=dialect), dialect)[0, :7]
    assert kept.tolist() == [448, 16, 20, -16, 0, 2 * 2.0**-9, 0]


def test_both_dialects_keep_the_same_values():
    x = sample(1, spread=8)
    ocp, fnuz = (act_quant(x, group=128, dialect=d) for d in DIALECTS)
    assert np.array_equal(values(*ocp, "ocp"), values(*fnuz, "fnuz"))
    assert torch.equal(fnuz[1], ocp[1] + 1)
    assert (ocp[0] == 0x80).any()
    assert not (fnuz[0] == 0x80).any()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(DIALECTS), st.sampled_from([64, 128]))
def test_quantising_twice_changes_nothing(seed, dialect, group):
    x = sample(seed, rows=20)
    once = values(*act_quant(x, group=group, dialect=dialect), dialect)
    again = act_quant(torch.from_numpy(once).to(torch.bfloat16), group=group, dialect=dialect)
    assert np.array_equal(values(*again, dialect), once)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_power_of_two_moves_the_scale_alone(dialect):
    x = sample(2)
    x[:, 0::64] = x[:, 0::64].sign() + 1.5  # amax of every group well above the floor
    codes, scale = act_quant(x, group=64, dialect=dialect)
    moved, moved_scale = act_quant(x * 2.0**7, group=64, dialect=dialect)
    assert torch.equal(moved, codes)
    assert torch.equal(moved_scale, scale + 7)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_sign_is_symmetric(dialect):
    x = sample(3)
    (codes, scale), (negative, same) = (act_quant(v, group=128, dialect=dialect) for v in (x, -x))
    assert torch.equal(scale, same)
    assert np.array_equal(values(negative, scale, dialect), -values(codes, scale, dialect))


def test_groups_and_rows_are_independent():
    x = sample(4)
    codes, scale = act_quant(x, group=64, dialect="ocp")
    for g in range(4):
        alone, alone_scale = act_quant(x[7:8, g * 64 : g * 64 + 64], group=64, dialect="ocp")
        assert torch.equal(alone, codes[7:8, g * 64 : g * 64 + 64])
        assert torch.equal(alone_scale, scale[7:8, g : g + 1])


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_group_that_is_not_finite_is_nan(dialect, bad):
    x = sample(5, rows=3)
    x[1, 100] = bad
    kept = values(*act_quant(x, group=64, dialect=dialect), dialect)
    assert np.isnan(kept[1, 64:128]).all()
    assert np.isnan(kept).sum() == 64


def test_no_tokens():
    codes, scale = act_quant(sample(0)[:0], group=64, dialect="ocp")
    assert (codes.shape, codes.dtype, scale.shape, scale.dtype) == ((0, 256), torch.uint8, (0, 4), torch.uint8)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_examples_give_what_the_oracle_rounds_to(dialect):
    """Decoded codes equal the oracle's quantiser on every example: no flips at all, inputs being the same."""
    seen = 0
    for example in act_quant.examples_function(TINY, np.random.default_rng(6)):
        if example.args["dialect"] == dialect:
            x = to_numpy(example.args["x"])
            expected, _ = oracle.quantize(x, example.args["group"], "fp8", dialect)
            assert np.array_equal(values(*act_quant(**example.args), dialect), expected), example.name
            seen += 1
    assert seen > 20


def broken(call: dict, **outputs) -> list[int]:
    return [n for n, i in enumerate(act_quant.invariants) if i.check({**call, **outputs})]


@pytest.mark.parametrize(("dialect", "nan"), [("ocp", 0x7F), ("ocp", 0xFF), ("fnuz", 0x80)])
def test_invariants_notice(dialect, nan):
    args = {"x": sample(7, rows=4), "group": 64, "dialect": dialect}
    codes, scale = act_quant(**args)
    call = {n: to_numpy(v) for n, v in {**args, "codes": codes, "scale": scale}.items()}
    assert broken(call) == []
    poisoned = codes.numpy().copy()
    poisoned[2, 5] = nan
    assert broken(call, codes=poisoned)[0] == 0
    assert 1 in broken(call, codes=np.zeros_like(poisoned))
    assert broken(call, scale=scale.numpy() + 1) == [2]  # values twice as large
    too_large = act_quant(sample(7, rows=4) / 2, group=64, dialect=dialect)[0].numpy() // 2 * 2
    assert 2 in broken(call, codes=too_large)
    assert broken(call, scale=np.zeros_like(scale.numpy()))[0] == 1  # below the floor
