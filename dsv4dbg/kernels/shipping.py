"""Values with tensors in them as bytes, storages apart: views of one storage stay views of one storage.

A call in another process then sees what a call in this one would: strides, offsets, aliases, the bytes around a view.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, cast

import torch


class Storages:
    """Storages by number: those of one call, on either side."""

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self._numbers: dict[tuple[int, int], int] = {}

    def number(self, storage: torch.UntypedStorage) -> int:
        key = (storage.data_ptr(), storage.nbytes())
        if key not in self._numbers:
            self.add(storage)
        return self._numbers[key]

    def add(self, storage: torch.UntypedStorage) -> None:
        self._numbers[storage.data_ptr(), storage.nbytes()] = len(self.storages)
        self.storages.append(storage)

    def bytes(self, number: int) -> memoryview:
        """The storage's memory, writable."""
        storage = self.storages[number]
        flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
        return memoryview(cast(Any, flat.numpy()))

    def pack(self, value: Any) -> bytes:
        """``value`` without the contents of its tensors (all on the CPU)."""
        file = io.BytesIO()
        _Pickler(file, self).dump(value)
        return file.getvalue()

    def unpack(self, data: bytes) -> Any:
        return _Unpickler(io.BytesIO(data), self).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, storages: Storages) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._storages = storages

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        obj = obj.detach()
        number = self._storages.number(obj.untyped_storage())
        return number, obj.dtype, tuple(obj.shape), obj.stride(), obj.storage_offset()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storages: Storages) -> None:
        super().__init__(file)
        self._storages = storages

    def persistent_load(self, pid: Any) -> torch.Tensor:
        number, dtype, shape, stride, offset = pid
        return torch.empty(0, dtype=dtype).set_(self._storages.storages[number], offset, shape, stride)
