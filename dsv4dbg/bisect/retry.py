"""One call again and again in an isolated worker: does it fail, how, and does a smaller one fail in the same way?

This is what makes a reproducer of a finding: the way in which the call fails when it stands alone, the smallest call
that fails so, and the files. The candidate runs in a process of its own and may end it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from dsv4dbg.bisect import reproducer
from dsv4dbg.bisect.checks import faulted, guards
from dsv4dbg.bisect.criteria import criteria
from dsv4dbg.bisect.derive import keep_tokens, permute_pages, reorder_tokens, tokens_of
from dsv4dbg.bisect.processes import LAUNCHES_ONE_BY_ONE, CandidateFault, DeviceLost, Worker
from dsv4dbg.bisect.protocol import Hello, Ran, Run
from dsv4dbg.bisect.repeats import AGAIN, RACE, REPEATS, judged
from dsv4dbg.bisect.shared import FRAME, Frame, Memory
from dsv4dbg.bisect.shrink import shrink
from dsv4dbg.bisect.subject import NotSupported, Outcome, Results, Subject
from dsv4dbg.compare import Verdict
from dsv4dbg.errors import DbgError, Untestable
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.registry import registry
from dsv4dbg.kernels.table import Call
from dsv4dbg.model.replay import run
from dsv4dbg.plan import REFERENCE

TRIALS = {"values": 60, "fills": 40, "runs": 20, "fault": 20, "hang": 8}  # to shrink a call, by what a trial costs
AGREE = 0.5  # relative error of a row of the reference below which it computes what the oracle does, FP4 included
HANGS = 10.0  # seconds after which a call that hung before counts as hanging again


@dataclass(frozen=True)
class Failure:
    """How a call fails on its own.

    Attributes:
        mode: one of `case.MODES`.
        runs: of the candidate, within which it shows.
        results: of a run that was wrong, if there are any.
    """

    mode: str
    outcome: Outcome
    runs: int = 1
    results: Mapping[str, Any] | None = None

    @property
    def kind(self) -> str:
        """The kind of fault, or ''."""
        return str(self.outcome.evidence.get("kind", "")) if self.mode == "fault" else ""


class Retry:
    """Runs calls of one candidate. A context manager: its worker ends with it.

    Args:
        timeout: seconds that one run may take.
    """

    def __init__(self, hello: Hello, timeout: float) -> None:
        self.hello, self.timeout = hello, timeout
        self._memory = Memory.create(2)
        self._worker = Worker(self._memory, hello, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close(kill=True)

    def admit(self, op: str) -> None:
        """Start the worker.

        Raises:
            DbgError: the op has no such candidate, or one that does not take the op's arguments.
        """
        name, found = self.hello.candidate, self._worker.start().candidates
        if op not in found:
            raise DbgError(f"{op} has no implementation '{name}'", "load yours with --plugin FILE; see: dsv4dbg ops")
        if found[op]:
            raise DbgError(found[op], f"see its contract: dsv4dbg ops {op}")

    def seconds(self, call: Call, name: str) -> float:
        """The shorter of two runs of an implementation, on the worker's device."""
        frame = Frame.number(self._memory, 1)
        packed = frame.pack_call(call)
        answers = [self._worker.run(Run(packed, name, frame.begin, 2 * FRAME)) for _ in range(2)]
        return min(answer.seconds for answer in answers if isinstance(answer, Ran))

    def subject(self, call: Call) -> Subject:
        """The call with the reference's results, in place of the one before."""
        frame = Frame.number(self._memory, 1)
        packed = frame.pack_call(call)
        results = frame.pack_all(run(call, registry().implementation(call.op.name, REFERENCE)))
        return Subject(
            self._memory, packed, results, frame.begin, 2 * FRAME, self.hello.candidate, self._worker,
            lambda: Worker(self._memory, self.hello, self.timeout, LAUNCHES_ONE_BY_ONE), doubtful=False,
        )  # fmt: skip

    def failure(self, call: Call, runs: int = AGAIN) -> Failure | None:
        """How a call fails; None if it is right in so many runs, and under two fills.

        Raises:
            NotSupported: the candidate does not take this call.
        """
        subject, made = self.subject(call), 0
        try:
            first, made = subject.run(), 1
            found = judged(subject, first)
            for _ in range(runs - 1):
                again, made = subject.run(), made + 1
                if again.digest != first.digest:
                    return _unstable(found if found.bad else judged(subject, again), _copied(first))
            if found.bad:
                return Failure("values", found, 1, _copied(first))
            fills = guards(subject)
            return Failure("fills", fills) if fills.verdict == Verdict.DIVERGED else None
        except CandidateFault as fault:
            return Failure("fault", faulted(fault), 1 if not made else REPEATS)

    def same(self, call: Call, known: Failure) -> bool:
        """Whether another call fails in the same way; False for one that makes no sense to reference and oracle."""
        self._worker.timeout = min(self.timeout, HANGS) if known.kind == "hang" else self.timeout
        try:
            subject = self.subject(call)
            try:
                fails = _FAILS[known.mode](subject, known.runs)
            except CandidateFault as fault:
                fails = known.mode == "fault" and faulted(fault).evidence["kind"] == known.kind
            return fails and _makes_sense(subject)
        except DeviceLost:
            raise
        except Exception:  # the reference, the oracle or the candidate cannot run it
            return False
        finally:
            self._worker.timeout = self.timeout


