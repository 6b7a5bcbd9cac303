"""indexer_q in Triton: a program takes one block of tokens after the other, with the Hadamard matrix kept at hand.

A block is ``[row, pair]`` twice, even and odd channels apart; a row is a head of a token. The rotation is a matrix
product of each half with +-1 in q's dtype (exact products, float32 sums) and the sum and difference of the two, so its
last bits may differ from the reference's; everything else has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4dbg.kernels import triton_codes as codes
from dsv4dbg.kernels.contract import ACT_DTYPES
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.triton_run import arch_of, processors, triton_implements
from dsv4dbg.pages import FP4_GROUP

PROGRAMS_PER_PROCESSOR = 8


@triton.jit
def _hadamard(P: tl.constexpr, dtype: tl.constexpr):
    """The Sylvester matrix ``[P, P]`` of +-1 as an operand of `dot`."""
    bits = tl.arange(0, P)[:, None] & tl.arange(0, P)[None, :]
    bits ^= bits >> 8
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    return codes.operand(1.0 - 2.0 * (bits & 1).to(tl.float32), dtype)


@triton.jit
def _rope(even, odd, row, ROPE: tl.constexpr, dtype: tl.constexpr, ROUND_TABLE: tl.constexpr):
    """The pairs of the last ``ROPE`` channels turned; ``row``: pointers ``[token]`` to the table's rows."""
    P: tl.constexpr = even.shape[1]
    HEADS: tl.constexpr = even.shape[0] // row.shape[0]
    place = tl.arange(0, P)[None, :] - (P - ROPE // 2)
    cos = tl.load(row[:, None] + place, place >= 0, other=1.0)
    sin = tl.load(row[:, None] + ROPE // 2 + place, place >= 0, other=0.0)
    if ROUND_TABLE:
        cos, sin = codes.widened(codes.rounded(cos, dtype)), codes.widened(codes.rounded(sin, dtype))
    cos = tl.reshape(tl.broadcast_to(cos[:, None, :], (row.shape[0], HEADS, P)), even.shape)
    sin = tl.reshape(tl.broadcast_to(sin[:, None, :], (row.shape[0], HEADS, P)), even.shape)
    first = tl.where(place >= 0, even * cos - odd * sin, even)
    second = tl.where(place >= 0, even * sin + odd * cos, odd)
    return first, second


@triton.jit
def _fp4_encode(x):
    """`codes.fp4_encode` with two comparisons instead of seven (whose masks fill AMD's scalar registers)."""
    bits = x.to(tl.int32, bitcast=True)
    size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    small = (size + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000  # + 2^22 rounds to halves
    wide = bits & 0x7FFFFFFF
    large = tl.minimum(((wide + 0x1FFFFF + ((wide >> 22) & 1)) >> 22) - 252, 7)
    code = tl.where(x == x, tl.where(size < 1.0, small, large), 0)
    return (code | ((bits >> 28) & 8)).to(tl.uint8)


@triton.jit
def _fp4(even, odd, GROUP: tl.constexpr):
    """Codes of float32 rows, even and odd channels ``[row, group, pair]``, and scale bytes ``[row, group]``."""
    GROUPS: tl.constexpr = 2 * even.shape[1] // GROUP
    even = tl.reshape(even, (even.shape[0], GROUPS, GROUP // 2))
    odd = tl.reshape(odd, (even.shape[0], GROUPS, GROUP // 2))
    reciprocal, byte = codes.fp4_scale(_amax(even, odd, 2))
    reciprocal = reciprocal[:, :, None]
    return _fp4_encode(even * reciprocal), _fp4_encode(odd * reciprocal), byte


@triton.jit
def _amax(even, odd, axis: tl.constexpr):
    """Largest magnitude of both along ``axis``; NaN if there is one."""
    even, odd = even.to(tl.int32, bitcast=True) & 0x7FFFFFFF, odd.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.maximum(even, odd), axis).to(tl.float32, bitcast=True)


@triton.jit
def _joined(even, odd, C: tl.constexpr):
    return tl.reshape(tl.join(even, odd), (even.shape[0], C))


@triton.jit
def _indexer_q(
    q, weights, positions, table, q_out, q_scale, weights_out,
    tokens, heads, q_token, q_head, weights_token, weights_head, position_stride, table_row, factor,
    FORMAT: tl.constexpr, ROPE: tl.constexpr, HADAMARD: tl.constexpr, QUANT: tl.constexpr,
    ROUND_TABLE: tl.constexpr, GROUP: tl.constexpr, T: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Program p: blocks p, p + programs, .. of T tokens with H heads; ``factor`` scales the head weights."""
    dtype: tl.constexpr = q.dtype.element_ty
    R: tl.constexpr = T * H
    P: tl.constexpr = C // 2
    row, pair, channel = tl.arange(0, R), tl.arange(0, P), tl.arange(0, C)
    head = row % H
    if HADAMARD:
        matrix = _hadamard(P, dtype)
    for block in range(tl.program_id(0), tl.cdiv(tokens, T), tl.num_programs(0)):
        first = tl.cast(block, tl.int64) * T  # 64 bits in the base, 32 within a block
        each, inner = tl.arange(0, T), row // H
        real = (inner < tokens - first) & (head < heads)
        rows = q + first * q_token + (inner[:, None] * q_token + head[:, None] * q_head + channel[None, :])
        x = codes.widened(tl.load(rows, real[:, None], other=0.0))
        even, odd = tl.split(tl.reshape(x, (R, P, 2)))
        where = positions + first * position_stride + each * position_stride
        position = tl.load(where, each < tokens - first, other=0).to(tl.int64)
        even, odd = _rope(even, odd, table + position * table_row, ROPE, dtype, ROUND_TABLE)
        if HADAMARD:
            a = codes.dot(codes.operand(even, dtype), matrix, tl.zeros((R, P), tl.float32))
            b = codes.dot(codes.operand(odd, dtype), matrix, tl.zeros((R, P), tl.float32))
            even, odd = (a + b) * C**-0.5, (a - b) * C**-0.5
        even, odd = codes.widened(codes.rounded(even, dtype)), codes.widened(codes.rounded(odd, dtype))

        place, start = inner * heads + head, first * heads
        if FORMAT == "fp4":
            low, high, byte = _fp4(even, odd, GROUP)
            packed = tl.reshape(low | (high << 4), (R, P))
            tl.store(q_out + start * P + (place[:, None] * P + pair[None, :]), packed, real[:, None])
            group = place[:, None] * (C // GROUP) + tl.arange(0, C // GROUP)[None, :]
            tl.store(q_scale + start * (C // GROUP) + group, byte, real[:, None])
        elif FORMAT == "plain":
            if QUANT:
                low, high, byte = _fp4(even, odd, GROUP)
                factors = codes.e8m0_decode(byte)[:, :, None]
                even = tl.reshape(codes.fp4_decode(low) * factors, (R, P))
                odd = tl.reshape(codes.fp4_decode(high) * factors, (R, P))
            result = codes.rounded(_joined(even, odd, C), dtype)
            tl.store(q_out + start * C + (place[:, None] * C + channel[None, :]), result, real[:, None])
        else:
            limit: tl.constexpr = 224.0 if FORMAT == "fnuz" else 448.0
            scale = tl.div_rn(codes.at_least(_amax(even, odd, 1), 1e-4), limit)
            divisor = tl.broadcast_to(scale[:, None], (R, P))
            low = codes.fp8_encode(tl.div_rn(even, divisor), FORMAT)
            high = codes.fp8_encode(tl.div_rn(odd, divisor), FORMAT)
            result = _joined(low, high, C)
            tl.store(q_out + start * C + (place[:, None] * C + channel[None, :]), result, real[:, None])
            tl.store(q_scale + start + place, scale, real)
        rows = weights + first * weights_token + (inner * weights_token + head * weights_head)
        w = codes.widened(tl.load(rows, real, other=0.0))
        tl.store(weights_out + start + place, codes.rounded(w * factor, weights_out.dtype.element_ty), real)


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    q, rope = args["q"], args["cos_sin"].shape[1]
    heads, channels = q.shape[1:]
    if q.dtype not in ACT_DTYPES or args["weights"].dtype not in ACT_DTYPES:
        return f"q is {q.dtype}, weights {args['weights'].dtype}"
    if args["cos_sin"].dtype != torch.float32:
        return f"cos_sin is {args['cos_sin'].dtype}"
    if channels < 64 or channels & (channels - 1) or heads * channels > 1 << 14:
        return f"{heads} heads of {channels} channels (a power of two from 64 on, at most {1 << 14} in all)"
    if rope % 2 or not 0 < rope <= channels:
        return f"rope on {rope} of {channels} channels"
    if args["format"] not in ("fp4", "fp8_ocp", "fp8_fnuz", "plain"):
        return f"format '{args['format']}'"
    if max(*q.stride(), *args["weights"].stride(), args["positions"].stride(0)) > 1 << 20:
        return "tokens or heads lie more than 2^20 elements apart"  # offsets within a block are 32 bits
    if (q.numel() and q.stride(2) != 1) or args["cos_sin"].stride(1) != 1:
        return "q or cos_sin is not contiguous along the last dim"
    return None


def _shapes() -> Iterator[dict[str, Any]]:
    """Flash and Pro: 64 heads of 128 in every format."""
    for format in ("fp4", "fp8_ocp", "fp8_fnuz", "plain"):
        yield {
            "q": torch.empty(4096, 64, 128, dtype=torch.bfloat16, device="meta"),
            "weights": torch.empty(4096, 64, dtype=torch.bfloat16, device="meta"),
            "positions": torch.empty(4096, dtype=torch.int64, device="meta"),
            "cos_sin": torch.empty(1 << 20, 64, device="meta"),
            "format": format,
        }


@triton_implements("indexer_q", supports=_supports, shapes=_shapes)
def indexer_q_triton(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    format: str,
    numerics: Numerics,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the reference. One launch."""
    tokens, heads, channels = q.shape
    stored = {"fp4": channels // 2}.get(format, channels)
    groups = {"fp4": channels // FP4_GROUP, "plain": 0}.get(format, 1)
    exact = numerics.index_score == "f32"
    q_out = torch.empty(
        tokens, heads, stored, dtype=q.dtype if format == "plain" else torch.uint8, device=q.device
    )  # fmt: skip
    q_scale = torch.empty(
        tokens, heads, groups, dtype=torch.uint8 if format == "fp4" else torch.float32, device=q.device
    )
    weights_out = torch.empty(tokens, heads, dtype=torch.float32 if exact else weights.dtype, device=q.device)
    if not tokens:
        return q_out, q_scale, weights_out
    factor = heads**-0.5 if exact else channels**-0.5 * heads**-0.5
    padded = triton.next_power_of_2(heads)
    block = triton.cdiv(1024 if arch_of(q.device) == "cpu" else 64, padded)  # the interpreter likes large blocks
    programs = min(triton.cdiv(tokens, block), PROGRAMS_PER_PROCESSOR * processors(q.device))
    _indexer_q[(programs,)](
        q, weights, positions, cos_sin, q_out, q_scale, weights_out,
        tokens, heads, q.stride(0), q.stride(1), weights.stride(0), weights.stride(1), positions.stride(0),
        cos_sin.stride(0), factor,
        FORMAT=format.removeprefix("fp8_"), ROPE=cos_sin.shape[1], HADAMARD=numerics.index_hadamard,
        QUANT=numerics.index_quant, ROUND_TABLE=numerics.rope_table == "act", GROUP=FP4_GROUP,
        T=block, H=padded, C=channels,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return q_out, q_scale, weights_out
