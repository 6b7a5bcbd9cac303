"""The bits of one stored tensor, read from the first byte to the last into memory that the caller owns.

A comparison of two traces goes through hundreds of megabytes; reading them a block at a time into the same small
buffers keeps the blocks in the processor's cache and memory bounded.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import xxhash


class Bits:
    """A tensor's bytes in the order in which they are stored.

    Args:
        descriptor: gives the open file, or raises ValueError if it was closed.
        place: offset of the first byte; two tensors at one place of a file are the same bytes.
        name: what messages call the tensor.
        expected: xxh3_128 in hex that the bytes must have, or empty. It is checked with the last byte.
    """

    def __init__(self, descriptor: Callable[[], int], place: int, nbytes: int, name: str, expected: str = "") -> None:
        self.place = place
        self.nbytes = nbytes
        self._descriptor = descriptor
        self._name = name
        self._expected = expected
        self._hash = xxhash.xxh3_128() if expected else None
        self._position = 0

    def fill(self, out: memoryview) -> None:
        """Read the next bytes into all of ``out`` (bytes, at most as many as are left).

        Raises:
            ValueError: the file is cut off or the bytes are not those that were written; or OSError.
        """
        rest = out
        while rest:
            count = os.preadv(self._descriptor(), [rest], self.place + self._position)
            if not count:
                raise ValueError(f"{self._name} was cut off while it was read")
            rest, self._position = rest[count:], self._position + count
        if self._hash is not None:
            self._hash.update(out)
            if self._position == self.nbytes and self._hash.hexdigest() != self._expected:
                raise ValueError(f"{self._name} is not what the capture wrote (its hash differs)")
