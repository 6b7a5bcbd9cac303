"""Cutting a failing call down: fewer tokens, smaller dims, fewer pages, while it fails in the same way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from dsv4dbg.bisect.derive import caches_of, compact_pages, keep_tokens, tokens_of
from dsv4dbg.bisect.search import smallest
from dsv4dbg.kernels.table import Call

BUDGET = 60  # trials

Cut = Callable[[Call, Sequence[int]], Call | None]


def shrink(call: Call, still_fails: Callable[[Call], bool], budget: int = BUDGET) -> Call:
    """A smaller call that fails as well.

    Tokens are dropped first, then entries of every other dim that the contract names, and pages that nothing points
    to at last. The same call and the same answers give the same result.

    Args:
        still_fails: runs the candidate and says whether it fails in the way that is sought; False for a call that the
            reference cannot run. ``still_fails(call)`` is taken to be true.
        budget: largest number of trials. Tokens take at most three quarters of it, every dim then half of what is left.
    """
    trials = _Trials(call, still_fails, budget)
    trials.cut(keep_tokens, tokens_of(call) or 0, budget // 4)
    for dim, size in _dims(call).items():
        trials.cut(_cutter(dim), size, trials.left // 2)
    if caches_of(call):
        trials.attempt(compact_pages(trials.best))
    return trials.best


class _Spent(Exception):
    """No trial is left for this dim."""


@dataclass
class _Trials:
    """Trials that are left, and the smallest call that failed."""

    best: Call
    still_fails: Callable[[Call], bool]
    left: int

    def attempt(self, call: Call | None) -> bool:
        if call is None or not self.left:
            return False
        self.left -= 1
        fails = self.still_fails(call)
        if fails:
            self.best = call
        return fails

    def cut(self, cut: Cut, size: int, reserve: int) -> None:
        """Keep as few of ``size`` elements as possible, and ``reserve`` trials for later."""
        whole, least = self.best, size
        known: dict[tuple[int, ...], bool] = {}

        def fails(elements: Sequence[int]) -> bool:
            nonlocal least
            key = tuple(elements)
            if key not in known:
                if self.left <= reserve:
                    raise _Spent
                before = self.best
                known[key] = self.attempt(cut(whole, elements))
                if known[key] and len(key) >= least:
                    self.best = before
                elif known[key]:
                    least = len(key)
            return known[key]

        if size > 1:
            with contextlib.suppress(_Spent):
                smallest(range(size), fails)


def _dims(call: Call) -> dict[str, int]:
    """Dims besides the token that inputs have, with their sizes; without those that have several."""
    sizes: dict[str, set[int]] = {}
    for name, arg in call.op.args.items():
        value = call.args[name]
        if isinstance(value, torch.Tensor):
            for dim, size in zip(arg.dims.split(), value.shape, strict=False):
                sizes.setdefault(dim, set()).add(size)
    return {dim: min(found) for dim, found in sizes.items() if dim != "token" and len(found) == 1 and min(found) > 1}


def _cutter(dim: str) -> Cut:
    def cut(call: Call, elements: Sequence[int]) -> Call:
        args, kept = dict(call.args), torch.tensor(list(elements), dtype=torch.long)
        for name, arg in call.op.args.items():
            if isinstance(args[name], torch.Tensor) and dim in arg.dims.split():
                args[name] = args[name].index_select(arg.dims.split().index(dim), kept)
        return replace(call, args=args)

    return cut
