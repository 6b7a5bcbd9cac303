"""Two traces side by side: where they part first, and what of that an op is to blame for (no torch).

`compare_traces` walks both in the order in which the calls finished and yields one `SiteDiff` per site that both
have. A site whose inputs are bit-equal and whose outputs are not is DIVERGED when implementation, numerics and
environment agree there. Where they do not, or where the inputs already differed, a *judge* (`dsv4dbg.bisect.rejudge`,
which has the weights) decides on the candidate's own inputs; without one the site counts as unjudged.

Inputs are tensors, scalars, weights and the content of caches, of which `CacheWatch` knows where it differs. A block
boundary is a view of the ops inside it and never judged itself, unless none of them was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dsv4dbg.compare import Verdict
from dsv4dbg.errors import DbgError
from dsv4dbg.site import BLOCK
from dsv4dbg.trace.reader import Trace
from dsv4dbg.trace.records import SiteRecord
from dsv4dbg.trace.side_by_side import EQUAL, CacheWatch, SideBySide, TensorDiff
from dsv4dbg.trace.text import listed, one_line, shorten

SAME_RUN = ("model", "prompt_tokens", "workload")  # manifest entries in which traces must agree to be compared
_PARTS = {
    "slots": "written at other slots",
    "stray_offsets": "bytes outside the call's slots changed",
    "stray_bytes": "bytes outside the call's slots changed",
    "records": "",
}  # of a cache write, the most telling first, and what a difference in it means
_NOT_ITS_FAULT = ("KeyboardInterrupt", "DbgError", "Untestable")  # errors that end a capture from outside
AHEAD = 8  # sites whose tensors are compared before their turn


@dataclass(frozen=True)
class Decision:
    """What a judge says of a site on the candidate's own inputs.

    Attributes:
        exact: the candidate's outputs are those of the reference implementation bit for bit.
        outputs: per output what the judge measured, as JSON.
    """

    verdict: Verdict
    sentence: str
    exact: bool = False
    where: Mapping[str, Any] = field(default_factory=dict)
    fingerprints: tuple[str, ...] = ()
    outputs: Mapping[str, Any] = field(default_factory=dict)


# judge(reference record, candidate record) -> decision, or in a few words why there is none
Judge = Callable[[SiteRecord, SiteRecord], Decision | str]


@dataclass(frozen=True)
class SiteDiff:
    """One site in both traces.

    Attributes:
        record, reference: the candidate's and the reference's record of the call.
        verdict: PASS (outputs bit-equal), ROUNDING, DRIFT, DIVERGED or FAULT.
        unjudged: why the verdict is not known (it then reads DRIFT, or PASS where only inputs differ); else empty.
        inputs: what of the inputs differs, in words; empty where all are bit-equal.
        outputs: differences by output, mutated caches under their argument's name.
        intended: in what the two captures differ on purpose at this op.
        sentence: why, in one line.
        decision: the judge's, if it was asked.
        view: a block boundary of whose ops some were compared, or a call that a filter left out and whose cache writes
            were kept: no evidence of its own.
    """

    record: SiteRecord
    reference: SiteRecord
    verdict: Verdict = Verdict.PASS
    unjudged: str = ""
    inputs: tuple[str, ...] = ()
    outputs: Mapping[str, TensorDiff] = field(default_factory=dict)
    intended: tuple[str, ...] = ()
    sentence: str = ""
    decision: Decision | None = None
    view: bool = False

    @property
    def differs(self) -> list[str]:
        """Names of the outputs that are not bit-equal."""
        return [name for name, t in self.outputs.items() if not t.equal]

    @property
    def worst(self) -> tuple[str, TensorDiff]:
        """The output that differs most, with its name."""

        def order(item: tuple[str, TensorDiff]) -> tuple[bool, float, float]:
            return not item[1].equal, item[1].error, item[1].share

        return max(self.outputs.items(), key=order, default=("", EQUAL))


@dataclass
class Diff:
    """The whole comparison; filled as `compare_traces` goes.

    Attributes:
        sites: one per site that both traces have and finished.
        only_reference, only_candidate: paths of sites that one trace lacks or did not finish.
    """

    sites: list[SiteDiff] = field(default_factory=list)
    only_reference: list[str] = field(default_factory=list)
    only_candidate: list[str] = field(default_factory=list)

    @property
    def judgeable(self) -> list[SiteDiff]:
        return [s for s in self.sites if not s.view]

    @property
    def first(self) -> SiteDiff | None:
        """The site to look at first: the first at fault, else the first that differs at all."""
        return next((s for s in self.judgeable if s.verdict >= Verdict.DIVERGED), None) or self.first_difference

    @property
    def first_difference(self) -> SiteDiff | None:
        return next((s for s in self.judgeable if s.verdict != Verdict.PASS), None)

    @property
    def identical(self) -> bool:
        return not any(s.differs or s.inputs or s.verdict for s in self.sites) and not self.missing

    @property
    def missing(self) -> int:
        return len(self.only_reference) + len(self.only_candidate)

    @property
    def verdict(self) -> Verdict:
        return max((s.verdict for s in self.judgeable), default=Verdict.PASS)

    def count(self, verdict: Verdict) -> int:
        """How many sites have this verdict for sure."""
        return sum(s.verdict == verdict and not s.unjudged for s in self.judgeable)

    @property
    def unjudged(self) -> list[SiteDiff]:
        return [s for s in self.judgeable if s.unjudged]

    @property
    def exit_code(self) -> int:
        """1: an op is at fault; 125: outputs differ and it is not known why; 0: all that differs is explained."""
        if self.verdict >= Verdict.DIVERGED:
            return 1
        return 125 if any(s.verdict for s in self.unjudged) else 0


@dataclass(frozen=True)
class Intent:
    """In what two captures differ on purpose.

    Attributes:
        switches: op -> switches of the numerics profile that it reads and that differ.
        formats: whether the caches were asked for in different formats.
    """

    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    formats: bool = False


def check_comparable(reference: Trace, candidate: Trace) -> None:
    """Refuse traces of different runs: every difference would be noise. Runs may differ in length."""
    for key in SAME_RUN:
        a, b = (_without_length(key, trace.manifest.get(key)) for trace in (reference, candidate))
        weights = [trace.manifest.get("weights") for trace in (reference, candidate)]
        if a == b or (key == "model" and weights[0] is not None and weights[0] == weights[1]):
            continue
        raise DbgError(
            f"the traces cannot be compared: {key.replace('_', ' ')} is {shorten(a)} in {reference.path} and "
            f"{shorten(b)} in {candidate.path}",
            "capture the same prompt with the same model and steps twice",
        )


def _without_length(key: str, value: Any) -> Any:
    """A manifest entry without the number of decode steps: steps that both runs took can be compared."""
    if key == "workload" and isinstance(value, dict) and "decode" in value:
        return {k: v for k, v in value.items() if k != "decode"}
    return value


def finished_in_both(reference: Trace, candidate: Trace) -> tuple[list[tuple[SiteRecord, SiteRecord]], Diff]:
    """Pairs of records in the order in which the candidate's calls finished, and a `Diff` that lists the others."""
    known = {record.site.path: record for record in reference.sites() if record.complete}
    records = sorted((r for r in candidate.sites() if r.complete), key=lambda r: r.finished or 0)
    pairs = [(known[r.site.path], r) for r in records if r.site.path in known]
    common = {r.site.path for _, r in pairs}
    only_candidate = [r.site.path for r in records if r.site.path not in common]
    return pairs, Diff([], [path for path in known if path not in common], only_candidate)


