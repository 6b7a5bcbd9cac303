"""indexer_topk in Triton: a program finds one token's k-th highest logit and compacts; a second launch sorts.

Logits become integers in the same order (-0 equals 0, NaN is above all). The threshold, the highest value that at least
k logits reach, is found bit by bit from the top; the walk ends where exactly k reach it, or where the lower bits are
zero throughout the row, as in logits that were rounded to bf16. What lies above is chosen, and of what equals it the
first in the row: integers only, so the result is the reference's on every device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4dbg.kernels.triton_run import arch_of, triton_implements

BLOCK = 1 << 12  # columns held at a time
LOWEST = tl.constexpr(-(1 << 31))


@triton.jit
def _ordered(x):
    """float32 to int32 in the same order, above LOWEST."""
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return tl.where(x == x, ordered, 0x7FC00000)


@triton.jit
def _keys(row, start, length, stride, N: tl.constexpr):
    """Keys of N columns from ``start`` on, LOWEST from ``length`` on."""
    column = start + tl.arange(0, N)
    x = tl.load(row + column * stride, column < length, other=0.0)
    return tl.where(column < length, _ordered(x), LOWEST)


@triton.jit
def _lowest_bit(keys):
    """The lowest bit that is set in any of the keys."""
    return tl.min(tl.where((keys == 0) | (keys == LOWEST), 1 << 30, keys & -keys), 0)


@triton.jit
def _select(
    logits, lens, chosen, width, k, logits_token, logits_column, lens_stride,
    WHOLE: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Program t: the chosen columns of token t as int64 ``[token, K]``: key above, complement of the column below.

    WHOLE: the row fits into N columns and stays in registers; else every pass reads it again.
    """
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * logits_token
    length = tl.minimum(tl.load(lens + token * lens_stride), width)
    keys = _keys(row, 0, length, logits_column, N)
    threshold = tl.full((), LOWEST, tl.int32)
    equal = 0  # how many that equal the threshold are chosen
    if length > k:
        lowest = _lowest_bit(keys)
        if not WHOLE:
            for start in range(N, length, N):
                lowest = tl.minimum(lowest, _lowest_bit(_keys(row, start, length, logits_column, N)))
        step = tl.full((), LOWEST, tl.int32)  # the sign bit first, then downwards
        reached = length
        while (reached != k) & (step != 0):
            trial = threshold ^ step
            count = tl.sum((keys >= trial).to(tl.int32), 0)
            if not WHOLE:
                for start in range(N, length, N):
                    count += tl.sum((_keys(row, start, length, logits_column, N) >= trial).to(tl.int32), 0)
            if count >= k:
                threshold = trial
                reached = count
            step = tl.where(step == lowest, 0, (step >> 1) & 0x7FFFFFFF)
        above = tl.sum((keys > threshold).to(tl.int32), 0)
        if not WHOLE:
            for start in range(N, length, N):
                above += tl.sum((_keys(row, start, length, logits_column, N) > threshold).to(tl.int32), 0)
        equal = k - above
    over_before, same_before = 0, 0
    for start in range(0, length, N):
        if not WHOLE:
            keys = _keys(row, start, length, logits_column, N)
        column = start + tl.arange(0, N)
        over, same = (keys > threshold).to(tl.int32), (keys == threshold).to(tl.int32)
        ranks = tl.cumsum(over + (same << 16), 0)  # both counts at once, N < 2^15
        over_rank, same_rank = (ranks & 0xFFFF) + over_before, (ranks >> 16) + same_before
        kept = over | (same & (same_rank <= equal).to(tl.int32))
        place = over_rank + tl.minimum(same_rank, equal) - 1
        value = (keys.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
        tl.store(chosen + token * K + place, value, (kept == 1) & (place < k))
        over_before += tl.sum(over, 0)
        same_before += tl.sum(same, 0)


@triton.jit
def _exchanged(x, stage: tl.constexpr, APART: tl.constexpr):
    """int64 ``[token, K]`` after pairs APART of the bitonic network's ``stage`` were put in order."""
    K: tl.constexpr = x.shape[1]
    PAIRS: tl.constexpr = x.shape[0] * K // (2 * APART)
    pair = tl.reshape(x, (PAIRS, 2, APART))
    other = tl.sum(pair, 1)[:, None, :] - pair  # modulo 2^64
    block = ((tl.arange(0, PAIRS) * (2 * APART)) & (K - 1)) >> stage  # every second block ascends
    larger = (tl.arange(0, 2)[None, :] ^ (block[:, None] & 1)) == 0  # the side that keeps the larger one
    return tl.reshape(tl.where((pair > other) == larger[:, :, None], pair, other), x.shape)


@triton.jit
def _sorted(x, STAGES: tl.constexpr):
    """int64 ``[token, 2^STAGES]`` in descending order: a bitonic network."""
    for stage in tl.static_range(1, STAGES + 1):
        for down in tl.static_range(1, stage + 1):
            x = _exchanged(x, stage, 1 << (stage - down))
    return x


@triton.jit
def _write(
    chosen, lens, indices, tokens, width, k, lens_stride, T: tl.constexpr, K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program p: the chosen of tokens p T .. p T + T - 1 in order."""
    token = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    column = tl.arange(0, K)
    length = tl.load(lens + token * lens_stride, token < tokens, other=0)
    count = tl.minimum(tl.minimum(length, width), k)
    here = column[None, :] < count[:, None]
    value = tl.load(chosen + token[:, None] * K + column[None, :], here, other=-(1 << 63))
    value = _sorted(value, STAGES)
    result = tl.where(here, 0x7FFFFFFF - (value & 0x7FFFFFFF).to(tl.int32), -1)
    tl.store(indices + token[:, None] * k + column[None, :], result, (token < tokens)[:, None] & (column < k)[None, :])


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    if args["logits"].dtype != torch.float32 or args["lens"].dtype not in (torch.int32, torch.int64):
        return f"logits are {args['logits'].dtype}, lens {args['lens'].dtype}"
    if args["logits"].shape[1] * args["logits"].stride(1) >= 1 << 31:
        return "logits of a token lie 2^31 elements apart"
    if not 0 < args["k"] <= 1 << 11:
        return f"k = {args['k']} (1 to {1 << 11})"
    return None


def _shapes() -> Iterator[dict[str, Any]]:
    """Flash (512) and Pro (1,024) at 8K and 64K tokens of context, and one row that is read in parts."""
    for tokens, width, k in ((4096, 2048, 512), (4096, 2048, 1024), (64, 16384, 512), (64, 16384, 1024)):
        yield {
            "logits": torch.empty(tokens, width, device="meta"),
            "lens": torch.empty(tokens, dtype=torch.int32, device="meta"),
            "k": k,
        }


@triton_implements("indexer_topk", supports=_supports, shapes=_shapes)
def indexer_topk_triton(logits: torch.Tensor, lens: torch.Tensor, *, k: int) -> torch.Tensor:
    """See the reference. Two launches."""
    tokens, width = logits.shape
    indices = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    if not tokens:
        return indices
    arch, columns = arch_of(logits.device), max(16, triton.next_power_of_2(k))
    chosen = torch.empty(tokens, columns, dtype=torch.int64, device=logits.device)
    block = min(BLOCK, max(16, triton.next_power_of_2(width)))
    many = tokens >= 1024 and arch.startswith("sm_")  # then small programs beat short ones
    select_warps, write_warps = max(4, min(16, block // (512 if many else 256))), 1 if many else 4
    _select[(tokens,)](
        logits, lens, chosen, width, k, logits.stride(0), logits.stride(1), lens.stride(0),
        WHOLE=width <= block, N=block, K=columns, num_warps=select_warps,
    )  # fmt: skip
    rows = max(1, (1 << 13) // columns) if arch == "cpu" else 1
    _write[(triton.cdiv(tokens, rows),)](
        chosen, lens, indices, tokens, width, k, lens.stride(0), T=rows, K=columns, STAGES=columns.bit_length() - 1,
        num_warps=write_warps,
    )  # fmt: skip
    return indices
