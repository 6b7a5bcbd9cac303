"""Codecs of formats.py against ml_dtypes over whole code spaces, golden exponents, Hadamard and RoPE."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4dbg.kernels import formats

DIALECTS = ("ocp", "fnuz")
FP8_TYPE = {"ocp": ml_dtypes.float8_e4m3fn, "fnuz": ml_dtypes.float8_e4m3fnuz}
BYTES = np.arange(256, dtype=np.uint8)
ALL_BYTES = torch.from_numpy(BYTES)
BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)  # every bf16 value
INF, NAN = float("inf"), float("nan")


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal as float32 bit for bit (so that -0 is not 0), all NaN alike."""
    a, b = a.astype(np.float32), b.astype(np.float32)
    return bool(np.all((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))))


def random_values(seed: int, n: int = 400_000) -> torch.Tensor:
    """float32 over 60 binades, with many exact ties of e4m3 and e2m1 among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n) * np.exp2(rng.uniform(-40, 20, n))
    ties = rng.integers(-64, 65, n) / 2 * np.exp2(rng.integers(-12, 6, n))
    return torch.from_numpy(np.concatenate((x, ties)).astype(np.float32))


# FP8


@pytest.mark.parametrize("dialect", DIALECTS)
def test_fp8_decodes_every_byte(dialect):
    assert same_bits(formats.fp8_decode(ALL_BYTES, dialect).numpy(), BYTES.view(FP8_TYPE[dialect]))


def test_fp8_bytes_where_the_dialects_are_not_a_factor_two_apart():
    ocp, fnuz = (formats.fp8_decode(ALL_BYTES, d) for d in DIALECTS)
    assert torch.nonzero(~(ocp == 2 * fnuz)).flatten().tolist() == [0x7F, 0x80, 0xFF]
    assert (ocp[0x7F].isnan(), fnuz[0x7F]) == (True, 240.0)
    assert (ocp[0xFF].isnan(), fnuz[0xFF]) == (True, -240.0)
    assert ocp[0x80] == 0
    assert torch.signbit(ocp[0x80])
    assert fnuz[0x80].isnan()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_fp8_round_trip_of_every_byte_in_range(dialect):
    values = formats.fp8_decode(ALL_BYTES, dialect)
    keep = values.abs() <= formats.FP8_MAX[dialect]
    assert keep.sum() == {"ocp": 254, "fnuz": 253}[dialect]
    assert torch.equal(formats.fp8_encode(values[keep], dialect), ALL_BYTES[keep])


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("values", [BF16[BF16.isfinite()].float(), random_values(0)], ids=["all bf16", "random"])
def test_fp8_encode_rounds_as_ml_dtypes_after_the_clamp(dialect, values):
    limit = formats.FP8_MAX[dialect]
    expected = np.clip(values.numpy(), -limit, limit).astype(FP8_TYPE[dialect]).view(np.uint8)
    assert np.array_equal(formats.fp8_encode(values, dialect).numpy(), expected)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_fp8_encode_saturates(dialect):
    codes = formats.fp8_encode(torch.tensor([INF, -INF, 1e9, -1e9]), dialect)
    assert codes.tolist() == [0x7E, 0xFE] * 2  # 448, and 224 (240 would be 0x7F)
    assert formats.fp8_decode(codes[:1], dialect) == formats.FP8_MAX[dialect]


def test_fnuz_never_emits_its_nan():
    small = torch.tensor([-0.0, -(2.0**-11), -(2.0**-12), -1e-30])  # all round to zero from below
    assert formats.fp8_encode(small, "fnuz").tolist() == [0] * 4
    assert formats.fp8_encode(2 * small, "ocp").tolist() == [0x80] * 4
    assert 0x80 not in formats.fp8_encode(random_values(1), "fnuz")
    assert formats.fp8_encode(torch.tensor([NAN, -NAN]), "fnuz").tolist() == [0, 0]  # the scale tells


@pytest.mark.parametrize(
    ("amax", "exponent"),
    [(0, -22), (1e-4, -22), (0.5, -9), (1, -8), (3.5, -7), (7, -6), (7.03125, -5), (448, 0), (450, 1)],
)
@pytest.mark.parametrize("group", [64, 128])
def test_golden_fp8_exponents(amax, exponent, group):
    x = torch.zeros(1, group, dtype=torch.bfloat16)
    x[0, 3] = -amax
    assert formats.fp8_quantize(x, group)[1].item() == exponent + 127
    assert formats.fp8_quantize(x, group, "fnuz")[1].item() == exponent + 1 + 127  # 224 needs one more


@pytest.mark.parametrize("maximum", [448.0, 224.0, 6.0])
def test_scale_exponent_is_exact_for_every_bf16_amax(maximum):
    """Any way to write ceil(log2(amax / max)) agrees on bf16: also frexp of the double quotient, which is exact."""
    amax = BF16[BF16.isfinite() & (BF16 > 0)].float()
    amax = amax[amax / maximum >= 2.0**-126]  # quantisers have a floor above
    mantissa, exponent = np.frexp(amax.double().numpy() / maximum)
    expected = exponent - (mantissa == 0.5)
    assert np.array_equal(formats.scale_exponent(amax, maximum).numpy(), expected)


@pytest.mark.parametrize("maximum", [448.0, 224.0, 6.0])
def test_scale_exponent_sees_every_mantissa_bit_of_a_float32_amax(maximum):
    edges = maximum * torch.exp2(torch.arange(-20.0, 20.0))
    assert formats.scale_exponent(edges, maximum).tolist() == list(range(-20, 20))
    assert formats.scale_exponent(edges * (1 + 2.0**-21), maximum).tolist() == list(range(-19, 21))
    assert formats.scale_exponent(edges * (1 - 2.0**-21), maximum).tolist() == list(range(-20, 20))


def test_both_dialects_hold_the_same_values():
    rng = np.random.default_rng(2)
    x = torch.from_numpy(rng.standard_normal((4000, 64)) * np.exp2(rng.uniform(-30, 30, (4000, 1))))
    x = (x * torch.from_numpy(np.exp2(rng.uniform(-14, 0, x.shape)))).to(torch.bfloat16)
    (ocp, ocp_scale), (fnuz, fnuz_scale) = (formats.fp8_quantize(x, 64, d) for d in DIALECTS)
    assert torch.equal(fnuz_scale.int(), ocp_scale.int() + 1)
    assert torch.equal(fnuz, torch.where(ocp == 0x80, 0, ocp))
    assert (ocp == 0x80).any()
    values = formats.fp8_dequantize(fnuz, fnuz_scale, "fnuz")
    assert torch.equal(values, formats.fp8_dequantize(ocp, ocp_scale, "ocp"))
    assert torch.equal(values, values.to(torch.bfloat16).float())  # sim-quant is exact in bf16


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_groups_that_are_not_finite_are_nan(bad):
    x = torch.linspace(-3, 3, 128)[None].clone()
    x[0, 70] = bad
    for dialect in DIALECTS:
        codes, scale = formats.fp8_quantize(x, 64, dialect)
        assert scale[0, 1] == 255
        assert formats.fp8_dequantize(codes, scale, dialect)[0, 64:].isnan().all()
        alone = formats.fp8_quantize(x[:, :64], 64, dialect)
        assert (codes[:, :64].equal(alone[0]), scale[:, :1].equal(alone[1])) == (True, True)
    values = formats.fp4_dequantize(*formats.fp4_quantize(x))
    assert values.isnan().flatten().tolist() == [64 <= i < 96 for i in range(128)]


def test_block_dequantize_repeats_scales_over_ragged_blocks():
    codes = torch.full((130, 384), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)  # 1.0
    scale = torch.tensor([[127, 128, 129], [130, 131, 132]], dtype=torch.uint8)
    values = formats.block_dequantize(codes, scale)
    assert values.shape == (130, 384)
    for row, expected in ((0, [1, 2, 4]), (127, [1, 2, 4]), (128, [8, 16, 32]), (129, [8, 16, 32])):
        assert torch.equal(values[row], torch.tensor(expected).repeat_interleave(128).float())
    assert torch.equal(values, formats.block_dequantize(codes, formats.e8m0_decode(scale)))
    stacked = formats.block_dequantize(torch.stack((codes, codes)), torch.stack((scale, scale + 1)))
    assert torch.equal(stacked, torch.stack((values, 2 * values)))


# E8M0


def test_e8m0_decodes_every_byte():
    expected = BYTES.view(ml_dtypes.float8_e8m0fnu)
    assert same_bits(formats.e8m0_decode(ALL_BYTES).numpy(), expected)
    assert formats.e8m0_decode(ALL_BYTES)[0] == 2.0**-127


def test_power_of_two_is_exact():
    exponents = torch.arange(-126, 128)
    assert formats.power_of_two(exponents).tolist() == [2.0**e for e in range(-126, 128)]
    assert formats.power_of_two(torch.tensor([-127, -129])).tolist() == [0, 0]


# FP4


def test_fp4_decodes_every_code():
    values = formats.fp4_decode(ALL_BYTES[:16]).numpy()
    expected = BYTES[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert same_bits(values, expected + 0.0)  # code 8 gives +0
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.mark.parametrize(("tie", "rounded"), [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4)])
def test_fp4_ties_to_even(tie, rounded):
    at = torch.tensor(float(tie))
    around = torch.stack((at.nextafter(torch.tensor(0.0)), at, at.nextafter(torch.tensor(9.0))))
    below, at, above = formats.fp4_decode(formats.fp4_encode(around)).tolist()
    assert (at, below < above) == (rounded, True)
    assert at in (below, above)
    assert formats.fp4_decode(formats.fp4_encode(-around)).tolist() == [-below, -at, -above]


@pytest.mark.parametrize("values", [BF16[BF16.isfinite()].float(), random_values(3)], ids=["all bf16", "random"])
def test_fp4_encode_rounds_as_ml_dtypes_after_the_clamp(values):
    expected = np.clip(values.numpy(), -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(formats.fp4_encode(values).numpy(), expected)


def test_fp4_bytes_hold_even_channels_in_the_low_nibble():
    codes = torch.tensor([[1, 2, 0xF, 0]], dtype=torch.uint8)
    assert formats.fp4_pack(codes).tolist() == [[0x21, 0x0F]]
    everything = ALL_BYTES.reshape(2, 128)
    assert torch.equal(formats.fp4_pack(formats.fp4_unpack(everything)), everything)


@pytest.mark.parametrize(
    ("amax", "exponent"), [(0, -126), (0.75, -3), (1, -2), (1.5, -2), (1.5078125, -1), (6, 0), (6.03125, 1)]
)
def test_golden_fp4_exponents(amax, exponent):
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 30] = -amax
    assert formats.fp4_quantize(x)[1].item() == exponent + 127


def test_fp4_quantize_keeps_groups_apart():
    x = torch.zeros(2, 64)
    x[0, :32], x[0, 32:], x[1, 0] = 3.0, 0.375, -6e10
    packed, scale = formats.fp4_quantize(x)
    values = formats.fp4_dequantize(packed, scale)
    assert (packed.shape, scale.shape) == ((2, 32), (2, 2))
    assert torch.equal(values[0], x[0])
    assert values[1, 1:].abs().max() == 0
    assert abs(values[1, 0] / x[1, 0] - 1) <= 0.25


# Hadamard and RoPE


@pytest.mark.parametrize("n", [1, 2, 64, 128])
def test_hadamard_is_the_sylvester_matrix(n):
    index = np.arange(n)
    sign = np.array([[(-1.0) ** (i & j).bit_count() for j in index.tolist()] for i in index.tolist()])
    assert np.array_equal(formats.hadamard(torch.eye(n)).numpy(), (sign * n**-0.5).astype(np.float32))
    x = torch.from_numpy(np.random.default_rng(n).standard_normal((5, 3, n)).astype(np.float32))
    assert np.allclose(formats.hadamard(x).numpy(), x.double().numpy() @ sign * n**-0.5, atol=1e-6)
    assert torch.allclose(formats.hadamard(formats.hadamard(x)), x, atol=1e-6)


def test_hadamard_rounds_bf16_once():
    x = torch.from_numpy(np.random.default_rng(4).standard_normal((50, 128)).astype(np.float32)).to(torch.bfloat16)
    assert torch.equal(formats.hadamard(x), formats.hadamard(x.float()).to(torch.bfloat16))


def table_of(angles: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.concatenate((np.cos(angles), np.sin(angles)), axis=-1).astype(np.float32))


@pytest.mark.parametrize("shape", [(7, 24), (7, 3, 24), (7, 8), (0, 3, 24)])
def test_rotate_is_a_complex_product_on_interleaved_pairs_of_the_last_channels(shape):
    rng = np.random.default_rng(5)
    x, angles = rng.standard_normal(shape).astype(np.float32), rng.uniform(-9, 9, (shape[0], 4))
    rotated = formats.rotate(torch.from_numpy(x), table_of(angles))
    pairs = x[..., -8:].astype(np.float64)
    turn = np.exp(1j * angles.reshape(shape[0], *(1,) * (len(shape) - 2), 4))
    product = (pairs[..., 0::2] + 1j * pairs[..., 1::2]) * turn
    expected = np.stack((product.real, product.imag), axis=-1).reshape(pairs.shape)
    assert np.array_equal(rotated[..., :-8].numpy(), x[..., :-8])
    assert np.allclose(rotated[..., -8:].numpy(), expected, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([2, 8, 64]))
def test_rotate_backwards_undoes_it_and_lengths_stay(seed, r):
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((3, 2, 64)).astype(np.float32))
    table = table_of(rng.uniform(-1e3, 1e3, (3, r // 2)))
    rotated = formats.rotate(x, table)
    assert torch.allclose(formats.rotate(rotated, table, inverse=True), x, atol=1e-5)
    assert torch.allclose(rotated.unflatten(-1, (-1, 2)).norm(dim=-1), x.unflatten(-1, (-1, 2)).norm(dim=-1), atol=1e-5)


def test_rotated_products_depend_on_the_distance_alone():
    q, k = torch.from_numpy(np.random.default_rng(6).standard_normal((2, 1, 8)).astype(np.float32))
    frequency = np.array([1.0, 0.3, 0.1, 0.01])

    def product(p: int, s: int) -> float:
        at_p, at_s = (formats.rotate(x, table_of(n * frequency[None])) for x, n in ((q, p), (k, s)))
        return (at_p * at_s).sum().item()

    assert product(5, 2) == pytest.approx(product(103, 100), abs=1e-5)
    assert product(5, 2) != pytest.approx(product(5, 3), abs=1e-3)
    assert product(5, 2) != pytest.approx(product(2, 5), abs=1e-3)


def test_rotate_rounds_bf16_once_and_leaves_position_zero_alone():
    x = torch.from_numpy(np.random.default_rng(7).standard_normal((9, 4, 64)).astype(np.float32)).to(torch.bfloat16)
    table = table_of(np.random.default_rng(8).uniform(-9, 9, (9, 16)))
    assert torch.equal(formats.rotate(x, table), formats.rotate(x.float(), table).to(torch.bfloat16))
    assert torch.equal(formats.rotate(x, table_of(np.zeros((9, 16)))), x)
