"""build_indices: which slots a token attends, window first, then compressed entries (spec 4.5, 9)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dsv4dbg.compare import Exact
from dsv4dbg.kernels.attention.sparse_samples import STARTS, WINDOW_BLOCK, Ragged, ragged
from dsv4dbg.kernels.contract import Example, Invariant, attr, op, tensor
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.invariants import first
from dsv4dbg.kernels.samples import TOKENS, block_table


def _numbers(slots: np.ndarray, table: np.ndarray | None, sequence: np.ndarray, block: int) -> np.ndarray:
    """Which record of its token's sequence each slot is; -1 for no slot, -2 for one in no page of the sequence."""
    numbers = np.where(slots == -1, -1, -2)
    if table is None:
        return numbers
    for s in np.unique(sequence):
        pages = table[s]
        number = np.full(max(pages.max(initial=0), slots.max(initial=0) // block) + 1, -1)
        number[pages[pages >= 0]] = np.flatnonzero(pages >= 0)
        here = (sequence == s)[:, None] & (slots >= 0)
        own = number[slots[here] // block]
        numbers[here] = np.where(own < 0, -2, own * block + slots[here] % block)
    return numbers


def _both_numbers(call: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    recent, entries = np.split(call["indices"], [call["window"]], axis=1)
    return (
        _numbers(recent, call["window_table"], call["sequence"], call["window_block"]),
        _numbers(entries, call["entry_table"], call["sequence"], call["entry_block"]),
    )


def _own_pages(call: Mapping[str, Any]) -> str | None:
    foreign = np.concatenate(_both_numbers(call), axis=1) == -2
    at = first(foreign) if foreign.any() else ()
    return f"slot {call['indices'][at]} at {at} is in no page of the token's sequence" if at else None


def _no_duplicates(call: Mapping[str, Any]) -> str | None:
    for name, slots in zip(("window", "entry"), np.split(call["indices"], [call["window"]], axis=1), strict=True):
        ordered = np.sort(slots, axis=1)
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != -1)
        if twice.any():
            return f"{name} slot {ordered[:, 1:][twice][0]} is twice in the list of token {first(twice)[0]}"
    return None


def _causal(call: Mapping[str, Any]) -> str | None:
    recent, entries = _both_numbers(call)
    p = call["positions"][:, None]
    wrong = (recent >= 0) & ((recent > p) | (recent <= p - call["window"]))
    if wrong.any():
        t = first(wrong)[0]
        return f"token {t} at position {p[t, 0]} attends position {recent[wrong][0]}"
    if call["entry_lens"] is None:
        return None
    wrong = entries >= call["entry_lens"][:, None]
    t = first(wrong)[0] if wrong.any() else 0
    return f"token {t} with {call['entry_lens'][t]} entries attends entry {entries[wrong][0]}" if wrong.any() else None


@op(
    family="attention",
    args={
        "positions": tensor("token", "i64", "-1 for a padded row"),
        "sequence": tensor("token", "i32"),
        "window_table": tensor("sequence window_page", "i32", "pages of the window cache, -1 for none"),
        "entry_table": tensor("sequence entry_page", "i32", "pages of the entry cache", optional=True),
        "entry_lens": tensor("token", "i32", "entries visible to the token", optional=True),
        "selected": tensor("token width", "i32", "entry numbers, -1 for none", optional=True),
        "window": attr("positions that a token sees"),
        "window_block": attr("records per page of the window cache"),
        "entry_block": attr("records per page of the entry cache"),
        "width": attr("columns for entries"),
    },
    outputs={"indices": tensor("token key", "i32")},
    compare={"indices": Exact()},
    invariants=(
        Invariant("slots in the sequence's pages", _own_pages),
        Invariant("no slot twice", _no_duplicates),
        Invariant("causal", _causal),
    ),
)
def build_indices(
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
    """Slots ``table[sequence, i // block] * block + i % block`` of the positions and entries that each token attends.

    Args:
        positions: int64 ``[token]``; a negative one is a padded row and has no window.
        sequence: int32 ``[token]``, row of the tables.
        window_table, entry_table: int32 ``[sequence, page]``. With block 1 they hold rows of a workspace.
        entry_lens: int32 ``[token]``, read when ``selected`` is None.
        selected: int32 ``[token, width]`` entry numbers, kept in their order and places.
    Returns:
        int32 ``[token, window + width]``. Columns 0..window-1: positions max(0, p - window + 1)..p, oldest first, then
        -1. The others: the selected entries, or else entries 0..entry_lens-1 in order, then -1; all -1 without
        entry_table. Whatever lies in a page that the table does not have is -1.
    """
    column = torch.arange(window + width, device=positions.device)
    recent = (positions - window + 1).clamp_min(0)[:, None] + column[:window]
    recent = torch.where(recent <= positions[:, None], recent, -1)
    parts = [_slots(window_table, sequence, recent, window_block)]
    if entry_table is None:
        parts.append(recent.new_full((len(positions), width), -1))
    elif selected is not None:
        parts.append(_slots(entry_table, sequence, selected.long(), entry_block))
    else:
        assert entry_lens is not None, "either selected or entry_lens"
        entries = torch.where(column[:width] < entry_lens[:, None], column[:width], -1)
        parts.append(_slots(entry_table, sequence, entries, entry_block))
    return torch.cat(parts, 1).to(torch.int32)


def _slots(table: torch.Tensor, sequence: torch.Tensor, index: torch.Tensor, block: int) -> torch.Tensor:
    """Slots int64 ``[token, n]`` of records ``index [token, n]`` of each token's sequence; -1 stays."""
    pages = F.pad(table, (0, 1), value=-1).long()  # one more column, for what lies behind the last page
    page = pages[sequence.long()[:, None], (index.clamp_min(0) // block).clamp_max(table.shape[1])]
    return torch.where((index >= 0) & (page >= 0), page * block + index % block, -1)


@build_indices.oracle
def _(
    positions: np.ndarray,
    sequence: np.ndarray,
    window_table: np.ndarray,
    entry_table: np.ndarray | None,
    entry_lens: np.ndarray | None,
    selected: np.ndarray | None,
    *,
    window: int,
    window_block: int,
    entry_block: int,
    width: int,
) -> np.ndarray:
    def slot(pages: np.ndarray, index: Any, block: int) -> int:
        page, offset = divmod(int(index), block)
        return pages[page] * block + offset if index >= 0 and page < len(pages) and pages[page] >= 0 else -1

    indices = np.full((len(positions), window + width), -1)
    for t, (p, s) in enumerate(zip(positions, sequence, strict=True)):
        for column, i in enumerate(range(max(0, p - window + 1), p + 1)):
            indices[t, column] = slot(window_table[s], i, window_block)
        if entry_table is None:
            continue
        if selected is not None:
            chosen = selected[t]
        else:
            assert entry_lens is not None
            chosen = np.arange(min(entry_lens[t], width))
        for column, i in enumerate(chosen):
            indices[t, window + column] = slot(entry_table[s], i, entry_block)
    return indices


@build_indices.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    def case(
        name: str, tokens: Ragged, ratio: int, select: bool, width: int, blocks: tuple[int, int], **changed: Any
    ) -> Example:
        visible = ((tokens.positions + 1) // ratio).to(torch.int32)
        selected = torch.full((len(visible), width), -1, dtype=torch.int32)
        for row, n in zip(selected, visible.tolist(), strict=True):
            chosen = torch.from_numpy(rng.permutation(n)[:width])
            row[: len(chosen)] = chosen
        args = {
            "positions": tokens.positions,
            "sequence": tokens.sequence,
            "window_table": block_table(rng, tokens.lengths, blocks[0])[0],
            "entry_table": block_table(rng, tokens.entries(ratio), blocks[1])[0],
            "entry_lens": visible,
            "selected": selected if select else None,
            "window": dims.window,
            "window_block": blocks[0],
            "entry_block": blocks[1],
            "width": width,
        }
        return Example(name, {**args, **{key: change(args[key]) for key, change in changed.items()}})

    def nothing(_: Any) -> None:
        return None

    csa = (dims.csa_ratio, True, dims.index_topk, (WINDOW_BLOCK, 16))
    hca = (dims.hca_ratio, False, 5, (WINDOW_BLOCK, 2))
    for count in TOKENS:
        yield case(f"{count} tokens, selected entries", ragged(count), *csa)
        yield case(f"{count} tokens, all entries", ragged(count), *hca)
    across = ragged(8, tuple(range(124, 132)))
    yield case("one token each at 124 to 131, selected", across, *csa)
    yield case("one token each at 124 to 131, all", across, *hca)
    yield case("one long sequence from 0", ragged(129, (0,)), *csa)
    yield case("window only", across, *hca[:2], 0, hca[3], entry_table=nothing, entry_lens=nothing)
    yield case("columns without a table", across, *hca, entry_table=nothing, entry_lens=nothing)
    yield case("selected, no lengths", across, *csa, entry_lens=nothing)
    yield case("rows of a workspace", ragged(63), *csa[:3], (1, 1))
    yield case("rows of a workspace, all entries", ragged(63), *hca[:3], (1, 1))
    yield case("pages of three", ragged(63), *hca[:3], (3, 3))
    padded = torch.tensor([2, 5])
    yield case(
        "padded rows, selected",
        across,
        *csa,
        positions=lambda p: p.index_fill(0, padded, -1),
        entry_lens=lambda n: n.index_fill(0, padded, 0),
        selected=lambda s: s.index_fill(0, padded, -1),
    )
    yield case(
        "padded rows, all",
        across,
        *hca,
        positions=lambda p: p.index_fill(0, padded, -1),
        entry_lens=lambda n: n.index_fill(0, padded, 0),
    )
    yield case("nothing selected", across, *csa, selected=lambda s: torch.full_like(s, -1))
    yield case("no entry pages yet", ragged(3, (0, 1, 2)), *hca)
    yield case(
        "first window page freed",
        ragged(5, (STARTS[-1],)),
        *csa,
        window_table=lambda table: table.index_fill(1, torch.tensor([0]), -1),
    )
    yield case("positions behind the table", across, *hca, window_table=lambda table: table[:, :2].contiguous())
    yield case(
        "a page of the window missing",
        ragged(5, (STARTS[-1],)),
        *csa,
        window_table=lambda table: table.index_fill(1, torch.tensor([3]), -1),
    )
