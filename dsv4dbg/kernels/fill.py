"""Memory that nobody wrote, made to hold a known byte, so that results that depend on it show.

Python code allocates through a few functions of torch, which `filled_empties` replaces at next to no cost. Extensions
in C++ pass them by: `FilledEmpties` sees theirs as well, and slows every operator down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

EMPTIES = ("empty", "empty_like", "empty_strided", "empty_permuted")
METHODS = ("new_empty", "new_empty_strided")


def _filled(result: torch.Tensor, byte: int) -> torch.Tensor:
    if result.device.type != "meta":
        storage = result.untyped_storage()
        flat = result.new_zeros(0, dtype=torch.uint8)
        flat.set_(storage, 0, (storage.nbytes(),), (1,)).fill_(byte)
    return result


@contextmanager
def filled_empties(byte: int) -> Iterator[None]:
    """Inside, what Python code gets from ``torch.empty`` and the like is filled with ``byte``."""

    def filling(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: _filled(function(*args, **kwargs), byte)

    places = [*((torch, name) for name in EMPTIES), *((torch.Tensor, name) for name in METHODS)]
    originals = [getattr(owner, name) for owner, name in places]
    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, filling(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


class FilledEmpties(TorchDispatchMode):
    """Inside ``with``, the same for whatever allocates through torch; not what a library takes from the driver."""

    def __init__(self, byte: int) -> None:
        super().__init__()
        self._byte = byte

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return _filled(result, self._byte) if func.overloadpacket.__name__ in (*EMPTIES, *METHODS) else result
