"""Graph replay: what is kept from an earlier call is found where the call as it came is right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from short_scans import Watcher, example_calls, results, workload

from dsv4dbg.bisect.derive import caches_of, other_contents
from dsv4dbg.bisect.graphs import STALE
from dsv4dbg.bisect.journal import Trial
from dsv4dbg.bisect.run import bisect
from dsv4dbg.bisect.settings import Settings
from dsv4dbg.bisect.subject import digest
from dsv4dbg.compare import Verdict
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.registry import registry
from dsv4dbg.model.recording import Request

HERE = Path(__file__).parent
OPS = registry().ops


def replayed(tmp_path: Path, candidate: str, *ops: str, device: str = "cpu") -> dict[str, list[Trial]]:
    """Trials of graph replay, by op; no other check runs."""
    plugins = (HERE / "stale_kernels.py", HERE / "faulty_kernels.py")
    request = Request(workload=workload(tmp_path, 2), plugins=plugins, device=device)
    result = bisect(Settings(request, candidate, ops, ("graph-replay",)), tmp_path / "journal.jsonl", False, Watcher())
    return {op: [trial for trial in result.trials if trial.op == op] for op in {trial.op for trial in result.trials}}


@pytest.mark.slow
def test_what_is_kept_is_found(tmp_path: Path) -> None:
    """Inputs by address, results by shape, and integers."""
    trials = replayed(tmp_path, "keeping")
    assert trials.keys() == {"rms_norm", "silu_mul", "embed"}
    for op, found in trials.items():
        assert len(found) > 1, op
        for trial in found:
            assert (trial.verdict, trial.fingerprints[0]) == (Verdict.DIVERGED, STALE), trial


@pytest.mark.slow
def test_lengths_of_the_step_before_are_found(tmp_path: Path) -> None:
    trials = replayed(tmp_path, "zoo:lengths-of-last-step", "indexer_topk")["indexer_topk"]
    assert any(trial.bad and STALE in trial.fingerprints for trial in trials), trials


@pytest.mark.slow
def test_a_kept_pointer_of_a_triton_launch_is_found(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    trials = replayed(tmp_path, "zoo:triton-stale-pointer", "moe_combine")["moe_combine"]
    assert any(trial.bad and STALE in trial.fingerprints for trial in trials), trials


@pytest.mark.slow
def test_right_candidates_follow_the_contents(tmp_path: Path) -> None:
    trials = replayed(tmp_path, "torch")
    assert trials.keys() == {trial.op for found in trials.values() for trial in found if trial.verdict == Verdict.PASS}
    assert {trial.verdict for found in trials.values() for trial in found} <= {Verdict.PASS, Verdict.SKIPPED}


@pytest.mark.slow
def test_a_candidate_that_is_just_wrong_keeps_nothing(tmp_path: Path) -> None:
    for trial in replayed(tmp_path, "wrong_anyway")["rms_norm"]:
        assert trial.verdict == Verdict.DIVERGED
        assert STALE not in trial.fingerprints
        assert "in a fresh process too" in trial.sentence


@pytest.mark.gpu
@pytest.mark.parametrize("candidate", ["zoo:first-input-again", "right"])
def test_replays_of_a_graph(tmp_path: Path, candidate: str) -> None:
    trials = replayed(tmp_path, candidate, "rms_norm", device="cuda")["rms_norm"]
    expected = Verdict.PASS if candidate == "right" else Verdict.DIVERGED
    assert {trial.verdict for trial in trials} == {expected}, trials


@pytest.mark.gpu
def test_a_candidate_that_waits_for_the_device_is_left_out(tmp_path: Path) -> None:
    for trial in replayed(tmp_path, "synchronising", device="cuda")["rms_norm"]:
        assert trial.verdict == Verdict.SKIPPED
        assert "cannot be captured" in trial.sentence


def form(value: object) -> object:
    tensor = value.data if isinstance(value, Cache) else value
    return (tensor.dtype, tensor.shape, tensor.stride()) if isinstance(tensor, torch.Tensor) else tensor


@pytest.mark.parametrize("name", OPS)
def test_other_contents_of_every_op(name: str) -> None:
    """Same form, same weights and tables, other results of the reference; the call itself stays as it was."""
    differing = 0
    for call in example_calls(name):
        before = digest({n: v for n, v in call.args.items() if isinstance(v, torch.Tensor | Cache)})
        other = other_contents(call, None)
        if other is None:
            continue
        for arg, spec in call.op.args.items():
            assert form(other.args[arg]) == form(call.args[arg]), arg
            assert spec.kind in ("tensor", "cache") or other.args[arg] is call.args[arg], arg
        differing += digest(results(other)) != digest(results(call))
        assert digest({n: v for n, v in call.args.items() if isinstance(v, torch.Tensor | Cache)}) == before
    assert differing


def test_contents_of_another_call_of_the_same_form() -> None:
    """Lengths and caches come with them; weights do not."""
    call = max(example_calls("compress_insert"), key=lambda c: sum(len(cache.data) for cache in caches_of(c).values()))
    args = {
        n: replace(v, data=v.data.flip(0)) if isinstance(v, Cache) else v.flip(0) if torch.is_tensor(v) else v
        for n, v in call.args.items()
    }
    other = replace(call, args=args)
    changed = other_contents(call, other)
    assert changed is not None
    for name, spec in call.op.args.items():
        source = other if spec.kind in ("tensor", "cache") else call
        assert form(changed.args[name]) == form(call.args[name])
        if isinstance(source.args[name], Cache | torch.Tensor):
            assert digest({name: changed.args[name]}) == digest({name: source.args[name]}), name
    attr = next(name for name, spec in call.op.args.items() if spec.kind == "attr")
    unlike = other_contents(call, replace(other, args={**args, attr: object()}))
    assert unlike is not None
    assert digest({"kv": unlike.args["kv"]}) != digest({"kv": changed.args["kv"]})
