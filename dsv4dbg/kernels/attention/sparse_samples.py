"""Ragged sequences with index lists and caches, for the examples of the sparse attention ops.

Whatever belongs to no record is 0xFF, which is NaN (or a NaN scale) in every format: it shows if it is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dsv4dbg.kernels import paged
from dsv4dbg.kernels.samples import activations, block_table, normal, table_slots
from dsv4dbg.pages import PageLayout

STARTS = (126, 0, 5, 128, 257)  # first positions of the new tokens: all remainders of 4, across 127/128/129
WINDOW_BLOCK = 64


@dataclass(frozen=True)
class Ragged:
    """New tokens of several sequences: row t is token ``positions[t]`` of sequence ``sequence[t]``."""

    sequence: torch.Tensor
    positions: torch.Tensor
    lengths: list[int]

    def entries(self, ratio: int) -> list[int]:
        """Compressed entries of each sequence."""
        return [n // ratio for n in self.lengths]


def ragged(tokens: int, starts: tuple[int, ...] = STARTS) -> Ragged:
    """``tokens`` new tokens dealt out to sequences of which the first new positions are ``starts``."""
    counts = [tokens // len(starts) + (i < tokens % len(starts)) for i in range(len(starts))]
    sequence = torch.tensor([s for s, n in enumerate(counts) for _ in range(n)], dtype=torch.int32)
    positions = [p for start, n in zip(starts, counts, strict=True) for p in range(start, start + n)]
    lengths = [start + n if n else 0 for start, n in zip(starts, counts, strict=True)]
    return Ragged(sequence, torch.tensor(positions, dtype=torch.int64), lengths)


def rows(rng: np.random.Generator, count: int, channels: int) -> torch.Tensor:
    """bf16 ``[count, channels]`` with another magnitude in every group of 64 channels, and one row of zeros."""
    x = activations(rng, count, channels)
    groups = torch.from_numpy(rng.integers(-2, 3, (count, channels // 64, 1)).astype(np.float32))
    x = (x.float().unflatten(1, (-1, 64)) * torch.exp2(groups)).flatten(1).to(torch.bfloat16)
    x[count // 2 : count // 2 + 1] = 0
    return x


def queries(rng: np.random.Generator, tokens: int, heads: int, channels: int) -> torch.Tensor:
    """bf16 ``[tokens, heads, channels]``, quiet enough that many keys have a share in the softmax over `rows`."""
    return activations(rng, tokens, heads, channels, scale=0.25)


def sinks(rng: np.random.Generator, heads: int) -> torch.Tensor:
    """float32 ``[heads]`` of the size of the lse over `rows`, so that the sink has a share too."""
    return normal(rng, heads) + 5


def paged_rows(
    rng: np.random.Generator, name: str, layout: PageLayout, lengths: list[int]
) -> tuple[paged.Cache, list[torch.Tensor], torch.Tensor]:
    """A cache with records for sequences of these lengths in shuffled pages, 0xFF everywhere else.

    Returns:
        the cache; for every sequence the slots int64 ``[length]`` of its records; the block table.
    """
    table, pages = block_table(rng, lengths, layout.entries)
    cache = paged.Cache(name, torch.full((pages, layout.page_bytes), 0xFF, dtype=torch.uint8), layout)
    slots = [table_slots(table, torch.full((n,), s), torch.arange(n), layout.entries) for s, n in enumerate(lengths)]
    paged.write(cache, torch.cat(slots), rows(rng, sum(lengths), layout.channels).float())
    return cache, slots, table


def workspace_rows(
    rng: np.random.Generator, lengths: list[int], entries: list[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Rows of a workspace in random order: for every sequence those of its positions and those of its entries."""
    order = torch.from_numpy(rng.permutation(sum(lengths) + sum(entries)))
    parts = order.split([*lengths, *entries])
    return list(parts[: len(lengths)]), list(parts[len(lengths) :])


def index_lists(
    rng: np.random.Generator,
    tokens: Ragged,
    window_slots: list[torch.Tensor],
    entry_slots: list[torch.Tensor],
    window: int,
    ratio: int,
    width: int,
) -> torch.Tensor:
    """int32 ``[token, window + width]``: the last positions, then some of the visible entries in random order."""
    lists = torch.full((len(tokens.positions), window + width), -1, dtype=torch.int32)
    for row, s, p in zip(lists, tokens.sequence.tolist(), tokens.positions.tolist(), strict=True):
        recent = window_slots[s][max(0, p - window + 1) : p + 1]
        row[: len(recent)] = recent
        chosen = torch.from_numpy(rng.permutation((p + 1) // ratio)[:width])
        row[window : window + len(chosen)] = entry_slots[s][chosen]
    return lists
