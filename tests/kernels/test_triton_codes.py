"""Device-side formats over all codes and many float32 values, against `formats` and ml_dtypes; the interpreter."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import codes_kernels as kernels

from dsv4dbg.kernels import formats
from dsv4dbg.kernels.child import ChildDied
from dsv4dbg.pages import kv_layout

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FP8 = {"ocp": ml_dtypes.float8_e4m3fn, "fnuz": ml_dtypes.float8_e4m3fnuz}


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal bits, any NaN equal to any NaN."""
    a, b = a.cpu(), b.cpu()
    assert a.dtype == b.dtype
    if a.is_floating_point():
        assert torch.equal(a.isnan(), b.isnan())
        a, b = (x.float().nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).view(torch.int32) for x in (a, b))
    wrong = (a != b).nonzero()
    assert not len(wrong), f"{len(wrong)} differ, first at {wrong[0].tolist()}"


def as_torch(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.astype(np.float32))


def many_floats() -> torch.Tensor:
    """All bf16 values; midpoints of every format and their neighbours; random bits; random sizes around the formats."""
    rng = np.random.default_rng(0)
    every = np.arange(65536, dtype=np.uint32) << 16
    ties = [np.arange(256, dtype=np.uint8).view(t).astype(np.float32) for t in FP8.values()]
    ties += [np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)]
    middles = [((a[:-1].astype(np.float64) + a[1:]) / 2).astype(np.float32) for a in map(np.sort, ties)]
    near = np.concatenate([*ties, *middles]).view(np.uint32)
    halves = rng.integers(0, 65536, 20000, dtype=np.uint32) << 16 | 0x8000  # ties of bf16
    random = rng.integers(0, 2**32, 50000, dtype=np.uint32)
    sized = (rng.standard_normal(50000) * 2.0 ** rng.integers(-14, 11, 50000)).astype(np.float32).view(np.uint32)
    bits = np.concatenate([every, near, near + 1, near - 1, halves, halves + 1, halves - 1, random, sized])
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


FLOATS = many_floats()


@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
def test_fp8_decode(dialect, device):
    codes = torch.arange(256, dtype=torch.uint8)
    got = kernels.decode(codes.to(device), dialect)
    same(got, formats.fp8_decode(codes, dialect))
    same(got, as_torch(codes.numpy().view(FP8[dialect])))


@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
def test_fp8_encode(dialect, device):
    code, scale = kernels.encode(FLOATS.to(device), dialect)
    same(code, formats.fp8_encode(FLOATS, dialect))
    exponent = formats.scale_exponent(FLOATS.abs().clamp_min(formats.FP8_AMAX_FLOOR), formats.FP8_MAX[dialect])
    same(scale, (exponent + 127).clamp(0, 255).to(torch.uint8))
    limit = formats.FP8_MAX[dialect]
    number = ~FLOATS.isnan()
    expected = FLOATS[number].clamp(-limit, limit).numpy().astype(FP8[dialect]).view(np.uint8)
    same(code.cpu()[number], torch.from_numpy(np.where((expected == 0x80) & (dialect == "fnuz"), 0, expected)))
    assert dialect == "ocp" or not (code == 0x80).any()


def test_fp4(device):
    codes = torch.arange(16, dtype=torch.uint8)
    got = kernels.decode(codes.to(device), "fp4")
    same(got, formats.fp4_decode(codes))
    same(got, as_torch(codes.numpy().view(ml_dtypes.float4_e2m1fn)) + 0.0)
    code, scale = kernels.encode(FLOATS.to(device), "fp4")
    same(code, formats.fp4_encode(FLOATS))
    exponent = formats.scale_exponent(FLOATS.abs().clamp_min(formats.FP4_AMAX_FLOOR), formats.FP4_MAX)
    same(scale, (exponent + 127).clamp(0, 255).to(torch.uint8))


def test_e8m0_decode(device):
    codes = torch.arange(256, dtype=torch.uint8)
    got = kernels.decode(codes.to(device), "e8m0")
    same(got, formats.e8m0_decode(codes))
    same(got, as_torch(codes.numpy().view(ml_dtypes.float8_e8m0fnu)))


