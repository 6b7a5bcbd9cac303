"""Zoo cases that are Triton kernels: faults of launches, most of which only a device shows in full.

In Triton's interpreter the addresses are real ones too, so what is written or read out of bounds is; programs run one
after the other, so that a race is none there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4dbg.kernels.attention.qnorm_rope_kv_insert import qnorm_rope_kv_insert
from dsv4dbg.kernels.norm.rms_norm import rms_norm
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.triton_codes import rounded, widened
from dsv4dbg.kernels.triton_run import on_cpu_interpreted
from dsv4dbg.kernels.zoo.case import case

BLOCK = 128
FAR = 1 << 44  # bytes; no process has memory that far from its own
PIECE = 16  # channels that one program of the race adds up


@triton.jit
def _touch(data, first, BLOCK: tl.constexpr):
    """Writes BLOCK bytes from ``first`` on, whatever is there."""
    tl.store(data + first + tl.arange(0, BLOCK), tl.full([BLOCK], 0x5A, tl.uint8))


@case("triton-store-past-end", op="qnorm_rope_kv_insert", bug="D15", kind="memory", shows="128 bytes behind the cache")
@on_cpu_interpreted
def store_past_end(*, window_cache: Cache, **call: Any) -> torch.Tensor:
    """sglang#40351: a paged store goes past the end of the pool; the mask of its last block is missing."""
    q = qnorm_rope_kv_insert(window_cache=window_cache, **call)
    _touch[(1,)](window_cache.data, window_cache.data.numel(), BLOCK=BLOCK)
    return q


@triton.jit
def _add_from_afar(a, b, y, far, size, BLOCK: tl.constexpr):
    """``y = a + b`` with b's address off by ``far`` elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    total = widened(tl.load(a + at, real, other=0.0)) + widened(tl.load(b + at + far, real, other=0.0))
    tl.store(y + at, rounded(total, y.dtype.element_ty), real)


@case("triton-unmapped-read", op="moe_combine", bug="C03", kind="fault", shows="the first call")
@on_cpu_interpreted
def unmapped_read(*, routed: torch.Tensor, shared: torch.Tensor, **call: Any) -> torch.Tensor:
    """vllm#48266: a kernel reads where no memory is; on a GPU this ends the process's whole context."""
    y = torch.empty_like(shared)
    if y.numel():
        grid = (triton.cdiv(y.numel(), BLOCK),)
        _add_from_afar[grid](routed, shared, y, FAR // shared.element_size(), y.numel(), BLOCK=BLOCK)
    return y


@triton.jit
def _wait(flag):
    """Waits for a flag that a program of a later wave would set."""
    while tl.load(flag, volatile=True) == 0:
        pass


@case("triton-endless", op="silu_mul", bug="G14", kind="hang", shows="the first call")
@on_cpu_interpreted
def endless(*, gate: torch.Tensor, **call: Any) -> torch.Tensor:
    """ATOM#1401: a grid barrier waits for a block that does not fit on the device beside those that wait."""
    _wait[(1,)](torch.zeros(1, dtype=torch.int32, device=gate.device))
    return torch.zeros_like(gate)


@triton.jit
def _add_squares(x, total, channels, PIECE: tl.constexpr):
    """Program (row, piece): adds the squares of PIECE channels to the row's total, and not atomically."""
    row, piece = tl.program_id(0), tl.program_id(1)
    value = widened(tl.load(x + row.to(tl.int64) * channels + piece * PIECE + tl.arange(0, PIECE)))
    before = tl.load(total + row, volatile=True)
    tl.store(total + row, before + tl.sum(value * value, 0))


@case(
    "triton-race", op="rms_norm", bug="E08", kind="race", shows="every call, differently", device="cuda",
    fingerprint="differs between runs",
)  # fmt: skip
@on_cpu_interpreted
def lost_additions(*, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """vllm#46856: the same inputs give other results; parts of a sum are lost because their addition is not atomic."""
    rows, channels = x.shape
    if not rows or channels % PIECE:
        return rms_norm(x, weight, eps=eps)
    x = x.contiguous()
    total = torch.zeros(rows, device=x.device)
    _add_squares[(rows, channels // PIECE)](x, total, channels, PIECE=PIECE)
    factor = torch.rsqrt(total / channels + eps)
    return (weight.float() * (x.float() * factor[:, None])).to(x.dtype)


@triton.jit
def _add(a, b, y, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    total = widened(tl.load(a + at, real, other=0.0)) + widened(tl.load(b + at, real, other=0.0))
    tl.store(y + at, rounded(total, y.dtype.element_ty), real)


_captured: dict[tuple[int, ...], tuple[Callable[[], None], torch.Tensor, Any]] = {}


@case("triton-stale-pointer", op="moe_combine", bug="H05", kind="state", shows="every call but the first of a shape")
@on_cpu_interpreted
def stale_pointer(*, routed: torch.Tensor, shared: torch.Tensor, **call: Any) -> torch.Tensor:
    """sglang#27664: a captured graph keeps the addresses of its first inputs; replays read what lies there now.

    Copies of the first inputs of a shape stay at these addresses. On the CPU the launch is made again, not replayed.
    """
    if not shared.numel():
        return torch.empty_like(shared)
    key = (*shared.shape,)
    if key not in _captured:
        _captured[key] = _capture(routed.clone(), shared.clone())
    replay, y, _ = _captured[key]
    replay()
    return y.clone()


def _capture(routed: torch.Tensor, shared: torch.Tensor) -> tuple[Callable[[], None], torch.Tensor, Any]:
    """What replays the addition of these two, where its result lies, and what has to stay alive for it."""
    y = torch.empty_like(shared)

    def launch() -> None:
        _add[(triton.cdiv(y.numel(), BLOCK),)](routed, shared, y, y.numel(), BLOCK=BLOCK)

    if y.device.type == "cpu":
        return launch, y, (routed, shared)
    launch()  # compiles, which cannot be captured
    torch.cuda.synchronize(y.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay, y, (routed, shared)
