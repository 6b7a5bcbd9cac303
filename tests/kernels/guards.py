"""Arguments in one arena with canaries between them, and what may change there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dsv4dbg.kernels.contract import Op
from dsv4dbg.kernels.paged import Cache

GAP = 1024  # bytes between buffers
PAGE_GAP = 64  # bytes between the pages of a cache, beyond what its layout has
NAN, LARGE = 0xFF, 0x7E  # fills: NaN, or a large finite number, in every floating-point format


@dataclass
class Guarded:
    """A call's arguments as views of one arena.

    Attributes:
        args: the arguments by name, caches with a page stride of their own.
        before: the arena's bytes when it was made.
        writable: bytes of the arena that the op may change.
    """

    args: dict[str, Any]
    arena: torch.Tensor
    before: torch.Tensor
    writable: torch.Tensor

    def damage(self) -> str | None:
        """One sentence about bytes that changed and were not the op's to change."""
        wrong = (self.arena.cpu() != self.before) & ~self.writable
        if not wrong.any():
            return None
        first = int(wrong.nonzero()[0])
        places = {n: v.data if isinstance(v, Cache) else v for n, v in self.args.items()}
        starts = {t.data_ptr() - self.arena.data_ptr(): n for n, t in places.items() if isinstance(t, torch.Tensor)}
        nearest = max((s for s in starts if s <= first), default=min(starts))
        return (
            f"{int(wrong.sum())} bytes changed, the first {first - nearest} bytes from the start of {starts[nearest]}"
        )


def guarded(op: Op, args: Mapping[str, Any], fill: int, device: torch.device) -> Guarded:
    """Copies of ``args`` on ``device``; bytes that belong to none of them, and records of 0xFF, are ``fill``."""
    values = op.bind((), args)
    sizes = {name: _extent(value) for name, value in values.items() if isinstance(value, torch.Tensor | Cache)}
    starts, end = {}, GAP
    for name, size in sizes.items():
        starts[name] = end
        end = -(-(end + size + GAP) // 256) * 256
    arena = torch.full((end,), fill, dtype=torch.uint8, device=device)
    writable = torch.zeros(end, dtype=torch.bool)
    for name, start in starts.items():
        value = values[name]
        if isinstance(value, Cache):
            data = _place(arena, start, value.data, (value.data.stride(0) + PAGE_GAP, 1))
            values[name] = replace(value, data=data)
            _fill_unused(values[name], fill)
            if name in op.mutates:
                stride = (value.data.stride(0) + PAGE_GAP, 1)
                torch.as_strided(writable, value.data.shape, stride, start).fill_(True)
        else:
            values[name] = _place(arena, start, value, value.stride())
    return Guarded(values, arena, arena.cpu().clone(), writable)


def _extent(value: torch.Tensor | Cache) -> int:
    """Bytes from the first element to the last."""
    if isinstance(value, Cache):
        return value.data.shape[0] * (value.data.stride(0) + PAGE_GAP)
    if value.numel() == 0:
        return 0
    return (sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1) * value.element_size()


def _place(arena: torch.Tensor, start: int, value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    size = value.element_size()
    typed = torch.empty(0, dtype=value.dtype, device=arena.device).set_(
        arena.untyped_storage(), start // size, value.shape, stride
    )
    if value.numel():
        same = tuple(slice(0, 1) if s == 0 else slice(None) for s in stride)  # broadcast dims hold one value
        typed[same].copy_(value[same])
    return typed


def _fill_unused(cache: Cache, fill: int) -> None:
    """Examples mark what belongs to no record with 0xFF."""
    base = 0
    for size in cache.layout.fields:
        rows = cache.data[:, base : base + cache.layout.entries * size].unflatten(1, (cache.layout.entries, size))
        rows.masked_fill_((rows == 0xFF).all(-1, keepdim=True), fill)
        base += cache.layout.entries * size
    cache.data[:, base:].masked_fill_(cache.data[:, base:] == 0xFF, fill)


def packed(cache: Cache, page_stride: int) -> Cache:
    """The cache on the CPU without the gaps between its pages."""
    return replace(cache, data=cache.data[:, :page_stride].cpu().contiguous())
