"""Zoo cases of the mHC ops."""

from __future__ import annotations

from typing import Any

import torch

from dsv4dbg.kernels.mhc.mhc_head import mhc_head
from dsv4dbg.kernels.mhc.mhc_post import mhc_post
from dsv4dbg.kernels.mhc.mhc_pre import mhc_pre
from dsv4dbg.kernels.zoo.case import case


@case("sinkhorn-too-few", op="mhc_pre", bug="D13", kind="values", shows="comb, every token")
def sinkhorn_too_few(*, iters: int, **call: Any) -> Any:
    """maxtext#4337: the number of Sinkhorn iterations is not the model's, so comb is not doubly stochastic."""
    return mhc_pre(iters=1, **call)


@case("half-reduction", op="mhc_pre", bug="F01", kind="values", shows="every token")
def half_reduction(*, fn: torch.Tensor, **call: Any) -> Any:
    """vllm#45698: 64 lanes are reduced as if they were a warp of 32, so half of the mix GEMM's terms are lost."""
    upper = torch.arange(fn.shape[1], device=fn.device) // 32 % 2 == 1
    return mhc_pre(fn=fn.masked_fill(upper, 0), **call)


@case("comb-rows", op="mhc_post", bug="F05", kind="values", shows="every token and stream")
def comb_rows(*, comb: torch.Tensor, **call: Any) -> Any:
    """mlx-lm#1189: comb's columns are not what sums to 1 where it is applied, because it is applied untransposed.

    The sum runs over the first index of comb.
    """
    return mhc_post(comb=comb.transpose(1, 2), **call)


@case("comb-bf16", op="mhc_post", kind="values", shows="every token, by less than 1%")
def comb_bf16(*, post: torch.Tensor, comb: torch.Tensor, **call: Any) -> Any:
    """The weights of the stream mix are rounded to bf16 before they are used; they are float32 in this model."""
    return mhc_post(post=post.bfloat16().float(), comb=comb.bfloat16().float(), **call)


@case("head-mean", op="mhc_head", bug="D13", kind="values", shows="every token")
def head_mean(*, streams: torch.Tensor, **call: Any) -> torch.Tensor:
    """maxtext#4337: the head's learned mix of the streams is missing; their mean stands in for it."""
    return streams.float().mean(1).to(streams.dtype)


@case("head-permuted-channels", op="mhc_head", bug="A11", kind="values", shows="every token", fingerprint="permuted")
def head_permuted_channels(*, streams: torch.Tensor, **call: Any) -> torch.Tensor:
    """vllm#56119: the result is stored in a tiled order that its reader does not know."""
    y = mhc_head(streams=streams, **call)
    return y.unflatten(1, (-1, 16)).transpose(1, 2).flatten(1)
