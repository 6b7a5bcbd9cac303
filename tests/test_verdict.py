"""The judge's parts: codecs and steps, limits, what every kind of output must and need not have, fingerprints."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verdict_blindspots import FAULTS, HARMLESS, blind_spot_case, index_case
from verdict_cases import PROTOTYPES
from verdict_variants import CLEAN, Case, case, mutants

from dsv4dbg.compare import Verdict
from dsv4dbg.kernels.arrays import CacheArray
from dsv4dbg.kernels.numerics import OFFICIAL
from dsv4dbg.kernels.registry import registry
from dsv4dbg.kernels.samples import activations, fp8_weight, norm_weight, normal
from dsv4dbg.verdict.bounds import mean_square_limit
from dsv4dbg.verdict.judge import judge
from dsv4dbg.verdict.metrics import rows_apart, same_bits
from dsv4dbg.verdict.steps import E2M1, E4M3, E8M0, UNIT, half_step, scaled_grid

BF16 = ml_dtypes.bfloat16


@pytest.fixture(scope="module")
def linear() -> Case:
    rng = np.random.default_rng(3)
    weight, scale = fp8_weight(rng, 128, 256)
    return case(registry().op("fp8_linear"), {"x": activations(rng, 300, 256), "weight": weight, "scale": scale})


@pytest.fixture(scope="module")
def entries() -> Case:
    return PROTOTYPES["compress_insert"](np.random.default_rng(3), 200)


def changed(c: Case, name: str, index, value) -> dict:
    y = c.reference[name].copy()
    y[index] = value
    return {**c.reference, name: y}


def output(c: Case, candidate: dict, name: str):
    return c.judge(candidate).outputs[name]


def test_verdicts_need_no_torch():
    code = "import sys, dsv4dbg.verdict; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# steps


@pytest.mark.parametrize(
    ("table", "dtype", "bits"),
    [
        (E4M3["ocp"], ml_dtypes.float8_e4m3fn, 8),
        (E4M3["fnuz"], ml_dtypes.float8_e4m3fnuz, 8),
        (E2M1, ml_dtypes.float4_e2m1fn, 4),
        (E8M0, ml_dtypes.float8_e8m0fnu, 8),
    ],
)
def test_tables_are_the_formats(table, dtype, bits):
    codes = np.arange(1 << bits, dtype=np.uint8)
    np.testing.assert_array_equal(table, codes.view(dtype).astype(np.float32))


@given(st.floats(2.0**-100, 2.0**100))
def test_half_step_bounds_rounding_and_no_more(x):
    x = np.array([x])
    rounded = x.astype(BF16).astype(np.float64)
    step = half_step(x, UNIT["bf16"])
    assert abs(rounded - x) <= step
    neighbour = (rounded.astype(BF16).view(np.uint16) + np.uint16(1)).view(BF16).astype(np.float64)
    assert neighbour - rounded <= 4 * step


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_grid_of_codes_holds_the_nearest_codes(fmt):
    from dsv4dbg.kernels.oracle import quantize

    x = np.random.default_rng(0).standard_normal((64, 128)) * np.exp2(np.arange(64.0))[:, None]
    grid = scaled_grid(x, 32, fmt, "ocp", 0.0)
    error = np.abs(quantize(x, 32, fmt)[0] - x)
    ratio = error / grid.half(slice(None), x)
    assert ratio.max() <= 1
    assert ratio.max() > 0.99


def test_mean_square_limit_is_rarely_passed_and_not_loose():
    squares = np.random.default_rng(0).uniform(-(3**0.5), 3**0.5, (20_000, 64)) ** 2
    assert squares.mean(axis=1).max() < mean_square_limit(np.array(64), 20_000)
    assert mean_square_limit(np.array(10_000_000), 1) < 1.01


# kinds


def test_equal_bits_pass_without_an_oracle(linear):
    def oracle():
        raise AssertionError("not needed")

    found = judge(linear.op, linear.arrays, linear.reference, linear.reference, oracle, OFFICIAL)
    assert found.verdict is Verdict.PASS


@pytest.mark.parametrize("variant", CLEAN)
@pytest.mark.parametrize("prototype", PROTOTYPES)
def test_clean_variants_do_not_diverge(prototype, variant):
    c = PROTOTYPES[prototype](np.random.default_rng(11), 1000)
    found = c.judge(CLEAN[variant](c))
    assert found.verdict <= Verdict.ROUNDING, found.sentence


@pytest.mark.parametrize("prototype", PROTOTYPES)
def test_mutants_diverge(prototype):
    c = PROTOTYPES[prototype](np.random.default_rng(12), 1000)
    faults = list(mutants(c, np.random.default_rng(12)))
    assert len(faults) >= 7
    missed = [name for name, candidate in faults if c.judge(candidate).verdict is not Verdict.DIVERGED]
    assert not missed


@pytest.mark.parametrize("name", FAULTS)
def test_blind_spots_of_global_distances_are_seen(name):
    c = index_case() if "index" in name else blind_spot_case()
    assert c.judge(FAULTS[name](c)).verdict is Verdict.DIVERGED


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_changes_are_no_faults(name):
    c = index_case() if "sets" in name else blind_spot_case()
    found = c.judge(HARMLESS[name](c))
    assert found.verdict <= Verdict.ROUNDING, found.sentence


def test_one_element_off_by_two_steps_diverges(linear):
    y = linear.reference["y"]
    place = (17, 5)
    found = output(linear, changed(linear, "y", place, (y[place].view(np.uint16) + np.uint16(3)).view(BF16)), "y")
    assert found.verdict is Verdict.DIVERGED
    assert found.at == {"token": 17, "out": 5}


def test_one_last_bit_is_rounding(linear):
    y = linear.reference["y"]
    place = (17, 5)
    found = output(linear, changed(linear, "y", place, (y[place].view(np.uint16) + np.uint16(1)).view(BF16)), "y")
    assert found.verdict is Verdict.ROUNDING
    assert found.errors["candidate"] > found.errors["reference"]


def test_numbers_and_limits_come_with_their_sources(linear):
    found = output(linear, changed(linear, "y", 3, 0), "y")
    assert {"reference", "candidate", "reference sigma", "candidate sigma"} == set(found.errors)
    assert all(clause.source for clause in found.clauses)
    assert found.sentence.startswith("y: ")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_finite_diverges_where_the_oracle_is_finite(linear, value):
    found = output(linear, changed(linear, "y", (4, 2), value), "y")
    assert found.verdict is Verdict.DIVERGED
    assert "not finite" in found.sentence


def test_another_shape_or_dtype_diverges(linear):
    y = linear.reference["y"]
    assert linear.judge({"y": y[:-1]}).verdict is Verdict.DIVERGED
    assert linear.judge({"y": y.astype(np.float32)}).verdict is Verdict.DIVERGED


def test_a_hidden_nan_is_no_pass():
    x = activations(np.random.default_rng(0), 8, 256)
    x[3, 5] = float("nan")
    weight = norm_weight(np.random.default_rng(0), 256)
    c = case(registry().op("rms_norm"), {"x": x, "weight": weight, "eps": 1e-6})
    found = output(c, changed(c, "y", 3, 0), "y")
    assert found.verdict is Verdict.ROUNDING
    assert found.notes == {"finite where the reference is not": 256}


def test_infinities_of_the_oracle_are_kept():
    rng = np.random.default_rng(0)
    c = next(c for c in _cases("indexer_logits", rng) if np.isinf(c.reference["logits"]).any())
    masked = tuple(np.argwhere(np.isinf(c.reference["logits"]))[0])
    found = output(c, changed(c, "logits", masked, -1e30), "logits")
    assert found.verdict is Verdict.DIVERGED


def _cases(name, rng):
    from dsv4dbg.kernels.dims import TINY

    op = registry().op(name)
    for example in op.examples_function(TINY, rng):
        yield case(op, example.args)


def test_codes_on_exact_inputs_must_be_the_reference_s():
    x = activations(np.random.default_rng(1), 50, 256)
    c = case(registry().op("act_quant"), {"x": x, "group": 128, "dialect": "ocp"})
    codes = c.reference["codes"].copy()
    codes[7, 9] += 1
    found = output(c, {**c.reference, "codes": codes}, "codes")
    assert found.verdict is Verdict.DIVERGED
    assert found.at == {"token": 7, "channel": 9}


def test_another_scale_with_the_same_values_is_rounding():
    x = activations(np.random.default_rng(1), 4, 128).abs() + 1  # no subnormal codes
    c = case(registry().op("act_quant"), {"x": x, "group": 128, "dialect": "ocp"})
    codes, scale = c.reference["codes"] - 8, c.reference["scale"] + 1  # half the value, twice the scale
    found = c.judge({"codes": codes, "scale": scale})
    assert found.verdict is Verdict.ROUNDING, found.sentence
    assert output(c, {"codes": c.reference["codes"], "scale": scale}, "codes").verdict is Verdict.DIVERGED


def test_flips_are_excused_only_near_ties(entries):
    """The last bit of the largest value of a record is no matter of noise; `CLEAN` holds the flips that are."""
    layout, data = entries.reference["cache"].layout, entries.reference["cache"].data
    slots = entries.arrays["slots"][entries.arrays["slots"] >= 0]
    records = layout.read(data, slots)
    channel = int(np.abs(entries.oracle["cache"][5, :64]).argmax())
    records[5, channel] ^= 1
    changed_data = data.copy()
    layout.write(changed_data, slots, records)
    found = output(entries, {**entries.reference, "cache": CacheArray(changed_data, layout)}, "cache")
    assert found.verdict is Verdict.DIVERGED
    assert found.at["slot"] == slots[5]
    assert found.at["channel"] == channel


def test_bytes_outside_slots_and_padding_are_guarded(entries):
    cache = entries.reference["cache"]
    data = cache.data.copy()
    data[0, -1] ^= 1  # behind the records of the page or in the last one's padding
    found = output(entries, {**entries.reference, "cache": CacheArray(data, cache.layout)}, "cache")
    assert found.verdict is Verdict.DIVERGED
    assert "outside the slots" in found.sentence or "padding" in found.sentence


def test_stale_records_are_named(entries):
    cache, before = entries.reference["cache"], entries.arrays["cache"]
    slot = entries.arrays["slots"][entries.arrays["slots"] >= 0][:1]
    data = cache.data.copy()
    cache.layout.write(data, slot, cache.layout.read(before.data, slot))
    found = output(entries, {**entries.reference, "cache": CacheArray(data, cache.layout)}, "cache")
    assert "not written" in found.fingerprints[0]


def test_ties_at_the_cut_are_excused_and_nothing_else():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    args = {"logits": logits, "lens": torch.tensor([5], dtype=torch.int32), "k": 2}
    c = case(registry().op("indexer_topk"), args)

    def verdict(*ids):
        return c.judge({"indices": np.array([ids], np.int32)})

    assert verdict(1, 3).verdict is Verdict.ROUNDING
    assert verdict(2, 1).verdict is Verdict.PASS
    assert verdict(2, 3).verdict is Verdict.DIVERGED  # both ties, without the best
    assert verdict(1, 0).verdict is Verdict.DIVERGED
    assert verdict(1, -1).verdict is Verdict.DIVERGED
    assert verdict(1, 5).verdict is Verdict.DIVERGED


def test_router_flips_need_a_gap_within_rounding():
    logits = torch.tensor([[2.0, 1.0, 1.0 + 2**-23, -1.0]])
    c = case(registry().op("moe_router"), {"logits": logits, "bias": torch.zeros(4), "topk": 2, "scale": 1.5})
    weights = c.reference["weights"]
    flipped = c.judge({"weights": weights, "ids": np.array([[0, 2]], np.int32)})
    assert flipped.outputs["ids"].verdict is Verdict.ROUNDING
    assert flipped.outputs["ids"].flips == {"excused": 1, "not excused": 0}
    assert c.judge({"weights": weights, "ids": np.array([[0, 3]], np.int32)}).verdict is Verdict.DIVERGED


def test_weights_are_compared_by_expert():
    c = PROTOTYPES["moe_router"](np.random.default_rng(0), 50)
    weights, ids = c.reference["weights"], c.reference["ids"]
    both = {"weights": weights[:, ::-1].copy(), "ids": ids[:, ::-1].copy()}
    assert c.judge(both).verdict is Verdict.PASS
    assert c.judge({**both, "ids": ids}).verdict is Verdict.DIVERGED
    assert c.judge({**both, "weights": weights}).verdict is Verdict.DIVERGED


def test_logits_show_kl_and_top1():
    rng = np.random.default_rng(0)
    args = {"y": activations(rng, 20, 128), "weight": normal(rng, 512, 128, scale=0.1).to(torch.bfloat16)}
    c = case(registry().op("lm_head"), args)
    found = output(c, {"logits": c.reference["logits"] * np.float32(1.001)}, "logits")
    assert found.notes["KL mean"] > 0
    assert found.notes["top-1 agreement"] == 1


# fingerprints


def _marks(c, candidate, name="y"):
    found = output(c, candidate, name)
    assert found.verdict is Verdict.DIVERGED
    return " | ".join(found.fingerprints)


def test_fingerprints_of_numbers(linear):
    y = linear.reference["y"].astype(np.float64)
    assert "FNUZ" in _marks(linear, {"y": (y * 2).astype(BF16)})
    assert "448" in _marks(linear, {"y": (y * 448 / 240).astype(BF16)})
    assert "exact zeros" in _marks(linear, changed(linear, "y", slice(100, None), 0))
    byte = int(np.median(linear.arrays["scale"]))
    assert "UE8M0" in _marks(linear, {"y": (y * byte * 2.0 ** (127 - byte)).astype(BF16)})
    truncated = (linear.oracle["y"].astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(BF16)
    assert "toward zero" in _marks(linear, {"y": truncated})


def test_fingerprints_of_places(linear):
    rng = np.random.default_rng(5)
    y = linear.reference["y"]
    noise = rng.standard_normal(y.shape).astype(BF16)
    assert "only the last token" in _marks(linear, changed(linear, "y", -1, noise[-1]))
    assert "only tokens from 200 on" in _marks(linear, changed(linear, "y", slice(200, None), noise[200:]))
    assert "= 3 mod 4" in _marks(linear, changed(linear, "y", slice(3, None, 4), noise[3::4]))
    assert "later" in _marks(linear, {"y": np.roll(y, -1, axis=0)})
    assert "columns are permuted" in _marks(linear, {"y": np.ascontiguousarray(y[:, ::-1])})


def test_fingerprint_of_heads():
    c = blind_spot_case()
    y = c.reference["y"].copy()
    y[:, 6:] = 0
    assert "only heads from 6 on" in _marks(c, {"y": y})


# cheap comparison without an oracle


def test_rows_apart_sums():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((37, 501)).astype(np.float32) for _ in range(2))
    found = rows_apart(a, b)
    np.testing.assert_allclose(found["difference2"], ((a - b) ** 2).sum(1), rtol=1e-5)
    np.testing.assert_allclose(found["largest"], np.abs(a - b).max(1))
    assert not same_bits(a, b)
    assert same_bits(a, a.copy())


def test_limits_do_not_depend_on_how_many_rows_are_clean(linear):
    """One bad row among many is found as in a few."""
    rng = np.random.default_rng(8)
    weight = norm_weight(rng, 256)
    for rows in (3, 20_000):
        c = case(registry().op("rms_norm"), {"x": activations(rng, rows, 256), "weight": weight, "eps": 1e-6})
        y = c.reference["y"].copy()
        y[1] = (y[1].astype(np.float32) * 1.03).astype(BF16)
        found = output(c, {"y": y}, "y")
        assert found.verdict is Verdict.DIVERGED
        assert found.at["token"] == 1


def test_case_is_frozen(linear):
    assert replace(linear, numerics=OFFICIAL).judge(linear.reference).verdict is Verdict.PASS
