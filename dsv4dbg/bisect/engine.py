"""The isolated scan: every call of the reference's forward, with the candidate run on it elsewhere.

One walker goes through the forward once; calls of a site always go to the same worker, in order, so that state that a
candidate carries along is carried as in a server. Which checks a call gets is decided in the order of the walk, and so
a resumed run decides the same.
"""

from __future__ import annotations

import queue
import threading
import time
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from dsv4dbg.bisect.checks import Check, chosen, faulted
from dsv4dbg.bisect.compile_check import compiled
from dsv4dbg.bisect.journal import Journal, Trial
from dsv4dbg.bisect.processes import LAUNCHES_ONE_BY_ONE, CandidateFault, Walker, Worker
from dsv4dbg.bisect.protocol import Hello, Missing, Opened, Shipped, Walk, Walked
from dsv4dbg.bisect.result import Result
from dsv4dbg.bisect.settings import Settings
from dsv4dbg.bisect.shared import FRAME, Memory, PackedCall, Place, PlacedCache
from dsv4dbg.bisect.subject import NotSupported, Outcome, Subject
from dsv4dbg.compare import Verdict
from dsv4dbg.errors import DbgError, Untestable
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.registry import registry
from dsv4dbg.kernels.table import Call
from dsv4dbg.model.recording import Request
from dsv4dbg.site import Site

CONFIRMED = 2  # bad calls of an op that are repeated in a fresh process
KEPT = 4 << 20  # bytes of a call that is kept until the next one of its op was tested
FAULTS = 3  # faults of an op after which its other calls are left out


class Watcher(Protocol):
    """Sees a bisect while it runs, from any thread."""

    def opened(self, model: str, steps: tuple[str, ...], ops: tuple[str, ...]) -> None: ...

    def trial(self, trial: Trial) -> None: ...


@dataclass
class _Item:
    """One shipped call on its way to a worker, with the checks that it gets."""

    shipped: Shipped
    checks: list[Check]


