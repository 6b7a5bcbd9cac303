"""Shared memory between the processes of a bisect: calls of ops and their results, without copying through a pipe.

One memory file is cut into frames of equal size; a frame holds one call with its results. Frame 0 is kept for tensors
that every call may refer to (weights, tables). Memory is taken only for what is written, and goes back when the last
process ends, however it ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4dbg.errors import Untestable
from dsv4dbg.kernels.numerics import profile
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.registry import registry
from dsv4dbg.kernels.table import Call
from dsv4dbg.pages import PageLayout
from dsv4dbg.site import Site

FRAME = 8 << 30  # bytes of address space per frame
ALIGN = 64


@dataclass(frozen=True)
class Place:
    """A tensor in shared memory: where its first element lies, and its dtype, shape and strides (in elements)."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class PlacedCache:
    """A paged cache in shared memory."""

    name: str
    data: Place
    layout: PageLayout


@dataclass(frozen=True)
class PackedCall:
    """A `Call` whose tensors lie in shared memory; it crosses a pipe in a few hundred bytes."""

    site: Site
    implementation: str
    numerics: str
    args: Mapping[str, Any]


class Memory:
    """The memory file of a bisect, mapped into this process.

    Args:
        fd: file descriptor of the memory file (`Memory.create` makes one).
        frames: how many frames it has.
    """

    def __init__(self, fd: int, frames: int) -> None:
        self.fd, self.frames = fd, frames
        self._bytes = torch.frombuffer(mmap.mmap(fd, frames * FRAME), dtype=torch.uint8)

    @classmethod
    def create(cls, frames: int) -> Memory:
        fd = os.memfd_create("dsv4dbg")
        try:
            os.ftruncate(fd, frames * FRAME)
            return cls(fd, frames)
        except OSError as error:
            raise Untestable(f"no shared memory for {frames} frames: {error.strerror}") from error

    def tensor(self, place: Place) -> torch.Tensor:
        """The tensor at a place; it shares the memory."""
        width = place.dtype.itemsize
        storage = self._bytes.untyped_storage()
        tensor = torch.empty(0, dtype=place.dtype)
        return tensor.set_(storage, place.offset // width, place.shape, place.stride)

    def value(self, packed: Any) -> Any:
        """A tensor, a cache, or what was no tensor to begin with."""
        if isinstance(packed, PlacedCache):
            return Cache(packed.name, self.tensor(packed.data), packed.layout)
        return self.tensor(packed) if isinstance(packed, Place) else packed

    def values(self, packed: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.value(value) for name, value in packed.items()}

    def call(self, packed: PackedCall) -> Call:
        """The call with its tensors in shared memory."""
        op = registry().op(packed.site.op)
        return Call(packed.site, op, packed.implementation, self.values(packed.args), profile(packed.numerics))


@dataclass
class Frame:
    """Room in shared memory, filled from the front.

    Attributes:
        begin, end: bytes of the memory file; what lies before ``begin`` is taken.
    """

    memory: Memory
    begin: int
    end: int

    @classmethod
    def number(cls, memory: Memory, number: int) -> Frame:
        return cls(memory, number * FRAME, (number + 1) * FRAME)

    def place(self, tensor: torch.Tensor) -> Place:
        """Copy a tensor of any device; its strides stay, so that a kernel meets what it met in the forward."""
        tensor = tensor.detach()
        stride, span = tensor.stride(), _span(tensor)
        if span > 2 * tensor.numel():  # a few columns of a wide buffer
            tensor = tensor.contiguous()
            stride, span = tensor.stride(), tensor.numel()
        begin = -(-self.begin // ALIGN) * ALIGN
        after = begin + span * tensor.element_size()
        if after > self.end:
            raise Untestable(f"a call is larger than {FRAME >> 30} GiB")
        self.begin = after
        place = Place(begin, tensor.dtype, tuple(tensor.shape), stride)
        self.memory.tensor(place).copy_(tensor) if 0 not in stride else self._repeated(place, tensor)
        return place

    def _repeated(self, place: Place, tensor: torch.Tensor) -> None:
        """Dims with stride 0 are stored once."""
        once = tuple(slice(0, 1) if s == 0 else slice(None) for s in place.stride)
        self.memory.tensor(place)[once].copy_(tensor[once])

    def pack(self, value: Any) -> Any:
        """A tensor or cache becomes its place; everything else stays."""
        if isinstance(value, Cache):
            return PlacedCache(value.name, self.place(value.data), value.layout)
        return self.place(value) if isinstance(value, torch.Tensor) else value

    def pack_all(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.pack(value) for name, value in values.items()}

    def pack_call(self, call: Call, kept: Kept | None = None) -> PackedCall:
        """A copy of the call.

        Args:
            kept: takes weights and tables, which many calls share.
        """
        args = {}
        for name, value in call.args.items():
            shared = kept is not None and call.op.args[name].kind in ("weight", "table")
            args[name] = kept.pack(value) if shared and kept else self.pack(value)
        return PackedCall(call.site, call.implementation, call.numerics.name, args)


@dataclass
class Kept:
    """Tensors that are placed once, in frame 0, and stay. They are held, so that their addresses stay theirs."""

    frame: Frame
    _known: dict[tuple[Any, ...], tuple[torch.Tensor, Place]] = field(default_factory=dict)

    def pack(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if key not in self._known:
            self._known[key] = value, self.frame.place(value)
        return self._known[key][1]


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
