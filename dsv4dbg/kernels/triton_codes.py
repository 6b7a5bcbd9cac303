"""Number formats and cache addresses for Triton kernels, exact on NVIDIA, on AMD and in Triton's CPU interpreter.

The device-side twin of `dsv4dbg.kernels.formats` and `dsv4dbg.pages`: same rounding points, same bits. Everything is
integer arithmetic and exact float32 products, because the interpreter truncates to bf16, rounds FP8 wrongly and
computes bf16 on raw bit patterns, and because hardware conversions to FP8 saturate in different ways; only bf16 and the
decoding of FP8 are left to devices that do them right. So a kernel

* loads FP8, FP4 and E8M0 as uint8 and decodes them here; bf16 and float32 are loaded as they are and `widened`;
* computes in float32;
* rounds with `rounded` before it stores, and with `operand` before a `dot`;
* takes largest magnitudes with `amax`, which keeps NaN.

Dialects are ``"ocp"`` and ``"fnuz"``. Kernels are launched with ``enable_fp_fusion=False``: then elementwise chains
have the same bits on every device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def widened(x):
    """bf16 or float32, as loaded, to float32 (exact; the interpreter's own conversion is wrong for subnormals)."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 to ``dtype`` (bf16 or float32), round to nearest even, ready for `tl.store`."""
    if not INTERPRETED:
        return x.to(dtype)
    elif dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, nearest, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x


@triton.jit
def operand(x, dtype: tl.constexpr):
    """float32 rounded to ``dtype``, as an operand of `dot` (the interpreter keeps rounded values in float32)."""
    if INTERPRETED:
        return widened(rounded(x, dtype))
    else:
        return rounded(x, dtype)


@triton.jit
def load_operand(pointer, mask):
    """bf16 or float32 values as an operand of `dot`; 0 where ``mask`` is false."""
    if INTERPRETED:
        return widened(tl.load(pointer, mask, other=0.0))
    else:
        return tl.load(pointer, mask, other=0.0)


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b`` in float32 on operands of `operand` or `load_operand`; float32 operands are not shortened."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def amax(x, axis: tl.constexpr):
    """Largest magnitude along ``axis``, float32; NaN if there is one (by comparing bits, so in any order the same)."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis).to(tl.float32, bitcast=True)


@triton.jit
def at_least(x, floor: tl.constexpr):
    """The larger of ``x`` and ``floor`` (> 0); NaN stays NaN."""
    return tl.where(x < floor, floor, x)


@triton.jit
def power_of_two(exponent):
    """``2.0 ** exponent`` in float32 for int32 exponents up to 127, from bits; 0 below -126."""
    return (tl.maximum(exponent + 127, 0) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_decode(byte):
    """E8M0 bytes (uint8) to float32: ``2^(byte - 127)``; byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    code = byte.to(tl.int32)
    bits = tl.where(code == 0, 1 << 22, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def scale_exponent(amax, maximum: tl.constexpr):
    """``ceil(log2(amax / maximum))`` as int32 from the bits of ``amax * (1 / maximum)``; above 127 for inf and NaN."""
    bits = (amax * (1.0 / maximum)).to(tl.int32, bitcast=True)
    return ((bits >> 23) & 0xFF) - 127 + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def e8m0_encode(exponent):
    """Exponents (int32) of scales to E8M0 bytes, 255 (NaN) from 128 on."""
    return tl.minimum(tl.maximum(exponent + 127, 0), 255).to(tl.uint8)


@triton.jit
def fp8_scale(amax, dialect: tl.constexpr):
    """Scale of a group whose largest magnitude is ``amax`` (`amax`): the exact reciprocal (float32) and the E8M0 byte.

    ``fp8_encode(x * reciprocal, dialect)`` are then the group's codes.
    """
    if dialect == "fnuz":
        exponent = scale_exponent(at_least(amax, 1e-4), 224.0)
    else:
        exponent = scale_exponent(at_least(amax, 1e-4), 448.0)
    return power_of_two(-exponent), e8m0_encode(exponent)


@triton.jit
def fp4_scale(amax):
    """As `fp8_scale`, for e2m1."""
    exponent = scale_exponent(at_least(amax, 7.052966104933725e-38), 6.0)  # 6 * 2^-126
    return power_of_two(-exponent), e8m0_encode(exponent)


@constexpr_function
def _decodes_fp8(dialect):
    """Whether the device that is compiled for has an instruction for it."""
    target = None if INTERPRETED else current_target()
    if target is None:
        return False
    if target.backend == "cuda":
        return dialect == "ocp" and target.arch >= 89
    return target.arch in (("gfx942",) if dialect == "fnuz" else ("gfx950", "gfx1200", "gfx1201"))


@triton.jit
def fp8_decode(code, dialect: tl.constexpr):
    """e4m3 bytes (uint8) to float32; by bits through float16, which has e4m3's subnormals as subnormals."""
    if _decodes_fp8(dialect):
        native: tl.constexpr = tl.float8e4b8 if dialect == "fnuz" else tl.float8e4nv
        return code.to(native, bitcast=True).to(tl.float32)
    wide = code.to(tl.uint16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32)
    if dialect == "fnuz":
        return tl.where(code == 0x80, float("nan"), half * 128.0)
    else:
        return tl.where((code & 0x7F) == 0x7F, float("nan"), half * 256.0)


@triton.jit
def fp8_encode(x, dialect: tl.constexpr):
    """float32 to e4m3 bytes (uint8): clamped to 448 (ocp) or 224 (fnuz), nearest even; FNUZ never gives 0x80."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    # e4m3's exponent bias is 8 (fnuz) or 7; a float32 sum with 2^shift rounds to multiples of the smallest subnormal
    if dialect == "fnuz":
        limit: tl.constexpr = 224.0
        bias: tl.constexpr = 8
    else:
        limit: tl.constexpr = 448.0
        bias: tl.constexpr = 7
    shift: tl.constexpr = 21 - bias
    size = tl.abs(x)
    size = tl.where(size > limit, limit, size)
    small = (size + 2.0**shift).to(tl.int32, bitcast=True) - ((127 + shift) << 23)
    of_size = size.to(tl.int32, bitcast=True)
    large = ((of_size + 0x7FFFF + ((of_size >> 20) & 1)) >> 20) - ((127 - bias) << 3)
    code = tl.where(size < 2.0 ** (1 - bias), small, large)
    if dialect == "fnuz":
        return tl.where((x == x) & (code != 0), code | sign, 0).to(tl.uint8)
    else:
        return (tl.where(x == x, code, 0x7F) | sign).to(tl.uint8)


@triton.jit
def fp4_decode(code):
    """e2m1 codes 0..15 (uint8, one per byte) to float32; minus zero becomes zero."""
    wide = code.to(tl.uint16)
    half = (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.where(wide == 8, 0.0, half * 16384.0)


@triton.jit
def fp4_encode(x):
    """float32 to e2m1 codes 0..15 (uint8), saturating at 6, ties to even."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code += (size > 2.5).to(tl.int32) + (size >= 3.5) + (size > 5.0)
    return (code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)).to(tl.uint8)


@triton.jit
def field_offset(slot, page_stride, entries: tl.constexpr, base: tl.constexpr, size: tl.constexpr):
    """Byte offset (int64) of one field's row in the records at ``slot`` (>= 0; mask what lies at -1).

    ``entries`` records a page, ``page_stride`` bytes from page to page, ``size`` bytes a row; ``base`` is the first
    row's place in its page: entries * (bytes of the fields before).
    """
    slot = tl.maximum(slot, 0)
    return (slot // entries).to(tl.int64) * page_stride + (base + (slot % entries) * size)