def compare_traces(
    reference: Trace,
    candidate: Trace,
    pairs: Sequence[tuple[SiteRecord, SiteRecord]],
    intent: Intent | None = None,
    judge: Judge | None = None,
    threads: int = 2,
) -> Iterator[SiteDiff]:
    """Compare the sites that both traces hold, one `SiteDiff` each, in order.

    Args:
        pairs: from `finished_in_both`.
        judge: decides about sites that bits alone cannot; None leaves them unjudged.
        threads: that compare tensors ahead of the walk.
    """
    walk = _Walk(reference, candidate, intent or Intent(), judge)
    with SideBySide(reference, candidate, threads) as tensors:
        ahead: list[_Pair] = []
        for a, b in pairs:
            ahead.append(_Pair(a, b, tensors))
            if len(ahead) > AHEAD:
                yield walk.site(ahead.pop(0))
        for pair in ahead:
            yield walk.site(pair)


class _Pair:
    """Two records of one site, whose tensors are being compared."""

    def __init__(self, a: SiteRecord, b: SiteRecord, tensors: SideBySide) -> None:
        self.a, self.b = a, b
        first, second = a.tensors(), b.tensors()
        self._found = {n: tensors.compare(a, b, n, first[n], second[n]) for n in first if n in second}
        self._only = {name for name in {**first, **second} if (name in first) != (name in second)}

    @property
    def only_writes(self) -> bool:
        """Whether a filter left the call out of a trace and kept only its writes: every op has tensors as inputs."""
        return any(r.site.op != BLOCK and bool(r.mutated) and not r.inputs for r in (self.a, self.b))

    def tensor(self, name: str) -> TensorDiff:
        if name in self._only:
            return TensorDiff(reason="only one of the traces has it")
        return self._found[name]()

    def outputs(self) -> dict[str, TensorDiff]:
        """Outputs and cache writes. A call that a filter kept for its writes only has no outputs to compare."""
        a, b = self.a, self.b
        found = {} if self.only_writes else {name: self.tensor(f"out/{name}") for name in {**a.outputs, **b.outputs}}
        return found | {arg: self.write(arg) for arg in {**a.mutated, **b.mutated}}

    def write(self, arg: str) -> TensorDiff:
        """A cache write: its records where the slots agree, else the part that does not."""
        if (arg in self.a.mutated) != (arg in self.b.mutated):
            return TensorDiff(reason="only one of the traces wrote to it")
        parts = {**self.a.mutated[arg].tensors, **self.b.mutated[arg].tensors}
        diffs = {part: self.tensor(f"mut/{arg}/{part}") for part in parts}
        differ = {part: d for part, d in diffs.items() if not d.equal}
        for part, words in _PARTS.items():
            if part in differ:
                return replace(differ[part], reason=words) if words else differ[part]
        return EQUAL


