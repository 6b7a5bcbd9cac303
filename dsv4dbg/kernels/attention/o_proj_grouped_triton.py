"""o_proj_grouped in Triton (`linear.gemm_triton`): one launch for all groups, the weight decoded tile by tile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dsv4dbg.kernels.linear.gemm_triton import multiply, not_adjacent
from dsv4dbg.kernels.triton_run import triton_implements


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    o = args["o"]
    if o.numel() and o.stride(1) != o.shape[2]:
        return "the heads of o are not adjacent"
    out = len(args["weight"]) // args["groups"]
    if args["scale"] is not None and args["groups"] > 1 and out % 16:
        return f"{out} outputs in a group of an FP8 weight: only multiples of 16"
    return not_adjacent(args, "o", "weight", "scale")


def _shapes() -> Iterator[dict[str, Any]]:
    """Flash and Pro, FP8 and bf16 weights."""
    for heads, groups in ((64, 8), (128, 16)):
        for tokens in (1, 64, 8192):
            o = torch.empty(tokens, heads, 512, dtype=torch.bfloat16, device="meta")
            weight = torch.empty(groups * 1024, 4096, dtype=torch.float8_e4m3fn, device="meta")
            scale = torch.empty(groups * 8, 32, dtype=torch.uint8, device="meta")
            yield {"o": o, "weight": weight, "scale": scale, "groups": groups}
            yield {"o": o, "weight": weight.to(torch.bfloat16), "scale": None, "groups": groups}


@triton_implements("o_proj_grouped", supports=_supports, shapes=_shapes)
def o_proj_grouped_triton(
    o: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None, *, groups: int
) -> torch.Tensor:
    """See the reference."""
    z = torch.empty(len(o), len(weight), dtype=o.dtype, device=o.device)
    if z.numel():
        multiply(o.flatten(1).unflatten(1, (groups, -1)), weight, scale, z, o.dtype, round_weight=True)
    return z
