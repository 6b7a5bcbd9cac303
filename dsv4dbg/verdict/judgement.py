"""What a judge says: per output a verdict with its numbers, and the gravest of them for the call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsv4dbg.compare import Verdict
from dsv4dbg.verdict.bounds import Clause


@dataclass(frozen=True)
class OutputJudgement:
    """One output (or mutated cache) of a call.

    Attributes:
        kind: name of the comparator.
        errors: relative L2 errors against the oracle: ``reference``, ``candidate``; and in units of the derived
            noise: ``reference sigma``, ``candidate sigma``.
        clauses: every test with its value, its limit and the limit's source; empty where bits are equal.
        at: coordinates of the worst place by dim name.
        flips: decisions that differ from the oracle's, ``excused`` and ``not excused``.
        fingerprints: shapes of known faults that fit, best first.
        notes: further numbers by name (KL and top-1 of logits, rows in another order).
    """

    name: str
    kind: str
    verdict: Verdict
    sentence: str
    errors: Mapping[str, float] = field(default_factory=dict)
    clauses: tuple[Clause, ...] = ()
    at: Mapping[str, Any] = field(default_factory=dict)
    flips: Mapping[str, int] = field(default_factory=dict)
    fingerprints: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def worst(self) -> Clause | None:
        """The clause that comes nearest to its limit, or breaks it most."""
        return max(self.clauses, key=lambda c: c.excess, default=None)


@dataclass(frozen=True)
class Judgement:
    """All outputs of one call of an op."""

    op: str
    outputs: Mapping[str, OutputJudgement]

    @property
    def verdict(self) -> Verdict:
        return max((o.verdict for o in self.outputs.values()), default=Verdict.PASS)

    @property
    def worst(self) -> OutputJudgement | None:
        """The output that decides, and among equals the one nearest to its limits."""
        return max(self.outputs.values(), key=lambda o: (o.verdict, o.worst.excess if o.worst else 0.0), default=None)

    @property
    def sentence(self) -> str:
        worst = self.worst
        return f"{self.op}: {worst.sentence}" if worst else f"{self.op} yields nothing"


def broken_decision(name: str, kind: str, sentence: str, **more: Any) -> OutputJudgement:
    return OutputJudgement(name, kind, Verdict.DIVERGED, sentence, **more)
