"""mhc_pre in Triton: two launches, see `mixes_triton`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dsv4dbg.kernels.mhc.mixes_triton import parts_of, run, unsupported
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.triton_run import triton_implements


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    return unsupported(args)


def _shapes() -> Iterator[dict[str, Any]]:
    """Flash and Pro: prefill and decode."""
    for channels in (4096, 7168):
        for tokens in (8192, 1):
            yield {
                "streams": torch.empty(tokens, 4, channels, dtype=torch.bfloat16, device="meta"),
                "fn": torch.empty(24, 4 * channels, device="meta"),
                "scale": torch.empty(3, device="meta"),
                "base": torch.empty(24, device="meta"),
                "norm_eps": 1e-6,
                "hc_eps": 1e-6,
                "iters": 20,
            }


def _prepare(fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    return parts_of(fn)


@triton_implements("mhc_pre", supports=_supports, prepare=_prepare, shapes=_shapes)
def mhc_pre_triton(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    numerics: Numerics,
    prepared: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the reference; sums have another order."""
    tokens, hc, channels = streams.shape
    y = torch.empty(tokens, channels, dtype=streams.dtype, device=streams.device)
    post = torch.empty(tokens, hc, dtype=torch.float32, device=streams.device)
    comb = torch.empty(tokens, hc, hc, dtype=torch.float32, device=streams.device)
    run(streams, fn, prepared, scale, base, norm_eps, hc_eps, iters, y, post, comb)
    return y, post, comb
