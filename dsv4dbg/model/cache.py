"""The paged caches of a run: pools of raw pages per layer, and which pages each sequence owns.

Five kinds of cache: ``window`` (every layer), ``entries`` and ``state`` (layers that compress), ``index`` and
``index_state`` (CSA layers). All layers with the same ratio share block tables, each has its own pool. Physical
pages are handed out in a shuffled, non-contiguous order unless the caller gives one; pages that hold only
positions which no later token can need are returned to the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.model.config import ModelConfig
from dsv4dbg.pages import PageLayout, index_layout, kv_data_bytes, kv_layout, state_layout

WINDOW_ENTRIES = 64  # tokens per window page
BLOCK_TOKENS = 256  # tokens whose compressed entries share a page
STATE_PAGE_FLOATS = 8192  # a state page holds about this many float32 (4 tokens of CSA, 8 of HCA at head_dim 512)
SPARE_PAGES = 3  # pages of a pool that no sequence owns


@dataclass(frozen=True)
class CacheFormat:
    """Number formats of the caches.

    Attributes:
        kv: ``fp8``, ``bf16`` or ``f32`` records for window and compressed entries.
        index: ``fp4``, ``fp8``, ``bf16`` or ``f32`` records for indexer keys.
        window_dialect, entry_dialect, index_dialect: fp8 dialect of each buffer, ``ocp`` or ``fnuz``.
    """

    kv: str = "fp8"
    index: str = "fp4"
    window_dialect: str = "ocp"
    entry_dialect: str = "ocp"
    index_dialect: str = "ocp"

    @classmethod
    def parse(cls, text: str) -> CacheFormat:
        """``fp8``, ``fp8-fnuz``, ``fp8-fnuz-window`` (only the window cache in FNUZ), ``bf16`` or ``f32``."""
        named = {
            "fp8": cls(),
            "fp8-fnuz": cls(window_dialect="fnuz", entry_dialect="fnuz", index_dialect="fnuz"),
            "fp8-fnuz-window": cls(window_dialect="fnuz"),
            "bf16": cls(kv="bf16", index="bf16"),
            "f32": cls(kv="f32", index="f32"),
        }
        if text not in named:
            raise DbgError(f"unknown cache format '{text}'", f"known: {', '.join(named)}")
        return named[text]


@dataclass(frozen=True)
class CacheKind:
    """One kind of cache: its record layout and how token positions map to records.

    Attributes:
        ratio: tokens per record (1 for window and state).
        keep: how many of the newest positions must stay readable; None keeps all.
    """

    name: str
    layout: PageLayout
    ratio: int
    keep: int | None


def state_kind(ratio: int, name: str = "state") -> str:
    return f"{name}{ratio}"


def cache_kinds(config: ModelConfig, fmt: CacheFormat, rollback: int) -> dict[str, CacheKind]:
    """Kinds that the configuration needs, by name: ``window``, and per ratio ``entries4``, ``state4``, ``index4``..."""
    d, r = config.head_dim, config.qk_rope_head_dim
    align = kv_data_bytes(d, r)
    window = kv_layout(fmt.kv, fmt.window_dialect, d, r, min(WINDOW_ENTRIES, config.sliding_window))
    kinds = [CacheKind("window", window, 1, config.sliding_window - 1 + rollback)]
    for ratio in sorted(set(config.compress_ratios) - {0}):
        overlap = 2 if ratio == config.csa_ratio else 1
        per_page = max(1, BLOCK_TOKENS // ratio)
        keep = overlap * ratio - 1 + rollback

        def state(width: int, name: str, keep: int = keep) -> CacheKind:
            entries = max(1, STATE_PAGE_FLOATS // (2 * width))
            return CacheKind(name, state_layout(width, entries, align), 1, keep)

        entries = kv_layout(fmt.kv, fmt.entry_dialect, d, r, per_page)
        kinds += [CacheKind(f"entries{ratio}", entries, ratio, None), state(overlap * d, f"state{ratio}")]
        if overlap == 2:
            keys = index_layout(fmt.index, fmt.index_dialect, config.index_head_dim, per_page, align)
            kinds += [
                CacheKind(f"index{ratio}", keys, ratio, None),
                state(overlap * config.index_head_dim, f"index_state{ratio}"),
            ]
    return {kind.name: kind for kind in kinds}


@dataclass
class BlockTable:
    """Pages of one kind: the free list and each sequence's pages in logical order (-1: returned to the pool)."""

    kind: CacheKind
    num_pages: int
    free: list[int]
    pages: list[list[int]] = field(default_factory=list)

    def reserve(self, sequence: int, start: int, end: int) -> None:
        """Own pages for the records of positions < ``end``; return those no token at ``start`` or later can need."""
        owned, entries, ratio = self.pages[sequence], self.kind.layout.entries, self.kind.ratio
        if self.kind.keep is not None:
            expired = max(0, start - self.kind.keep) // entries
            for block in range(min(expired, len(owned))):
                if owned[block] >= 0:
                    self.free.append(owned[block])
                    owned[block] = -1
        while len(owned) < -(-(end // ratio) // entries):
            if not self.free:
                raise DbgError(f"the {self.kind.name} cache is full: sequence {sequence} needs {end} tokens")
            owned.append(self.free.pop(0))

    def slots(self, sequence: int, records: np.ndarray) -> np.ndarray:
        """Slots ``int64 [n]`` of a sequence's records."""
        entries = self.kind.layout.entries
        pages = np.asarray(self.pages[sequence], dtype=np.int64)
        return pages[records // entries] * entries + records % entries if len(records) else np.zeros(0, np.int64)

    def array(self) -> np.ndarray:
        """``int32 [sequence, max pages]``, -1 where there is none."""
        width = max((len(p) for p in self.pages), default=0)
        result = np.full((len(self.pages), width), -1, dtype=np.int32)
        for row, pages in enumerate(self.pages):
            result[row, : len(pages)] = pages
        return result


class CacheManager:
    """Pools and block tables for a set of sequences.

    Args:
        max_tokens: for each sequence the largest length that it will reach.
        step_tokens: the largest number of new tokens of one sequence in one step.
        placement: ``placement(kind name, num_pages)`` gives the order in which physical pages are handed out;
            default: a permutation seeded by ``seed``.
        rollback: how many tokens a sequence may be taken back.
        fill: byte that unused pages hold at the start.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_tokens: Sequence[int],
        step_tokens: int,
        device: torch.device,
        fmt: CacheFormat | None = None,
        seed: int = 0,
        placement: Mapping[str, Sequence[int]] | None = None,
        rollback: int = 8,
        fill: int = 0,
    ) -> None:
        self.format = fmt or CacheFormat()
        self.fill = fill
        self.max_tokens = list(max_tokens)
        self.rollback_tokens = rollback
        self.kinds = cache_kinds(config, self.format, rollback)
        self.lengths = [0] * len(max_tokens)
        self.lowest = [0] * len(max_tokens)  # lengths that each sequence can be taken back to
        self.tables: dict[str, BlockTable] = {}
        for number, kind in enumerate(self.kinds.values()):
            pages = SPARE_PAGES + sum(self._pages(kind, tokens, step_tokens) for tokens in max_tokens)
            order = (placement or {}).get(kind.name)
            if order is None:
                order = np.random.Generator(np.random.Philox(key=[seed, number])).permutation(pages).tolist()
            self.tables[kind.name] = BlockTable(kind, max(order) + 1, list(order), [[] for _ in max_tokens])
        self.caches: dict[str, dict[str, Cache]] = {}
        self.kind_of: dict[str, str] = {}  # cache name -> kind
        scopes = [f"L{i}" for i in range(config.num_hidden_layers)]
        scopes += [f"mtp{i}" for i in range(config.num_nextn_predict_layers)]
        for scope, ratio in zip(scopes, config.compress_ratios, strict=True):
            roles = {"window": "window"}
            if ratio:
                roles |= {"entries": f"entries{ratio}", "state": f"state{ratio}"}
            if ratio == config.csa_ratio:
                roles |= {"index": f"index{ratio}", "index_state": f"index_state{ratio}"}
            self.caches[scope] = {role: self._pool(f"{scope}.{role}", kind, device) for role, kind in roles.items()}

    @staticmethod
    def _pages(kind: CacheKind, tokens: int, step_tokens: int) -> int:
        entries = kind.layout.entries
        full = -(-(tokens // kind.ratio) // entries)
        if kind.keep is None:
            return full
        return min(full, (kind.keep + min(step_tokens, tokens)) // entries + 2)

    def _pool(self, name: str, kind: str, device: torch.device) -> Cache:
        table = self.tables[kind]
        self.kind_of[name] = kind
        shape = (table.num_pages, table.kind.layout.page_bytes)
        if device.type == "cpu":
            # numpy's zeros, not torch's: untouched pages of a huge pool then cost no memory
            data = torch.from_numpy(np.zeros(shape, np.uint8))
        else:
            data = torch.zeros(shape, dtype=torch.uint8, device=device)
        return Cache(name, data.fill_(self.fill) if self.fill else data, table.kind.layout)

    def all_caches(self) -> Iterable[Cache]:
        return (cache for roles in self.caches.values() for cache in roles.values())

    def needed(self, kind: str) -> int:
        """How many of the newest records of a kind with a limit the next token can read (rollback left aside)."""
        keep = self.tables[kind].kind.keep
        assert keep is not None
        return keep - self.rollback_tokens

    def reserve(self, sequence: int, new_tokens: int) -> int:
        """Make room for ``new_tokens`` more tokens of a sequence and count them; returns its old length."""
        start = self.lengths[sequence]
        if start + new_tokens > self.max_tokens[sequence]:
            raise DbgError(
                f"sequence {sequence} would grow to {start + new_tokens} tokens, "
                f"{self.max_tokens[sequence]} were planned"
            )
        for table in self.tables.values():
            table.reserve(sequence, start, start + new_tokens)
        self.lowest[sequence] = max(self.lowest[sequence], start - self.rollback_tokens)
        self.lengths[sequence] = start + new_tokens
        return start

    def rollback(self, sequence: int, length: int) -> None:
        """Take a sequence back to ``length`` tokens; bytes of the tokens taken back stay until overwritten.

        Raises:
            DbgError: pages that the next token would read have been returned to the pool.
        """
        if not self.lowest[sequence] <= length <= self.lengths[sequence]:
            raise DbgError(
                f"sequence {sequence} has {self.lengths[sequence]} tokens and cannot be taken back to {length}; "
                f"its caches reach back to {self.lowest[sequence]}"
            )
        self.lengths[sequence] = length
