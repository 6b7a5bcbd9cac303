"""Guards around a call: an arena of our own, where what a kernel may not touch is seen when it is touched.

All buffers of a call are copied into one block of memory, each with a gap before and behind. Gaps, bytes between the
rows of strided buffers and cache entries that no pointer names hold a fill; after the run everything that the
contract does not let the op write must be as it was. Two runs under different fills that differ have read what they do
not own. Memory that the candidate allocates through torch is filled too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dsv4dbg.bisect.derive import owned_entries
from dsv4dbg.bisect.faults import Range, place
from dsv4dbg.kernels.fill import FilledEmpties, filled_empties
from dsv4dbg.kernels.paged import Cache, field_rows
from dsv4dbg.kernels.table import Call

FILLS = {"nan": 0xFF, "large": 0x7E}  # bytes: NaN and -1, or large and finite, in every format
GAP = 4096  # bytes at least between buffers
ALIGN = 256
WORD = 8  # bytes compared at a time

Entries = tuple[torch.Tensor, ...]  # pages, and entries in them


@dataclass(frozen=True)
class Damage:
    """Bytes that a run changed and had no right to.

    Attributes:
        where: the buffer that they lie in, or next to.
        offset: of the first one from the start of that buffer.
    """

    where: str
    offset: int
    count: int
    sentence: str


@dataclass(frozen=True)
class _Buffer:
    """One tensor or cache in the arena: its bytes ``begin <= a < end``, counted from the arena's start."""

    name: str
    begin: int
    end: int


