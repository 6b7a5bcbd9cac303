"""A kernel whose result depends on its number of warps, a plug-in of the tests of launch configurations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import num_warps

from dsv4dbg.kernels.registry import implements, registry


@triton.jit
def _scale(y, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(y + at, at < size) * (num_warps() // 4), at < size)


@implements("rms_norm", "by_warps")
def by_warps(**kwargs):
    y = registry().ops["rms_norm"].reference(**kwargs)
    flat = torch.empty_like(y, memory_format=torch.contiguous_format).copy_(y)
    _scale[(triton.cdiv(flat.numel(), 1024),)](flat, flat.numel(), BLOCK=1024, num_warps=4)
    return flat
