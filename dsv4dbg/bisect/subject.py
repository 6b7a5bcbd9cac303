"""Subject: one call of an op under test, with everything that a check may ask of it.

A check runs the candidate on the call or on one derived from it, as often as it likes and under other circumstances,
and has results judged. It never learns which candidate that is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xxhash

from dsv4dbg.bisect.processes import Worker
from dsv4dbg.bisect.protocol import Ran, Refused, Run
from dsv4dbg.bisect.shared import Frame, Memory, PackedCall
from dsv4dbg.compare import Verdict
from dsv4dbg.kernels.arrays import CacheArray, to_arrays
from dsv4dbg.kernels.compile_report import KernelReport
from dsv4dbg.kernels.oracle import run_oracle
from dsv4dbg.kernels.registry import registry
from dsv4dbg.kernels.table import Call
from dsv4dbg.model.replay import run
from dsv4dbg.plan import REFERENCE
from dsv4dbg.verdict.judge import judge
from dsv4dbg.verdict.judgement import Judgement


@dataclass(frozen=True)
class Outcome:
    """What a check found.

    Attributes:
        rate: runs that failed of those made.
    """

    verdict: Verdict
    sentence: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)
    fingerprints: tuple[str, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    threshold: Mapping[str, Any] = field(default_factory=dict)
    rate: tuple[int, int] | None = None

    @property
    def bad(self) -> bool:
        return Verdict.DIVERGED <= self.verdict <= Verdict.TIMEOUT


@dataclass(frozen=True)
class Results:
    """One run's outputs and mutated caches, in shared memory, and what the guards saw.

    Attributes:
        launches: how many Triton launches were made otherwise than asked for.
    """

    values: Mapping[str, Any]
    damage: tuple[str, ...]
    launches: int = 0

    @cached_property
    def digest(self) -> str:
        """A hash of all bits."""
        return digest(self.values)


class NotSupported(Exception):
    """The candidate does not support this call."""


@dataclass
class Clock:
    """Seconds spent on one trial."""

    candidate: float = 0.0
    reference: float = 0.0
    oracle: float = 0.0


class Subject:
    """A call in a frame of shared memory, the reference's results beside it, and a worker to run the candidate.

    Attributes:
        call, reference: tensors are in shared memory and must not be written to.
        clock: of the trial that is running.
        before: the call that the worker ran before this one.
        compiled: compiles the candidate's kernels of this op for AMD GPUs.
        doubtful: whether a failure is worth a fresh process: the op was not found at fault in several already.
    """

    def __init__(
        self, memory: Memory, packed: PackedCall, reference: Mapping[str, Any], used: int, frame_end: int,
        candidate: str, worker: Worker, alone: Callable[[], Worker], before: PackedCall | None = None,
        doubtful: bool = True, compiled: Callable[[], list[KernelReport]] = list,
    ) -> None:  # fmt: skip
        self.call: Call = memory.call(packed)
        self.reference = memory.values(reference)
        self.clock = Clock()
        self.before, self.doubtful, self.compiled = before, doubtful, compiled
        self._memory, self._packed, self._candidate = memory, packed, candidate
        self._frame = Frame(memory, used, frame_end)
        self._worker, self._alone = worker, alone
        self._first: Results | None = None

    @property
    def first(self) -> Results:
        """The candidate's first run on the call as it came."""
        if self._first is None:
            self._first = self.run()
        return self._first

    def misfit(self) -> str:
        """Which result of the first run has another shape or dtype than the op's, or ''."""
        if self._first is None:
            return ""
        for name, value in self.reference.items():
            got = self._first.values[name]
            if isinstance(value, torch.Tensor) and (got.shape, got.dtype) != (value.shape, value.dtype):
                return f"returned {name} as {_form(got)}, the op yields {_form(value)}"
        return ""

    @property
    def previous(self) -> Call | None:
        """The call that the worker ran before this one."""
        return self.before and self._memory.call(self.before)

    def run(
        self, call: Call | None = None, *, fill: str = "nan", seed: int = 0, thorough: bool = False,
        alone: bool = False, earlier: Sequence[Call] = (), launch: str = "",
    ) -> Results:  # fmt: skip
        """Run the candidate.

        Args:
            call: a derived call (default: the subject's own).
            fill, seed, thorough: of the memory around its buffers, and of what it allocates.
            alone: in a fresh process with launches one by one.
            earlier: what its buffers hold before (see `protocol.Run`).
            launch: a name of `launches.CHANGES`.

        Raises:
            NotSupported: with the candidate's reason.
            CandidateFault: it did not end with results.
        """
        before = tuple(self._pack(other) for other in earlier)
        request = self._request(self._pack(call or self.call), fill, seed, thorough, before, launch)
        if not alone:
            return self._ask(self._worker, request)
        worker = self._alone()
        try:
            return self._ask(worker, request)
        finally:
            worker.close()

    def after(self, packed: PackedCall) -> Results:
        """Run the candidate on another call first, and then on this one, in one process."""
        self._ask(self._worker, self._request(packed))
        return self.run()

    def _pack(self, call: Call) -> PackedCall:
        """A derived call shares what it did not change with the subject's own."""
        own = self.call.args
        args = {n: self._packed.args[n] if v is own[n] else self._frame.pack(v) for n, v in call.args.items()}
        return replace(self._packed, args=args)

    def _request(self, packed: PackedCall, *how: Any) -> Run:
        return Run(packed, self._candidate, self._frame.begin, self._frame.end, *how)

    def _ask(self, worker: Worker, request: Run) -> Results:
        answer = worker.run(request)
        if isinstance(answer, Refused):
            raise NotSupported(answer.reason)
        assert isinstance(answer, Ran)
        self.clock.candidate += answer.seconds
        values = self._memory.values(answer.results)
        self._frame.begin = answer.used
        return Results(values, answer.damage, answer.launches)

    def reference_of(self, call: Call) -> dict[str, Any]:
        """The reference's results on a derived call, computed here on the CPU."""
        begin = time.perf_counter()
        results = run(call, registry().implementation(call.op.name, REFERENCE))
        self.clock.reference += time.perf_counter() - begin
        return results

    def judge(
        self, results: Mapping[str, Any], call: Call | None = None, reference: Mapping[str, Any] | None = None
    ) -> Judgement:
        """The verdict rule on results of the call, or of a derived one with its own reference."""
        call, reference = call or self.call, self.reference if reference is None else reference
        return judged(call, reference, results, self.clock)

    def equal(self, results: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
        return digest(results) == digest(others)

    def renewed(self) -> None:
        """A new trial begins: its times count from zero."""
        self.clock = Clock()

    def forget(self) -> None:
        """The first run is made again when it is asked for next."""
        self._first = None


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def judged(
    call: Call, reference: Mapping[str, Any], results: Mapping[str, Any], clock: Clock | None = None
) -> Judgement:
    """The verdict rule on results of a call; ``clock`` takes the oracle's time."""

    def oracle() -> Any:
        begin = time.perf_counter()
        found = run_oracle(call.op, call.args, call.numerics)
        if clock is not None:
            clock.oracle += time.perf_counter() - begin
        return found

    return judge(call.op, to_arrays(call.args), to_arrays(reference), to_arrays(results), oracle, call.numerics)


def outcome_of(judgement: Judgement) -> Outcome:
    """A judgement as an outcome."""
    worst = judgement.worst
    if worst is None:
        return Outcome(judgement.verdict, judgement.sentence)
    clause = worst.worst
    threshold = clause and {name: getattr(clause, name) for name in ("name", "value", "limit", "source")}
    evidence = {"output": worst.name, "comparator": worst.kind, **worst.errors, **worst.flips, **worst.notes}
    return Outcome(
        judgement.verdict, worst.sentence, plain(worst.at), worst.fingerprints, plain(evidence),
        plain(threshold or {}),
    )  # fmt: skip


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of numpy as Python's, for JSON."""
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}


def digest(values: Mapping[str, Any]) -> str:
    """A hash of the bits of all results, shapes and dtypes included."""
    state = xxhash.xxh3_128()
    for name, array in to_arrays(values).items():
        data = np.ascontiguousarray(array.data if isinstance(array, CacheArray) else array)
        state.update(f"{name} {data.dtype} {data.shape}".encode())
        state.update(data.reshape(-1).view(np.uint8).data)
    return state.hexdigest()