class Arena:
    """The block of memory; it grows to the largest call and is used again for every one."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._before = torch.empty(0, dtype=torch.uint8)

    def place(self, call: Call, device: torch.device, fill: str = "nan", seed: int = 0) -> Placed:
        """Copy a call into the arena.

        Args:
            fill: a name of `FILLS`.
            seed: decides the order in which the buffers lie (0: that of the contract).
        """
        tensors = {n: v.data if isinstance(v, Cache) else v for n, v in call.args.items()}
        names = [name for name, value in tensors.items() if isinstance(value, torch.Tensor)]
        if seed:
            names = [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
        buffers, end = [], GAP
        for name in names:
            begin, end = end, end + _bytes(tensors[name])
            buffers.append(_Buffer(name, begin, end))
            end = -(-(end + GAP) // ALIGN) * ALIGN
        self._reserve(end, device)
        memory, byte = self._memory[:end], FILLS[fill]
        args, owned, last = dict(call.args), {}, 0
        for buffer in buffers:
            name, value, source = buffer.name, args[buffer.name], tensors[buffer.name]
            sparse = isinstance(value, Cache) or not source.is_contiguous()
            memory[last : buffer.end if sparse else buffer.begin].fill_(byte)
            placed = _view(self._memory, buffer.begin, source)
            if isinstance(value, Cache):
                args[name] = replace(value, data=placed)
                owned[name] = owned_entries(call, name).nonzero(as_tuple=True)
                _copy_entries(args[name], value, owned[name])
            else:
                args[name] = placed
                _copy(placed, source)
            last = buffer.end
        memory[last:].fill_(byte)
        return Placed(call, replace(call, args=args), owned, buffers, memory, self._before[:end])

    def _reserve(self, size: int, device: torch.device) -> None:
        if len(self._memory) < size or self._memory.device != device:
            self._memory = self._before = torch.empty(0, dtype=torch.uint8)  # freed before the larger one is taken
            self._memory = torch.empty(size, dtype=torch.uint8, device=device)
            self._before = torch.empty(size, dtype=torch.uint8, device=device)


class Placed:
    """A call in the arena.

    Attributes:
        call: its tensors and caches lie in the arena, with the strides that they had.
    """

    def __init__(
        self, source: Call, call: Call, owned: dict[str, Entries], buffers: list[_Buffer], memory: torch.Tensor,
        before: torch.Tensor,
    ) -> None:  # fmt: skip
        self.call = call
        self._source, self._owned, self._buffers, self._memory, self._before = source, owned, buffers, memory, before
        before.copy_(memory)

    def ranges(self) -> list[Range]:
        """Device addresses of the call's buffers."""
        start = self._memory.data_ptr()
        return [Range(b.name, start + b.begin, start + b.end) for b in self._buffers if b.end > b.begin]

    def damage(self) -> list[Damage]:
        """What the run changed beside its own entries of caches; then what nobody owns holds what the call had."""
        for buffer in self._buffers:
            if buffer.name in self.call.op.mutates:
                cache = self.call.args[buffer.name]
                before = replace(cache, data=_view(self._before, buffer.begin, cache.data))
                _copy_entries(before, cache, self._owned[buffer.name])
        now, before = self._memory.view(torch.int64), self._before.view(torch.int64)
        found = [] if torch.equal(now, before) else self._changed((now != before).nonzero().flatten())
        for name in self.call.op.mutates:
            self._put_back(name)
        return found

    def _changed(self, words: torch.Tensor) -> list[Damage]:
        """The bytes that differ in some words of the arena, sorted into buffers and gaps."""
        at = (words[:, None] * WORD + torch.arange(WORD, device=words.device)).flatten()
        at = at[self._memory[at] != self._before[at]].cpu().numpy()
        found, inside = [], np.zeros(len(at), bool)
        for buffer in self._buffers:
            hit = (at >= buffer.begin) & (at < buffer.end)
            inside |= hit
            if hit.any():
                found += self._inside(buffer, at[hit] - buffer.begin)
        return found if inside.all() else [self._outside(at[~inside]), *found]

    def _inside(self, buffer: _Buffer, offsets: np.ndarray) -> list[Damage]:
        """Changed bytes of a buffer."""
        name, value, first = buffer.name, self.call.args[buffer.name], int(offsets[0])
        if name not in self.call.op.mutates:
            what = f"bytes of {name}, which the op must not change, are changed, first at {first:,}"
        else:
            page, entry = entry_of(value, first)
            where = f"behind the entries of page {page}" if entry is None else f"in page {page}, entry {entry}"
            what = f"bytes of {name} that no slot names are changed, first {where}"
        return [Damage(name, first, len(offsets), f"{len(offsets):,} {what}")]

    def _outside(self, at: np.ndarray) -> Damage:
        """Changed bytes of gaps."""
        ranges = [Range(b.name, b.begin, b.end) for b in self._buffers if b.end > b.begin]
        where = place(int(at[0]), ranges)
        name = where.rpartition(" of ")[2]
        offset = int(at[0]) - next(r.begin for r in ranges if r.name == name)
        return Damage(name, offset, len(at), f"{len(at):,} bytes written outside of all buffers, first {where}")

    def _put_back(self, name: str) -> None:
        """A mutated cache holds the op's own entries, and otherwise what it held before it was filled."""
        cache, source = self.call.args[name], self._source.args[name]
        if not isinstance(cache, Cache):
            return
        page, entry = self._owned[name]
        mine = [rows[page, entry] for rows in field_rows(cache)]
        cache.data.copy_(source.data)
        for rows, row in zip(field_rows(cache), mine, strict=True):
            rows[page, entry] = row


def entry_of(cache: Cache, offset: int) -> tuple[int, int | None]:
    """Page and entry of a byte of a cache's buffer; no entry behind the records of a page."""
    page, column = divmod(offset, cache.data.stride(0))
    for size in cache.layout.fields:
        if column < cache.layout.entries * size:
            return page, column // size
        column -= cache.layout.entries * size
    return page, None


def _copy_entries(target: Cache, source: Cache, entries: Entries) -> None:
    for to, rows in zip(field_rows(target), field_rows(source), strict=True):
        to[entries] = rows[entries].to(to.device)


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    if not tensor.numel():
        return 0
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return span * tensor.element_size()


def _view(memory: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the same dtype, shape and strides at a place of the arena."""
    tensor = torch.empty(0, dtype=like.dtype, device=memory.device)
    return tensor.set_(memory.untyped_storage(), begin // like.element_size(), like.shape, like.stride())


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy elements; a dim of stride 0 holds its values once."""
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in source.stride())
    target[once].copy_(source[once])


def unwritten(fill: str, thorough: bool) -> AbstractContextManager[Any]:
    """Inside ``with``, memory that the candidate allocates holds a fill of `FILLS`; ``thorough``: in C++ code too."""
    return FilledEmpties(FILLS[fill]) if thorough else filled_empties(FILLS[fill])
