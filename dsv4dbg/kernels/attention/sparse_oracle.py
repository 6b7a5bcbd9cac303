"""Sparse attention as the oracles and invariants of prefill and decode see it: numpy float64, token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dsv4dbg.kernels.contract import Invariant
from dsv4dbg.kernels.invariants import first
from dsv4dbg.kernels.numerics import Numerics


def attention(
    q: np.ndarray,
    indices: np.ndarray,
    sink: np.ndarray | None,
    scale: float,
    rows: Callable[[np.ndarray, np.ndarray], np.ndarray],
    numerics: Numerics,
) -> dict[str, np.ndarray]:
    """Softmax over the listed rows and the sink.

    Args:
        q: ``[token, head, channel]``.
        indices: ``[token, key]``; entries of -1 are dropped.
        rows: gives ``[n, channel]`` for columns ``[n]`` and indices ``[n]`` of one list.
    Returns:
        o ``[token, head, channel]`` and lse ``[token, head]`` without the sink; and the sizes of their terms: P V,
        times the logits where those are rounded ("eager"), and logits or the dots that they come from.
    """
    eager = numerics.attention == "eager"
    o, lse = np.zeros_like(q), np.full(q.shape[:2], -np.inf)
    o_terms, lse_terms = np.zeros_like(q), np.zeros(q.shape[:2])
    for t in range(len(q)):
        columns = np.flatnonzero(indices[t] != -1)
        if not len(columns):
            continue
        values = rows(columns, indices[t, columns])
        logits = scale * (q[t] @ values.T)
        lse[t] = np.logaddexp.reduce(logits, axis=1)
        total = lse[t] if sink is None else np.logaddexp(lse[t], sink)
        p = np.exp(logits - total[:, None])
        o[t] = p @ values
        rounded = 1 + 2 * logits**2 if eager else 1.0
        o_terms[t] = np.sqrt((p**2 * rounded) @ values**2) + eager * np.abs(o[t]) * np.abs(logits).max(axis=1)[:, None]
        dots = scale * np.linalg.norm(q[t], axis=1) * np.linalg.norm(values, axis=1).max()
        lse_terms[t] = 1 + (np.abs(logits).max(axis=1) if eager else dots)
    return {"o": o, "lse": lse, "o.terms": o_terms, "lse.terms": lse_terms}


def _no_keys(call: Mapping[str, Any]) -> str | None:
    """Exactly the tokens whose list is empty have lse = -inf, and their o is 0."""
    empty = (call["indices"] == -1).all(axis=1)
    wrong = (call["lse"] == -np.inf) != empty[:, None]
    if wrong.any():
        at = first(wrong)
        return f"lse is {call['lse'][at]} at {at}, and the list is {'' if empty[at[0]] else 'not '}empty"
    loud = empty[:, None, None] & (call["o"] != 0)
    return f"o is {call['o'][first(loud)]} at {first(loud)}, list empty" if loud.any() else None


no_keys = Invariant("no keys: o = 0, lse = -inf", _no_keys)
