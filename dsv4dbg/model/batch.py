"""One step of a run as the ops see it: ragged tokens with positions, slots, block tables and index ranges.

A `Step` says what is fed; `StepInputs` holds the tensors derived from it. Row t of every per-token tensor belongs
to ``sequence[t]`` at ``positions[t]``; a sequence may have one token (decode), a few (verify) or many (prefill).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dsv4dbg.model.cache import CacheManager


@dataclass(frozen=True)
class Chunk:
    """New tokens of one sequence."""

    sequence: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """What one forward is fed.

    Attributes:
        name: ``prefill0``, ``decode3``, ``verify0``; its letters are the phase.
        chunks: new tokens of each sequence that takes part, in row order.
        all_rows: compute logits for every row instead of each chunk's last.
    """

    name: str
    chunks: tuple[Chunk, ...]
    all_rows: bool = False

    @property
    def phase(self) -> str:
        return self.name.rstrip("0123456789")


@dataclass(frozen=True)
class Workspace:
    """Which cache records a prefill gathers, and tables that address them as rows (block size 1).

    Attributes:
        window_slots, entry_slots: ``int64 [n]`` slots to gather; rows of the workspace in this order, window first.
        window_table: ``int32 [sequence, position]`` row of a position, -1 where it is not gathered.
        entry_table: ``int32 [sequence, entry]`` row of a compressed entry.
    """

    window_slots: torch.Tensor
    window_table: torch.Tensor
    entry_slots: torch.Tensor | None
    entry_table: torch.Tensor | None


@dataclass(frozen=True)
class StepInputs:
    """Tensors of a step on the device.

    Attributes:
        ids, positions: ``int64 [token]``.
        sequence: ``int32 [token]``.
        logit_rows: ``int64 [row]`` rows whose logits are wanted.
        slots: cache kind -> ``int64 [token]`` slot that the token writes, -1 for none.
        tables: cache kind -> ``int32 [sequence, page]``.
        visible: ratio -> ``int32 [token]`` number of compressed entries that the token may see, ``(p + 1) // ratio``.
        most_visible: ratio -> the largest of them.
        workspace: ratio (0 for none) -> what a prefill gathers; empty in decode and verify.
    """

    step: Step
    ids: torch.Tensor
    positions: torch.Tensor
    sequence: torch.Tensor
    logit_rows: torch.Tensor
    slots: dict[str, torch.Tensor]
    tables: dict[str, torch.Tensor]
    visible: dict[int, torch.Tensor]
    most_visible: dict[int, int]
    workspace: dict[int, Workspace] = field(default_factory=dict)


def prepare_step(step: Step, manager: CacheManager, window: int, device: torch.device) -> StepInputs:
    """Reserve pages for a step's tokens and build its tensors.

    Args:
        window: sliding window length.
    """
    starts = [manager.reserve(c.sequence, len(c.tokens)) for c in step.chunks]
    counts = [len(c.tokens) for c in step.chunks]
    positions = [np.arange(s, s + n, dtype=np.int64) for s, n in zip(starts, counts, strict=True)]
    sequences = [np.full(n, c.sequence, dtype=np.int32) for c, n in zip(step.chunks, counts, strict=True)]
    last = np.cumsum(counts) - 1
    rows = np.arange(sum(counts)) if step.all_rows else last[np.asarray(counts) > 0]

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    slots = {}
    for name, table in manager.tables.items():
        parts = [
            _written_slots(table.slots, c.sequence, p, table.kind.ratio)
            for c, p in zip(step.chunks, positions, strict=True)
        ]
        slots[name] = put(_join(parts, np.int64))
    ratios = sorted({kind.ratio for kind in manager.kinds.values()} - {1})
    all_positions = _join(positions, np.int64)
    visible = {m: ((all_positions + 1) // m).astype(np.int32) for m in ratios}
    workspace = {}
    if step.phase == "prefill":
        spans = list(zip((c.sequence for c in step.chunks), starts, counts, strict=True))
        workspace = {m: _workspace(manager, spans, window, m, put) for m in (0, *ratios)}
    return StepInputs(
        step=step,
        ids=put(np.asarray([t for c in step.chunks for t in c.tokens], dtype=np.int64)),
        positions=put(all_positions),
        sequence=put(_join(sequences, np.int32)),
        logit_rows=put(rows.astype(np.int64)),
        slots=slots,
        tables={name: put(table.array()) for name, table in manager.tables.items()},
        visible={m: put(v) for m, v in visible.items()},
        most_visible={m: int(v.max(initial=0)) for m, v in visible.items()},
        workspace=workspace,
    )


def _join(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _written_slots(slots, sequence: int, positions: np.ndarray, ratio: int) -> np.ndarray:
    """Slot that each token writes: its own record, or that of the entry it completes, else -1."""
    result = np.full(len(positions), -1, dtype=np.int64)
    completes = (positions + 1) % ratio == 0
    result[completes] = slots(sequence, positions[completes] // ratio)
    return result


def _workspace(manager: CacheManager, spans, window: int, ratio: int, put) -> Workspace:
    num_sequences = len(manager.lengths)
    first = [max(0, start - window + 1) for _, start, _ in spans]
    end = [start + count for _, start, count in spans]
    window_table = np.full((num_sequences, max(end, default=0)), -1, dtype=np.int32)
    window_slots, row = [], 0
    for (sequence, _, _), low, high in zip(spans, first, end, strict=True):
        window_slots.append(manager.tables["window"].slots(sequence, np.arange(low, high)))
        window_table[sequence, low:high] = np.arange(row, row + high - low)
        row += high - low
    if not ratio:
        return Workspace(put(_join(window_slots, np.int64)), put(window_table), None, None)
    entry_table = np.full((num_sequences, max(end, default=0) // ratio), -1, dtype=np.int32)
    entry_slots = []
    for (sequence, _, _), high in zip(spans, end, strict=True):
        entries = high // ratio
        entry_slots.append(manager.tables[f"entries{ratio}"].slots(sequence, np.arange(entries)))
        entry_table[sequence, :entries] = np.arange(row, row + entries)
        row += entries
    return Workspace(
        put(_join(window_slots, np.int64)), put(window_table), put(_join(entry_slots, np.int64)), put(entry_table)
    )
