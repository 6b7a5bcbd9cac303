"""A reproducer's criteria against the judge: zoo cases are wrong, the reference and our Triton kernels are right."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from short_scans import example_calls, results

from dsv4dbg.bisect.criteria import broken, criteria
from dsv4dbg.bisect.reproducer import oracle_of
from dsv4dbg.bisect.subject import judged
from dsv4dbg.compare import Verdict
from dsv4dbg.kernels.numerics import OFFICIAL
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.registry import registry
from dsv4dbg.kernels.table import Call
from dsv4dbg.kernels.zoo.case import Case, cases

CASES = [case for case in cases().values() if case.kind == "values"]
QUICK = ("rms_norm", "fp8_linear", "moe_router", "inv_rope")
ELSEWHERE = {  # these show at sizes or layers that no example has
    "rope-table-ends", "draft-layer-compact", "one-layer", "upper-heads", "scale-transposed", "stray-block-row",
}  # fmt: skip


def shapes(values: dict) -> dict:
    return {n: (v.data if isinstance(v, Cache) else v).shape for n, v in values.items()}


def diverged(case: Case) -> Iterator[tuple[Call, dict, dict]]:
    """Calls at which a case is wrong, with the results of reference and case."""
    for call in example_calls(case.op, 0):
        reference, candidate = results(call), results(call, f"zoo:{case.name}")
        if shapes(reference) != shapes(candidate) or judged(call, reference, candidate).verdict == Verdict.DIVERGED:
            yield call, reference, candidate


def held(case: Case, count: int) -> None:
    found = list(islice(diverged(case), count))
    assert bool(found) != (case.name in ELSEWHERE)
    for call, reference, candidate in found:
        oracle = oracle_of(call)
        limits = criteria(call.op, call, reference, oracle, candidate)
        assert broken(limits, call, candidate, reference, oracle)
        assert not broken(limits, call, reference, reference, oracle)
        fast = registry().find(case.op, "triton")
        if fast and not fast.why_not(torch.device("cpu"), "cpu", {**call.args, "numerics": OFFICIAL}):
            assert not broken(limits, call, results(call, "triton"), reference, oracle)


@pytest.mark.parametrize("case", [c for c in CASES if c.op in QUICK], ids=lambda c: c.name)
def test_wrong_and_right(case: Case) -> None:
    held(case, 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_whole_zoo(case: Case) -> None:
    held(case, 6)
