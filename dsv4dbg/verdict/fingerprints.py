"""Shapes of known faults, looked for where an output diverged: first what the wrong values are, then where they lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4dbg.verdict.bounds import FACTOR, Clause, mean_square_limit
from dsv4dbg.verdict.metrics import Measured, Sums
from dsv4dbg.verdict.steps import as_float

if TYPE_CHECKING:
    from dsv4dbg.verdict.values import Values

SAMPLE = 2048  # bad segments that are looked at
KNOWN_RATIOS = {
    2.0: "FNUZ bytes read as OCP, or a scale one too high",
    0.5: "OCP bytes read as FNUZ, or a scale one too low",
    448 / 240: "scaled to 240, read as if scaled to 448",
    240 / 448: "scaled to 448, read as if scaled to 240",
    -1.0: "the sign is wrong",
}


def bad_segments(found: Measured, sums: Sums) -> np.ndarray:
    """``[rows, segments]``: where a single segment is wrong by itself."""
    n = np.maximum(found.shared["count"], 1)
    limit = FACTOR**2 * mean_square_limit(n, n.size)
    return (sums.broken > 0) | (sums.worst > 1) | (sums.z2 / n > limit)


def fingerprints(v: Values, found: Measured, sums: Sums, broken: list[Clause], context: Mapping[str, Any]) -> list[str]:
    """Sentences, the most telling first."""
    bad = bad_segments(found, sums)
    if not bad.any():
        return _of_sums(broken, found, sums)
    rows, segments = np.nonzero(bad)
    pick = np.linspace(0, len(rows) - 1, min(len(rows), SAMPLE)).astype(int)
    c, o = (
        x.reshape(len(x), -1, found.width)[rows[pick], segments[pick]].astype(np.float64)
        for x in (as_float(v.candidate), v.oracle)
    )
    with np.errstate(all="ignore"):
        what = [text for text in (_numbers(c, o, context), _moved(v, found, bad)) if text]
        where = _where(v, bad, context)
    return [*what, *where]


def _of_sums(broken: list[Clause], found: Measured, sums: Sums) -> list[str]:
    names = " ".join(c.name for c in broken)
    n = max(found.shared["count"].sum(), 1)
    if "bias" in names:
        toward, down = sums.bias.sum() / n, sums.shift.sum() / n
        if abs(toward) >= abs(down):
            return [f"errors lean {'away from' if toward > 0 else 'toward'} zero (truncation instead of rounding)"]
        return [f"errors lean {'up' if down > 0 else 'down'} (rounding in one direction)"]
    if "scale" in names:
        scale = 1 + sums.fit.sum() / max(found.shared["weight"].sum(), 1e-30)
        return [f"values are {scale:.6g} times the oracle's, each one within its bound"]
    return []


def _numbers(c: np.ndarray, o: np.ndarray, context: Mapping[str, Any]) -> str:
    finite = np.isfinite(c)
    if not finite.any():
        return "only NaN or inf"
    if not finite.all():
        return f"NaN or inf in {np.mean(~finite):.1%} of the elements of wrong segments"
    judged = np.abs(o) > np.abs(o).max(axis=1, keepdims=True) * 0.05
    judged &= np.isfinite(o)
    if not judged.any():
        return ""
    if not c.any():
        return "exact zeros"
    ratio = c[judged] / o[judged]
    middle = float(np.median(ratio))
    spread = float(np.quantile(np.abs(ratio / middle - 1), 0.8)) if middle else np.inf
    if spread > 0.1:
        return ""
    for known, meaning in KNOWN_RATIOS.items():
        if abs(middle / known - 1) < 0.01:
            return f"ratio {known:.4g} ({meaning})"
    if middle > 64 and (byte := _scale_byte(context)) and abs(np.log2(middle) - (np.log2(byte) + 127 - byte)) < 1:
        return f"ratio {middle:.4g} near scale byte {byte:.0f} x 2^{127 - byte:.0f} (UE8M0 read as an integer)"
    if abs(middle - 1) > 0.002:
        power = np.log2(abs(middle))
        exact = abs(power - round(power)) < 0.005 and abs(power) > 0.5
        return f"ratio 2^{round(power)} (a scale is off)" if exact else f"ratio {middle:.4g}"
    return ""


def _scale_byte(context: Mapping[str, Any]) -> float:
    """Median E8M0 byte among the arguments that are scales."""
    scales = [a for n, a in context.items() if "scale" in n and getattr(a, "dtype", None) == np.uint8 and a.size]
    return float(np.median(scales[0])) if scales else 0.0


def _moved(v: Values, found: Measured, bad: np.ndarray) -> str:
    """Right values in wrong places: rows shifted, columns or groups permuted."""
    c, o = as_float(v.candidate).astype(np.float32), v.oracle.astype(np.float32)
    rows = np.flatnonzero(bad.any(axis=1))[:256]
    scale = np.sqrt(np.mean(o[rows] ** 2)) or 1.0

    def close(a: np.ndarray, b: np.ndarray) -> bool:
        return a.size > 0 and bool(np.mean(np.abs(a - b)) < 0.1 * scale) and bool(np.ptp(b) > 0)

    for shift in (1, -1):
        kept = rows[(rows + shift >= 0) & (rows + shift < len(o))]
        if len(kept) and len(kept) >= len(rows) - 1 and close(c[kept], o[kept + shift]):
            return f"rows hold what belongs {abs(shift)} row {'later' if shift > 0 else 'earlier'}"
    if len(rows) and len(o) > 1:
        row = rows[0]
        others = np.flatnonzero(np.mean(np.abs(o - c[row]), axis=1) < 0.1 * scale)
        if len(others) and others[0] != row and np.ptp(o[row]) > 0:
            return f"row {row} holds what belongs to row {others[0]}"
    width = found.width
    if o.shape[1] > width:
        row = rows[0]
        blocks_c, blocks_o = c[row].reshape(-1, width), o[row].reshape(-1, width)
        apart = np.mean(np.abs(blocks_c[:, None] - blocks_o[None]), axis=2)
        match = apart.argmin(axis=1)
        if (match != np.arange(len(match))).any() and (apart.min(axis=1) < 0.1 * scale).all():
            return f"groups of {width} columns are permuted"
    ordered = np.abs(np.sort(c[rows], axis=1) - np.sort(o[rows], axis=1))
    if o.shape[1] > 3 and np.mean(ordered) < 0.05 * scale and np.mean(np.abs(c[rows] - o[rows])) > 0.3 * scale:
        return "columns are permuted"
    return ""


def _where(v: Values, bad: np.ndarray, context: Mapping[str, Any]) -> list[str]:
    """Along every dim: where wrong segments lie, if not everywhere."""
    found = []
    dims = dict(v.axes.rows) if np.prod(list(v.axes.rows.values())) == len(bad) else {"row": len(bad)}
    mask = bad.reshape(*dims.values(), bad.shape[1])
    dims["head or column block" if "head" not in dims else "column block"] = bad.shape[1]
    for axis, (name, size) in enumerate(dims.items()):
        at = np.flatnonzero(mask.any(axis=tuple(i for i in range(mask.ndim) if i != axis)))
        if size < 2 or len(at) == size:
            continue
        if len(at) == 1:
            found.append(f"only the last {name}" if at[0] == size - 1 else f"only {name} {at[0]} of {size}")
        elif np.array_equal(at, np.arange(at[0], size)):
            zero = axis == 0 and not as_float(v.candidate).reshape(size, -1)[at].any()
            found.append(f"only {name}s from {at[0]} on" + (", exact zeros there" if zero else ""))
        elif axis == 0:
            found += _phase(at, size, context)
    return found


def _phase(rows: np.ndarray, count: int, context: Mapping[str, Any]) -> list[str]:
    positions = context.get("positions")
    named = positions is not None and len(positions) == count
    place = np.asarray(positions) if named else np.arange(count)
    for modulus in (4, 64, 128):
        phases, reached = np.unique(place[rows] % modulus), np.unique(place % modulus)
        if len(phases) == 1 and len(reached) > 1 and len(rows) >= 2:
            return [f"only {'positions' if named else 'rows'} = {phases[0]} mod {modulus}"]
    return []
