"""Guards around a call: an arena of our own, where what a kernel may not touch is seen when it is touched.

All buffers of a call are copied into one block of memory, each with a gap before and behind. Gaps, bytes between the
rows of strided buffers and cache entries that no pointer names hold a fill; after the run everything that the
contract does not let the op write must be as it was. Two runs under different fills that differ have read what they do
not own. Memory that the candidate allocates through torch is filled too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from dsv4dbg.bisect.derive import owned_entries
from dsv4dbg.bisect.faults import Range, place
from dsv4dbg.kernels.fill import FilledEmpties
from dsv4dbg.kernels.paged import Cache, field_rows
from dsv4dbg.kernels.table import Call

FILLS = {"nan": 0xFF, "large": 0x7E}  # bytes: NaN and -1, or large and finite, in every format
GAP = 4096  # bytes at least between buffers
ALIGN = 256


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
        tensors = {n: v for n, v in tensors.items() if isinstance(v, torch.Tensor)}
        names = sorted(tensors, key=lambda name: name in call.op.mutates)
        if seed:
            names = [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
        buffers, end = [], GAP
        for name in names:
            begin, end = end, end + _bytes(tensors[name])
            buffers.append(_Buffer(name, begin, end))
            end = -(-(end + GAP) // ALIGN) * ALIGN
        self._reserve(end, device)
        memory, byte = self._memory[:end], FILLS[fill]
        args, last = dict(call.args), 0
        for buffer in buffers:
            memory[last : buffer.begin].fill_(byte)
            source = tensors[buffer.name]
            if not source.is_contiguous():
                memory[buffer.begin : buffer.end].fill_(byte)
            placed = _view(self._memory, buffer.begin, source)
            _copy(placed, source)
            value = args[buffer.name]
            args[buffer.name] = replace(value, data=placed) if isinstance(value, Cache) else placed
            last = buffer.end
        memory[last:].fill_(byte)
        return Placed(call, replace(call, args=args), buffers, memory, self._before[:end], byte)

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
        self, source: Call, call: Call, buffers: list[_Buffer], memory: torch.Tensor, before: torch.Tensor, byte: int
    ) -> None:
        self.call = call
        self._source, self._buffers, self._memory, self._before = source, buffers, memory, before
        self._free = {name: self._fill_unowned(name, byte) for name, v in call.args.items() if isinstance(v, Cache)}
        before.copy_(memory)

    def _fill_unowned(self, name: str, byte: int) -> torch.Tensor:
        """Fill the entries of a cache that no pointer names, and say which: ``bool [page, entry]``."""
        cache = self.call.args[name]
        free = ~owned_entries(self._source, name).to(cache.data.device)
        if free.any():
            for rows in field_rows(cache):
                rows[free] = byte
        return free

    def ranges(self) -> list[Range]:
        """Device addresses of the call's buffers."""
        start = self._memory.data_ptr()
        return [Range(b.name, start + b.begin, start + b.end) for b in self._buffers if b.end > b.begin]

    def damage(self) -> list[Damage]:
        """What the run changed beside its own slots of caches; afterwards unowned entries hold what the call had."""
        found = []
        for name in self.call.op.mutates:
            if isinstance(self.call.args[name], Cache):
                found += self._unowned(name)
        if not _equal(self._memory, self._before):
            found += self._elsewhere()
        return found

    def _unowned(self, name: str) -> list[Damage]:
        """Changed entries of a mutated cache that no pointer names. Its owned ones are no concern of the guards."""
        now, free = self.call.args[name], self._free[name]
        buffer = next(b for b in self._buffers if b.name == name)
        was = replace(now, data=_view(self._before, buffer.begin, now.data))
        source = self._source.args[name]
        changed = torch.zeros_like(free)
        count = 0
        for rows, old, original in zip(field_rows(now), field_rows(was), field_rows(source), strict=True):
            different = (rows != old) & free[..., None]
            changed |= different.any(-1)
            count += int(different.sum())
            rows.copy_(torch.where(free[..., None], original.to(rows.device), rows))
            old.copy_(rows)
        if not count:
            return []
        page, entry = (int(i) for i in changed.nonzero()[0])
        sentence = f"{count:,} bytes written to entries of {name} that no slot names, first page {page} entry {entry}"
        return [Damage(name, page * now.data.stride(0), count, sentence)]

    def _elsewhere(self) -> list[Damage]:
        """Changed bytes by buffer; a gap's belong to the nearest one."""
        at = (self._memory != self._before).nonzero().flatten().cpu().numpy()
        ranges = [Range(b.name, b.begin, b.end) for b in self._buffers if b.end > b.begin]
        inside = [(at >= r.begin) & (at < r.end) for r in ranges]
        found = [_changed(r, at[hit]) for r, hit in zip(ranges, inside, strict=True) if hit.any()]
        gaps = at[~np.any(inside, axis=0)] if inside else at
        return ([_written(gaps, ranges)] if len(gaps) else []) + found


def _changed(buffer: Range, at: np.ndarray) -> Damage:
    offset = int(at[0]) - buffer.begin
    sentence = (
        f"{len(at):,} bytes of {buffer.name}, which the op must not change, are changed, first at byte {offset:,}"
    )
    return Damage(buffer.name, offset, len(at), sentence)


def _written(at: np.ndarray, ranges: list[Range]) -> Damage:
    where = place(int(at[0]), ranges)
    name = where.rpartition(" of ")[2]
    offset = int(at[0]) - next((r.begin for r in ranges if r.name == name), 0)
    return Damage(name, offset, len(at), f"{len(at):,} bytes written outside of all buffers, first {where}")


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


def _equal(now: torch.Tensor, before: torch.Tensor) -> bool:
    return torch.equal(now.view(torch.int64), before.view(torch.int64))


def filled_empties(fill: str) -> FilledEmpties:
    """Inside ``with``, memory that ``torch.empty`` and the like return holds a fill of `FILLS`."""
    return FilledEmpties(FILLS[fill])
