"""sparse_mla_prefill in Triton: `sparse_mla_decode`'s kernel over a workspace, whose rows are pages of one record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dsv4dbg.kernels.attention.sparse_triton import attend, unsupported
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.triton_run import triton_implements
from dsv4dbg.pages import PageLayout


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    kv = args["kv"]
    if kv.numel() and (kv.stride(1) != 1 or kv.stride(0) * kv.element_size() % 16 or kv.data_ptr() % 16):
        return "kv has rows at addresses that are no multiple of 16"
    return unsupported(args, ())


def _shapes() -> Iterator[dict[str, Any]]:
    """Flash: 64 heads of 512; 4,096 tokens over 128 recent tokens and 512 entries."""
    yield {
        "q": torch.empty(4096, 64, 512, dtype=torch.bfloat16, device="meta"),
        "kv": torch.empty(5120, 512, dtype=torch.bfloat16, device="meta"),
        "indices": torch.empty(4096, 640, dtype=torch.int32, device="meta"),
        "sink": torch.empty(64, device="meta"),
        "scale": 512**-0.5,
    }


@triton_implements("sparse_mla_prefill", supports=_supports, shapes=_shapes)
def sparse_mla_prefill_triton(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sink: torch.Tensor | None = None,
    *,
    scale: float,
    numerics: Numerics,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference. ``kv`` is read in place, as a cache of bf16 or float32 records."""
    channels, size = kv.shape[1], kv.element_size()
    layout = PageLayout("kv", "bf16" if size == 2 else "f32", "", 1, channels, 0, (channels * size,), 1)
    pages = kv if kv.numel() else kv.new_empty(1, channels)
    cache = Cache("workspace", pages.view(torch.uint8), layout)
    return attend(q, cache, None, indices, sink, indices.shape[1], scale)
