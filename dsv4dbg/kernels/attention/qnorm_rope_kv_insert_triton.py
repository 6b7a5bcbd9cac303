"""qnorm_rope_kv_insert in one Triton launch.

The first programs take some heads each: norm, and rope on the last channels, which they read a second time (so that a
tile holds nothing else). The others take some tokens' kv rows: rope, encoding, store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4dbg.kernels.attention.entries_triton import (
    cos_sin_rows,
    near,
    reciprocal_root,
    store_kv,
    turned,
    unsupported,
)
from dsv4dbg.kernels.attention.sparse_triton import Layout
from dsv4dbg.kernels.contract import ACT_DTYPES
from dsv4dbg.kernels.numerics import OFFICIAL, Numerics
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.triton_codes import rounded, widened
from dsv4dbg.kernels.triton_run import arch_of, triton_implements
from dsv4dbg.pages import kv_layout


@triton.jit
def _scaled(x, factor, NORM: tl.constexpr, act: tl.constexpr):
    return x * factor if NORM == "f32" else near(x * factor, act)


@triton.jit
def _heads(
    q, out, row, rows, heads, q_token, q_head, positions, table, table_row, eps,
    CHANNELS: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, ROUND_TABLE: tl.constexpr,
):  # fmt: skip
    """Norm and rope of the heads ``row`` = token * heads + head."""
    act: tl.constexpr = q.dtype.element_ty
    real = row < rows
    token = row // heads
    x_rows = (q + token * q_token + (row % heads) * q_head)[:, None]
    out_rows = (out + row * CHANNELS)[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    x = widened(tl.load(x_rows + channel, real[:, None], other=0.0))
    if NORM == "act":
        mean = near(tl.sum(near(x * x, act), 1) / CHANNELS, act)
        factor = near(reciprocal_root(near(mean + eps, act)), act)
    else:
        factor = reciprocal_root(tl.sum(x * x, 1) / CHANNELS + eps)
        if NORM == "mixed":
            factor = near(factor, act)
    factor = factor[:, None]
    y = _scaled(x, factor, NORM, act)
    tl.store(out_rows + channel, rounded(y, act), real[:, None] & (channel < CHANNELS - ROPE))

    tail = CHANNELS - ROPE + tl.arange(0, ROPE)[None, :]
    x = _scaled(widened(tl.load(x_rows + tail, real[:, None], other=0.0)), factor, NORM, act)
    position = tl.load(positions + token, real, other=0)
    cos, sin = cos_sin_rows(table, table_row, position, real, ROPE // 2, 0, ROPE // 2)
    if ROUND_TABLE:
        cos, sin = near(cos, act), near(sin, act)
    tl.store(out_rows + tail, rounded(turned(x, cos, sin, 0), act), real[:, None])


@triton.jit
def _kv(
    kv, cache, slots, token, tokens, kv_token, positions, table, table_row, page_stride,
    LAYOUT: tl.constexpr, ROPE: tl.constexpr, ROUND_TABLE: tl.constexpr, SIM: tl.constexpr,
):  # fmt: skip
    """Rope of the kv rows of tokens ``token``, and their records."""
    act: tl.constexpr = kv.dtype.element_ty
    CHANNELS: tl.constexpr = LAYOUT[3]
    SKIP: tl.constexpr = (CHANNELS - ROPE) // 2
    slot = tl.load(slots + token, token < tokens, other=-1)
    stored = slot >= 0
    channel = tl.arange(0, CHANNELS)[None, :]
    x = widened(tl.load(kv + token[:, None] * kv_token + channel, stored[:, None], other=0.0))
    position = tl.load(positions + token, stored, other=0)
    cos, sin = cos_sin_rows(table, table_row, position, stored, CHANNELS // 2, SKIP, ROPE // 2)
    if ROUND_TABLE:
        cos, sin = near(cos, act), near(sin, act)
    store_kv(near(turned(x, cos, sin, SKIP), act), cache, page_stride, slot, LAYOUT, SIM, act)


@triton.jit
def _insert(
    q, kv, positions, table, cache, slots, out,
    tokens, heads, q_token, q_head, kv_token, table_row, page_stride, eps,
    LAYOUT: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, ROUND_TABLE: tl.constexpr, SIM: tl.constexpr,
    M: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rows = tl.cast(tokens, tl.int64) * heads
    first = tl.cdiv(rows, M).to(tl.int32)
    if program < first:
        row = program.to(tl.int64) * M + tl.arange(0, M)
        _heads(
            q, out, row, rows, heads, q_token, q_head, positions, table, table_row, eps,
            LAYOUT[3], ROPE, NORM, ROUND_TABLE,
        )  # fmt: skip
    else:
        token = (program - first).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        _kv(
            kv, cache, slots, token, tokens, kv_token, positions, table, table_row, page_stride,
            LAYOUT, ROPE, ROUND_TABLE, SIM,
        )  # fmt: skip


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    q, kv, layout = args["q"], args["kv"], args["window_cache"].layout
    rope = args["cos_sin"].shape[1]
    if q.dtype not in ACT_DTYPES or kv.dtype != q.dtype:
        return f"q is {q.dtype}, kv {kv.dtype}"
    if layout.kind != "kv" or layout.channels != q.shape[2]:
        return f"records of kind {layout.kind} with {layout.channels} channels"
    if rope & (rope - 1):
        return f"rope on {rope} channels: no power of two"
    if q.numel() and (q.stride(2) != 1 or kv.stride(1) != 1):
        return "q or kv is not contiguous along the last dim"
    return unsupported(args, "window_cache")


def _shapes() -> Iterator[dict[str, Any]]:
    """Flash and Pro, prefill."""
    for heads, fmt, dialect in ((64, "fp8", "ocp"), (64, "fp8", "fnuz"), (128, "fp8", "ocp"), (64, "bf16", "")):
        layout = kv_layout(fmt, dialect, 512, 64, 64)
        data = torch.empty(1000, layout.page_bytes, dtype=torch.uint8, device="meta")
        yield {
            "q": torch.empty(8192, heads, 512, dtype=torch.bfloat16, device="meta"),
            "kv": torch.empty(8192, 512, dtype=torch.bfloat16, device="meta"),
            "positions": torch.empty(8192, dtype=torch.int64, device="meta"),
            "cos_sin": torch.empty(1 << 20, 64, device="meta"),
            "window_cache": Cache("window", data, layout),
            "window_slots": torch.empty(8192, dtype=torch.int64, device="meta"),
            "eps": 1e-6,
        }


@triton_implements("qnorm_rope_kv_insert", supports=_supports, shapes=_shapes)
def qnorm_rope_kv_insert_triton(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    window_cache: Cache,
    window_slots: torch.Tensor,
    *,
    eps: float,
    numerics: Numerics = OFFICIAL,
) -> torch.Tensor:
    """See the reference."""
    tokens, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    m, rows = (64, 64) if arch_of(q.device) == "cpu" else (8, 4)
    data = window_cache.data
    _insert[(triton.cdiv(tokens * heads, m) + triton.cdiv(tokens, rows),)](
        q, kv, positions.contiguous(), cos_sin, data, window_slots.contiguous(), out,
        tokens, heads, q.stride(0), q.stride(1), kv.stride(0), cos_sin.stride(0), data.stride(0), eps,
        LAYOUT=Layout.of(window_cache), ROPE=cos_sin.shape[1], NORM=numerics.head_norm,
        ROUND_TABLE=numerics.rope_table == "act", SIM=numerics.kv_quant, M=m, TOKENS=rows,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
