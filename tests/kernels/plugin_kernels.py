"""Implementations of rms_norm that fail to compile in one way each, for tests/kernels/test_compile_report.py."""

from __future__ import annotations

import os
import time

import torch
import triton
import triton.language as tl

from dsv4dbg.kernels.registry import implements


@triton.jit
def _matmul(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m * N + n[None, :], tl.dot(x, y))


@triton.jit
def _misspelt(x, out):
    tl.store(out, no_such_name)  # noqa: F821


@triton.autotune([triton.Config({"BLOCK": n}) for n in (128, 256)], key=["count"])
@triton.jit
def _tuned(x, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < count), at < count)


def _multiply(x: torch.Tensor, dtype: torch.dtype, m: int, n: int, k: int, warps: int) -> torch.Tensor:
    a, b = torch.empty(m, k, dtype=dtype), torch.empty(k, n, dtype=dtype)
    _matmul[(1,)](a, b, torch.empty(m, n), m, n, k, num_warps=warps)
    return x


@implements("rms_norm", "much_lds")
def much_lds(x, weight, *, eps):
    return _multiply(x, torch.bfloat16, 128, 256, 256, 8)


@implements("rms_norm", "spilling")
def spilling(x, weight, *, eps):
    return _multiply(x, torch.bfloat16, 256, 256, 64, 1)


@implements("rms_norm", "fp8_dot")
def fp8_dot(x, weight, *, eps):
    return _multiply(x, torch.float8_e4m3fn, 64, 64, 64, 4)


@implements("rms_norm", "misspelt")
def misspelt(x, weight, *, eps):
    _misspelt[(1,)](x, torch.empty(1))
    return x


@implements("rms_norm", "tuned")
def tuned(x, weight, *, eps):
    _tuned[(1,)](x, torch.empty_like(x), x.numel())
    return x


@implements("rms_norm", "raising")
def raising(x, weight, *, eps):
    raise RuntimeError("needs a GPU")


@implements("rms_norm", "dying")
def dying(x, weight, *, eps):
    os.abort()


@implements("rms_norm", "hanging")
def hanging(x, weight, *, eps):
    time.sleep(1000)


@implements("rms_norm", "plain")
def plain(x, weight, *, eps):
    return x
