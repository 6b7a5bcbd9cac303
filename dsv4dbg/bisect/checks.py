"""The checks: small judges of a candidate at one call, each looking for another kind of fault.

A check is a declaration: its name, to which ops it applies, whether it judges every call or a sample of each class of
calls, and a function from a `Subject` to an `Outcome`. None of them knows the candidate's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from dsv4dbg.bisect.compile_check import offline_compile
from dsv4dbg.bisect.derive import keep_tokens, permute_pages, reorder_tokens, tokens_of
from dsv4dbg.bisect.graphs import graph_replay
from dsv4dbg.bisect.launches import launch_config
from dsv4dbg.bisect.processes import CandidateFault
from dsv4dbg.bisect.repeats import AGAIN, RACE, REPEATS, judged, steady, unstable
from dsv4dbg.bisect.subject import Outcome, Results, Subject
from dsv4dbg.compare import Verdict
from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.arrays import CacheArray, to_arrays
from dsv4dbg.kernels.contract import Op
from dsv4dbg.kernels.invariants import violations
from dsv4dbg.kernels.table import Call

CERTAIN = 4  # more runs that must fail before a race is ruled out
CALLS = 16  # that `serial_equivalence` divides a call into, about
ROWS = 5  # tokens that `batch_invariance` runs alone

Judge = Callable[[Subject], Outcome]


@dataclass(frozen=True)
class Check:
    """A kind of question to a candidate.

    Attributes:
        per: it judges every ``call``, one of each ``class`` of calls, or one of each ``op``.
        applies: says why an op has no use for it, or ''.
        of_itself: whether it compares the candidate with itself, and so says something about one that is wrong too.
        asked: it runs only when it is named: it takes long, or is about another machine.
        doc: what it finds.
    """

    name: str
    judge: Judge
    doc: str
    per: str = "class"
    of_itself: bool = False
    asked: bool = False
    applies: Callable[[Op], str] = lambda op: ""


def differential(subject: Subject) -> Outcome:
    """Candidate and reference on the same inputs, both against the oracle; a failure is repeated."""
    first = subject.first
    found = judged(subject, first)
    return _repeated(subject, found, first) if found.bad else found


def _repeated(subject: Subject, found: Outcome, first: Results) -> Outcome:
    """The failure again: always the same bits, in a fresh process too, or at which rate."""
    again = [subject.run() for _ in range(AGAIN - 1)]
    if all(run.digest == first.digest for run in again):
        if not subject.doubtful:
            return found
        alone = subject.run(alone=True)
        if alone.digest == first.digest or judged(subject, alone).bad:
            return found
        again += [subject.run() for _ in range(CERTAIN)]
        if all(run.digest == first.digest for run in again):
            return _carried(found)
    elif subject.before is not None and not any(judged(subject, run).bad for run in again):
        after = [subject.after(subject.before) for _ in range(AGAIN)]
        if all(run.digest == first.digest for run in after):
            return _carried(found)
    return unstable(found, subject.run, lambda run: judged(subject, run), again)


def _carried(found: Outcome) -> Outcome:
    return replace(
        found, sentence=f"right in a fresh process, wrong after earlier calls: {found.sentence}",
        fingerprints=("state carried from call to call", *found.fingerprints),
    )  # fmt: skip


def invariants(subject: Subject) -> Outcome:
    """What holds for every correct call of the op."""
    op, results = subject.call.op, subject.first.values
    broken = violations(op, {**subject.call.args, **results})
    if not broken:
        return Outcome(Verdict.PASS, f"{len(op.invariants)} invariants hold")
    name, sentence = next(iter(broken.items()))
    return Outcome(Verdict.DIVERGED, f"{name}: {sentence}", evidence={"broken": broken})


def repeatability(subject: Subject) -> Outcome:
    """The same bits in every run."""
    first = subject.first
    runs = [subject.run() for _ in range(AGAIN - 1)]
    if all(run.digest == first.digest for run in runs):
        return Outcome(Verdict.PASS, f"{AGAIN} runs gave the same bits")
    return _different(subject, [*runs, *(subject.run() for _ in range(REPEATS - AGAIN))])


def _different(subject: Subject, runs: Sequence[Results]) -> Outcome:
    """How many runs gave other bits than the first; none is a PASS."""
    different = sum(run.digest != subject.first.digest for run in runs)
    if not different:
        return Outcome(Verdict.PASS, f"{1 + len(runs)} runs gave the same bits")
    wrong = sum(judged(subject, run).bad for run in (subject.first, *runs))
    sentence = f"{different} of {len(runs)} runs gave other bits than the first ({wrong} were wrong)"
    return Outcome(Verdict.UNSTABLE, sentence, fingerprints=(RACE,), rate=(different, len(runs)))


def fresh_process(subject: Subject) -> Outcome:
    """The same bits in a process that has run nothing else; some faults are settled when a process starts."""
    alone = [subject.run(alone=True)]
    if alone[0].digest == subject.first.digest:
        return Outcome(Verdict.PASS, "a fresh process gave the same bits")
    alone.append(subject.run(alone=True))
    here = _different(subject, [subject.run() for _ in range(REPEATS - 1)])
    if here.bad or alone[1].digest == subject.first.digest:
        return here if here.bad else _different(subject, [*alone, *(subject.run() for _ in range(REPEATS - 1))])
    sentence = "fresh processes give other bits than one that ran earlier calls"
    return Outcome(Verdict.UNSTABLE, sentence, fingerprints=("differs between processes",), rate=(2, 2))


def guards(subject: Subject) -> Outcome:
    """Nothing is read or written that the call does not own: two fills of the memory around give the same bits."""
    first = subject.run(thorough=True)
    other = subject.run(fill="large", seed=1, thorough=True)
    damage = first.damage or other.damage
    if damage:
        return Outcome(Verdict.DIVERGED, damage[0], evidence={"damage": list(damage)})
    if other.digest == first.digest:
        return Outcome(Verdict.PASS, "nothing outside its buffers was read or written")
    again = [subject.run(thorough=True).digest != first.digest for _ in range(CERTAIN)]
    again += [subject.run(fill="large", seed=1, thorough=True).digest != other.digest for _ in range(CERTAIN)]
    if any(again):
        sentence = f"{sum(again)} of {len(again)} runs gave other bits than the first with the same fill"
        return Outcome(Verdict.UNSTABLE, sentence, fingerprints=(RACE,), rate=(sum(again), len(again)))
    differs = _first_difference(first, other)
    sentence = f"{differs} depends on memory that the call does not own or never wrote"
    return Outcome(Verdict.DIVERGED, sentence, fingerprints=("differs between fills (unowned read)",))


def _first_difference(first: Results, other: Results) -> str:
    """Name of the first result that differs, and at which element."""
    mine, theirs = to_arrays(first.values), to_arrays(other.values)
    for name, value in mine.items():
        a, b = (v.data if isinstance(v, CacheArray) else v for v in (value, theirs[name]))
        bad = (a != b) & ~((a != a) & (b != b))
        if bad.any():
            return f"{name} at {np.argwhere(bad)[0].tolist()}"
    return "a NaN's payload"


def block_permutation(subject: Subject) -> Outcome:
    """Other physical pages change nothing."""
    derived = permute_pages(subject.call, np.random.default_rng(0))
    if derived is None:
        return Outcome(Verdict.SKIPPED, "this call has no pages to move")
    call, back = derived

    def run() -> Results:
        results = subject.run(call)
        return Results(back(results.values), results.damage)

    moved = run()
    if moved.digest == subject.first.digest:
        return Outcome(Verdict.PASS, "the same bits from other pages")
    found = steady(judged(subject, moved), moved, run, lambda one: judged(subject, one))
    if not found.bad:
        return found
    sentence = f"with the caches' pages in another order: {found.sentence}"
    return replace(found, sentence=sentence, fingerprints=("depends on physical pages", *found.fingerprints))


def batch_invariance(subject: Subject) -> Outcome:
    """Tokens alone, and in reversed order, agree with the batch."""
    call = subject.call
    tokens = _tokens(call)
    if tokens < 2:
        return Outcome(Verdict.SKIPPED, "the call has one token or none")
    rows = np.unique(np.linspace(0, tokens - 1, ROWS).astype(int))
    cases = [(f"token {row} alone", keep_tokens(call, [int(row)])) for row in rows]
    cases.append(("tokens in reversed order", reorder_tokens(call, list(range(tokens))[::-1])))
    worst = Outcome(Verdict.PASS, f"{len(cases)} other batches agree")
    for what, derived in cases:
        if derived is None:
            return Outcome(Verdict.SKIPPED, "the op's tokens cannot be taken apart")
        results, reference = subject.run(derived), subject.reference_of(derived)

        def judge(one: Results, derived: Call = derived, reference: Mapping[str, Any] = reference) -> Outcome:
            return judged(subject, one, derived, reference)

        found = steady(judge(results), results, lambda derived=derived: subject.run(derived), judge)
        if found.verdict > worst.verdict:
            worst = replace(found, sentence=f"{what}: {found.sentence}")
    return worst


def _tokens(call: Call) -> int:
    sizes = [len(call.args[n]) for n, arg in call.op.args.items() if arg.dims.startswith("token") and _given(call, n)]
    return sizes[0] if sizes else 0


def serial_equivalence(subject: Subject) -> Outcome:
    """Tokens in several calls, each on the caches that the one before left, agree with all of them in one."""
    tokens = _tokens(subject.call)
    if tokens < 2:
        return Outcome(Verdict.SKIPPED, "the call has one token or none")
    if tokens_of(subject.call) is None:
        return Outcome(Verdict.SKIPPED, "the op's tokens cannot be taken apart")
    cuts = {"in two calls": [tokens // 2], "in calls of several tokens": [*range(3, tokens, max(3, tokens // CALLS))]}
    if tokens <= CALLS:
        cuts["one by one"] = [*range(1, tokens)]
    worst = Outcome(Verdict.PASS, f"{len(cuts)} ways to divide the call agree")
    for what, at in cuts.items():
        bounds = [0, *at, tokens]
        results = _in_parts(subject, bounds)
        found = steady(
            judged(subject, results), results, lambda bounds=bounds: _in_parts(subject, bounds),
            lambda one: judged(subject, one),
        )  # fmt: skip
        if found.verdict > worst.verdict:
            worst = replace(found, sentence=f"tokens {what}: {found.sentence}")
    return worst


def _in_parts(subject: Subject, bounds: list[int]) -> Results:
    """Results of the call's tokens given in parts: outputs joined, caches as the last part left them."""
    call, parts, caches = subject.call, list[Results](), dict[str, Any]()
    for begin, end in pairwise(bounds):
        part = keep_tokens(call, range(begin, end))
        assert part is not None
        parts.append(subject.run(replace(part, args={**part.args, **caches})))
        caches = {name: parts[-1].values[name] for name in call.op.mutates}
    joined = {name: torch.cat([part.values[name] for part in parts]) for name in call.op.outputs}
    return Results({**joined, **caches}, tuple(words for part in parts for words in part.damage))


