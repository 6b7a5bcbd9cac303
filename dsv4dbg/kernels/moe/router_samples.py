"""Logits for the examples of both routers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from dsv4dbg.kernels.samples import TOKENS, normal


def alone(experts: int, loud: torch.Tensor) -> torch.Tensor:
    """Logits of tokens for which only expert ``loud[i]`` has a score; all others underflow in float32."""
    return torch.full((len(loud), experts), -104.0).scatter_(1, loud[:, None], 1.0)


def logit_samples(rng: np.random.Generator, experts: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and ``[token, expert]`` float32 logits (bf16 where the name says so).

    Logits span -104 (where float32 exp underflows) to 200. No row is so low everywhere that all scores underflow.
    """
    for tokens in TOKENS:
        yield f"{tokens}", normal(rng, tokens, experts, scale=2.0)
    for tokens in (3, 129):
        yield f"bf16, {tokens}", normal(rng, tokens, experts, scale=2.0).to(torch.bfloat16)
    span = torch.linspace(-104, 200, experts)
    yield "-104 to 200", torch.stack([span[torch.from_numpy(rng.permutation(experts))] for _ in range(7)])
    threshold = 20 + normal(rng, 7, experts, scale=1e-3)
    yield "around the softplus threshold", threshold
    low = -83 + normal(rng, 7, experts).clamp(-3, 3)
    yield "all low", low
    yield "all low, bf16", low.to(torch.bfloat16)
    ties = normal(rng, 1, experts).repeat(7, 1)
    ties[0] = 0.5
    ties[1] = 200
    ties[2, 1::2] = ties[2, 0::2]
    ties[3, experts // 2 :] = ties[3, : experts // 2]
    ties[4] = ties[4].max()
    ties[4, :2] += 1
    yield "exact ties", ties
    near = ties.clone()
    near[:, 1::2] = torch.nextafter(near[:, 1::2], torch.tensor(torch.inf))
    yield "ties but for one bit", near
    apart = normal(rng, 7, 1).expand(7, experts) + 1e-4 * torch.from_numpy(
        rng.random((7, experts)).argsort(axis=-1).astype(np.float32)
    )
    yield "near ties, far enough to tell", apart
