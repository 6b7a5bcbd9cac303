"""What a bisect found: its trials, the culprits among the ops, and what that cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4dbg.bisect.journal import Trial
from dsv4dbg.compare import Verdict
from dsv4dbg.site import Site

DIFFERENTIAL = "differential"


@dataclass(frozen=True)
class Culprit:
    """An op whose candidate is at fault.

    Attributes:
        trial: the earliest bad trial in the order of the forward.
        bad, tested: sites that are bad, and that were tested.
        layers, phases: where the bad ones are.
        checks: how many trials of each check are bad.
        reproducer: directory of the one that was written.
    """

    op: str
    trial: Trial
    bad: int
    tested: int
    layers: tuple[str, ...]
    phases: tuple[str, ...]
    checks: Mapping[str, int]
    reproducer: Path | None = None

    @property
    def site(self) -> Site:
        step, _, name = self.trial.site.rpartition("/")
        return Site(name, self.op, step)

    def to_json(self) -> dict[str, Any]:
        trial = self.trial
        return {
            "op": self.op, "model": trial.model, "site": trial.site, "layer": self.site.layer, "phase": self.site.phase,
            "verdict": trial.verdict.name, "check": trial.check, "sentence": trial.sentence,
            "fingerprint": list(trial.fingerprints), "where": dict(trial.where), "evidence": dict(trial.evidence),
            "threshold": dict(trial.threshold), "rate": trial.rate, "bad": self.bad, "tested": self.tested,
            "layers": list(self.layers), "phases": list(self.phases), "checks": dict(self.checks),
            "reproducer": str(self.reproducer) if self.reproducer else None,
        }  # fmt: skip


@dataclass
class Result:
    """Everything that a bisect knows in the end.

    Attributes:
        reference_s: seconds of the reference's forward alone; ``calls`` ops in it.
        untested: op -> why none of its calls was tested.
        reproducers: op -> the directory of the one that was asked for; ``unreproduced``: op -> why there is none.
    """

    trials: list[Trial] = field(default_factory=list)
    regimes: Mapping[str, bool] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    device: str = ""
    reference_s: float = 0.0
    calls: int = 0
    wall_s: float = 0.0
    untested: dict[str, str] = field(default_factory=dict)
    reproducers: dict[str, Path] = field(default_factory=dict)
    unreproduced: dict[str, str] = field(default_factory=dict)

    @property
    def tested(self) -> list[Trial]:
        return [t for t in self.trials if t.verdict != Verdict.SKIPPED]

    @property
    def culprits(self) -> list[Culprit]:
        """In the order of the forward."""
        found = {}
        for trial in sorted((t for t in self.trials if t.bad), key=lambda t: t.number):
            found.setdefault(trial.op, trial)
        return [self._culprit(op, first) for op, first in found.items()]

    def _culprit(self, op: str, first: Trial) -> Culprit:
        bad = [t for t in self.trials if t.op == op and t.bad]
        sites = [Site(t.site.rpartition("/")[2], op, t.site.rpartition("/")[0]) for t in bad]
        return Culprit(
            op, first, len({(t.model, t.site) for t in bad}),
            len({(t.model, t.site) for t in self.tested if t.op == op}),
            tuple(_unique(s.name.partition(".")[0] for s in sites)), tuple(_unique(s.phase for s in sites)),
            Counter(t.check for t in bad), self.reproducers.get(op),
        )  # fmt: skip

    @property
    def verdict(self) -> Verdict:
        """The gravest, where anything was tested."""
        return max((t.verdict for t in self.tested), default=Verdict.SKIPPED)

    @property
    def exit_code(self) -> int:
        if not self.tested:
            return 125
        return 1 if any(t.bad for t in self.trials) else 0

    @property
    def cost(self) -> dict[str, float]:
        """Seconds, summed over processes; ``forward_equivalents`` of the isolated differential scan without oracle."""
        scan = [t for t in self.trials if t.check == DIFFERENTIAL]
        others = [t for t in self.trials if t.check != DIFFERENTIAL]
        oracle = sum(t.oracle_s for t in scan)
        compared = sum(t.seconds for t in scan) - oracle
        return {
            "reference_s": self.reference_s, "candidate_s": sum(t.candidate_s for t in scan), "oracle_s": oracle,
            "checks_s": sum(t.seconds for t in others), "wall_s": self.wall_s,
            "forward_equivalents": (self.reference_s + compared) / self.reference_s if self.reference_s else 0.0,
        }  # fmt: skip

    def counts(self) -> dict[str, int]:
        """Sites by what happened to them."""
        sites: dict[str, set[Verdict]] = {}
        for trial in self.trials:
            sites.setdefault(f"{trial.model}:{trial.site}", set()).add(trial.verdict)
        tested = {site for site, verdicts in sites.items() if verdicts - {Verdict.SKIPPED}}
        passed = {site for site in tested if max(sites[site] - {Verdict.SKIPPED}) <= Verdict.ROUNDING}
        return {
            "tested": len(tested), "passed": len(passed), "judged": len(tested), "unjudged": 0,
            "skipped": len(sites) - len(tested),
        }  # fmt: skip


def _unique(names: Any) -> Sequence[str]:
    return list(dict.fromkeys(names))
