"""The judge of choices: top-k index sets, expert ids with their weights, and outputs that must be equal bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dsv4dbg.compare import IndexSet, Routing, Verdict
from dsv4dbg.verdict.judgement import OutputJudgement, broken_decision
from dsv4dbg.verdict.metrics import same_bits
from dsv4dbg.verdict.steps import UNIT, as_float

SCORE_STEPS = 16  # float32 half steps that a score may be off: softplus, sqrt and one addition, each a few


def judge_exact(name: str, expected: np.ndarray, candidate: np.ndarray) -> OutputJudgement:
    """Equal to ``expected`` bit for bit; an oracle's values are converted to the stored dtype, which holds them."""
    if candidate.shape != expected.shape:
        return broken_decision(name, "Exact", f"{name} has shape {candidate.shape}, not {expected.shape}")
    if same_bits(candidate, expected):
        return OutputJudgement(name, "Exact", Verdict.PASS, f"{name} is equal bit for bit")
    view = np.dtype(f"u{candidate.dtype.itemsize}")
    wrong = np.ascontiguousarray(candidate).view(view) != np.ascontiguousarray(expected).view(view)
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    c, e = as_float(candidate)[wrong].astype(np.float64), as_float(expected)[wrong].astype(np.float64)
    marks = []
    with np.errstate(all="ignore"):
        if len(np.unique(c - e)) == 1:
            marks.append(f"always off by {c[0] - e[0]:+g}")
        if not c.any():
            marks.append("exact zeros")
    marks += row_marks(wrong.reshape(len(wrong), -1).any(axis=1)) if wrong.ndim else []
    text = f"{name} differs in {int(wrong.sum())} of {wrong.size} elements, first at {place}: {c[0]:g}, not {e[0]:g}"
    text += f"; {marks[0]}" if marks else ""
    return broken_decision(name, "Exact", text, at=dict(enumerate(place)), fingerprints=tuple(marks))


def row_marks(bad: np.ndarray) -> list[str]:
    """Where wrong rows lie."""
    rows, count = np.flatnonzero(bad), len(bad)
    if len(rows) in (0, count):
        return []
    if len(rows) == 1:
        return ["only the last row" if rows[0] == count - 1 else f"only row {rows[0]} of {count}"]
    if rows[-1] == count - 1 and len(rows) == count - rows[0]:
        return [f"only rows from {rows[0]} on"]
    return []


def _structure(ids: np.ndarray, limit: np.ndarray, wanted: np.ndarray) -> tuple[str, int] | None:
    """What no choice may do whatever the scores: a reason and the row, or None."""
    beyond = (ids < -1) | (ids >= limit[:, None])
    if beyond.any():
        row = int(np.argwhere(beyond)[0][0])
        wrong = ids[row][beyond[row]][0]
        return f"index {wrong} in row {row} is outside [-1, {limit[row]})", row
    ordered = np.sort(ids, axis=1)
    twice = ((np.diff(ordered, axis=1) == 0) & (ordered[:, 1:] >= 0)).any(axis=1)
    if twice.any():
        row = int(np.flatnonzero(twice)[0])
        return f"row {row} holds an index twice", row
    count = (ids >= 0).sum(axis=1)
    if (count != wanted).any():
        row = int(np.flatnonzero(count != wanted)[0])
        return f"row {row} holds {count[row]} indices, not {wanted[row]}", row
    return None