def _given(call: Call, name: str) -> bool:
    return call.args[name] is not None


def _no_invariants(op: Op) -> str:
    return "" if op.invariants else "the op declares none"


def _no_caches(op: Op) -> str:
    return "" if any(arg.kind == "cache" for arg in op.args.values()) else "the op has no cache"


def _no_state(op: Op) -> str:
    return "" if op.mutates else "the op leaves nothing behind for its next call"


def _no_tokens(op: Op) -> str:
    if op.mutates:
        return "the op's tokens act on each other through the cache"
    return "" if any(arg.dims.startswith("token") for arg in op.args.values()) else "the op has no tokens"


CHECKS = {
    check.name: check
    for check in (
        Check("differential", differential, "wrong results, bytes written outside the contract's slots", per="call"),
        Check("invariants", invariants, "results that no correct call can have", applies=_no_invariants),
        Check("repeatability", repeatability, "races", of_itself=True),
        Check("fresh-process", fresh_process, "state that outlives a call, luck at start", per="op", of_itself=True),
        Check("guards", guards, "reads and writes outside the call's own memory", of_itself=True),
        Check("block-permutation", block_permutation, "physical pages that matter", applies=_no_caches),
        Check("serial-equivalence", serial_equivalence, "state lost between calls", applies=_no_state),
        Check("batch-invariance", batch_invariance, "rows that see their neighbours", applies=_no_tokens),
        Check("graph-replay", graph_replay, "inputs or results kept from an earlier call"),
        Check("launch-config", launch_config, "results that depend on numbers of warps or stages"),
        Check("compile", offline_compile, "kernels that gfx942 or gfx950 cannot run", "op", asked=True),
    )
}


def chosen(names: tuple[str, ...]) -> list[Check]:
    """Checks by name, the differential one first; for none, all that need not be asked for."""
    names = tuple(name.replace("_", "-") for name in names)
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise DbgError(f"there is no check '{unknown[0]}'", f"checks: {', '.join(CHECKS)}")
    return [check for name, check in CHECKS.items() if name in names or not (names or check.asked)]


def faulted(fault: CandidateFault) -> Outcome:
    """The outcome of a run that ended without results."""
    kind = fault.fault.kind
    verdict = Verdict.TIMEOUT if kind == "hang" else Verdict.FAULT
    return Outcome(verdict, fault.fault.text, evidence={"kind": kind}, fingerprints=(kind,))
