"""lm_head in Triton (`linear.gemm_triton`): bf16 dots, exact products, float32 sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dsv4dbg.kernels.linear.gemm_triton import multiply, not_adjacent
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.triton_run import triton_implements


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    return not_adjacent(args, "y", "weight")


def _shapes() -> Iterator[dict[str, Any]]:
    for channels in (4096, 7168):
        weight = torch.empty(129280, channels, dtype=torch.bfloat16, device="meta")
        for tokens in (1, 64, 4096):
            yield {"y": torch.empty(tokens, channels, dtype=torch.bfloat16, device="meta"), "weight": weight}


@triton_implements("lm_head", supports=_supports, shapes=_shapes)
def lm_head_triton(y: torch.Tensor, weight: torch.Tensor, *, numerics: Numerics) -> torch.Tensor:
    """See the reference."""
    logits = torch.empty(len(y), len(weight), dtype=torch.float32, device=y.device)
    if logits.numel():
        multiply(y[:, None], weight, None, logits, y.dtype if numerics.logits == "act" else torch.float32)
    return logits
