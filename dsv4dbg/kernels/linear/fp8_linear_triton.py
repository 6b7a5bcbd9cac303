"""fp8_linear in Triton: activations are quantised and dequantised once, then multiplied (`gemm_triton`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dsv4dbg.kernels.linear.gemm_triton import multiply, not_adjacent, simulate
from dsv4dbg.kernels.triton_run import triton_implements


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    return not_adjacent(args, "x", "weight", "scale")


def _shapes() -> Iterator[dict[str, Any]]:
    """wq_a and wq_b of Flash, wo_b of Pro; one with float32 scales."""
    sizes = ((4096, 1024, torch.uint8), (1024, 32768, torch.uint8), (16384, 7168, torch.uint8))
    for inp, out, scale in (*sizes, (4096, 1024, torch.float32)):
        for tokens in (1, 64, 8192):
            yield {
                "x": torch.empty(tokens, inp, dtype=torch.bfloat16, device="meta"),
                "weight": torch.empty(out, inp, dtype=torch.float8_e4m3fn, device="meta"),
                "scale": torch.empty(out // 128, inp // 128, dtype=scale, device="meta"),
            }


@triton_implements("fp8_linear", supports=_supports, shapes=_shapes)
def fp8_linear_triton(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """See the reference. With E8M0 scales every product is exact; float32 scales multiply sums over 128 channels."""
    y = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    if y.numel():
        multiply(simulate(x)[:, None], weight, scale, y, x.dtype)
    return y
