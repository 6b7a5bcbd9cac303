"""Launch helpers of kernels that go over rows of channels."""

from __future__ import annotations

import torch
import triton


def has_rows(*tensors: torch.Tensor) -> bool:
    """Whether the last dim of each is contiguous (an empty tensor has no elements apart)."""
    return all(x.stride(-1) == 1 or x.shape[-1] == 1 or not x.numel() for x in tensors)


def row_piece(arch: str, channels: int) -> int:
    """Channels of a row that a program of 4 warps takes: 8 a thread, so that bf16 moves by 16 bytes."""
    return min(2048 if arch.startswith("gfx9") else 1024, triton.next_power_of_2(channels))
