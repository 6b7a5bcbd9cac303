"""The judge of numbers: candidate and reference against the oracle, on a grid of stored values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dsv4dbg.compare import Verdict
from dsv4dbg.verdict.bounds import LEVELS, Clause, clauses
from dsv4dbg.verdict.fingerprints import fingerprints
from dsv4dbg.verdict.judgement import OutputJudgement
from dsv4dbg.verdict.metrics import Measured, Noise, Sums, measure
from dsv4dbg.verdict.steps import Grid, as_float


@dataclass(frozen=True)
class Axes:
    """What rows and columns of a flattened output are: dim names with sizes.

    Attributes:
        row_labels: for rows that are not a product of dims (records, aligned rows): the label of every row.
    """

    rows: Mapping[str, int]
    columns: Mapping[str, int]
    row_labels: Mapping[str, np.ndarray] = field(default_factory=dict)

    def row(self, index: int) -> dict[str, int]:
        if self.row_labels:
            return {name: int(labels[index]) for name, labels in self.row_labels.items()}
        return dict(zip(self.rows, map(int, np.unravel_index(index, tuple(self.rows.values()))), strict=True))

    def column(self, index: int) -> dict[str, int]:
        if not self.columns:
            return {}
        return dict(zip(self.columns, map(int, np.unravel_index(index, tuple(self.columns.values()))), strict=True))


@dataclass(frozen=True)
class Values:
    """Numbers to judge, flattened to ``[rows, columns]``: decoded, or in their stored float dtype.

    Attributes:
        exact: the oracle's values are known exactly where they are rounded, so another value than the reference's
            is a wrong decision.
        independent: errors of elements are independent (nothing but the store rounds).
    """

    name: str
    kind: str
    reference: np.ndarray | None
    candidate: np.ndarray
    oracle: np.ndarray
    grid: Grid
    noise: Noise
    axes: Axes
    exact: bool = False

    @property
    def independent(self) -> bool:
        return self.noise.rounded == 0 and self.grid.unit >= 8 * self.noise.summed


def judge_values(v: Values, context: Mapping[str, Any] | None = None) -> OutputJudgement:
    """PASS: nowhere worse than the reference; ROUNDING: every clause holds; else DIVERGED."""
    both = [v.candidate] if v.reference is None else [v.candidate, v.reference]
    found = measure(both, v.oracle, v.grid, v.noise)
    candidate, reference = found.sums[0], found.sums[1] if v.reference is not None else None
    with np.errstate(all="ignore"):  # sums of garbage may overflow; a NaN breaks its clause
        tests = clauses(found, candidate, reference, v.independent, v.noise.summed)
    if v.exact and v.reference is not None:
        tests.insert(1, _decisions(v, found))
    numbers = _errors(found, candidate, reference)
    flips = _flips(tests, candidate)
    broken = [c for c in tests if not c.holds]
    hidden = _hidden(v, found)
    if not broken:
        nowhere_worse = reference is not None and not hidden and _nowhere_worse(candidate, reference)
        verdict = Verdict.PASS if nowhere_worse else Verdict.ROUNDING
        tail = "nowhere worse than the reference" if nowhere_worse else _closest(tests)
        text = f"{v.name} has {numbers['candidate sigma']:.2f} of the derived noise, {tail}"
        text += f"; finite in {hidden} elements where the reference is not" if hidden else ""
        notes = {"finite where the reference is not": hidden} if hidden else {}
        return OutputJudgement(v.name, v.kind, verdict, text, numbers, tuple(tests), {}, flips, notes=notes)
    worst = broken[0]  # tests are ordered from single elements to the tensor: the first one says most exactly where
    at = coordinates(worst, v, found)
    marks = fingerprints(v, found, candidate, broken, context or {})
    text = f"{v.name}: {worst.name} is {worst.value:.3g}, at most {worst.limit:.3g} is explained{place(at)}"
    text += "".join(f"; {mark}" for mark in marks[:2])
    return OutputJudgement(
        v.name, v.kind, Verdict.DIVERGED, text, numbers, tuple(tests), at, flips, tuple(marks)
    )  # fmt: skip


def _hidden(v: Values, found: Measured) -> int:
    """Elements that the oracle leaves open (NaN) and the reference made NaN or inf, finite in the candidate."""
    if v.reference is None or found.shared["count"].sum() == v.oracle.size:
        return 0
    c, r = (np.isfinite(as_float(x)) for x in (v.candidate, v.reference))
    return int((c & ~r & np.isnan(v.oracle)).sum())


def place(at: Mapping[str, Any]) -> str:
    return " at " + ", ".join(f"{k} {v}" for k, v in at.items()) if at else ""


def _closest(tests: list[Clause]) -> str:
    worst = max(tests, key=lambda c: c.excess)
    return f"nearest to its limit: {worst.name}, {worst.value:.3g} of {worst.limit:.3g}"


def _nowhere_worse(candidate: Sums, reference: Sums) -> bool:
    return not candidate.broken.any() and all(
        bool((level.total(candidate.z2) <= level.total(reference.z2) * (1 + 1e-9)).all()) for level in LEVELS
    )


def _errors(found: Measured, candidate: Sums, reference: Sums | None) -> dict[str, float]:
    n, size = max(found.shared["count"].sum(), 1), found.shared["size"].sum()
    result = {}
    for name, sums in (("candidate", candidate), ("reference", reference)):
        if sums is not None:
            with np.errstate(invalid="ignore"):  # squares of values near 1e38 overflow
                result[name] = float(np.sqrt(sums.square.sum() / (size or 1.0)))
            result[f"{name} sigma"] = float(np.sqrt(sums.z2.sum() / n))
    return result


def _flips(tests: list[Clause], candidate: Sums) -> dict[str, int]:
    total = int(candidate.flips.sum())
    beyond = int((candidate.worst > 1).sum())
    return {"excused": total - min(beyond, total), "not excused": beyond}


def _decisions(v: Values, found: Measured) -> Clause:
    """Another value where the rounding had nothing to decide."""
    assert v.reference is not None
    a, b = as_float(v.candidate), as_float(v.reference)
    wrong = (a != b) & ~(np.isnan(a) & np.isnan(b))
    count = int(wrong.sum())
    at = {}
    if count:
        row, column = np.argwhere(wrong)[0]
        at = {"row": int(row), "column": int(column)}
    return Clause("other codes than exact inputs give", count, 0.0, "inputs of the quantiser are exact", at)


def coordinates(clause: Clause, v: Values, found: Measured) -> dict[str, int]:
    """Coordinates by dim name; inside a segment those of the element that is furthest beyond its own limit."""
    at, width = clause.at, found.width
    result = v.axes.row(at["row"]) if "row" in at else {}
    if "column" in at:
        return result | v.axes.column(at["column"])
    if "segment" not in at:
        return result
    first = at["segment"] * width
    if "row" not in at or clause.name.endswith("of a tile"):
        return result | v.axes.column(first)
    row = slice(at["row"], at["row"] + 1)
    with np.errstate(all="ignore"):
        o = v.oracle[row].astype(np.float64)
        limit = v.grid.half(row, o) * (1 + v.noise.extra) + v.noise.at(row, np.abs(o))[1]
        apart = np.abs(as_float(v.candidate[row]).astype(np.float64) - o) / limit
    apart = np.where(np.isfinite(apart), apart, np.inf)[0, first : first + width]
    return result | v.axes.column(first + int(apart.argmax()))
