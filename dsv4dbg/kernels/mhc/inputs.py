"""Example inputs that the mHC ops share: residual streams and mix parameters."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.samples import TOKENS, activations, normal


def stream_cases(dims: Dims, rng: np.random.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Named residual streams ``[token, stream, channel]`` in bf16."""
    hc, channels = dims.hc_mult, dims.hidden
    for tokens in TOKENS:
        yield f"{tokens} tokens", activations(rng, tokens, hc, channels)
    zero = activations(rng, 3, hc, channels)
    zero[1] = 0
    yield "zero row", zero
    silent = activations(rng, 3, hc, channels)
    silent[:, 2] = 0
    yield "one stream zero", silent
    unlike = torch.tensor([2.0 ** (5 - 6 * j) for j in range(hc)], dtype=torch.bfloat16)[:, None]
    yield "streams of unlike size", activations(rng, 3, hc, channels) * unlike
    size = torch.tensor([1e-18, 1e15], dtype=torch.bfloat16)[:, None, None]
    yield "tiny and huge rows", activations(rng, 2, hc, channels) * size
    yield "cancelling streams", activations(rng, 3, 1, channels) * (1 - 2 * (torch.arange(hc) % 2))[:, None]
    yield "two streams", activations(rng, 3, 2, channels)
    yield "float32", normal(rng, 5, hc, channels)


def mix_parameters(
    rng: np.random.Generator, mixes: int, parts: int, flat: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fn ``[mixes, flat]``, scale ``[parts]`` and base ``[mixes]``, float32: mixes are about normal."""
    return normal(rng, mixes, flat, scale=flat**-0.5), 1 + normal(rng, parts, scale=0.3), normal(rng, mixes)
