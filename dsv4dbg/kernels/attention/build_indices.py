"""build_indices: which slots a token attends, window first, then compressed entries (spec 4.5, 9)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsv4dbg.compare import Exact
from dsv4dbg.kernels.contract import attr, op, tensor


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
        entries = torch.where(column[:width] < entry_lens[:, None], column[:width], -1)
        parts.append(_slots(entry_table, sequence, entries, entry_block))
    return torch.cat(parts, 1).to(torch.int32)


def _slots(table: torch.Tensor, sequence: torch.Tensor, index: torch.Tensor, block: int) -> torch.Tensor:
    """Slots int64 ``[token, n]`` of records ``index [token, n]`` of each token's sequence; -1 stays."""
    pages = F.pad(table, (0, 1), value=-1).long()  # one more column, for what lies behind the last page
    page = pages[sequence.long()[:, None], (index.clamp_min(0) // block).clamp_max(table.shape[1])]
    return torch.where((index >= 0) & (page >= 0), page * block + index % block, -1)
