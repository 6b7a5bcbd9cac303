"""Kernels at fault, and right ones, for reproducers: a plug-in that imports what stands beside it, and Triton."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import torch
import triton
import triton.language as tl
from lone_helper import normed

from dsv4dbg.kernels.attention.qnorm_rope_kv_insert import qnorm_rope_kv_insert
from dsv4dbg.kernels.paged import Cache, write
from dsv4dbg.kernels.registry import implements


@implements("rms_norm", "wrong")
def one_element_wrong(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    out = normed(x, weight, eps)
    out[len(x) // 2, 3] = 1.5
    return out


@implements("rms_norm", "flaky")
def flaky(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    out = normed(x, weight, eps)
    return out * 2 if os.urandom(1)[0] < 128 else out


@implements("rms_norm", "unwritten")
def unwritten(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    workspace = torch.empty(4, dtype=torch.int8)
    return normed(x, weight, eps) * (workspace < 0).all()


@implements("rms_norm", "segfault")
def segfault(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return ctypes.string_at(0)  # type: ignore[return-value]


@implements("rms_norm", "hang")
def hang(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    while True:
        time.sleep(0.1)


@implements("rms_norm", "leaves")
def leaves(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    os._exit(0)


def fixed(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return normed(x, weight, eps)


@triton.jit
def _row(x, weight, y, channels, eps, factor, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    start = tl.program_id(0).to(tl.int64) * channels
    value = tl.load(x + start + at, at < channels, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / channels + eps) * tl.load(weight + at, at < channels, other=0.0)
    tl.store(y + start + at, (value * factor).to(tl.bfloat16), at < channels)


def _launched(x: torch.Tensor, weight: torch.Tensor, eps: float, factor: float) -> torch.Tensor:
    y = torch.empty_like(x)
    _row[(len(x),)](x, weight, y, x.shape[1], eps, factor, BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


@implements("rms_norm", "wrong_triton")
def wrong_triton(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return _launched(x, weight, eps, 1.03)


def fixed_triton(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return _launched(x, weight, eps, 1.0)


@implements("qnorm_rope_kv_insert", "one_slot_on")
def one_slot_on(*, window_cache: Cache, window_slots: torch.Tensor, **others: Any) -> torch.Tensor:
    """The reference, and a record in the slot behind the last one."""
    out = qnorm_rope_kv_insert(window_cache=window_cache, window_slots=window_slots, **others)
    write(window_cache, (window_slots[-1:] + 1) % window_cache.num_slots, torch.ones(1, window_cache.layout.channels))
    return out
