"""The zoo: every planted fault really is one, where it says, and nothing reaches it but its name."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsv4dbg.compare import Verdict
from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.arrays import CacheArray, copied, to_arrays
from dsv4dbg.kernels.contract import Op
from dsv4dbg.kernels.dims import PRESETS
from dsv4dbg.kernels.numerics import OFFICIAL
from dsv4dbg.kernels.oracle import run_oracle
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.registry import Implementation, registry
from dsv4dbg.kernels.table import Call
from dsv4dbg.kernels.zoo.case import KINDS, Case, cases
from dsv4dbg.model.recording import Request, load_model, open_session, open_workload, record, run_request
from dsv4dbg.model.replay import run
from dsv4dbg.plan import REFERENCE, Plan
from dsv4dbg.site import Site
from dsv4dbg.trace.reader import Trace
from dsv4dbg.verdict.judge import judge
from dsv4dbg.verdict.judgement import Judgement

CASES = cases()
ENDS_PROCESS = {"segfault": -signal.SIGSEGV, "silent-exit": 0}
RAISES = {
    "dtype-raises": (Exception, "E8|e8m0|Float8"),
    "workspace-too-large": (RuntimeError, "memory"),
    "exit-in-wrapper": (SystemExit, "no kernel"),
}
BEHIND_END = ("out-of-bounds-write", "triton-store-past-end")
NOT_IN_EXAMPLES = ("draft-layer-compact", "one-layer", "rope-table-ends", "stray-block-row")  # names, or large sizes


def live_cases(model: str) -> list[Case]:
    """Cases whose results show in a forward on the CPU."""
    kinds = ("values", "state", "race", "memory")
    return [
        c for c in CASES.values() if c.kind in kinds and c.model == model and not c.device and c.name not in BEHIND_END
    ]


def named(kind: str) -> list[str]:
    return [name for name, case in CASES.items() if case.kind == kind]


def judged(call: Call, reference: Mapping[str, Any], candidate: Mapping[str, Any]) -> Judgement:
    return judge(
        call.op, to_arrays(call.args), to_arrays(reference), to_arrays(candidate),
        lambda: run_oracle(call.op, call.args, call.numerics), call.numerics,
    )  # fmt: skip


def bits(values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    arrays = [v.data if isinstance(v, CacheArray) else v for v in to_arrays(values).values()]
    return [(a.shape, a.dtype, np.ascontiguousarray(a).tobytes()) for a in arrays]


def example_calls(op: Op, sizes: str = "tiny") -> Iterator[Call]:
    assert op.examples_function is not None
    for example in op.examples_function(PRESETS[sizes], np.random.default_rng(7)):
        yield Call(Site(op.name, op.name), op, REFERENCE, op.bind((), example.args), OFFICIAL)


def reference_of(call: Call) -> dict[str, Any]:
    return run(call, registry().implementation(call.op.name, REFERENCE))


def largest_call(op: Op) -> Call:
    return max(example_calls(op), key=lambda c: sum(v.numel() for v in c.args.values() if torch.is_tensor(v)))


# what there is


def test_the_zoo_covers_families_kinds_and_reports() -> None:
    families = {registry().ops[c.op].family for c in CASES.values()}
    assert families == {op.family for op in registry().ops.values()}
    assert {c.kind for c in CASES.values()} == set(KINDS)
    assert len({c.bug for c in CASES.values()} - {""}) >= 40
    never_called = {"act_quant", "merge_attn_states"}  # the forward has them only inside chains
    assert {c.op for c in CASES.values()} == set(registry().ops) - never_called


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_says_what_it_is(case: Case) -> None:
    assert case.shows
    assert case.doc.endswith(".")
    assert not case.bug or "#" in case.doc or "@" in case.doc, "names no public report"


# how it is reached


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_only_its_name_leads_to_a_case(case: Case) -> None:
    name = f"zoo:{case.name}"
    for op, implementation in case.implementations.items():
        assert registry().implementation(op, name) is implementation
        assert name not in registry().names(op)
    assert not [i for i in registry().implementations.values() if i.name.startswith("zoo:")]


def test_a_case_of_another_op_is_refused() -> None:
    for name in ("zoo:hang", "zoo:no-such-case", "hang", "zoo:"):
        with pytest.raises(DbgError, match="has no implementation"):
            registry().implementation("rms_norm", name)


def test_a_plan_names_a_case(tmp_path: Path) -> None:
    plan = Plan.parse("L1.ffn.ffn_norm=zoo:neighbour-factor, op:mhc_head=zoo:head-mean")
    recorded = record(Request(tokens=(5, 6, 7), decode=0, plan=plan), tmp_path / "zoo.h5")
    with Trace.open(recorded.path) as trace:
        ran = {r.site.name: r.implementation for r in trace.sites() if r.implementation.startswith("zoo:")}
    heads = dict.fromkeys(("head.mhc_head", "mtp0.mhc_head"), "zoo:head-mean")
    assert ran == {"L1.ffn.ffn_norm": "zoo:neighbour-factor", **heads}
    with pytest.raises(DbgError, match="no such implementation"):
        record(Request(tokens=(5,), plan=Plan.parse("op:rms_norm=zoo:head-mean")), tmp_path / "never.h5")
    with pytest.raises(DbgError, match="sites that are named"):
        record(Request(tokens=(5,), plan=Plan.parse("*=zoo:head-mean")), tmp_path / "never.h5")


def test_ops_lists_the_cases_of_an_op(dsv4dbg: Callable[..., Any]) -> None:
    shown = dsv4dbg("ops", "sparse_mla_decode").out
    for case in CASES.values():
        assert (f"zoo:{case.name} " in shown) == (case.op == "sparse_mla_decode"), case.name
    assert "zoo:" not in dsv4dbg("ops").out


# that it is wrong


@dataclass
class Seen:
    """What a case did over a workload.

    Attributes:
        first: site of the first call with other bits than the reference's.
        found: the gravest judgement.
    """

    calls: int = 0
    first: str = ""
    found: Judgement | None = None

    @property
    def done(self) -> bool:
        return self.found is not None and self.found.verdict == Verdict.DIVERGED


@dataclass
class Zookeeper:
    """Listener that runs cases beside the reference forward, on its live inputs, until each has diverged."""

    watched: list[Case]
    seen: dict[str, Seen] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)

    def before(self, call: Call) -> None:
        self.args = copied(call.args)

    def after(self, call: Call, outputs: Mapping[str, torch.Tensor]) -> None:
        alone = replace(call, args=self.args)
        reference = {**outputs, **{name: call.args[name] for name in call.op.mutates}}
        for case in self.watched:
            seen = self.seen.setdefault(case.name, Seen())
            if case.op != call.op.name or seen.done:
                continue
            seen.calls += 1
            candidate = run(alone, case.implementation)
            if bits(candidate) == bits(reference):
                continue
            seen.first = seen.first or call.site.path
            found = judged(alone, reference, candidate)
            if seen.found is None or found.verdict > seen.found.verdict:
                seen.found = found

    def boundary(self, site: Site, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        pass


def watched(model: str) -> dict[str, Seen]:
    request = Request(workload="coverage", model=model)
    checkpoint, opened, device = load_model(request)
    workload = open_workload("coverage", checkpoint)
    session = open_session(request, opened, device, [], workload)
    keeper = Zookeeper(live_cases(model))
    session.listen(keeper)
    run_request(request, session, [], None, workload)
    return keeper.seen


def check(case: Case, seen: Seen) -> None:
    assert seen.first, f"the same bits as the reference in all {seen.calls} calls"
    assert seen.done, f"{seen.found and seen.found.verdict.name} only, in {seen.calls} calls"
    assert seen.found is not None
    worst = seen.found.worst
    if case.kind == "state":
        assert seen.calls > 1
    elif case.kind == "values" and case.fingerprint:
        assert worst is not None
        assert any(case.fingerprint in text for text in worst.fingerprints), worst.fingerprints


@pytest.fixture(scope="module")
def tiny() -> dict[str, Seen]:
    return watched("tiny")


@pytest.mark.parametrize("case", live_cases("tiny"), ids=lambda c: c.name)
def test_a_case_diverges_in_the_coverage_workload(case: Case, tiny: dict[str, Seen]) -> None:
    check(case, tiny[case.name])


@pytest.mark.slow
def test_cases_of_wide_sizes_diverge_in_the_coverage_workload() -> None:
    seen = watched("wide")
    for case in live_cases("wide"):
        check(case, seen[case.name])


def test_faults_of_one_place_show_there_only(tiny: dict[str, Seen]) -> None:
    assert "/L3." in tiny["one-layer"].first
    assert "/mtp0." in tiny["draft-layer-compact"].first
    assert tiny["drafts-see-first-list"].first.startswith("verify")
    assert tiny["page-before-edge"].first.startswith("decode")


@pytest.mark.parametrize("name", [n for n in named("values") if n not in NOT_IN_EXAMPLES])
def test_a_case_diverges_in_an_example(name: str) -> None:
    case = CASES[name]
    op = registry().ops[case.op]
    for call in example_calls(op, case.model):
        reference, candidate = reference_of(call), run(call, case.implementation)
        if bits(reference) != bits(candidate) and judged(call, reference, candidate).verdict == Verdict.DIVERGED:
            return
    pytest.fail("no example shows it")


@pytest.mark.parametrize("name", BEHIND_END)
def test_bytes_behind_a_buffer_change_and_nothing_else(name: str) -> None:
    case = CASES[name]
    op = registry().ops[case.op]
    call = next(c for c in example_calls(op) if len(c.args["positions"]) > 2)
    arg = list(op.mutates)[-1]
    cache = call.args[arg]
    arena = torch.full((cache.data.numel() + 4096,), 0xA5, dtype=torch.uint8)
    inside = arena[: cache.data.numel()].view(cache.data.shape)
    inside.copy_(cache.data)
    kwargs = {**copied(call.args), arg: Cache(cache.name, inside, cache.layout), "numerics": OFFICIAL}
    outputs = op.name_outputs(case.implementation.function(**kwargs))
    mutated = {n: kwargs[n] for n in op.mutates}
    assert bits({**outputs, **mutated}) == bits(reference_of(call))
    behind = arena[cache.data.numel() :]
    changed = (behind != 0xA5).nonzero().flatten()
    assert len(changed)
    assert int(changed[0]) == 0
    assert int(changed[-1]) < 128


@pytest.mark.parametrize("name", RAISES)
def test_a_case_raises(name: str) -> None:
    kind, text = RAISES[name]
    with pytest.raises(kind, match=text):
        run(largest_call(registry().ops[CASES[name].op]), CASES[name].implementation)


def in_process(call: Call, implementation: Implementation) -> BaseProcess:
    """A forked process, at the head of a group of its own, that runs a case on a call and ends with 77."""

    def target() -> None:
        os.setsid()
        faulthandler.disable()
        run(call, implementation)
        os._exit(77)

    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    return process


@pytest.mark.parametrize("name", ENDS_PROCESS)
def test_a_case_ends_its_process(name: str) -> None:
    process = in_process(largest_call(registry().ops[CASES[name].op]), CASES[name].implementation)
    process.join(60)
    assert process.exitcode == ENDS_PROCESS[name]


def test_an_unmapped_read_kills_the_interpreter() -> None:
    pytest.importorskip("triton")
    from dsv4dbg.kernels.child import ChildDied

    case = CASES["triton-unmapped-read"]
    with pytest.raises(ChildDied, match="SIGSEGV"):
        run(largest_call(registry().ops[case.op]), case.implementation)


@pytest.mark.parametrize("name", named("hang"))
def test_a_case_does_not_return(name: str) -> None:
    process = in_process(largest_call(registry().ops[CASES[name].op]), CASES[name].implementation)
    process.join(6)
    hung = process.is_alive()
    os.killpg(process.pid or 0, signal.SIGKILL)
    process.join(10)
    assert hung, f"ended with {process.exitcode}"


@pytest.mark.parametrize("name", named("together"))
def test_a_pair_is_right_until_both_run(name: str) -> None:
    case = CASES[name]
    (partner,) = set(case.implementations) - {case.op}
    calls = {op: largest_call(registry().ops[op]) for op in case.implementations}

    def right(op: str) -> bool:
        return bits(run(calls[op], case.implementations[op])) == bits(reference_of(calls[op]))

    assert right(case.op)
    assert right(case.op)
    assert right(partner)
    assert right(partner)
    assert not right(case.op)


def test_the_race_is_none_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    call = next(example_calls(registry().ops["rms_norm"]))
    candidate = run(call, CASES["triton-race"].implementation)
    assert judged(call, reference_of(call), candidate).verdict <= Verdict.ROUNDING


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton-race", "triton-stale-pointer"])
def test_a_case_diverges_on_a_gpu(name: str) -> None:
    case = CASES[name]
    found = []
    for call in example_calls(registry().ops[case.op]):
        for factor in (1, 2):
            args = {n: v * factor if torch.is_tensor(v) and v.is_floating_point() else v for n, v in call.args.items()}
            there = {n: v.cuda() if torch.is_tensor(v) else v for n, v in args.items()}
            changed = replace(call, args=args)
            candidate = run(replace(call, args=there), case.implementation)
            found.append(judged(changed, reference_of(changed), candidate).verdict)
    assert Verdict.DIVERGED in found
