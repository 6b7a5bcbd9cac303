"""Launch configurations: how a kernel is spread over warps and stages must not show in what it computes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from dsv4dbg.bisect.repeats import judged, steady
from dsv4dbg.bisect.subject import Outcome, Subject
from dsv4dbg.compare import Verdict

MOST_WARPS = 16  # that a block of threads has room for where a warp has 64

CHANGES: Mapping[str, tuple[str, Callable[[int], int]]] = {
    "half the warps": ("num_warps", lambda warps: warps // 2),
    "twice the warps": ("num_warps", lambda warps: warps * 2),
    "one stage": ("num_stages", lambda stages: 1),
    "one stage more": ("num_stages", lambda stages: stages + 1),
}


def changed(name: str, options: Mapping[str, int]) -> dict[str, int]:
    """The options of a launch that one of `CHANGES` makes differ: at most one, none where it would be out of range."""
    option, new = CHANGES[name]
    value = new(options[option])
    allowed = 1 <= value <= MOST_WARPS or option != "num_warps"
    return {option: value} if allowed and value != options[option] else {}


def launched(name: str) -> AbstractContextManager[list[str]]:
    """Inside, Triton launches are made with a change of `CHANGES` ('': none); gives the kernels that were."""
    if not name or importlib.util.find_spec("triton") is None:
        return nullcontext([])
    from dsv4dbg.kernels.triton_run import launching

    return launching(lambda options: changed(name, options))


def launch_config(subject: Subject) -> Outcome:
    """Other numbers of warps and stages give the same bits, or results that are as right."""
    worst, made = Outcome(Verdict.PASS), 0
    for name in CHANGES:
        results = subject.run(launch=name)
        made += bool(results.launches)
        if not results.launches or results.digest == subject.first.digest:
            continue
        found = steady(
            judged(subject, results), results, lambda name=name: subject.run(launch=name),
            lambda one: judged(subject, one),
        )  # fmt: skip
        if found.verdict > worst.verdict:
            worst = replace(
                found, sentence=f"with {name}: {found.sentence}",
                fingerprints=("depends on the launch configuration", *found.fingerprints),
            )  # fmt: skip
    if not made:
        return Outcome(Verdict.SKIPPED, "it launches no Triton kernel that could be launched otherwise")
    return worst if worst.sentence else replace(worst, sentence=f"{made} other launch configurations agree")
