"""Thresholds, each with the formula it comes from.

Everything is in units of sigma, the derived noise of one element (`dsv4dbg.verdict.metrics`). A clean candidate may
be noisier than that by FACTOR (another order of roundings), as noisy as the reference is on the same data, and
unlucky with probability ALPHA in a whole judgement:

    mean square   FACTOR^2 * base * (1 + sqrt(6 L / n) + 2 L / n), base = max(1, the reference's)
                  Bernstein's inequality for n squares of mean 1 that are at most 3 (even on +-sqrt 3); it also covers
                  chi-square (Laurent and Massart, 2000: 1 + 2 sqrt(L / n) + 2 L / n). L = ln(groups / ALPHA)
                  plus, where a quantiser sits inside, the square of one of its steps shared by the group's rows
    one element   h + extra + CONFIDENCE a, times FACTOR * the reference's own excess if it has one
    scale         |fit / weight| <= sqrt(2 L base / weight) + relative noise + FACTOR * the reference's
                  standard error of weighted least squares, Gaussian tail
    bias          |sum| <= sqrt(2 L base n) + FACTOR * |the reference's|, and at least BIAS per element.
                  With roundings before the store, errors within a row hang together: the row sums' own squares
                  take the place of base * n (cluster-robust variance)
    flips         count <= FACTOR * max(expected, the reference's) + sqrt(2 L that) + L;  Bernstein for Poisson;
                  direction: |away - toward| <= sqrt(2 L x squares of row sums) + L + FACTOR * the reference's
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsv4dbg.verdict.metrics import CONFIDENCE, Measured, Sums

FACTOR = 2.0  # how much noisier than the derived noise or the reference a clean candidate may be
ALPHA = 1e-10  # chance that luck alone breaks a clause
BIAS = 0.08  # least bias per element, in sigma, that counts; truncation has 0.87
TILE_ROWS = 16
CLUSTERS = 32  # fewest rows from which the variance of their sums is known


@dataclass(frozen=True)
class Clause:
    """One test of a judgement: ``value`` must not exceed ``limit``.

    Attributes:
        name: what was tested, with its level: ``error of a row``.
        source: where the limit comes from, as a formula with its numbers.
        at: group that is worst: ``{"row": 3, "segment": 0}``; levels without that axis leave it out.
    """

    name: str
    value: float
    limit: float
    source: str
    at: dict[str, int]

    @property
    def holds(self) -> bool:
        return self.value <= self.limit

    @property
    def excess(self) -> float:
        return self.value / self.limit if self.limit > 0 else (np.inf if self.value > 0 else 0.0)


@dataclass(frozen=True)
class Level:
    """A way to put segments together: ``rows`` rows and ``segments`` segments to a group (0: all)."""

    name: str
    rows: int
    segments: int

    def total(self, x: np.ndarray) -> np.ndarray:
        rows = self.rows or max(x.shape[0], 1)
        segments = self.segments or max(x.shape[1], 1)
        if rows > 1:
            x = np.add.reduceat(x, np.arange(0, len(x), rows), axis=0)
        return np.add.reduceat(x, np.arange(0, x.shape[1], segments), axis=1) if segments > 1 else x

    def where(self, index: int, groups: tuple[int, ...]) -> dict[str, int]:
        row, segment = np.unravel_index(index, groups)
        found = {"row": int(row) * (self.rows or 1)} if self.rows else {}
        return found | ({"segment": int(segment)} if self.segments else {})


LEVELS = (
    Level("segment", 1, 1),
    Level("row", 1, 0),
    Level("tile", TILE_ROWS, 1),
    Level("column block", 0, 1),
    Level("tensor", 0, 0),
)


def logarithm(groups: int) -> float:
    return float(np.log(max(groups, 1) / ALPHA))


def mean_square_limit(n: np.ndarray, groups: int) -> np.ndarray:
    """How far the mean of n squares of mean 1 may rise by luck, anywhere among ``groups`` groups."""
    share = logarithm(groups) / np.maximum(n, 1)
    return 1 + np.sqrt(6 * share) + 2 * share


def _worst(name: str, value: np.ndarray, limit: np.ndarray, level: Level, source: str) -> Clause:
    with np.errstate(all="ignore"):
        excess = np.where(value > 0, value / limit, 0.0)
    index = int(np.argmax(np.where(np.isnan(excess), np.inf, excess)))
    label = f" of the {level.name}" if level.name == "tensor" else f" of a {level.name}" if level.name else ""
    return Clause(
        name + label, float(value.flat[index]), float(np.broadcast_to(limit, value.shape).flat[index]), source,
        level.where(index, value.shape),
    )  # fmt: skip


def clauses(found: Measured, candidate: Sums, reference: Sums | None, independent: bool, summed: float) -> list[Clause]:
    """All tests of one output's values. ``independent``: nothing but the store rounds; ``summed``: `Noise.summed`.

    Without a reference the tests of scale and bias are left out: a factor near 1 on values that lie on the grid
    already leans in one direction by right (round(x (1 - tiny)) = x), which only the reference can show.
    """
    if not found.shared["count"].any():
        return [_broken(candidate)]
    result = [_broken(candidate), _elements(candidate, reference)]
    for level in LEVELS:
        result.append(_error(level, found, candidate, reference))
        if reference is not None:
            result.append(_scale(level, found, candidate, reference, summed))
    for level in LEVELS[1:]:
        if reference is None:
            break
        for kind in ("bias", "shift"):
            clause = _bias(kind, level, found, candidate, reference, independent)
            result += [clause] if clause else []
    return [*result, *_flips(found, candidate, reference)]


def _broken(candidate: Sums) -> Clause:
    source = "finite where the oracle is, and its infinities"
    if not candidate.broken.size:
        return Clause("values that are not finite", 0.0, 0.0, source, {})
    return _worst("values that are not finite", candidate.broken, np.zeros(()), Level("", 1, 1), source)


def _elements(candidate: Sums, reference: Sums | None) -> Clause:
    limit = np.ones(candidate.worst.shape)
    if reference is not None:
        row = reference.worst.max(axis=1, keepdims=True)
        limit = np.maximum(limit, np.where(row > 1, FACTOR * row, 1))
    source = f"half a step + allowed roundings + {CONFIDENCE:g} a, or {FACTOR:g} x the reference's excess in the row"
    return _worst("error of an element", candidate.worst, limit, Level("", 1, 1), source)


def _base(level: Level, found: Measured, reference: Sums | None) -> np.ndarray:
    """Mean square to start from: the reference's in this group or in its noisier groups (upper decile), at least the
    derived 1; or, from CLUSTERS rows on, that of the reference's worst group and of the store and functions alone."""
    n = level.total(found.shared["count"])
    if reference is None:
        return np.ones(n.shape)
    own = level.total(reference.z2) / np.maximum(n, 1)
    least = np.ones(n.shape)
    if len(found.shared["count"]) >= CLUSTERS:
        unavoidable = level.total(found.shared["least"]) / np.maximum(n, 1)
        least = np.minimum(1, np.maximum(own.max(initial=0.0), unavoidable))
    return np.maximum(np.maximum(own, np.quantile(own, 0.9)), least)


