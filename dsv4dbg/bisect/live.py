"""The candidate in the live forward: what isolation cannot show, such as two ops that are wrong only together.

Every trial is a forward in a fresh process with the candidate at a set of sites; each of its calls there is judged on
the inputs that it really had. Where the candidate kills the process nothing can be judged, and halving over the sites
finds the one that does it.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dsv4dbg.bisect.checks import faulted
from dsv4dbg.bisect.journal import Journal, Trial
from dsv4dbg.bisect.processes import CandidateFault, Walker
from dsv4dbg.bisect.protocol import Passing, Shipped, Walk
from dsv4dbg.bisect.search import smallest
from dsv4dbg.bisect.settings import Settings
from dsv4dbg.bisect.shared import Memory
from dsv4dbg.bisect.subject import Outcome, digest, judged, outcome_of
from dsv4dbg.compare import Verdict

CHECK = "in-place"
LAST = 1 << 30  # number of a finding: behind those of the isolated scan
FRAMES = 4


@dataclass(frozen=True)
class Failure:
    """How a live forward failed.

    Attributes:
        op: the op that diverged first, or that was running when the process died.
        sites: names of all of its sites that diverged; where the process died, the one it died in.
        first: path of the first of them.
    """

    op: str
    sites: tuple[str, ...]
    first: str
    outcome: Outcome

    def like(self, other: Failure | None) -> bool:
        """Whether another trial failed in the same way."""
        return other is not None and (self.op, self.outcome.verdict) == (other.op, other.outcome.verdict)


class Live:
    """Trials of a candidate in the live forward.

    Args:
        ops: name of a site -> its op, in the order of the forward; the sites at which the candidate may run.
    Attributes:
        trials: how many forwards were run.
    """

    def __init__(self, settings: Settings, journal: Journal, ops: Mapping[str, str]) -> None:
        self._settings, self._journal, self._ops = settings, journal, ops
        self._memory = Memory.create(1 + FRAMES)
        self.trials = 0

    def search(self) -> list[Trial]:
        """Find everything that fails: after each culprit, what is left is tried again."""
        found, left = list[Trial](), list(self._ops)
        while left:
            failure = self.fails(left)
            if failure is None:
                break
            cause = self._cause(left, failure)
            found.append(self._finding(failure, cause))
            gone = set(failure.sites) & set(cause) or set(cause)
            left = [name for name in left if name not in gone]
        return found

    def _cause(self, left: Sequence[str], failure: Failure) -> list[str]:
        """The sites that must be swapped for the failure to show."""
        own = [name for name in left if self._ops[name] == failure.op]
        alone = own if len(own) == len(left) or failure.like(self.fails(own)) else None
        if alone is not None and failure.outcome.verdict == Verdict.DIVERGED:
            return list(failure.sites)
        return smallest(alone or left, lambda names: failure.like(self.fails(list(names))))

    def _finding(self, failure: Failure, cause: Sequence[str]) -> Trial:
        outcome, ops = failure.outcome, sorted({self._ops[name] for name in cause})
        sentence = outcome.sentence
        if len(ops) > 1:
            sentence = f"only with {' and '.join(cause)} swapped together: {sentence}"
        site = failure.first if len(ops) > 1 or outcome.verdict == Verdict.DIVERGED else cause[0]
        op = self._ops[cause[0]] if len(ops) == 1 else failure.op
        return Trial(
            LAST, site, op, CHECK, outcome.verdict, sentence, outcome.where, outcome.fingerprints,
            {**outcome.evidence, "swapped": list(cause), "forwards": self.trials}, outcome.threshold,
        )  # fmt: skip

    def fails(self, names: Sequence[str]) -> Failure | None:
        """One trial: a forward with the candidate at these sites."""
        label = ", ".join(names) if len(names) < 3 else f"{len(names)} sites {zlib.crc32(' '.join(names).encode()):08x}"
        key = self._settings.request.model, label, "", CHECK
        known = self._journal.finished.get(key)
        if known is None:
            self._journal.begin(LAST, key)
            known = self._run(names, label)
            self._journal.end(known)
        self.trials += 1
        if not known.bad:
            return None
        evidence = dict(known.evidence)
        op, sites, first = evidence.pop("op"), evidence.pop("sites"), evidence.pop("first")
        outcome = Outcome(
            known.verdict, known.sentence, known.where, known.fingerprints, evidence, known.threshold, known.rate
        )
        return Failure(op, tuple(sites), first, outcome)

    def _run(self, names: Sequence[str], label: str) -> Trial:
        settings = self._settings
        walk = Walk(
            settings.request, frozenset(), tuple(range(1, 1 + FRAMES)), live=frozenset(names),
            candidate=settings.candidate,
        )  # fmt: skip
        begin = time.perf_counter()
        found: Failure | None = None
        passing = ""
        walker = Walker(self._memory, walk, settings.timeout)
        try:
            for message in walker:
                if isinstance(message, Passing):
                    passing = message.site
                elif isinstance(message, Shipped):
                    found = self._judge(message, found)
                    walker.free(message.frame)
        except CandidateFault as fault:
            name = passing.rpartition("/")[2]
            found = Failure(self._ops.get(name, ""), (name,), passing, faulted(fault))
        finally:
            walker.close(kill=True)
        seconds = time.perf_counter() - begin
        if found is None:
            sentence = f"{len(names)} sites agree"
            return Trial(LAST, label, "", CHECK, Verdict.PASS, sentence, seconds=seconds, model=settings.request.model)
        o = found.outcome
        evidence = {**o.evidence, "op": found.op, "sites": list(found.sites), "first": found.first}
        return Trial(
            LAST, label, "", CHECK, o.verdict, o.sentence, o.where, o.fingerprints, evidence, o.threshold, seconds,
            model=settings.request.model,
        )  # fmt: skip

    def _judge(self, shipped: Shipped, found: Failure | None) -> Failure | None:
        """Take one call of the live forward into account."""
        assert shipped.candidate is not None
        site = shipped.call.site
        if found is not None and (site.op != found.op or site.name in found.sites):
            return found
        reference, candidate = self._memory.values(shipped.reference), self._memory.values(shipped.candidate)
        if digest(reference) == digest(candidate):
            return found
        outcome = outcome_of(judged(self._memory.call(shipped.call), reference, candidate))
        if not outcome.bad:
            return found
        if found is None:
            return Failure(site.op, (site.name,), site.path, outcome)
        return replace(found, sites=(*found.sites, site.name))
