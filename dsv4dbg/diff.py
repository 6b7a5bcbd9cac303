"""Two traces side by side: where they part first, and what of that an op is to blame for (no torch).

`compare_traces` walks both in execution order and yields one `SiteDiff` per site, reading one tensor pair at a time.
A site whose inputs are bit-equal and whose outputs are not is DIVERGED when plan, numerics and environment agree there;
where they do not, or where the inputs already differed, a *judge* (`dsv4dbg.bisect.rejudge`, which has the weights)
decides on the candidate's own inputs, and without one the site counts as unjudged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dsv4dbg.compare import Verdict
from dsv4dbg.errors import DbgError
from dsv4dbg.site import BLOCK
from dsv4dbg.trace.reader import Trace
from dsv4dbg.trace.records import SiteRecord, TensorSpec, view_bits
from dsv4dbg.verdict.metrics import rows_apart, same_bits

SAME_RUN = ("model", "prompt_tokens", "workload")  # manifest entries in which traces must agree to be compared
FLOATS = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class TensorDiff:
    """One tensor of a site in both traces.

    Attributes:
        error: relative L2 error of the whole tensor; ``row_error`` of its worst row, which is ``row``.
        share: share of elements that differ.
        reason: for tensors that cannot be subtracted (other shape, indices, bytes), what differs.
    """

    equal: bool
    error: float = 0.0
    row_error: float = 0.0
    row: int = 0
    share: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class SiteDiff:
    """One site in both traces.

    Attributes:
        verdict: PASS (bit-equal outputs), ROUNDING, DRIFT or DIVERGED.
        judged: whether the verdict is known; an unjudged site is DRIFT.
        inputs_equal: whether both sites were given the same bits.
        intended: numerics switches of this op in which the two captures differ on purpose.
        outputs: differences by output (mutated caches under their argument's name).
        sentence: why, in one line.
    """

    record: SiteRecord
    verdict: Verdict
    judged: bool
    inputs_equal: bool
    outputs: Mapping[str, TensorDiff] = field(default_factory=dict)
    intended: tuple[str, ...] = ()
    sentence: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)
    fingerprints: tuple[str, ...] = ()

    @property
    def worst(self) -> TensorDiff:
        return max(self.outputs.values(), key=lambda t: (not t.equal, t.error), default=TensorDiff(True))


@dataclass(frozen=True)
class Decision:
    """What a judge says of a site on the candidate's own inputs."""

    verdict: Verdict
    sentence: str
    where: Mapping[str, Any] = field(default_factory=dict)
    fingerprints: tuple[str, ...] = ()


# judge(reference record, candidate record) -> decision, or None where it cannot judge
Judge = Callable[[SiteRecord, SiteRecord], Decision | None]


@dataclass
class Diff:
    """The whole comparison; filled as `compare_traces` goes.

    Attributes:
        only_reference, only_candidate: site paths that one trace lacks.
    """

    sites: list[SiteDiff] = field(default_factory=list)
    only_reference: list[str] = field(default_factory=list)
    only_candidate: list[str] = field(default_factory=list)

    @property
    def first(self) -> SiteDiff | None:
        """The site to look at first: the first DIVERGED one, else the first that differs at all."""
        diverged = next((s for s in self.sites if s.verdict == Verdict.DIVERGED), None)
        return diverged or self.first_difference

    @property
    def first_difference(self) -> SiteDiff | None:
        return next((s for s in self.sites if s.verdict != Verdict.PASS), None)

    @property
    def identical(self) -> bool:
        return all(s.verdict == Verdict.PASS and s.inputs_equal for s in self.sites) and not (
            self.only_reference or self.only_candidate
        )

    @property
    def verdict(self) -> Verdict:
        return max((s.verdict for s in self.sites), default=Verdict.PASS)

    def count(self, verdict: Verdict) -> int:
        return sum(s.verdict == verdict for s in self.sites)

    @property
    def unjudged(self) -> int:
        return sum(not s.judged for s in self.sites)


def check_comparable(reference: Trace, candidate: Trace) -> None:
    """Refuse traces of different runs: every difference would be noise."""
    for key in SAME_RUN:
        a, b = reference.manifest.get(key), candidate.manifest.get(key)
        if key == "model" and reference.manifest.get("weights") == candidate.manifest.get("weights"):
            continue
        if a != b:
            raise DbgError(
                f"the traces cannot be compared: {key} is {_short(a)} in {reference.path} and {_short(b)} in {candidate.path}",
                "capture the same prompt with the same model twice",
            )


def compare_traces(
    reference: Trace, candidate: Trace, intended: Mapping[str, tuple[str, ...]], judge: Judge | None = None
) -> Iterator[SiteDiff]:
    """Compare all sites that both traces hold, in the candidate's execution order.

    Args:
        intended: op -> numerics switches in which the two captures differ on purpose.
        judge: decides about sites that bits alone cannot.
    """
    walk = _Walk(reference, candidate)
    same_place = _same_environment(reference, candidate)
    known = {record.site.path: record for record in reference.sites()}
    for other in candidate.sites():
        record = known.get(other.site.path)
        if record is None:
            continue
        inputs = walk.inputs(record, other)
        outputs = walk.outputs(record, other)
        if record.complete != other.complete:
            outputs["finished"] = TensorDiff(False, reason="the call did not finish in one of the traces")
        differs = [name for name, t in outputs.items() if not t.equal]
        switches = intended.get(other.site.op, ())
        site = SiteDiff(other, Verdict.PASS, True, inputs, outputs, switches if differs else ())
        if not differs:
            yield site
        elif other.site.op == BLOCK:
            yield replace(site, verdict=Verdict.DRIFT, sentence="a block boundary: see the ops inside")
        elif inputs and same_place and not switches and record.implementation == other.implementation:
            text = f"inputs are bit-equal, {' and '.join(differs)} not: this op"
            yield replace(site, verdict=Verdict.DIVERGED, sentence=text)
        else:
            yield _decided(site, judge(record, other) if judge else None)


def _decided(site: SiteDiff, decision: Decision | None) -> SiteDiff:
    """A site with its judge's decision; what is explained but had other inputs is judged DRIFT."""
    intent = f"differs by intent: {', '.join(site.intended)}" if site.intended and site.inputs_equal else ""
    if decision is None:
        known = (
            "inputs are bit-equal, what computed them is not the same"
            if site.inputs_equal
            else "inputs already differed"
        )
        return replace(site, verdict=Verdict.DRIFT, judged=False, sentence=f"{intent or known}; not judged")
    explained = decision.verdict <= Verdict.ROUNDING
    drift = explained and (not site.inputs_equal or bool(intent))
    return replace(
        site, verdict=Verdict.DRIFT if drift else decision.verdict, where=decision.where,
        sentence=intent if intent and explained else decision.sentence, fingerprints=decision.fingerprints,
    )  # fmt: skip


def missing_sites(reference: Trace, candidate: Trace) -> tuple[list[str], list[str]]:
    """Paths of sites that only one of the traces holds: (only reference, only candidate)."""
    a = {r.site.path: None for r in reference.sites()}
    b = {r.site.path: None for r in candidate.sites()}
    return [p for p in a if p not in b], [p for p in b if p not in a]


class _Walk:
    """Compares tensors once each: an input that is an earlier output is not read again; caches by their writes."""

    def __init__(self, reference: Trace, candidate: Trace) -> None:
        self._traces = (reference, candidate)
        self._known: dict[tuple[str, str], TensorDiff] = {}
        self._changed: set[str] = {
            name for name, spec in candidate.caches.items() if reference.caches.get(name) != spec
        }  # caches whose contents differ by now

    def inputs(self, a: SiteRecord, b: SiteRecord) -> bool:
        if set(a.inputs) != set(b.inputs) or a.absent != b.absent or a.weights != b.weights or _attrs(a) != _attrs(b):
            return False
        if {k: (c.cache, c.version) for k, c in a.caches.items()} != {
            k: (c.cache, c.version) for k, c in b.caches.items()
        }:
            return False
        if any(c.cache in self._changed for c in b.caches.values()):
            return False
        return all(self._tensor(a, b, f"in/{name}").equal for name in b.inputs)

    def outputs(self, a: SiteRecord, b: SiteRecord) -> dict[str, TensorDiff]:
        found = {}
        for name in {**a.outputs, **b.outputs}:
            if name in a.outputs and name in b.outputs:
                found[name] = self._tensor(a, b, f"out/{name}")
            else:
                found[name] = TensorDiff(False, reason="only one of the traces has it")
        for arg in {**a.mutated, **b.mutated}:
            found[arg] = self._writes(a, b, arg)
        return found

    def _writes(self, a: SiteRecord, b: SiteRecord, arg: str) -> TensorDiff:
        parts = [set(r.mutated[arg].tensors) if arg in r.mutated else set() for r in (a, b)]
        result = TensorDiff(False, reason="the writes have other parts")
        if parts[0] == parts[1]:
            diffs = [self._tensor(a, b, f"mut/{arg}/{part}") for part in sorted(parts[0])]
            result = next((d for d in diffs if not d.equal), TensorDiff(True))
        if not result.equal and arg in b.caches:
            self._changed.add(b.caches[arg].cache)
        return result

    def _tensor(self, a: SiteRecord, b: SiteRecord, name: str) -> TensorDiff:
        first, second = a.tensors()[name], b.tensors()[name]
        key = (first.origin or f"{a.site.path}/{name}", second.origin or f"{b.site.path}/{name}")
        key = (key[0].removeprefix("/steps/"), key[1].removeprefix("/steps/"))
        if key not in self._known:
            self._known[key] = self._compare(a, b, name, first, second)
        return self._known[key]

    def _compare(self, a: SiteRecord, b: SiteRecord, name: str, first: TensorSpec, second: TensorSpec) -> TensorDiff:
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return TensorDiff(False, reason=f"{first.dtype} {first.shape} and {second.dtype} {second.shape}")
        x, y = self._traces[0].read(a, name), self._traces[1].read(b, name)
        if same_bits(x, y):
            return TensorDiff(True)
        return tensor_diff(x, y, first.dtype)


def tensor_diff(x: np.ndarray, y: np.ndarray, dtype: str) -> TensorDiff:
    """How two unequal tensors (raw bits, same shape and dtype) differ: rows are the first dim, one pass."""
    rows = x.shape[0] if x.ndim else 1
    different = x.reshape(rows, -1) != y.reshape(rows, -1)
    share = float(np.count_nonzero(different) / different.size)
    row = int(np.argmax(different.any(axis=1)))
    if dtype not in FLOATS:
        return TensorDiff(False, share=share, row=row, reason=f"{share:.1%} of the {dtype} values differ")
    found = rows_apart(view_bits(x, dtype).reshape(rows, -1), view_bits(y, dtype).reshape(rows, -1))
    with np.errstate(all="ignore"):
        errors = np.sqrt(found["difference2"] / np.maximum(found["a2"], np.float32(1e-30)))
        errors = np.where(np.isfinite(errors), errors, np.inf)
        whole = float(
            np.sqrt(found["difference2"].sum(dtype=np.float64) / max(found["a2"].sum(dtype=np.float64), 1e-30))
        )
    worst = int(np.argmax(errors))
    return TensorDiff(False, whole if np.isfinite(whole) else float("inf"), float(errors[worst]), worst, share)


def _attrs(record: SiteRecord) -> dict[str, Any]:
    """Scalar arguments that are inputs; the numerics profile is judged by its switches."""
    return {k: v for k, v in record.attrs.items() if k != "numerics"}


def _same_environment(a: Trace, b: Trace) -> bool:
    return a.manifest.get("environment") == b.manifest.get("environment")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
