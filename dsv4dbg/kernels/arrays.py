"""Torch tensors as numpy arrays of the same bits, for judges and files: bf16 as ml_dtypes.bfloat16, float8 as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch

from dsv4dbg.kernels.paged import Cache
from dsv4dbg.pages import PageLayout


@dataclass(frozen=True)
class CacheArray:
    """A paged cache on the host."""

    data: np.ndarray
    layout: PageLayout


def to_array(value: Any) -> Any:
    """The same bits as numpy; shares memory with a tensor on the CPU."""
    if isinstance(value, Cache):
        return CacheArray(to_array(value.data), value.layout)
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    if value.dtype == torch.bfloat16:
        return value.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if value.element_size() == 1 and value.dtype not in (torch.uint8, torch.int8, torch.bool):
        return value.contiguous().view(torch.uint8).numpy()
    return value.numpy()


def to_arrays(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: to_array(value) for name, value in values.items()}


def copied(args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments whose caches are copies, for a call that mutates them."""
    return {
        name: Cache(value.name, value.data.clone(), value.layout) if isinstance(value, Cache) else value
        for name, value in args.items()
    }
