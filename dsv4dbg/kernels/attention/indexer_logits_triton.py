"""indexer_logits in Triton: a program holds a block of decoded keys and runs over a block of tokens.

Keys are the rows and heads the columns of a token's matrix product, so the sum over heads stays within a row. Keys are
read and decoded once for every run of tokens of one sequence. Codes are decoded to bf16, which is exact, and FP8's
float32 scales multiply the products; quantised queries are decoded by a launch of their own. Sums over channels and
over heads may differ from the reference's in their order.
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
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.triton_run import arch_of, triton_implements
from dsv4dbg.pages import FP4_GROUP, index_layout


@triton.jit
def _decode_rows(row, scale, valid, FORMAT: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, dtype: tl.constexpr):
    """Rows ``[n, C]`` as operands of `dot` in ``dtype``, zeros where not ``valid``; FP8 codes without their scale.

    ``row`` and ``scale``: byte pointers ``[n]`` to codes and to FP4's scales.
    """
    channel, valid = tl.arange(0, C)[None, :], valid[:, None]
    if FORMAT == "fp4":
        packed = tl.load(row[:, None] + tl.arange(0, C // 2)[None, :], valid, other=0)
        byte = tl.load(scale[:, None] + tl.arange(0, C // GROUP)[None, :], valid, other=127)
        shape: tl.constexpr = (packed.shape[0], C // GROUP, GROUP // 2)
        factor = codes.e8m0_decode(byte)[:, :, None]
        low = tl.reshape(codes.fp4_decode(packed & 15), shape) * factor
        high = tl.reshape(codes.fp4_decode(packed >> 4), shape) * factor
        return codes.operand(tl.reshape(tl.join(low, high), (packed.shape[0], C)), dtype)
    elif FORMAT == "bf16":
        x = tl.load(row.to(tl.pointer_type(tl.bfloat16))[:, None] + channel, valid, other=0.0)
        return codes.operand(codes.widened(x), dtype)
    elif FORMAT == "f32":
        return codes.operand(tl.load(row.to(tl.pointer_type(tl.float32))[:, None] + channel, valid, other=0.0), dtype)
    else:
        return codes.operand(codes.fp8_decode(tl.load(row[:, None] + channel, valid, other=0), FORMAT), dtype)


@triton.jit
def _decode_q(
    q, q_scale, out, rows, heads, q_token, q_head, scale_token, scale_head,
    FORMAT: tl.constexpr, R: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Program p: rows (a head of a token) p R .. p R + R - 1 of quantised queries to ``out [row, C]``."""
    number = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    token, head = number // heads, number % heads
    row = q + token * q_token + head * q_head
    scale = q_scale + token * scale_token + head * scale_head
    x = _decode_rows(row, scale, number < rows, FORMAT, C, GROUP, tl.bfloat16)
    place = number[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(out + place, codes.rounded(x, tl.bfloat16), (number < rows)[:, None])


@triton.jit
def _nearest(x, dtype: tl.constexpr):
    """float32 rounded to ``dtype``, as float32."""
    return codes.widened(codes.rounded(x, dtype))


@triton.jit
def _relu(x):
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _logits(
    q, q_scale, weights, keys, table, sequence, lens, logits,
    tokens, width, blocks, heads, q_token, q_head, scale_token, scale_head, weights_token, weights_head,
    page_stride, table_row, sequence_stride, lens_stride, factor,
    FORMAT: tl.constexpr, SCALED: tl.constexpr, EXACT: tl.constexpr, dtype: tl.constexpr, ENTRIES: tl.constexpr,
    DATA: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr,
    T: tl.constexpr, N: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Program (p, b): columns b N .. b N + N - 1 of tokens p T .. p T + T - 1.

    SCALED: dot products are multiplied by q_scale; EXACT: nothing is rounded, ``factor`` multiplies the products.
    """
    first = tl.program_id(0).to(tl.int64) * T
    column, head, channel = tl.program_id(1) * N + tl.arange(0, N), tl.arange(0, H), tl.arange(0, C)
    inner = tl.arange(0, T)
    here = inner < tokens - first
    rows = tl.load(sequence + (first + inner) * sequence_stride, here, other=-1)
    counts = tl.load(lens + (first + inner) * lens_stride, here, other=0)
    counts = tl.minimum(tl.where(rows < 0, 0, counts), width)
    last = tl.minimum(tokens - first, T).to(tl.int32)
    start = 0
    while start < last:
        row = tl.sum(tl.where(inner == start, rows, 0), 0)
        stop = tl.min(tl.where((inner > start) & (rows != row), inner, last), 0)
        seen = tl.max(tl.where((inner >= start) & (inner < stop), counts, 0), 0)
        if tl.program_id(1) * N < seen:
            valid = column < seen
            block = column // ENTRIES
            page = tl.load(table + row.to(tl.int64) * table_row + block, valid & (block < blocks), other=-1).to(
                tl.int64
            )
            valid &= page >= 0
            base = keys + tl.maximum(page, 0) * page_stride
            entry = column % ENTRIES
            scale_row = base + ENTRIES * DATA + entry * SCALES
            k = _decode_rows(base + entry * DATA, scale_row, valid, FORMAT, C, GROUP, dtype)
            if SCALES == 4 and FORMAT != "fp4":
                k_scale = tl.load(scale_row.to(tl.pointer_type(tl.float32)), valid, other=0.0)
            for number in range(start, stop):
                token = first + number
                count = tl.minimum(tl.load(lens + token * lens_stride), width)
                where = q + token * q_token + head[None, :] * q_head + channel[:, None]
                x = tl.load(where, (head < heads)[None, :], other=0.0)
                if codes.INTERPRETED or x.dtype != dtype:
                    x = codes.operand(codes.widened(x), dtype)
                score = codes.dot(k, x, tl.zeros((N, H), tl.float32))
                if SCALED:
                    scale = tl.load(q_scale + token * scale_token + head * scale_head, head < heads, other=0.0)
                    score *= scale[None, :]
                if SCALES == 4 and FORMAT != "fp4":
                    score *= k_scale[:, None]
                w = tl.load(weights + token * weights_token + head * weights_head, head < heads, other=0.0)
                w = codes.widened(w)[None, :]
                if EXACT:
                    result = tl.sum(_relu(score) * factor * w, 1)
                else:
                    act: tl.constexpr = weights.dtype.element_ty
                    score = _nearest(score, act)
                    result = _nearest(tl.sum(_nearest(_relu(score) * w, act), 1), act)
                result = tl.where(column < count, result, float("-inf"))
                tl.store(logits + token * width + column, result, column < width)
        else:
            for number in range(start, stop):
                tl.store(logits + (first + number) * width + column, float("-inf"), column < width)
        start = stop


def _config(arch: str, dtype: torch.dtype, tokens: int) -> tuple[int, int, int, int]:
    """Tokens and keys of a program, warps, pipeline stages."""
    many = 32 if tokens >= 4096 else 16 if tokens >= 256 else 1
    if arch == "cpu":
        return 256, 256, 4, 1
    if dtype == torch.float32:
        return many, 64, 4, 1
    if arch.startswith("sm_"):
        return many, 128, 4, 3
    return many, 64, 4, 1


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    q, cache, layout = args["q"], args["index_cache"], args["index_cache"].layout
    channels = layout.channels
    if layout.format not in ("fp4", "fp8", "bf16", "f32"):
        return f"keys in format '{layout.format}'"
    stored = {"fp4": channels // 2}.get(layout.format, channels)
    if q.dtype == torch.uint8 and (layout.format not in ("fp4", "fp8") or q.shape[2] != stored):
        return f"quantised q of {q.shape[2]} bytes on {layout.format} keys of {channels} channels"
    if q.dtype not in (torch.uint8, *ACT_DTYPES) or args["weights"].dtype not in ACT_DTYPES:
        return f"q is {q.dtype}, weights {args['weights'].dtype}"
    if q.dtype != torch.uint8 and q.shape[2] != channels:
        return f"q has {q.shape[2]} channels, keys have {channels}"
    if channels < 32 or channels & (channels - 1) or channels > 256 or q.shape[1] > 128:
        return f"{q.shape[1]} heads of {channels} channels (at most 128 of 32, 64, 128 or 256)"
    if max(q.shape[1] * t.stride(1) for t in (q, args["q_scale"], args["weights"])) >= 1 << 31:
        return "heads of a token lie 2^31 elements apart"
    if q.numel() and (q.stride(2) != 1 or args["index_table"].stride(1) != 1):
        return "q or index_table is not contiguous along the last dim"
    if cache.data.stride(0) % 16 or cache.data.stride(1) != 1 or cache.data.data_ptr() % 16:
        return "index_cache has records at addresses that are no multiple of 16"
    return None


def _shapes() -> Iterator[dict[str, Any]]:
    """Flash and Pro: 64 heads of 128, prefill and decode at 8K tokens of context."""
    for tokens in (4096, 16):
        for fmt, dialect in (("fp4", ""), ("fp8", "ocp"), ("fp8", "fnuz"), ("bf16", "")):
            layout = index_layout(fmt, dialect, 128, 64, 576)
            stored, groups, kind, scales = {
                "fp4": (64, 4, torch.uint8, torch.uint8),
                "fp8": (128, 1, torch.uint8, torch.float32),
                "bf16": (128, 0, torch.bfloat16, torch.float32),
            }[fmt]
            data = torch.empty(1000, layout.page_bytes, dtype=torch.uint8, device="meta")
            yield {
                "q": torch.empty(tokens, 64, stored, dtype=kind, device="meta"),
                "q_scale": torch.empty(tokens, 64, groups, dtype=scales, device="meta"),
                "weights": torch.empty(tokens, 64, dtype=torch.bfloat16, device="meta"),
                "index_cache": Cache("index", data, layout),
                "index_table": torch.empty(16, 32, dtype=torch.int32, device="meta"),
                "sequence": torch.empty(tokens, dtype=torch.int32, device="meta"),
                "lens": torch.empty(tokens, dtype=torch.int32, device="meta"),
                "width": 2048,
            }


@triton_implements("indexer_logits", supports=_supports, shapes=_shapes)
def indexer_logits_triton(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    weights: torch.Tensor,
    index_cache: Cache,
    index_table: torch.Tensor,
    sequence: torch.Tensor,
    lens: torch.Tensor,
    *,
    width: int,
    numerics: Numerics,
) -> torch.Tensor:
    """See the reference. One launch, two for quantised queries."""
    (tokens, heads), layout, data = q.shape[:2], index_cache.layout, index_cache.data
    channels, arch = layout.channels, arch_of(q.device)
    logits = torch.empty(tokens, width, dtype=torch.float32, device=q.device)
    if not tokens or not width:
        return logits
    fp8 = q.dtype == torch.uint8 and q_scale.dtype != torch.uint8
    if q.dtype == torch.uint8:
        decoded = torch.empty(tokens, heads, channels, dtype=torch.bfloat16, device=q.device)
        rows = 1024 if arch == "cpu" else 64
        _decode_q[(triton.cdiv(tokens * heads, rows),)](
            q, q_scale, decoded, tokens * heads, heads, q.stride(0), q.stride(1), q_scale.stride(0), q_scale.stride(1),
            FORMAT=layout.dialect if fp8 else "fp4", R=rows, C=channels, GROUP=FP4_GROUP,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
        q = decoded
    dtype = torch.float32 if layout.format == "f32" else q.dtype
    block, columns, warps, stages = _config(arch, dtype, tokens)
    _logits[(triton.cdiv(tokens, block), triton.cdiv(width, columns))](
        q, q_scale, weights, data, index_table, sequence, lens, logits,
        tokens, width, index_table.shape[1], heads, q.stride(0), q.stride(1),
        q_scale.stride(0), q_scale.stride(1), weights.stride(0), weights.stride(1),
        data.stride(0), index_table.stride(0), sequence.stride(0), lens.stride(0), channels**-0.5,
        FORMAT=layout.dialect or layout.format, SCALED=fp8, EXACT=numerics.index_score == "f32",
        dtype=tl.float32 if dtype == torch.float32 else tl.bfloat16,
        ENTRIES=layout.entries, DATA=layout.fields[0], SCALES=(*layout.fields, 0)[1], GROUP=FP4_GROUP,
        T=block, N=columns, H=max(16, triton.next_power_of_2(heads)), C=channels,
        num_warps=warps, num_stages=stages, enable_fp_fusion=False,
    )  # fmt: skip
    return logits
