"""Failures again: a result is blamed on its inputs only where it shows every time, and otherwise gets its rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dsv4dbg.bisect.subject import Outcome, Results, Subject, outcome_of
from dsv4dbg.compare import Verdict
from dsv4dbg.kernels.table import Call

REPEATS = 20  # runs that tell how often a failure shows: one that shows in 1 run of 6 hides from all with p = 0.026
RACE = "differs between runs (race or unwritten memory)"
AGAIN = 3  # runs that must agree before a result counts as repeatable


def judged(
    subject: Subject, results: Results, call: Call | None = None, reference: Mapping[str, Any] | None = None
) -> Outcome:
    """What the guards saw, or else the verdict rule on results of the call, or of a derived one and its reference."""
    if results.damage:
        return Outcome(Verdict.DIVERGED, results.damage[0], evidence={"damage": list(results.damage)})
    return outcome_of(subject.judge(results.values, call, reference))


def unstable(
    found: Outcome, run: Callable[[], Results], judge: Callable[[Results], Outcome], made: Sequence[Results] = ()
) -> Outcome:
    """A failure that is not the same in every run: how often it shows, in so many more runs."""
    runs = [*made, *(run() for _ in range(REPEATS - 1 - len(made)))]
    failed = 1 + sum(judge(one).bad for one in runs)
    return replace(
        found, verdict=Verdict.UNSTABLE, rate=(failed, len(runs) + 1),
        sentence=f"wrong in {failed} of {len(runs) + 1} runs on the same inputs: {found.sentence}",
        fingerprints=(RACE, *found.fingerprints),
    )  # fmt: skip


def steady(found: Outcome, first: Results, run: Callable[[], Results], judge: Callable[[Results], Outcome]) -> Outcome:
    """A failure of a derived call, if it shows in the same bits again; else that it is unstable."""
    again = [run() for _ in range(AGAIN - 1)] if found.bad else []
    return found if all(one.digest == first.digest for one in again) else unstable(found, run, judge, again)
