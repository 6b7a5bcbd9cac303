"""A reproducer's criteria against the judge: zoo cases are wrong, the reference and our Triton kernels are right."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch

from dsv4dbg.bisect.criteria import broken, criteria
from dsv4dbg.bisect.reproducer import oracle_of
from dsv4dbg.bisect.subject import judged
from dsv4dbg.compare import Verdict
from dsv4dbg.kernels.dims import TINY
from dsv4dbg.kernels.numerics import OFFICIAL
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.registry import registry
from dsv4dbg.kernels.table import Call
from dsv4dbg.kernels.zoo.case import Case, cases
from dsv4dbg.model.replay import run
from dsv4dbg.site import Site

CASES = [case for case in cases().values() if case.kind == "values"]
QUICK = ("rms_norm", "fp8_linear", "moe_router", "inv_rope")
ELSEWHERE = {  # these show at sizes or layers that no example has
    "rope-table-ends", "draft-layer-compact", "one-layer", "upper-heads", "scale-transposed", "stray-block-row",
}  # fmt: skip


def results(call: Call, name: str) -> dict:
    return run(call, registry().implementation(call.op.name, name))


def shapes(values: dict) -> dict:
    return {n: (v.data if isinstance(v, Cache) else v).shape for n, v in values.items()}


def diverged(case: Case) -> Iterator[tuple[Call, dict, dict]]:
    """Calls at which a case is wrong, with the results of reference and case."""
    op = registry().op(case.op)
    assert op.examples_function is not None
    for example in op.examples_function(TINY, np.random.default_rng(0)):
        call = Call(Site("L1.x", op.name, "decode3"), op, "torch", op.bind((), example.args), OFFICIAL)
        reference, candidate = results(call, "torch"), results(call, f"zoo:{case.name}")
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
