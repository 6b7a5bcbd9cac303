"""build_indices in one Triton launch: a program makes some columns of the lists of some tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4dbg.kernels.triton_run import arch_of, triton_implements


@triton.jit
def _slots(table, table_stride, pages, sequence, index, BLOCK: tl.constexpr):
    """Slots int32 ``[token, column]`` of records ``index`` of each token's sequence; -1 for none."""
    page = tl.maximum(index, 0) // BLOCK
    known = (index >= 0) & (page < pages)
    number = tl.load(table + sequence[:, None] * table_stride + page, known, other=-1)
    return tl.where(number >= 0, number * BLOCK + index % BLOCK, -1)


@triton.jit
def _build(
    positions, sequence, window_table, entry_table, entry_lens, selected, out, tokens, window_table_stride,
    window_pages, entry_table_stride, entry_pages, selected_stride,
    WINDOW: tl.constexpr, WINDOW_BLOCK: tl.constexpr, ENTRY_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    SOURCE: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    programs: tl.constexpr = (WINDOW + WIDTH + COLUMNS - 1) // COLUMNS
    token = (tl.program_id(0) // programs).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    first = (tl.program_id(0) % programs) * COLUMNS
    column = first + tl.arange(0, COLUMNS)[None, :]
    inside = token < tokens
    own = tl.load(sequence + token, inside, other=0).to(tl.int64)

    slots = tl.full((TOKENS, COLUMNS), -1, tl.int32)
    if first < WINDOW:
        position = tl.load(positions + token, inside, other=-1).to(tl.int32)[:, None]
        recent = tl.maximum(position - (WINDOW - 1), 0) + column
        recent = tl.where((column < WINDOW) & (recent <= position), recent, -1)
        slots = _slots(window_table, window_table_stride, window_pages, own, recent, WINDOW_BLOCK)
    if SOURCE != "none":  # noqa: SIM102  (decided at compile time)
        if first + COLUMNS > WINDOW:
            entry = column - WINDOW
            here = inside[:, None] & (entry >= 0) & (entry < WIDTH)
            if SOURCE == "selected":
                entry = tl.load(selected + token[:, None] * selected_stride + entry, here, other=-1)
            else:
                visible = tl.load(entry_lens + token, inside, other=0)
                entry = tl.where(here & (entry < visible[:, None]), entry, -1)
            chosen = _slots(entry_table, entry_table_stride, entry_pages, own, entry, ENTRY_BLOCK)
            slots = tl.where(column < WINDOW, slots, chosen)
    place = out + token[:, None] * (WINDOW + WIDTH) + column
    tl.store(place, slots, inside[:, None] & (column < WINDOW + WIDTH))


def _supports(device: torch.device, arch: str, args: Mapping[str, Any]) -> str | None:
    for name in ("window_table", "entry_table", "selected"):
        if args[name] is not None and args[name].shape[-1] > 1 and args[name].stride(-1) != 1:
            return f"{name}: rows are not contiguous"
    return None


def _shapes() -> Iterator[Mapping[str, Any]]:
    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    tokens, fixed = 8192, {"window": 128, "window_block": 64}
    for entry_block, width, selected in ((64, 512, True), (64, 1024, True), (2, 64, False)):
        yield {
            "positions": ints(tokens, dtype=torch.int64), "sequence": ints(tokens), "window_table": ints(4, 128),
            "entry_table": ints(4, 32), "entry_lens": ints(tokens),
            "selected": ints(tokens, width) if selected else None,
            "entry_block": entry_block, "width": width, **fixed,
        }  # fmt: skip


@triton_implements("build_indices", supports=_supports, shapes=_shapes)
def build_indices_triton(
    positions: torch.Tensor,
    sequence: torch.Tensor,
    window_table: torch.Tensor,
    entry_table: torch.Tensor | None,
    entry_lens: torch.Tensor | None,
    selected: torch.Tensor | None,
    *,
    window: int,
    window_block: int,
    entry_block: int,
    width: int,
) -> torch.Tensor:
    """See the reference."""
    tokens, columns = len(positions), window + width
    out = torch.empty(tokens, columns, dtype=torch.int32, device=positions.device)
    if not out.numel():
        return out
    source = "none" if entry_table is None else "all" if selected is None else "selected"
    entries = window_table if entry_table is None else entry_table
    rows, across = (64, 1024) if arch_of(out.device) == "cpu" else (8, 128)
    grid = (triton.cdiv(tokens, rows) * triton.cdiv(columns, across),)
    _build[grid](
        positions.contiguous(), sequence.contiguous(), window_table, entries,
        entry_lens.contiguous() if source == "all" else sequence, selected if source == "selected" else sequence, out,
        tokens, window_table.stride(0), window_table.shape[1], entries.stride(0), entries.shape[1],
        selected.stride(0) if selected is not None else 0,
        WINDOW=window, WINDOW_BLOCK=window_block, ENTRY_BLOCK=entry_block, WIDTH=width, SOURCE=source,
        TOKENS=rows, COLUMNS=across, num_warps=4,
    )  # fmt: skip
    return out
