"""Ragged batches for examples: tokens of several sequences in one call, and caches whose unused bytes are NaN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.samples import block_table, table_slots
from dsv4dbg.pages import PageLayout

MIXED = ((0, 3), (5, 2), (126, 5), (7, 1), (128, 3), (0, 0), (127, 1), (0, 1))  # (first position, tokens) each


@dataclass(frozen=True)
class Ragged:
    """New tokens of several sequences, sequence after sequence."""

    spans: tuple[tuple[int, int], ...]

    @property
    def ends(self) -> list[int]:
        return [start + count for start, count in self.spans]

    @property
    def positions(self) -> torch.Tensor:
        parts = [np.arange(start, start + count) for start, count in self.spans]
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    @property
    def sequence(self) -> torch.Tensor:
        counts = [count for _, count in self.spans]
        return torch.from_numpy(np.repeat(np.arange(len(counts), dtype=np.int32), counts))

    def __len__(self) -> int:
        return sum(count for _, count in self.spans)


def nan_cache(name: str, layout: PageLayout, pages: int, gap: int = 0) -> Cache:
    """A cache full of 0xFF (NaN in every format) whose pages lie ``gap`` bytes apart."""
    arena = torch.full((pages, layout.page_bytes + gap), 0xFF, dtype=torch.uint8)
    return Cache(name, arena[:, : layout.page_bytes], layout)


def paged_cache(
    rng: np.random.Generator, name: str, layout: PageLayout, lengths: list[int], gap: int = 0
) -> tuple[Cache, torch.Tensor]:
    """A `nan_cache` for sequences of ``lengths`` records, and its block table ``int32 [sequence, page]``."""
    table, pages = block_table(rng, lengths, layout.entries)
    return nan_cache(name, layout, pages, gap), table


def own_slots(batch: Ragged, table: torch.Tensor, entries: int, ratio: int = 1) -> torch.Tensor:
    """Slot ``int64 [token]`` of the record that each token completes, -1 for none; one record is ``ratio`` tokens."""
    completes = (batch.positions + 1) % ratio == 0
    slots = torch.full((len(batch),), -1, dtype=torch.int64)
    records = batch.positions[completes] // ratio
    slots[completes] = table_slots(table, batch.sequence[completes], records, entries)
    return slots