def _error(level: Level, found: Measured, candidate: Sums, reference: Sums | None) -> Clause:
    n = level.total(found.shared["count"])
    value = level.total(candidate.z2) / np.maximum(n, 1)
    limit = FACTOR**2 * _base(level, found, reference) * mean_square_limit(n, n.size)
    limit += level.total(found.shared["leap"]) / np.maximum(n, 1) / (level.rows or max(len(candidate.z2), 1))
    log = logarithm(n.size)
    source = f"{FACTOR:g} sigma, or {FACTOR:g} x the reference's, x sqrt(1 + sqrt(6L/n) + 2L/n), L = {log:.0f}"
    return _worst("error", np.sqrt(value), np.sqrt(limit), level, source)


def _spread(level: Level, sums: np.ndarray) -> np.ndarray | None:
    """Root of the sum of squares of row sums, per group of a level over all rows: the error of a total whose rows are
    independent and whose elements are not. None where there are too few rows to know."""
    if level.rows != 0 or len(sums) < CLUSTERS:
        return None
    per_row = sums if level.segments else sums.sum(axis=1, keepdims=True)
    return np.sqrt((per_row**2).sum(axis=0, keepdims=True))


def _scale(level: Level, found: Measured, candidate: Sums, reference: Sums, summed: float) -> Clause:
    n, weight = level.total(found.shared["count"]), np.maximum(level.total(found.shared["weight"]), 1e-30)
    value = np.abs(level.total(candidate.fit)) / weight
    limit = np.sqrt(2 * logarithm(n.size) * _base(level, found, reference) / weight)
    spread = _spread(level, reference.fit)
    if spread is None:
        limit += level.total(found.shared["blur"]) / weight * (CONFIDENCE if level.rows == 1 else FACTOR)
    else:
        limit += FACTOR * np.sqrt(2 * logarithm(n.size)) * spread / weight + FACTOR * summed
    limit += FACTOR * np.abs(level.total(reference.fit)) / weight
    source = "best-fit scale - 1: sqrt(2L/weight) + relative noise (over many rows: 2 sqrt(2L) x the spread of the "
    source += "reference's rows) + 2 x the reference's"
    return _worst("scale", value, limit, level, source)


