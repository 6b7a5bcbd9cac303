"""Graph replay: buffers stay where they are and get new contents, and results must follow the contents.

A captured graph knows addresses only. A candidate that took something else along from the capture - lengths read on
the host, a copy of an input, a result of an earlier call - computes on what was, not on what is.
"""

from __future__ import annotations

from dataclasses import replace

from dsv4dbg.bisect.derive import other_contents
from dsv4dbg.bisect.repeats import judged, steady
from dsv4dbg.bisect.subject import Outcome, Results, Subject
from dsv4dbg.compare import Verdict

STALE = "stale inputs (kept from an earlier call)"


def graph_replay(subject: Subject) -> Outcome:
    """Replayed three times with changing contents of the same buffers, it computes on these, not on the first ones."""
    other = other_contents(subject.call, subject.previous)
    if other is None:
        return Outcome(Verdict.SKIPPED, "there is nothing else that the buffers of this call could hold")
    earlier = (subject.call, other, subject.call)

    def run() -> Results:
        return subject.run(other, earlier=earlier)

    results, reference = run(), subject.reference_of(other)

    def judge(one: Results) -> Outcome:
        return judged(subject, one, other, reference)

    found = steady(judge(results), results, run, judge)
    if not found.bad:
        return replace(found, sentence="results follow the contents of the buffers")
    if judge(subject.run(other, alone=True)).bad:
        return replace(found, sentence=f"with other inputs, in a fresh process too: {found.sentence}")
    return replace(
        found, sentence=f"with new contents in the same buffers: {found.sentence}",
        fingerprints=(STALE, *found.fingerprints),
    )  # fmt: skip
