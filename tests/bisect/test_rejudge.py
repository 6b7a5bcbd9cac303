"""The judge of `dsv4dbg diff` over real captures: right on every site, and never the end of a comparison."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from dsv4dbg.bisect import rejudge
from dsv4dbg.bisect.rejudge import Rejudge
from dsv4dbg.compare import Verdict
from dsv4dbg.diff import Decision
from dsv4dbg.errors import DbgError
from dsv4dbg.model.checkpoint import open_model
from dsv4dbg.model.recording import Request, record
from dsv4dbg.model.weights import ModelWeights
from dsv4dbg.site import BLOCK
from dsv4dbg.trace.reader import Trace
from dsv4dbg.trace.records import SiteRecord, TensorSpec


def tiny() -> ModelWeights:
    return ModelWeights(open_model("tiny"), torch.device("cpu"))


def gone() -> ModelWeights:
    raise DbgError("tiny is not there")


def ops(trace: Trace) -> list[SiteRecord]:
    return [r for r in trace.sites() if r.site.op != BLOCK]


def test_every_site_of_a_capture_is_judged_and_exact(tiny_trace: Path) -> None:
    """The reference, run again on what a trace holds, yields what the trace holds: no argument is lost or changed."""
    with Trace.open(tiny_trace) as trace:
        judge = Rejudge(trace, tiny)
        for found in ops(trace):
            decision = judge(found, found)
            assert isinstance(decision, Decision), decision
            assert (decision.verdict, decision.exact) == (Verdict.PASS, True), f"{found.site} {decision.sentence}"


@pytest.mark.parametrize("request_", [
    Request(tokens=tuple(range(20)), decode=2, numerics="hf", kv_cache="bf16"),
    Request(tokens=tuple(range(20)), decode=6, verify=3, kv_cache="fp8-fnuz"),
    Request(tokens=tuple(range(20)), decode=1, kv_cache="f32", chunk=7),
], ids=["hf", "verify", "chunks"])  # fmt: skip
@pytest.mark.slow
def test_every_site_of_other_captures(tmp_path: Path, request_: Request) -> None:
    record(request_, tmp_path / "t.h5")
    test_every_site_of_a_capture_is_judged_and_exact(tmp_path / "t.h5")


@pytest.fixture
def edited(tiny_trace: Path, tmp_path: Path) -> Path:
    """The capture with one value of one output far off."""
    path = tmp_path / "edited.h5"
    shutil.copy(tiny_trace, path)
    with h5py.File(path, "r+") as file:
        file["steps/prefill0/L2.attn.wq_b/out/y"][3, 17] ^= 0x4000
    return path


def test_a_wrong_output_has_its_place_and_numbers(edited: Path) -> None:
    with Trace.open(edited) as trace:
        found = trace.site("prefill0", "L2.attn.wq_b")
        decision = Rejudge(trace, tiny)(found, found)
        assert isinstance(decision, Decision)
        assert (decision.verdict, decision.exact) == (Verdict.DIVERGED, False)
        assert dict(decision.where) == {"token": 3, "out": 17}
        assert decision.sentence.startswith("y: ")
        judged = decision.outputs["y"]
        assert judged["verdict"] == "DIVERGED"
        assert judged["clause"]["value"] > judged["clause"]["limit"]


def test_the_model_opens_when_a_site_needs_it_and_once(tiny_trace: Path) -> None:
    opened = []

    def counting() -> ModelWeights:
        opened.append(1)
        return tiny()

    with Trace.open(tiny_trace) as trace:
        judge = Rejudge(trace, counting)
        combine, linear = trace.site("prefill0", "L0.ffn.moe_combine"), trace.site("prefill0", "L0.attn.wq_a")
        assert isinstance(judge(combine, combine), Decision)
        assert not opened
        for _ in range(2):
            assert isinstance(judge(linear, linear), Decision)
        assert len(opened) == 1


def test_without_the_model_sites_without_weights_are_judged_still(tiny_trace: Path) -> None:
    with Trace.open(tiny_trace) as trace:
        judge = Rejudge(trace, gone)
        for found in ops(trace):
            decision = judge(found, found)
            assert isinstance(decision, str) == bool(found.weights), f"{found.site} {decision}"
            if found.weights:
                assert decision == "the model's weights are not at hand (tiny is not there)"


def test_weights_of_another_model(tiny_trace: Path) -> None:
    with Trace.open(tiny_trace) as trace:
        judge = Rejudge(trace, lambda: ModelWeights(open_model("wide"), torch.device("cpu")))
        found = trace.site("prefill0", "L0.attn.wq_a")
        assert "not the one that the trace was made with" in str(judge(found, found))


def without(found: SiteRecord, name: str) -> SiteRecord:
    return replace(found, inputs={n: s for n, s in found.inputs.items() if n != name})


def reshaped(spec: TensorSpec) -> TensorSpec:
    return replace(spec, shape=spec.shape[::-1])


@pytest.mark.parametrize(
    ("site", "change", "words"),
    [
        ("L0.attn.wq_a", lambda r: without(r, "x"), "has no x"),
        ("L0.attn.wq_a", lambda r: replace(r, outputs={}), "has no y of prefill0/L0.attn.wq_a"),
        ("L0.attn.wq_a", lambda r: replace(r, site=replace(r.site, op="warp_drive")), "unknown op 'warp_drive'"),
        ("L0.attn.wq_a", lambda r: replace(r, weights=dict.fromkeys(r.weights, 3)), "with TypeError"),
        ("L0.ffn.moe_combine", lambda r: replace(r, attrs={"numerics": "no\nsuch"}), "'no such'"),
        ("L0.attn.sparse_mla_prefill", lambda r: replace(r, attrs=r.attrs | {"scale": "wide"}), "judging it failed"),
        ("L0.attn.qnorm_rope_kv_insert", lambda r: replace(r, mutated={}), "has no window_cache of"),
    ],
)  # fmt: skip
def test_whatever_a_record_holds_is_a_decision_or_a_sentence(tiny_trace: Path, site: str, change, words: str) -> None:
    with Trace.open(tiny_trace) as trace:
        judge = Rejudge(trace, tiny)
        broken = change(trace.site("prefill0", site))
        said = judge(broken, broken)
        assert isinstance(said, str)
        assert words in said
        assert "\n" not in said
        assert len(said) < 300


def test_a_crash_of_the_judge_is_a_sentence(tiny_trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*args: object) -> None:
        raise IndexError("index 7 is out of bounds\nfor axis 0")

    monkeypatch.setattr(rejudge, "judge", crash)
    with Trace.open(tiny_trace) as trace:
        found = trace.site("prefill0", "embed")
        said = Rejudge(trace, tiny)(found, found)
        assert said == "judging it failed with IndexError: index 7 is out of bounds for axis 0"


def test_judging_leaves_the_replayed_caches_alone(tiny_trace: Path) -> None:
    """The reference writes to a copy: judging a site twice, or the next one, finds the cache as the trace has it."""
    with Trace.open(tiny_trace) as trace:
        judge = Rejudge(trace, tiny)
        for found in ops(trace):
            if found.mutated:
                for _ in range(2):
                    decision = judge(found, found)
                    assert isinstance(decision, Decision)
                    assert decision.exact
                for arg in found.caches:
                    np.testing.assert_array_equal(
                        judge._caches.at(found, arg), trace.cache_at(found.site.step, found.site.name, arg)
                    )