def _bias(
    kind: str, level: Level, found: Measured, candidate: Sums, reference: Sums, independent: bool
) -> Clause | None:
    n = level.total(found.shared["count"])
    sums = getattr(candidate, kind)
    spread = _spread(level, getattr(reference, kind))
    if independent:
        noise = np.sqrt(_base(level, found, reference) * n)
    elif spread is not None:
        noise = np.maximum(FACTOR * spread, np.sqrt(n))
    else:
        return None
    limit = np.maximum(np.sqrt(2 * logarithm(n.size)) * noise, BIAS * n)
    limit += FACTOR * np.abs(level.total(getattr(reference, kind)))
    name = {"bias": "bias away from or toward zero", "shift": "bias up or down"}[kind]
    n = np.maximum(n, 1)
    source = f"mean of e/sigma: sqrt(2L/n){'' if independent else ' over rows as clusters'}, at least {BIAS:g}"
    return _worst(name, np.abs(level.total(sums)) / n, limit / n, level, source)


def _flips(found: Measured, candidate: Sums, reference: Sums | None) -> list[Clause]:
    """How often the stored value is not the nearest one, against what the derived noise and the reference explain."""
    level = LEVELS[-1]
    if found.shared["chance"].sum() > 0.1 * found.shared["count"].sum():
        return []  # the noise is as large as the steps
    expected = level.total(found.shared["chance"])
    if reference is not None:
        expected = np.maximum(expected, level.total(reference.flips))
    wide = FACTOR * expected
    log = logarithm(1)
    source = f"{FACTOR:g} x max(expected, the reference's) + sqrt(2L x that) + L, L = {log:.0f}"
    count = level.total(candidate.flips)
    result = [_worst("values that are not the nearest", count, wide + np.sqrt(2 * log * wide) + log, level, source)]
    if reference is None:
        return result  # values rounded onto ties first turn by right, as ties to even do not balance
    per_row = candidate.turns.sum(axis=1)
    limit = np.sqrt(2 * log * (per_row**2).sum()) + log + FACTOR * abs(reference.turns.sum())
    source = "flips away from zero minus flips toward it: sqrt(2L x squares of row sums) + L + 2 x the reference's"
    turned = np.abs(level.total(candidate.turns))
    return [*result, _worst("flips in one direction", turned, np.full((1, 1), limit), level, source)]
