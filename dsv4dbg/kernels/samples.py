"""Random inputs for examples: torch tensors made from numpy generators, the same on every machine."""

from __future__ import annotations

import numpy as np
import torch

from dsv4dbg.kernels import paged
from dsv4dbg.kernels.formats import fp8_encode
from dsv4dbg.pages import PageLayout

TOKENS = (0, 1, 3, 63, 127, 128, 129)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """float32 normal values."""
    return torch.from_numpy((rng.standard_normal(shape) * scale).astype(np.float32))


def activations(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """bf16 normal values with a few outlying channels, as activations have."""
    x = normal(rng, *shape, scale=scale)
    if x.numel():
        loud = torch.from_numpy(rng.integers(0, shape[-1], max(1, shape[-1] // 64)))
        x[..., loud] *= 8
    return x.to(torch.bfloat16)


def norm_weight(rng: np.random.Generator, channels: int) -> torch.Tensor:
    """bf16 weights around 1."""
    return (1 + normal(rng, channels, scale=0.2)).to(torch.bfloat16)


def fp8_weight(rng: np.random.Generator, out: int, inp: int) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3fn ``[out, in]`` and E8M0 bytes ``[out/128, in/128]``, every block with another scale."""
    codes = fp8_encode(normal(rng, out, inp, scale=100.0), "ocp").view(torch.float8_e4m3fn)
    exponents = rng.integers(-14, -9, (-(-out // 128), -(-inp // 128)))
    return codes, torch.from_numpy((exponents + 127).astype(np.uint8))


def fp4_weight(rng: np.random.Generator, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4: packed codes ``uint8 [..., in/2]`` and E8M0 bytes ``[..., in/32]`` for a shape ``[..., in]``."""
    packed = torch.from_numpy(rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8))
    exponents = rng.integers(-8, -4, (*shape[:-1], shape[-1] // 32))
    return packed, torch.from_numpy((exponents + 127).astype(np.uint8))


def cos_sin(max_position: int, rope_dim: int, theta: float = 10000.0) -> torch.Tensor:
    """float32 ``[max_position, rope_dim]``: cosines, then sines (plain RoPE)."""
    frequency = theta ** (-torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim)
    angle = torch.arange(max_position, dtype=torch.float32)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=1)


def block_table(rng: np.random.Generator, lengths: list[int], entries: int, spare: int = 3) -> tuple[torch.Tensor, int]:
    """Shuffled physical pages for sequences that hold ``lengths`` records.

    Returns:
        table ``int32 [sequence, max pages]`` (-1 where a sequence has no page) and the number of pages in the pool.
    """
    counts = [-(-n // entries) for n in lengths]
    pages = sum(counts) + spare
    order = iter(rng.permutation(pages).tolist())
    result = torch.full((len(lengths), max(counts, default=0)), -1, dtype=torch.int32)
    for row, count in enumerate(counts):
        result[row, :count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int32)
    return result, pages


def table_slots(table: torch.Tensor, sequence: torch.Tensor, index: torch.Tensor, entries: int) -> torch.Tensor:
    """Slots ``int64 [n]`` of record ``index[i]`` of sequence ``sequence[i]``."""
    return table[sequence.long(), index.long() // entries].long() * entries + index.long() % entries


def filled_cache(
    rng: np.random.Generator, name: str, layout: PageLayout, pages: int, slots: torch.Tensor
) -> paged.Cache:
    """A cache with random valid records at ``slots`` and 0xFF-free noise nowhere else (unused pages are zero)."""
    cache = paged.Cache(name, torch.zeros(pages, layout.page_bytes, dtype=torch.uint8), layout)
    if len(slots):
        paged.write(cache, slots, activations(rng, len(slots), layout.channels).float())
    return cache
