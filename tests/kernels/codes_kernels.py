"""Kernels that apply the helpers of `triton_codes` to whole arrays, for tests/kernels/test_triton_codes.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4dbg.kernels import triton_codes as codes
from dsv4dbg.kernels.triton_run import on_cpu_interpreted

BLOCK = 4096


@triton.jit
def _decode(x, out, count, BLOCK: tl.constexpr, KIND: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(x + at, at < count, other=0)
    if KIND == "fp4":
        value = codes.fp4_decode(code)
    elif KIND == "bf16":
        value = codes.widened(code)
    elif KIND == "e8m0":
        value = codes.e8m0_decode(code)
    else:
        value = codes.fp8_decode(code, KIND)
    tl.store(out + at, value, at < count)


@triton.jit
def _encode(x, out, scale, count, BLOCK: tl.constexpr, KIND: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < count, other=0.0)
    if KIND == "bf16":
        tl.store(out + at, codes.rounded(value, tl.bfloat16), at < count)
    elif KIND == "fp4":
        tl.store(out + at, codes.fp4_encode(value), at < count)
        _, byte = codes.fp4_scale(tl.abs(value))
        tl.store(scale + at, byte, at < count)
    else:
        tl.store(out + at, codes.fp8_encode(value, KIND), at < count)
        _, byte = codes.fp8_scale(tl.abs(value), KIND)
        tl.store(scale + at, byte, at < count)


@triton.jit
def _quantize(x, out, scale, DIALECT: tl.constexpr, GROUP: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    value = codes.widened(tl.load(x + at))
    if DIALECT == "fp4":
        reciprocal, byte = codes.fp4_scale(codes.amax(value, 0))
        code = codes.fp4_encode(value * reciprocal)
    else:
        reciprocal, byte = codes.fp8_scale(codes.amax(value, 0), DIALECT)
        code = codes.fp8_encode(value * reciprocal, DIALECT)
    tl.store(out + at, code)
    tl.store(scale + tl.program_id(0), byte)


@triton.jit
def _offsets(slots, out, count, page_stride, ENTRIES: tl.constexpr, BASE: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, 256)
    slot = tl.load(slots + at, at < count, other=-1)
    tl.store(out + at, codes.field_offset(slot, page_stride, ENTRIES, BASE, SIZE), at < count)


@triton.jit
def _dot(a, b, out):
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    x = codes.load_operand(a + row * 16 + column, row < 12)
    y = codes.operand(codes.widened(tl.load(b + row * 16 + column)), a.dtype.element_ty)
    acc = codes.dot(x, y, tl.zeros((16, 16), tl.float32))
    tl.store(out + row * 16 + column, acc)


@on_cpu_interpreted
def decode(x: torch.Tensor, kind: str) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _decode[(triton.cdiv(len(x), BLOCK),)](x, out, len(x), BLOCK, kind, enable_fp_fusion=False)
    return out


@on_cpu_interpreted
def encode(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(x.shape, dtype=torch.bfloat16 if kind == "bf16" else torch.uint8, device=x.device)
    scale = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    _encode[(triton.cdiv(len(x), BLOCK),)](x, out, scale, len(x), BLOCK, kind, enable_fp_fusion=False)
    return out, scale


@on_cpu_interpreted
def quantize(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(len(x), dtype=torch.uint8, device=x.device)
    _quantize[(len(x),)](x, out, scale, kind, x.shape[1], enable_fp_fusion=False)
    return out, scale


@on_cpu_interpreted
def offsets(slots: torch.Tensor, page_stride: int, entries: int, base: int, size: int) -> torch.Tensor:
    out = torch.empty(slots.shape, dtype=torch.int64, device=slots.device)
    _offsets[(1,)](slots, out, len(slots), page_stride, entries, base, size, enable_fp_fusion=False)
    return out


@on_cpu_interpreted
def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.empty(16, 16, dtype=torch.float32, device=a.device)
    _dot[(1,)](a, b, out, enable_fp_fusion=False)
    return out


@on_cpu_interpreted
def failing(x: torch.Tensor, how: str) -> None:
    if how == "raise":
        raise ValueError("no such shape")
    if how == "crash":
        import ctypes

        ctypes.string_at(0)


@on_cpu_interpreted
def views(data: torch.Tensor, part: torch.Tensor, table: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict]:
    """Writes through a view, returns a view of its argument and a new tensor."""
    part += 1
    return data[1:, ::2], {"sum": table["x"] + part.sum(), "strides": part.stride()}
