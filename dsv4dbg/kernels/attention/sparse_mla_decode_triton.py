"""sparse_mla_decode in Triton: straight from the paged caches, both FP8 dialects, split over the keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dsv4dbg.kernels.attention.sparse_triton import attend, unsupported
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.triton_run import triton_implements
from dsv4dbg.pages import kv_layout


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    return unsupported(args, ("window_cache", "entry_cache"))


def _shapes() -> Iterator[dict[str, Any]]:
    """Flash: 64 heads of 512; decode of 1 and 64 tokens over 128 recent tokens and 512 entries."""
    for tokens, dialect in ((1, "fnuz"), (64, "ocp")):
        layout = kv_layout("fp8", dialect, 512, 64, 64)
        data = torch.empty(1000, layout.page_bytes, dtype=torch.uint8, device="meta")
        yield {
            "q": torch.empty(tokens, 64, 512, dtype=torch.bfloat16, device="meta"),
            "window_cache": Cache("window", data, layout),
            "entry_cache": Cache("entries", data, layout),
            "indices": torch.empty(tokens, 640, dtype=torch.int32, device="meta"),
            "sink": torch.empty(64, device="meta"),
            "window": 128,
            "scale": 512**-0.5,
        }


@triton_implements("sparse_mla_decode", supports=_supports, shapes=_shapes)
def sparse_mla_decode_triton(
    q: torch.Tensor,
    window_cache: Cache,
    entry_cache: Cache | None,
    indices: torch.Tensor,
    sink: torch.Tensor | None = None,
    *,
    window: int,
    scale: float,
    numerics: Numerics,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference. Small batches are split over the keys; float32 partial sums are merged in order."""
    return attend(q, window_cache, entry_cache, indices, sink, window, scale)
