"""Zoo cases that end a process or a call, write where they must not, differ from run to run, or need a partner."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import Any

import torch

from dsv4dbg.kernels.attention.compress_insert import compress_insert
from dsv4dbg.kernels.attention.inv_rope import inv_rope
from dsv4dbg.kernels.attention.qnorm_rope_kv_insert import qnorm_rope_kv_insert
from dsv4dbg.kernels.linear.fp8_linear import fp8_linear
from dsv4dbg.kernels.mhc.mhc_pre import mhc_pre
from dsv4dbg.kernels.moe.moe_combine import moe_combine
from dsv4dbg.kernels.moe.silu_mul import silu_mul
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.zoo.case import case

FAILS = 43  # of 256: one call in six
BEHIND = 64  # bytes written past the end


@case("hang", op="moe_combine", bug="G14", kind="hang", shows="the first call")
def hang(**call: Any) -> Any:
    """ATOM#1401: a barrier waits for blocks that cannot run; nothing faults, nothing returns."""
    while True:
        time.sleep(0.01)


@case("segfault", op="build_indices", bug="C02", kind="fault", shows="the first call")
def segfault(**call: Any) -> Any:
    """vllm#49714: an address computed from garbage is read; the process dies by a signal."""
    return ctypes.string_at(0)


@case("silent-exit", op="hash_router", bug="H09", kind="fault", shows="the first call; the exit code is 0")
def silent_exit(**call: Any) -> Any:
    """vllm#41834: a worker is gone without a word, and from outside all looks well."""
    os._exit(0)


@case("exit-in-wrapper", op="moe_router", bug="G10", kind="fault", shows="the first call")
def exit_in_wrapper(**call: Any) -> Any:
    """ATOM#2022: a wrapper that finds no kernel for a shape ends the program instead of saying so."""
    sys.exit("no kernel for this shape")


@case("dtype-raises", op="fp8_linear", bug="A01", kind="fault", shows="the first call")
def dtype_raises(*, scale: torch.Tensor, **call: Any) -> torch.Tensor:
    """vllm#41961: the block scale is doubled by a multiplication, which its dtype (E8M0) does not have."""
    doubled = scale.view(torch.float8_e8m0fnu) * 2 if scale.dtype == torch.uint8 else scale * 2
    return fp8_linear(scale=doubled.view(scale.dtype), **call)


@case("workspace-too-large", op="mhc_pre", bug="B07", kind="fault", shows="the first call: out of memory")
def workspace_too_large(*, streams: torch.Tensor, **call: Any) -> Any:
    """vllm#41963: a kernel asks for more memory than there is, because its sizes were tuned for another machine."""
    workspace = torch.empty(1 << 50, dtype=torch.uint8, device=streams.device)
    return mhc_pre(streams=streams + workspace[:1], **call)


@case("out-of-bounds-write", op="compress_insert", bug="C09", kind="memory", shows="64 bytes behind the entries")
def out_of_bounds_write(*, cache: Cache, **call: Any) -> None:
    """sglang-glm53-flash-sm120#4: a store runs past the end of its buffer; a later op, or nobody, notices."""
    compress_insert(cache=cache, **call)
    if cache.data.device.type == "cpu":
        ctypes.memset(cache.data.data_ptr() + cache.data.numel(), 0x5A, BEHIND)
    else:
        cache.data.as_strided((BEHIND,), (1,), cache.data.storage_offset() + cache.data.numel()).fill_(0x5A)


@case("unwritten-row", op="moe_combine", bug="C01", kind="memory", shows="the last row of calls with several")
def unwritten_row(*, routed: torch.Tensor, shared: torch.Tensor, **call: Any) -> torch.Tensor:
    """vllm#49896: a part of the result is not written, and holds what its memory held before."""
    y = torch.empty_like(shared)
    y[:-1] = moe_combine(routed=routed[:-1], shared=shared[:-1], **call)
    return y


@case(
    "race", op="inv_rope", bug="E08", kind="race", shows="one call in six, one channel of every row",
    fingerprint="differs between runs",
)  # fmt: skip
def race(**call: Any) -> torch.Tensor:
    """vllm#46856: the same inputs give other results in about one run of six."""
    y = inv_rope(**call)
    if os.urandom(1)[0] < FAILS:
        y[..., -1] += 1
    return y


_workspace: dict[str, torch.Tensor] = {}


def _shared_workspace(device: torch.device) -> torch.Tensor:
    return _workspace.setdefault(str(device), torch.zeros(1, device=device))


def _leaves_workspace_dirty(**call: Any) -> torch.Tensor:
    """The partner of `shared_workspace`: it needs scratch for a maximum and does not clear it."""
    y = silu_mul(**call)
    _shared_workspace(y.device).fill_(1)
    return y


@case(
    "shared-workspace", op="moe_combine", bug="H01", kind="together", shows="if silu_mul is swapped too",
    partner=("silu_mul", _leaves_workspace_dirty),
)  # fmt: skip
def shared_workspace(*, shared: torch.Tensor, **call: Any) -> torch.Tensor:
    """vllm#52644: two kernels share scratch that one expects to find as it left it (zero); the other writes to it."""
    y = moe_combine(shared=shared, **call)
    return (y + _shared_workspace(y.device)).to(shared.dtype)


@case("async-lengths", op="qnorm_rope_kv_insert", bug="E14", kind="state", shows="every step but the first of its size")
def async_lengths(*, positions: torch.Tensor, **call: Any) -> torch.Tensor:
    """vllm-ascend#14122: a host buffer is filled again while the step that reads it still runs.

    The positions of a step are those of the step before it with as many tokens.
    """
    before = _positions.get(len(positions), positions)
    _positions[len(positions)] = positions.clone()
    return qnorm_rope_kv_insert(positions=before, **call)


_positions: dict[int, torch.Tensor] = {}