def _choice(
    ids: np.ndarray, scores: np.ndarray, wanted: np.ndarray, margin: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per row: score at the cut, how far below it the worst chosen score is, how many clear winners are missing."""
    ordered = -np.sort(-scores, axis=1)
    cut = np.take_along_axis(ordered, np.maximum(wanted - 1, 0)[:, None], axis=1)[:, 0]
    chosen = np.where(ids >= 0, np.take_along_axis(scores, np.maximum(ids, 0), axis=1), np.inf)
    with np.errstate(invalid="ignore"):
        short = np.nan_to_num(cut - chosen.min(axis=1, initial=np.inf), nan=0.0, neginf=0.0)
        clear = scores > (cut + margin)[:, None]
        missing = clear.sum(axis=1) - (np.isfinite(chosen) & (chosen > (cut + margin)[:, None])).sum(axis=1)
    none = wanted == 0
    return cut, np.where(none, 0, short), np.where(none, 0, np.maximum(missing, 0))


def _same_sets(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (np.sort(a, axis=1) == np.sort(b, axis=1)).all(axis=1)


def _judge_choice(
    name: str, kind: str, reference: np.ndarray | None, ids: np.ndarray, scores: np.ndarray, limit: np.ndarray,
    wanted: np.ndarray, margin: np.ndarray, oracle: np.ndarray | None,
) -> OutputJudgement:  # fmt: skip
    fault = _structure(ids, limit, wanted)
    if fault:
        off = reference is not None and bool((ids == reference + 1).all())
        mark = ("always off by +1",) if off else ()
        return broken_decision(name, kind, f"{name}: {fault[0]}", at={"row": fault[1]}, fingerprints=mark)
    unknown = np.isnan(scores).any(axis=1)
    cut, short, missing = _choice(ids, np.nan_to_num(scores, nan=-np.inf), wanted, margin)
    wrong = ((short > 2 * margin) | (missing > 0)) & ~unknown
    against = reference if reference is not None else oracle
    same = _same_sets(ids, against) if against is not None else np.ones(len(ids), bool)
    flips = {"excused": int((~same & ~wrong).sum()), "not excused": int(wrong.sum())}
    if wrong.any():
        row = int(np.argmax(np.where(wrong, short, -1)))
        marks = row_marks(wrong)
        text = f"{name}: row {row} misses the cut at {cut[row]:.6g} by {short[row]:.3g}, at most {2 * margin[row]:.3g} "
        text += f"is a tie; {int(wrong.sum())} of {len(wrong)} rows" + (f"; {marks[0]}" if marks else "")
        return broken_decision(name, kind, text, at={"row": row}, flips=flips, fingerprints=tuple(marks))
    order = int((ids != against).any(axis=1).sum()) if against is not None else 0
    notes = {"rows in another order": order - flips["excused"]} if order > flips["excused"] else {}
    if flips["excused"]:
        text = f"{name}: {flips['excused']} of {len(ids)} rows choose otherwise, all within the margin of ties"
        return OutputJudgement(name, kind, Verdict.ROUNDING, text, flips=flips, notes=notes)
    text = f"{name} chooses the same sets" + (f", {next(iter(notes.values()))} rows in another order" if notes else "")
    return OutputJudgement(name, kind, Verdict.PASS, text, flips=flips, notes=notes)


def judge_index_set(
    name: str, compare: IndexSet, reference: np.ndarray | None, candidate: np.ndarray, args: Mapping[str, Any]
) -> OutputJudgement:
    """Scores are inputs and known exactly: only equal scores at the cut are ties."""
    ids = candidate.astype(np.int64)
    scores = as_float(args[compare.scores]).astype(np.float64)
    limit = np.asarray(args[compare.lengths]).astype(np.int64)
    if scores.shape[1] == 0:
        scores = np.full((len(scores), 1), -np.inf)
    limit = np.minimum(limit, scores.shape[1])
    visible = np.arange(scores.shape[1]) < limit[:, None]
    wanted = np.minimum(limit, ids.shape[1])
    zero = np.zeros(len(ids))
    other = None if reference is None else reference.astype(np.int64)
    scores = np.where(visible, scores, -np.inf)
    return _judge_choice(name, "IndexSet", other, ids, scores, limit, wanted, zero, None)


def judge_routing(
    name: str, reference: np.ndarray | None, candidate: np.ndarray, oracle: Mapping[str, np.ndarray],
    args: Mapping[str, Any], unit: float,
) -> OutputJudgement:  # fmt: skip
    """``unit``: half a step of the dtype in which scores are computed, in SCORE_STEPS of which two may change order."""
    ids, scores = candidate.astype(np.int64), oracle[f"{name}.scores"]
    with np.errstate(invalid="ignore"):
        size = np.where(np.isfinite(scores), np.abs(scores), 0).max(axis=1, initial=0.0)
    if args.get("bias") is not None:
        bias = as_float(args["bias"]).astype(np.float64)
        size = size + np.abs(np.where(np.isfinite(bias), bias, 0)).max(initial=0.0)
    steps = 3 if unit > UNIT["f32"] else SCORE_STEPS
    wanted = np.full(len(ids), ids.shape[1])
    other = None if reference is None else reference.astype(np.int64)
    limit = np.full(len(ids), scores.shape[1])
    return _judge_choice(
        name, Routing.__name__, other, ids, scores, limit, wanted, steps * unit * size, oracle[name].astype(np.int64)
    )  # fmt: skip


def align(ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weights in ascending order of their ids."""
    return np.take_along_axis(weights, np.argsort(ids, axis=1, kind="stable"), axis=1)