def replayed(call: Call, hello: Hello, timeout: float) -> tuple[Outcome, float | None, float | None]:
    """Run a call once with the candidate and judge it; and the seconds of reference and candidate, where they ran.

    Raises:
        Untestable: the candidate does not take this call.
        DbgError: the candidate is not there.
    """
    with Retry(hello, timeout) as retry:
        retry.admit(call.op.name)
        subject = retry.subject(call)
        try:
            found = judged(subject, subject.run())
            return found, retry.seconds(call, REFERENCE), retry.seconds(call, hello.candidate)
        except NotSupported as reason:
            raise _refused(call, hello, reason) from reason
        except CandidateFault as fault:
            return faulted(fault), retry.seconds(call, REFERENCE), None


def _refused(call: Call, hello: Hello, reason: NotSupported) -> Untestable:
    return Untestable(f"'{hello.candidate}' cannot run {call.op.name} at {call.site}: {reason}")


def _unstable(found: Outcome, results: Mapping[str, Any]) -> Failure:
    sentence = "other bits in other runs on the same inputs" + (f": {found.sentence}" if found.bad else "")
    prints = (RACE, *found.fingerprints)
    seen = Outcome(Verdict.UNSTABLE, sentence, found.where, prints, found.evidence, found.threshold)
    return Failure("runs", seen, REPEATS, results if found.bad else None)


def _makes_sense(subject: Subject) -> bool:
    """Whether reference and oracle agree on a call, as they do on all that are not cut in a wrong place."""
    call, reference = subject.call, subject.reference
    found = criteria(call.op, call, reference, reproducer.oracle_of(call), None)
    return all(criterion.reference < AGREE for criterion in found)


def _is_wrong(subject: Subject, runs: int) -> bool:
    return judged(subject, subject.run()).bad


def _differs(subject: Subject, runs: int) -> bool:
    first = subject.run().digest
    return any(subject.run().digest != first for _ in range(runs - 1))


def _faults(subject: Subject, runs: int) -> bool:
    """False, unless a run raises `CandidateFault`."""
    for _ in range(runs):
        subject.run()
    return False


_FAILS = {
    "values": _is_wrong,
    "runs": _differs,
    "fills": lambda subject, runs: guards(subject).verdict == Verdict.DIVERGED,
    "fault": _faults,
}


def _copied(results: Results) -> dict[str, Any]:
    return {
        name: Cache(v.name, v.data.clone(), v.layout) if isinstance(v, Cache) else v.clone()
        for name, v in results.values.items()
    }


def variants(call: Call, check: str) -> Iterator[Call]:
    """The call, and those derived from it in which a check may have found the fault."""
    yield call
    if check == "block-permutation" and (moved := permute_pages(call, np.random.default_rng(0))):
        yield moved[0]
    if check == "batch-invariance" and (tokens := tokens_of(call)):
        orders = [[int(row)] for row in np.unique(np.linspace(0, tokens - 1, 5).astype(int))]
        alone = [keep_tokens(call, rows) for rows in orders]
        yield from (c for c in (*alone, reorder_tokens(call, range(tokens)[::-1])) if c is not None)


@dataclass(frozen=True)
class Reproduced:
    """A reproducer that was written.

    Attributes:
        call: in it.
        confirmed: its script ended with exit code 1.
    """

    directory: Path
    call: Call
    failure: Failure
    confirmed: bool
    finding: Mapping[str, Any] = field(default_factory=dict)


def reproduce(
    directory: Path, call: Call, hello: Hello, environment: Mapping[str, Any], *,
    finding: Mapping[str, Any] | None = None, timeout: float = 60.0, smaller: bool = True,
) -> Reproduced | None:  # fmt: skip
    """Run a call in an isolated worker, cut it down while it fails, and write a reproducer.

    Args:
        directory: is made; it must not hold anything yet.
        call: its tensors are on the CPU.
        hello: candidate, plug-ins and device.
        finding: what is known already: ``check``, ``verdict``, ``sentence``, ``fingerprint`` and more, as JSON. What
            is missing comes from the run.
        timeout: seconds that one run may take.
        smaller: shrink the call.

    Returns:
        None if the call does not fail on its own.

    Raises:
        Untestable: the candidate does not take this call.
        DbgError: the directory is not empty, or the candidate is not there.
    """
    reproducer.vacant(directory)
    known = dict(finding or {})
    runs = REPEATS if known.get("verdict", "UNSTABLE") == Verdict.UNSTABLE.name else AGAIN
    with Retry(hello, timeout) as retry:
        retry.admit(call.op.name)
        try:
            found = next(
                ((c, f) for c in variants(call, known.get("check", "")) if (f := retry.failure(c, runs))), None
            )
        except NotSupported as reason:
            raise _refused(call, hello, reason) from reason
        if found is None:
            return None
        call, failure = found
        if smaller:
            trials = TRIALS["hang" if failure.kind == "hang" else failure.mode]
            small = shrink(call, lambda c: retry.same(c, failure), trials)
            again = retry.failure(small, failure.runs if failure.mode == "runs" else AGAIN)
            if again is not None and again.mode == failure.mode:
                call, failure = small, again
    seen = found[1].outcome
    known = {
        "verdict": seen.verdict.name, "sentence": seen.sentence, "fingerprint": list(seen.fingerprints),
        "where": dict(seen.where), "evidence": dict(seen.evidence), "threshold": dict(seen.threshold), **known,
    }  # fmt: skip
    reproducer.write(
        directory, call, hello.candidate, hello.plugins, mode=failure.mode, finding=known, environment=environment,
        results=failure.results, runs=failure.runs, timeout=min(timeout, HANGS) if failure.kind == "hang" else timeout,
    )  # fmt: skip
    return Reproduced(directory, call, failure, _confirmed(directory, hello.device), known)


def _confirmed(directory: Path, device: str) -> bool:
    """Whether the script, run once, ends as it should."""
    command = [sys.executable, str(directory / "reproduce.py"), "--device", device]
    return subprocess.run(command, capture_output=True, check=False).returncode == 1
