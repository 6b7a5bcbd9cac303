"""The bytes of a trace file while it is written: our tensors by offset, HDF5's own structures through a file object.

HDF5 decides where a dataset lies and keeps the structures that make the file readable for others; the
bits themselves go straight to their place with ``pwrite``. So they are in the file (in the system's page cache, which
outlives a killed process) before the journal says so, whatever HDF5 still holds in memory.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from dsv4dbg.errors import DbgError

_CHUNK = 1 << 20  # bytes compared at a time


def write_error(path: Path, error: OSError, hint: str = "") -> DbgError:
    """The sentence for a failed write: ``cannot write a.h5: No space left on device``."""
    return DbgError(f"cannot write {path}: {error.strerror or error}", hint)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """pwrite until everything is there; the system may take less at a time than it is given."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


class DataFile:
    """A new file that both we and HDF5 write.

    The lower half is the Python file object that HDF5 works through. After the first failed write of
    HDF5's structures it swallows all further ones: HDF5 cannot drop a file without flushing it, and a
    flush that keeps failing leaves the library in a bad state until the process ends. The error is kept in
    ``failure`` for the writer to look at.
    """

    def __init__(self, path: Path) -> None:
        """Create ``path``, which must not exist. Raises OSError."""
        self.failure: OSError | None = None
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self._position = 0
        self._scratch = np.empty(_CHUNK, np.uint8)

    def put(self, array: np.ndarray, offset: int) -> None:
        """Write the bytes of a C-contiguous ``array`` at ``offset``. Raises OSError."""
        write_all(self._fd, raw(array), offset)

    def holds(self, array: np.ndarray, offset: int) -> bool:
        """Whether the bytes at ``offset`` are exactly those of a C-contiguous ``array``. Raises OSError."""
        data = np.frombuffer(raw(array), np.uint8)
        for start in range(0, len(data), _CHUNK):
            part = data[start : start + _CHUNK]
            stored = self._scratch[: len(part)]
            if os.preadv(self._fd, [stored.data], offset + start) != len(part) or not np.array_equal(part, stored):
                return False
        return True

    def sync(self) -> None:
        """Have everything on the disk itself. Raises OSError."""
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: os.fstat(self._fd).st_size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:
        count = os.preadv(self._fd, [buffer], self._position)
        self._position += count
        return count

    def write(self, buffer: memoryview) -> int:
        if self.failure is None:
            try:
                write_all(self._fd, memoryview(buffer).cast("B"), self._position)
            except OSError as error:
                self.failure = error
        self._position += len(buffer)
        return len(buffer)

    def truncate(self, size: int) -> None:
        if self.failure is None:
            try:
                os.ftruncate(self._fd, size)
            except OSError as error:
                self.failure = error

    def flush(self) -> None:
        """HDF5 asks for this at its own flush; we hold nothing back."""

    def discard(self, error: OSError) -> None:
        """Swallow from here on what HDF5 writes."""
        self.failure = self.failure or error


def raw(array: np.ndarray) -> memoryview:
    """The bytes of a C-contiguous array of any shape, without a copy."""
    return array.reshape(-1).view(np.uint8).data
