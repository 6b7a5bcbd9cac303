"""Which of many swaps makes a run fail: halving and delta debugging over sets, knowing nothing of kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
Fails = Callable[[Sequence[T]], bool]


def smallest(elements: Sequence[T], fails: Fails[T]) -> list[T]:
    """A set from which no element can be taken away without the failure going away; ``fails(elements)`` is known.

    First by halving, which finds a single cause among n elements in ``ceil(log2 n)`` trials and a last one that
    confirms it; where the half that is left does not fail alone, by delta debugging (Zeller and Hildebrandt, 2002).
    """
    found = _halve(elements, fails)
    return found if found is not None else _delta(list(elements), fails)


def _halve(elements: Sequence[T], fails: Fails[T]) -> list[T] | None:
    """The one element that fails alone, if there is one; the last trial is skipped where it was made on the way."""
    left, known = list(elements), True
    while len(left) > 1:
        half = (len(left) + 1) // 2
        known = fails(left[:half])
        left = left[:half] if known else left[half:]
    return left if known or fails(left) else None


def _delta(left: list[T], fails: Fails[T]) -> list[T]:
    parts = 2
    while len(left) > 1:
        bounds = [len(left) * i // parts for i in range(parts + 1)]
        pieces = [left[a:b] for a, b in itertools.pairwise(bounds)]
        smaller = next((piece for piece in pieces if len(piece) < len(left) and fails(piece)), None)
        if smaller is not None:
            left, parts = smaller, 2
            continue
        rests = [[x for x in left if x not in piece] for piece in pieces] if parts > 2 else []
        rest = next((r for r in rests if fails(r)), None)
        if rest is not None:
            left, parts = rest, parts - 1
        elif parts < len(left):
            parts = min(len(left), 2 * parts)
        else:
            break
    return left