@dataclass
class _Inside:
    """What a block boundary stands for: the ops compared inside it, in one step."""

    sites: int = 0
    differing: int = 0
    verdict: Verdict = Verdict.PASS
    unjudged: str = ""
    caches: dict[str, str] = field(default_factory=dict)  # how they differed when the block first saw them, or ""


class _Walk:
    """Goes from site to site; knows which caches differ by now and what the ops of a block came to."""

    def __init__(self, reference: Trace, candidate: Trace, intent: Intent, judge: Judge | None) -> None:
        self._caches = CacheWatch(reference, candidate)
        self._intent = intent
        self._judge = judge
        self._same_place = reference.manifest.get("environment") == candidate.manifest.get("environment")
        self._same_plan = reference.manifest.get("plan") == candidate.manifest.get("plan")
        self._inside: dict[tuple[str, str], _Inside] = {}

    def site(self, pair: _Pair) -> SiteDiff:
        a, b = pair.a, pair.b
        outputs = pair.outputs()
        if pair.only_writes:
            return self._left_out(SiteDiff(b, a, outputs=outputs))
        inputs, by_intent = self._inputs(pair)
        site = SiteDiff(b, a, inputs=inputs, outputs=outputs)
        intended = (*self._intent.switches.get(b.site.op, ()), *by_intent)
        if b.site.op == BLOCK:
            return self._block(site)
        self._take_writes(site)
        if site.differs:
            site = replace(site, intended=intended)
            explained = set(inputs) <= set(by_intent)
            same = self._same_place and not intended and a.implementation == b.implementation and a.site.op == b.site.op
            site = self._at_fault(site) if explained and same else self._decided(site, explained)
        elif inputs:
            site = self._unmoved(site)
        self._note(site)
        return site

    def _inputs(self, pair: _Pair) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What differs of the inputs, in words; and which of that is so on purpose."""
        a, b = pair.a, pair.b
        found, intended = [], []
        if a.site.op != b.site.op:
            found.append("the op")
        given, absent = ({**a.inputs, **b.inputs}, {*a.absent, *b.absent})
        found += [name for name in given if not pair.tensor(f"in/{name}").equal]
        found += [name for name in sorted(absent) if name not in given and (name in a.absent) != (name in b.absent)]
        found += [name for name in {**a.weights, **b.weights} if a.weights.get(name) != b.weights.get(name)]
        for name in {**a.attrs, **b.attrs}:
            x, y = a.attrs.get(name), b.attrs.get(name)
            if x != y and name != "numerics":  # of the profile only what an op reads of it counts
                found.append(f"{name} ({shorten(y)}, not {shorten(x)})")
                if isinstance(x, str) and isinstance(y, str) and (self._intent.switches or self._intent.formats):
                    intended.append(found[-1])  # a number format that follows from numerics or caches
        for arg in {**a.caches, **b.caches}:
            words = self._caches.differ(a.caches.get(arg), b.caches.get(arg))
            if words:
                found.append(f"cache {words}")
                if self._intent.formats and self._caches.of_other_format(b.caches.get(arg)):
                    intended.append(found[-1])
            self._saw(b, arg, words)
        if b.site.op == BLOCK:
            inside = self._inside.get((b.site.step, b.site.name), _Inside())
            found += [f"cache {words}" for words in inside.caches.values() if words]
        # names of arguments and caches come from files
        return tuple(map(one_line, found)), tuple(map(one_line, intended))

    def _take_writes(self, site: SiteDiff) -> None:
        for arg in {**site.reference.mutated, **site.record.mutated}:
            self._caches.wrote(site.reference, site.record, arg, site.outputs[arg])

    def _left_out(self, site: SiteDiff) -> SiteDiff:
        """A call of which only the cache writes were kept: it tells what the caches hold, and is no site to judge."""
        for arg in site.record.caches:
            self._saw(site.record, arg, self._caches.differ(site.reference.caches.get(arg), site.record.caches[arg]))
        self._take_writes(site)
        return replace(site, view=True, verdict=Verdict.DRIFT if site.differs else Verdict.PASS)

    def _saw(self, record: SiteRecord, arg: str, words: str) -> None:
        """Note for the blocks around a call how a cache differed when they first met it."""
        if arg in record.caches:
            for inside in self._around(record):
                inside.caches.setdefault(record.caches[arg].cache, words)

    def _around(self, record: SiteRecord) -> Iterator[_Inside]:
        """The blocks that a call lies in: ``L3.attn.wq_b`` in ``L3.attn`` and ``L3``."""
        name = record.site.name
        while name := name.rpartition(".")[0]:
            yield self._inside.setdefault((record.site.step, name), _Inside())

    def _note(self, site: SiteDiff) -> None:
        for inside in self._around(site.record):
            inside.sites += 1
            inside.differing += site.verdict != Verdict.PASS
            inside.verdict = max(inside.verdict, site.verdict)
            inside.unjudged = inside.unjudged or site.unjudged

    def _at_fault(self, site: SiteDiff) -> SiteDiff:
        """Equal inputs, code and place, other bits. The judge cannot acquit, but says what it looks like."""
        names = " and ".join(site.differs)
        same = "inputs, implementation and environment are equal"
        decision = self._judge(site.reference, site.record) if self._judge else ""
        if isinstance(decision, str):
            return replace(site, verdict=Verdict.DIVERGED, sentence=f"{names} differs although {same}")
        if decision.exact:
            text = f"{names} differs although {same}; the candidate's is what torch yields here, the reference's is not"
        elif decision.verdict <= Verdict.ROUNDING:
            text = f"{names} differs although {same} (within rounding: is it repeatable?)"
        else:
            text = decision.sentence
        return replace(site, verdict=Verdict.DIVERGED, sentence=text, decision=decision)

    def _decided(self, site: SiteDiff, explained: bool) -> SiteDiff:
        """A site with its judge's decision. What is right on inputs that already differed is DRIFT.

        Args:
            explained: inputs are equal but for what differs on purpose.
        """
        intent = f"differs on purpose: {', '.join(site.intended)}" if site.intended and explained else ""
        decision = self._judge(site.reference, site.record) if self._judge else "no judge"
        if isinstance(decision, str):
            if site.inputs and not intent:
                known = f"inputs already differed ({listed(site.inputs)})"
            else:
                known = intent or "inputs are equal, implementation or environment are not"
            return replace(site, verdict=Verdict.DRIFT, unjudged=decision, sentence=known)
        site = replace(site, decision=decision, verdict=decision.verdict, sentence=decision.sentence)
        if decision.verdict > Verdict.ROUNDING:
            return site
        if intent:
            return replace(site, verdict=Verdict.DRIFT, sentence=intent)
        if site.inputs:
            text = "equal to torch on its own inputs" if decision.exact else f"on its own inputs: {decision.sentence}"
            return replace(site, verdict=Verdict.DRIFT, sentence=text)
        return replace(site, verdict=Verdict.ROUNDING)

    def _unmoved(self, site: SiteDiff) -> SiteDiff:
        """Other inputs, the same outputs: right where the judge says so."""
        decision = self._judge(site.reference, site.record) if self._judge else "no judge"
        if isinstance(decision, str):
            return replace(
                site, unjudged=decision, sentence=f"outputs are equal, inputs are not ({listed(site.inputs)})"
            )
        if decision.verdict <= Verdict.ROUNDING:
            return replace(site, decision=decision)
        text = f"outputs did not follow the inputs ({listed(site.inputs)}): {decision.sentence}"
        return replace(site, verdict=decision.verdict, sentence=text, decision=decision)

    def _block(self, site: SiteDiff) -> SiteDiff:
        """A boundary: what its ops came to; evidence of its own only where none of those that differ was captured."""
        b = site.record
        inside = self._inside.pop((b.site.step, b.site.name), _Inside())
        site = replace(site, view=inside.sites > 0)
        if inside.differing:
            text = f"{inside.differing} of {inside.sites} ops inside differ"
            return replace(site, verdict=inside.verdict, unjudged=inside.unjudged, sentence=text)
        if not site.differs:
            return site
        if site.inputs or not (self._same_place and self._same_plan and not self._intent.switches):
            known = (
                f"inputs already differed ({listed(site.inputs)})"
                if site.inputs
                else "numerics, plan or environment differ"
            )
            words = "a block cannot be judged, and no op inside that differs was captured"
            return replace(site, verdict=Verdict.DRIFT, unjudged=words, sentence=known, view=False)
        what = "no op inside that differs was captured" if inside.sites else "no op inside was captured"
        text = f"inputs are bit-equal, {' and '.join(site.differs)} is not; {what}"
        return replace(site, verdict=Verdict.DIVERGED, sentence=text, view=False)


def add_fault(result: Diff, reference: Trace, candidate: Trace) -> None:
    """Add the call in which an error ended the candidate's capture, if the reference got past it, as a FAULT."""
    error = one_line(str(candidate.manifest.get("error", "")))
    if not error or error.startswith(_NOT_ITS_FAULT):
        return
    last = [r for r in candidate.sites() if not r.complete and r.site.op != BLOCK]
    passed = {r.site.path: r for r in reference.sites() if r.complete}
    if last and last[-1].site.path in passed:
        text = f"the candidate's capture ended inside this call: {error}"
        result.sites.append(SiteDiff(last[-1], passed[last[-1].site.path], Verdict.FAULT, sentence=text))