def test_bf16_widening(device):
    every = torch.arange(-32768, 32768).to(torch.int16).view(torch.bfloat16)
    same(kernels.decode(every.to(device), "bf16"), every.float())


def test_bf16_rounding(device):
    code, _ = kernels.encode(FLOATS.to(device), "bf16")
    same(code, FLOATS.to(torch.bfloat16))
    with np.errstate(invalid="ignore"):
        expected = FLOATS.numpy().astype(ml_dtypes.bfloat16).view(np.int16)
    same(code, torch.from_numpy(expected).view(torch.bfloat16))


@pytest.mark.parametrize("kind", ["ocp", "fnuz", "fp4"])
def test_quantise_groups(kind, device):
    """Groups with every exponent, of zeros, with inf and with NaN."""
    generator = torch.Generator().manual_seed(1)
    group = 32 if kind == "fp4" else 64
    x = (
        torch.randn(280, group, generator=generator)
        * torch.exp2(torch.arange(-145, 135).clamp_max(127).float())[:, None]
    )
    x[3] = 0
    x[5, 7], x[6, 9], x[7, 0] = torch.nan, torch.inf, -torch.inf
    x[8] = torch.tensor([448.0, -448.0]).repeat(group // 2)
    for values in (x, x.to(torch.bfloat16)):
        code, scale = kernels.quantize(values.to(device), kind)
        expected = formats.fp4_quantize(values) if kind == "fp4" else formats.fp8_quantize(values, group, kind)
        same(scale, expected[1].flatten())
        number = expected[1].flatten() != 255  # the sign of a NaN that a product makes is the device's own
        codes = formats.fp4_pack(code.cpu()) if kind == "fp4" else code.cpu()
        same(codes[number], expected[0][number])
        assert (~number).sum() >= 3


@pytest.mark.parametrize("entries", [1, 2, 64])
def test_field_offsets_beyond_32_bits(entries, device):
    layout = kv_layout("fp8", "ocp", 512, 64, entries)
    stride = layout.page_bytes + 640
    last = 2**33 // stride * entries
    slots = torch.tensor([0, 1, entries - 1, entries, 3 * entries + entries // 2, last, last + entries - 1])
    for number, expected in enumerate(layout.field_offsets(slots.numpy(), stride)):
        base = entries * sum(layout.fields[:number])
        for dtype in (torch.int32, torch.int64):
            got = kernels.offsets(slots.to(dtype).to(device), stride, entries, base, layout.fields[number])
            same(got, torch.from_numpy(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dot_is_exact_on_small_integers(dtype, device):
    a = torch.arange(256).remainder(13).sub(6).view(16, 16)
    b = torch.arange(256).remainder(11).sub(5).view(16, 16)
    got = kernels.dot(a.to(dtype).to(device), b.to(dtype).to(device))
    same(got, (a * (torch.arange(16) < 12)[:, None]).float() @ b.float())


def test_float32_dots_are_not_shortened(device):
    a = torch.full((16, 16), 1 + 2.0**-20)
    got = kernels.dot(a.to(device), torch.eye(16).to(device))
    same(got[:12], a[:12])


def test_views_and_aliases_cross_processes():
    data = torch.arange(24.0).view(4, 6)
    part = data[1, 1:5:2]
    view, more = kernels.views(data, part, {"x": torch.tensor([1.0])})
    assert part.tolist() == [8.0, 10.0]
    assert data[1].tolist() == [6.0, 8.0, 8.0, 10.0, 10.0, 11.0]
    assert view.data_ptr() == data[1:].data_ptr()
    assert view.stride() == (6, 2)
    assert more == {"sum": torch.tensor([19.0]), "strides": (2,)}


def test_an_exception_is_the_same_exception():
    with pytest.raises(ValueError, match="no such shape") as caught:
        kernels.failing(torch.zeros(1), "raise")
    assert "codes_kernels.py" in str(caught.value.__cause__)


def test_a_crash_is_reported_and_the_next_call_runs():
    with pytest.raises(ChildDied, match="SIGSEGV"):
        kernels.failing(torch.zeros(1), "crash")
    assert kernels.decode(torch.tensor([0x38], dtype=torch.uint8), "ocp").tolist() == [1.0]