@dataclass
class Scan:
    """One isolated scan; `run` does it.

    Attributes:
        kept: for every op that failed, the call of its first bad trial.
    """

    settings: Settings
    journal: Journal
    watcher: Watcher
    result: Result = field(default_factory=Result)
    kept: dict[str, tuple[Trial, Call]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _faults: Counter[str] = field(default_factory=Counter)
    _wrong: Counter[str] = field(default_factory=Counter)
    _seen: set[tuple[Any, ...]] = field(default_factory=set)
    _fitting: set[str] = field(default_factory=set)
    _request: Request = field(init=False)
    _failure: list[BaseException] = field(default_factory=list)

    def run(self) -> Result:
        """Walk, test, judge.

        Raises:
            DbgError: what is wrong with the request, the plug-in or the candidate.
            Untestable: nothing could be tested, or the reference is not repeatable.
        """
        begin = time.perf_counter()
        self._checks = chosen(self.settings.checks)
        self._frames = self.settings.workers * (3 + len(registry().ops))
        self._memory = Memory.create(1 + self._frames)
        first = self.settings.request
        for model in (first.model, *self.settings.models):
            self._request = replace(first, model=model)
            if not self._scan():
                break
        self.result.wall_s = time.perf_counter() - begin
        self.result.trials.sort(key=lambda t: t.number)
        return self.result

    def _scan(self) -> bool:
        """Scan one model's forward; False if no op was left to test. Its workers are new: they keep weights."""
        hello = Hello(self.settings.candidate, self._request.plugins, self._request.device)
        self._alone = lambda: Worker(self._memory, hello, self.settings.timeout, LAUNCHES_ONE_BY_ONE)
        workers = [Worker(self._memory, hello, self.settings.timeout) for _ in range(self.settings.workers)]
        try:
            wrong = {trial.op for trial in self.result.trials if trial.bad}
            ops = tuple(op for op in self._ops(workers[0].start().candidates) if op not in wrong)
            if not ops:
                return False
            self._seen.clear()
            walk = Walk(self._request, frozenset(ops), tuple(range(1, 1 + self._frames)), self.settings.trace)
            self._walker = Walker(self._memory, walk)
            try:
                self._walk(workers, ops)
            finally:
                self._walker.close(kill=True)
        finally:
            for worker in workers:
                worker.close(kill=True)
        return True

    def _ops(self, available: Mapping[str, str]) -> tuple[str, ...]:
        """The ops to test, all of which have the candidate."""
        name = self.settings.candidate
        if not available:
            raise DbgError(f"no op has an implementation '{name}'", "load yours with --plugin FILE; see: dsv4dbg ops")
        ops = self.settings.ops or tuple(available)
        for op in ops:
            registry().op(op)
            if op not in available:
                raise DbgError(f"{op} has no implementation '{name}'", f"these have: {', '.join(available)}")
            if available[op]:
                raise DbgError(available[op], f"see its contract: dsv4dbg ops {op}")
        return ops

    def _walk(self, workers: list[Worker], ops: tuple[str, ...]) -> None:
        queues: list[queue.Queue[_Item | None]] = [queue.Queue() for _ in workers]
        threads = [
            threading.Thread(target=self._serve, args=pair, daemon=True) for pair in zip(queues, workers, strict=True)
        ]
        for thread in threads:
            thread.start()
        walked: Walked | None = None
        try:
            for message in self._walker:
                if self._failure:
                    break
                if isinstance(message, Opened):
                    self._opened(message, ops)
                elif isinstance(message, Walked):
                    walked = message
                elif isinstance(message, Shipped):
                    self._dispatch(message, queues)
                elif isinstance(message, Missing):
                    self._left_out(message.number, message.site, self._checks[0].name, message.reason)
        finally:
            for pending in queues:
                pending.put(None)
            for thread in threads:
                thread.join()
        if self._failure:
            raise self._failure[0]
        assert walked is not None
        self.result.calls += walked.calls
        self.result.reference_s += walked.seconds
        for op in ops:
            if not any(t.op == op for t in self.result.tested):
                reasons = [t.sentence for t in self.result.trials if t.op == op]
                self.result.untested[op] = reasons[0] if reasons else "the workload does not call it"

    def _opened(self, message: Opened, ops: tuple[str, ...]) -> None:
        result, model = self.result, self._request.model
        result.environment, result.device = message.environment, message.device
        result.regimes = {name: reached or result.regimes.get(name, False) for name, reached in message.regimes.items()}
        regimes = dict(message.regimes)
        self.journal.event("opened", model=model, steps=message.steps, ops=ops, regimes=regimes)
        self.watcher.opened(model, message.steps, ops)

    def _dispatch(self, shipped: Shipped, queues: list[queue.Queue[_Item | None]]) -> None:
        """Decide which checks a call gets, and hand it to the worker of its site."""
        site = shipped.call.site
        if shipped.repeatable is False:
            raise Untestable(f"the reference itself is not repeatable at {site} ({site.op})", "nothing can be judged")
        checks = []
        for check in self._checks:
            if check.per != "call" and not self._sampled(check, shipped.call):
                continue
            known = self.journal.finished.get((self._request.model, site.path, site.op, check.name))
            if known is None:
                checks.append(check)
            else:
                self._note(known)
                if known.bad:
                    self._keep(known, self._memory.call(shipped.call))
        if checks:
            queues[zlib.crc32(site.name.encode()) % len(queues)].put(_Item(shipped, checks))
        else:
            self._walker.free(shipped.frame)

    def _sampled(self, check: Check, call: PackedCall) -> bool:
        """Whether a call is the first of its kind to get a check that applies to it."""
        if check.applies(registry().op(call.site.op)):
            return False
        key = (check.name, call.site.op) if check.per == "op" else (check.name, *call_class(call))
        seen = key in self._seen
        self._seen.add(key)
        return not seen

    def _serve(self, items: queue.Queue[_Item | None], worker: Worker) -> None:
        """A worker's thread: one call after the other. A small call's frame is kept until the op's next one is done."""
        before: dict[str, Shipped] = {}
        item: _Item | None = None
        try:
            while (item := items.get()) is not None:
                shipped, op = item.shipped, item.shipped.call.site.op
                previous = before.pop(op, None)
                if not self._failure:
                    self._test(item, worker, previous.call if previous else None)
                if previous is not None:
                    self._walker.free(previous.frame)
                if shipped.used - shipped.frame * FRAME <= KEPT:
                    before[op] = shipped
                else:
                    self._walker.free(shipped.frame)
        except BaseException as error:
            self._failure.append(error)
            for shipped in before.values():
                self._walker.free(shipped.frame)
            while item is not None:  # without frames the walker would wait, and send nothing more
                self._walker.free(item.shipped.frame)
                item = items.get()

    def _test(self, item: _Item, worker: Worker, before: PackedCall | None) -> None:
        shipped, op = item.shipped, item.shipped.call.site.op
        end = (shipped.frame + 1) * FRAME
        subject = Subject(
            self._memory, shipped.call, shipped.reference, shipped.used, end, self.settings.candidate, worker,
            self._alone, before, self._wrong[op] < CONFIRMED,
            lambda: compiled(op, self.settings.candidate, self.settings.request.plugins, self.settings.timeout),
        )  # fmt: skip
        site, wrong = shipped.call.site, ""
        for check in item.checks:
            if self._faults[site.op] >= FAULTS:
                wrong = f"{FAULTS} calls of {site.op} ended in a fault; its other calls are left out"
            elif wrong and check.of_itself and not wrong.startswith("the candidate ends"):
                wrong = ""
            if wrong:
                self._left_out(shipped.number, site, check.name, wrong)
                continue
            trial = self._try(check, subject, shipped)
            self._fits(site.op, trial, subject)
            self._note(trial)
            if trial.verdict in (Verdict.FAULT, Verdict.TIMEOUT):
                self._faults[site.op] += 1
                wrong = "the candidate ends in a fault here"
            elif trial.bad and check.per == "call":
                wrong = "the candidate is wrong here already"
            if trial.bad:
                self._wrong[site.op] += 1
                self._keep(trial, subject.call)

    def _fits(self, op: str, trial: Trial, subject: Subject) -> None:
        """An op whose first result has not even the right form was wired wrongly, which no verdict is about."""
        misfit = subject.misfit() if trial.bad and op not in self._fitting else ""
        if misfit:
            name = self.settings.candidate
            raise DbgError(f"candidate '{name}' of {op} {misfit}", f"see its contract: dsv4dbg ops {op}")
        self._fitting.add(op)

    def _try(self, check: Check, subject: Subject, shipped: Shipped) -> Trial:
        """One trial, with its lines in the journal."""
        site = shipped.call.site
        number = self.result.calls + shipped.number
        self.journal.begin(number, (self._request.model, site.path, site.op, check.name))
        subject.renewed()
        begin = time.perf_counter()
        try:
            outcome = check.judge(subject)
        except NotSupported as reason:
            outcome = Outcome(Verdict.SKIPPED, str(reason))
        except CandidateFault as fault:
            outcome = self._again(subject, fault) if subject.doubtful else faulted(fault)
        clock = subject.clock
        trial = Trial(
            number, site.path, site.op, check.name, outcome.verdict, outcome.sentence, outcome.where,
            outcome.fingerprints, outcome.evidence, outcome.threshold, time.perf_counter() - begin, clock.candidate,
            shipped.seconds, clock.oracle, outcome.rate,
            self._request.model,
        )  # fmt: skip
        self.journal.end(trial)
        return trial

    def _again(self, subject: Subject, fault: CandidateFault) -> Outcome:
        """A fault once more, alone in a fresh process with its launches one by one."""
        found = faulted(fault)
        subject.forget()
        try:
            subject.run(alone=True)
        except CandidateFault as again:
            sentence = f"{again.fault.text} (again alone, in a fresh process)"
            return Outcome(found.verdict, sentence, {}, found.fingerprints, found.evidence)
        sentence = f"{found.sentence} (not again alone, in a fresh process: an earlier call may have caused it)"
        return Outcome(found.verdict, sentence, {}, found.fingerprints, found.evidence, rate=(1, 2))

    def _left_out(self, number: int, site: Site, check: str, reason: str) -> None:
        trial = Trial(
            self.result.calls + number, site.path, site.op, check, Verdict.SKIPPED, reason, model=self._request.model
        )
        self.journal.end(trial)
        self._note(trial)

    def _note(self, trial: Trial) -> None:
        with self._lock:
            self.result.trials.append(trial)
        self.watcher.trial(trial)

    def _keep(self, trial: Trial, call: Call) -> None:
        """Remember the earliest bad call of an op, for a reproducer."""
        with self._lock:
            known = self.kept.get(call.op.name)
            if known is None or trial.number < known[0].number:
                self.kept[call.op.name] = trial, _copied(call)


def call_class(call: PackedCall) -> tuple[Any, ...]:
    """What makes two calls alike for a check: op, phase, layouts of caches, what is absent, and how many tokens."""
    tensors = [value for value in call.args.values() if isinstance(value, Place)]
    tokens = tensors[0].shape[0] if tensors and tensors[0].shape else 0
    caches = tuple(value.layout for value in call.args.values() if isinstance(value, PlacedCache))
    absent = tuple(name for name, value in call.args.items() if value is None)
    return call.site.op, call.site.phase, caches, absent, min(tokens, 2) if tokens < 64 else 64


def _copied(call: Call) -> Call:
    """The call with tensors of its own."""

    def own(value: Any) -> Any:
        if isinstance(value, Cache):
            return Cache(value.name, value.data.clone(), value.layout)
        return value.clone() if isinstance(value, torch.Tensor) else value

    return Call(call.site, call.op, call.implementation, {n: own(v) for n, v in call.args.items()}, call.numerics)
