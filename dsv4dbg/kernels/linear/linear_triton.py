"""linear in Triton (`gemm_triton`): bf16 products are exact in float32, so bf16 dots serve for bf16 on both sides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dsv4dbg.kernels.linear.gemm_triton import multiply, not_adjacent
from dsv4dbg.kernels.triton_run import triton_implements


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    return not_adjacent(args, "x", "weight")


def _shapes() -> Iterator[dict[str, Any]]:
    """The router, the indexer's weights and a compressor projection of Flash; the router of Pro; float32 weights."""
    bf16, f32 = torch.bfloat16, torch.float32
    for inp, out, result, dtype in (
        (4096, 256, "f32", bf16), (4096, 64, "act", bf16), (4096, 1024, "f32", bf16), (7168, 384, "f32", bf16),
        (4096, 256, "f32", f32),
    ):  # fmt: skip
        for tokens in (1, 64, 8192):
            x = torch.empty(tokens, inp, dtype=bf16, device="meta")
            yield {"x": x, "weight": torch.empty(out, inp, dtype=dtype, device="meta"), "out": result}


@triton_implements("linear", supports=_supports, shapes=_shapes)
def linear_triton(x: torch.Tensor, weight: torch.Tensor, *, out: str) -> torch.Tensor:
    """See the reference."""
    result = x.dtype if out == "act" else torch.float32
    y = torch.empty(len(x), len(weight), dtype=result, device=x.device)
    if y.numel():
        multiply(x[:, None], weight, None, y, result)
    return y
