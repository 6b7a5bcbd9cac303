"""Memory that nobody wrote, made to hold a known byte, so that results that depend on it show."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

EMPTIES = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"))


class FilledEmpties(TorchDispatchMode):
    """Inside ``with``, what ``torch.empty`` and the like return is filled with ``byte``, from C++ too.

    Memory that a kernel's library takes from the driver itself is beyond its reach.
    """

    def __init__(self, byte: int) -> None:
        super().__init__()
        self._byte = byte

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in EMPTIES and result.device.type != "meta":
            storage = result.untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8, device=result.device)
            flat.set_(storage, 0, (storage.nbytes(),), (1,)).fill_(self._byte)
        return result
