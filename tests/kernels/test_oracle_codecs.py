"""The oracles' codecs against the bit formulas of the formats, and against the paged codecs of the forward."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsv4dbg.compare import Exact
from dsv4dbg.kernels import oracle, paged
from dsv4dbg.kernels.contract import op, tensor
from dsv4dbg.kernels.numerics import OFFICIAL
from dsv4dbg.pages import index_layout, kv_layout, state_layout

BYTES = np.arange(256, dtype=np.uint8)
INF, NAN = float("inf"), float("nan")


def minifloat(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Value of sign | exponent | mantissa with subnormals and no special codes."""
    mantissa, code = code % 2**mantissa_bits, code >> mantissa_bits
    exponent, sign = code % 2**exponent_bits, -1.0 if code >> exponent_bits else 1.0
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


def test_fp8_tables():
    ocp = [NAN if code & 0x7F == 0x7F else minifloat(code, 4, 3, 7) for code in range(256)]
    fnuz = [NAN if code == 0x80 else minifloat(code, 4, 3, 8) for code in range(256)]
    assert np.array_equal(oracle.fp8(BYTES), ocp, equal_nan=True)
    assert np.array_equal(oracle.fp8(BYTES, "fnuz"), fnuz, equal_nan=True)


def test_e8m0_table():
    expected = [2.0 ** (b - 127) for b in range(255)] + [NAN]
    assert np.array_equal(oracle.e8m0(BYTES), expected, equal_nan=True)


def test_fp4_table_and_nibble_order():
    low = oracle.fp4(BYTES[:16, None])[:, 0]
    assert np.array_equal(low, [minifloat(code, 2, 1, 1) for code in range(16)])
    assert not np.signbit(low[8])
    assert np.array_equal(oracle.fp4(np.array([[0x21, 0x7F]], np.uint8)), [[0.5, 1.0, -6.0, 6.0]])


def test_mx_scales_span_32_channels():
    packed, scale = np.full((2, 32), 0x22, np.uint8), np.array([[127, 130], [126, 127]], np.uint8)
    assert oracle.mx(packed, scale)[:, ::32].tolist() == [[1.0, 8.0], [0.5, 1.0]]


@pytest.mark.parametrize(("fmt", "dialect", "maximum"), [("fp8", "ocp", 448), ("fp8", "fnuz", 224), ("fp4", "", 6)])
def test_quantize_picks_the_smallest_power_of_two_that_does_not_saturate(fmt, dialect, maximum):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 64)) * np.exp2(rng.uniform(-12, 60, (200, 1)))
    values, scale = oracle.quantize(x, 64, fmt, dialect)
    ratio = np.abs(x).max(axis=1) / scale[:, 0]
    assert np.array_equal(np.frexp(scale)[0], np.full_like(scale, 0.5))
    assert ratio.max() <= maximum
    assert ratio.min() > maximum / 2
    step = np.abs(x) * (2.0**-4 if fmt == "fp8" else 2.0**-2)
    smallest = {"ocp": 2.0**-10, "fnuz": 2.0**-11, "": 0.25}[dialect] * scale
    assert np.all(np.abs(values - x) <= np.maximum(step, smallest))


def test_quantize_keeps_exact_bounds_and_floors():
    x = np.zeros((4, 64))
    x[1, 0], x[2, 0], x[3, 0] = 448.0, 448.0000001, 1e-9
    assert np.log2(oracle.quantize(x, 64)[1][:, 0]).tolist() == [-22, 0, 1, -22]
    assert np.log2(oracle.quantize(x, 64, "fp4")[1][0, 0]) == -126


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_groups_that_are_not_finite_are_nan(bad):
    x = np.ones((1, 128))
    x[0, 70] = bad
    assert np.isnan(oracle.quantize(x, 64)[0]).tolist() == [[i >= 64 for i in range(128)]]


LAYOUTS = {
    "kv fp8 ocp": kv_layout("fp8", "ocp", 512, 64, 4),
    "kv fp8 fnuz": kv_layout("fp8", "fnuz", 128, 64, 4),
    "kv bf16": kv_layout("bf16", "", 128, 64, 4),
    "index fp8 ocp": index_layout("fp8", "ocp", 128, 4, 576),
    "index fp8 fnuz": index_layout("fp8", "fnuz", 128, 4, 576),
    "index fp4": index_layout("fp4", "", 128, 4, 576),
    "index f32": index_layout("f32", "", 128, 4, 576),
    "state": state_layout(64, 4, 576),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_oracle_reads_what_the_forward_writes(name):
    layout = LAYOUTS[name]
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((6, layout.channels)) * np.exp2(rng.uniform(-9, 9, (6, 1)))
    rows = torch.from_numpy(rows.astype(np.float32)).to(torch.bfloat16).float()
    cache = paged.Cache("c", torch.full((3, layout.page_bytes + 64), 0xFF, dtype=torch.uint8), layout)
    slots = torch.tensor([11, 0, 3, 4, 7, 10])
    paged.write(cache, slots, rows)
    decoded = oracle.to_numpy(cache).rows(slots.numpy())
    assert np.array_equal(decoded.astype(np.float32), paged.read(cache, slots, torch.float32).numpy())
    assert np.abs(decoded - rows.numpy()).max() <= {"fp4": 0.25, "fp8": 0.07}.get(layout.format, 0) * rows.abs().max()
    assert np.isnan(oracle.to_numpy(cache).rows(np.array([1]))).all()  # not written: still 0xFF


def test_arguments_arrive_as_documented():
    seen = {}

    @op(family="x", args={n: tensor("n", "") for n in "abcd"}, outputs={"y": tensor("n", "")}, compare={"y": Exact()})
    def probe(a, b, c, d):
        return a

    @probe.oracle
    def _(**arguments):
        seen.update(arguments)
        return arguments["a"]

    eight = torch.tensor([0x38, 0xB8], dtype=torch.uint8)
    values = {"a": torch.ones(2, dtype=torch.bfloat16), "b": eight.view(torch.float8_e4m3fn), "c": torch.ones(2).int()}
    result = oracle.run_oracle(probe, values, OFFICIAL)
    assert {n: v.dtype for n, v in seen.items() if v is not None} == {"a": np.float64, "b": np.uint8, "c": np.int64}
    assert seen["b"].tolist() == [0x38, 0xB8]
    assert seen["d"] is None
    assert list(result) == ["y"]
