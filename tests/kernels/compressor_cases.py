"""A compressor with caches, block tables and weights, for the tests of compress_insert."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch

from dsv4dbg.kernels import paged, samples
from dsv4dbg.kernels.attention.compress_insert import compress_insert
from dsv4dbg.kernels.numerics import OFFICIAL, Numerics
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.pages import PageLayout, index_layout, kv_layout, state_layout

C, R, EPS = 128, 64, 1e-6
TABLE = samples.cos_sin(1200, R, 160000.0)
KINDS = {  # name -> ratio, overlap, layout of entries
    "csa": (4, True, kv_layout("fp8", "ocp", C, R, 4)),
    "hca": (128, False, kv_layout("fp8", "fnuz", C, R, 2)),
    "index": (4, True, index_layout("fp4", "", C, 4, 576)),
    "index fp8": (4, True, index_layout("fp8", "ocp", C, 4, 576)),
    "csa bf16": (4, True, kv_layout("bf16", "", C, R, 4)),
}
EXACT = replace(OFFICIAL, kv_quant=False, index_quant=False, index_hadamard=False)


@dataclass
class Compressor:
    """Weights, caches and tables of one compressor for sequences of at most ``length`` tokens."""

    ratio: int
    overlap: bool
    layout: PageLayout
    length: int = 300
    sequences: int = 1
    seed: int = 0
    fill: int = 0xFF
    act: str = "bf16"
    numerics: Numerics = OFFICIAL
    cos_sin: torch.Tensor = field(default_factory=lambda: TABLE)
    state: Cache = field(init=False)
    entries: Cache = field(init=False)

    def __post_init__(self) -> None:
        width = C * (2 if self.overlap else 1)
        weights, places = np.random.default_rng(7), np.random.default_rng(self.seed)
        self.ape, self.weight = samples.normal(weights, self.ratio, width), samples.norm_weight(weights, C)
        state = state_layout(width, 8, 576)
        self.state_table, pages = samples.block_table(places, [self.length] * self.sequences, 8)
        self.state = Cache("state", torch.full((pages, state.page_bytes), self.fill, dtype=torch.uint8), state)
        lengths = [self.length // self.ratio] * self.sequences
        self.table, pages = samples.block_table(places, lengths, self.layout.entries)
        self.entries = Cache(
            "e", torch.full((pages, self.layout.page_bytes), self.fill, dtype=torch.uint8), self.layout
        )

    def feed(
        self, kv: torch.Tensor, gate: torch.Tensor, positions: torch.Tensor, sequence: int | torch.Tensor = 0
    ) -> None:
        sequence = torch.as_tensor(sequence, dtype=torch.int32).expand(len(positions))
        slots = torch.full_like(positions, -1)
        full = (positions + 1) % self.ratio == 0
        slots[full] = self.entry_slots(positions[full] // self.ratio, sequence[full])
        compress_insert(
            kv, gate, self.ape, self.weight, positions, sequence, self.cos_sin, self.state,
            samples.table_slots(self.state_table, sequence, positions, 8), self.state_table, self.entries, slots,
            ratio=self.ratio, eps=EPS, act=self.act, numerics=self.numerics,
        )  # fmt: skip

    def entry_slots(self, entries: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
        return samples.table_slots(self.table, sequence, entries, self.layout.entries)

    def rows(self, count: int, sequence: int = 0) -> torch.Tensor:
        """The first ``count`` entries of a sequence, decoded."""
        slots = self.entry_slots(torch.arange(count), torch.full((count,), sequence))
        return paged.read(self.entries, slots, torch.float32)


def make(kind: str, **options) -> Compressor:
    return Compressor(*KINDS[kind], **options)


def plain(kind: str, **options) -> Compressor:
    """The same compressor with a float32 cache and float32 activations, nothing quantised or rotated by Hadamard."""
    ratio, overlap, layout = KINDS[kind]
    layout = replace(layout, format="f32", dialect="", fields=(C * 4,))
    return Compressor(ratio, overlap, layout, act="f32", numerics=EXACT, **options)


def inputs(compressor: Compressor, tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    rng, width = np.random.default_rng(seed), compressor.ape.shape[1]
    return samples.normal(rng, tokens, width), samples.normal(rng, tokens, width, scale=2.0)


def chunks(tokens: int, sizes: list[int]) -> list[torch.Tensor]:
    """Positions 0 .. tokens - 1 in chunks of ``sizes``, repeated."""
    cuts, i = [0], 0
    while cuts[-1] < tokens:
        cuts.append(min(tokens, cuts[-1] + sizes[i % len(sizes)]))
        i += 1
    return [torch.arange(a, b) for a, b in pairwise(cuts)]
