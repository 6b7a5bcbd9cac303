"""A bisect end to end, in real processes: planted faults are found, told apart and blamed on the right op."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from short_scans import Watcher, workload

from dsv4dbg.bisect.journal import Journal, events, read
from dsv4dbg.bisect.live import Live
from dsv4dbg.bisect.result import Result
from dsv4dbg.bisect.run import bisect
from dsv4dbg.bisect.settings import Settings
from dsv4dbg.compare import Verdict
from dsv4dbg.errors import DbgError, Untestable
from dsv4dbg.model.checkpoint import open_model
from dsv4dbg.model.recording import Request

PLUGIN = Path(__file__).parent / "faulty_kernels.py"


@pytest.fixture(scope="module")
def request_(tmp_path_factory: pytest.TempPathFactory) -> Request:
    return Request(workload=workload(tmp_path_factory.mktemp("workload")), plugins=(PLUGIN,))


def run(settings: Settings, path: Path, resume: bool = False) -> Result:
    return bisect(settings, path / "journal.jsonl", resume, Watcher())


def test_faults_of_every_kind_in_one_scan(request_: Request, tmp_path: Path) -> None:
    checks = ("differential", "repeatability", "guards")
    result = run(Settings(request_, "all_kinds", (), checks, timeout=4), tmp_path)
    found = {culprit.op: culprit for culprit in result.culprits}
    expected = {
        "rms_norm": (Verdict.DIVERGED, ""), "silu_mul": (Verdict.FAULT, "signal"),
        "moe_router": (Verdict.FAULT, "exception"), "hash_router": (Verdict.FAULT, "exit"),
        "lm_head": (Verdict.TIMEOUT, "hang"),
        "embed": (Verdict.FAULT, "out of memory"), "inv_rope": (Verdict.UNSTABLE, ""),
        "moe_combine": (Verdict.DIVERGED, ""), "qnorm_rope_kv_insert": (Verdict.DIVERGED, ""),
        "gather_kv": (Verdict.DIVERGED, ""),
    }  # fmt: skip
    assert {op: culprit.trial.verdict for op, culprit in found.items()} == {op: v for op, (v, _) in expected.items()}
    for op, (_, kind) in expected.items():
        assert kind in str(found[op].trial.evidence.get("kind", "")), found[op].trial
    assert result.exit_code == 1

    row = found["rms_norm"].trial
    assert row.where["token"] == 30  # the last of the 31 in the first prefill
    assert any("2" in print for print in row.fingerprints)
    failed, runs = found["inv_rope"].trial.rate or (0, 0)
    assert 0 < failed / runs <= 0.75  # of few runs, where the guards saw it first
    assert any("carried" in print for print in found["gather_kv"].trial.fingerprints)
    assert any("fills" in p for t in result.trials if t.op == "moe_combine" for p in t.fingerprints)


def test_right_candidates_are_clean(request_: Request, tmp_path: Path) -> None:
    seen = Watcher()
    result = bisect(Settings(request_, "right"), tmp_path / "j", False, seen)
    assert (result.exit_code, result.culprits, result.verdict) == (0, [], Verdict.PASS)
    assert {t.op for t in result.tested} == set(seen.ops)
    assert len(result.trials) == len(seen.trials)
    assert {t.check for t in result.tested} == {
        "differential", "invariants", "repeatability", "fresh-process", "guards", "block-permutation",
        "serial-equivalence", "batch-invariance", "graph-replay",
    }  # fmt: skip


def test_several_tokens_per_sequence(request_: Request, tmp_path: Path) -> None:
    settings = Settings(request_, "only_several_tokens", checks=("differential",))
    (culprit,) = run(settings, tmp_path).culprits
    assert culprit.op == "sparse_mla_decode"
    assert culprit.phases == ("verify",)
    assert culprit.bad == 7  # six layers and the MTP block, one step


@pytest.mark.slow
def test_state_lost_between_calls(request_: Request, tmp_path: Path) -> None:
    """Serial equivalence finds it in a call that is right as it came."""
    ops, checks = ("compress_insert",), ("differential", "serial-equivalence")
    result = run(Settings(request_, "zoo:chunk-forgets", ops, checks), tmp_path)
    found = {trial.site: trial.check for trial in result.trials if trial.bad and trial.site.startswith("prefill0")}
    assert set(found.values()) == {"serial-equivalence"}
    assert not run(Settings(request_, "right", ops, checks), tmp_path).culprits


@pytest.mark.slow
def test_two_ops_that_are_wrong_only_together(request_: Request, tmp_path: Path) -> None:
    settings = Settings(request_, "pair", checks=("differential",), in_place=True, workers=1)
    live = Live(settings, Journal(tmp_path / "j", {}), {"head.mhc_head": "mhc_head", "head.lm_head": "lm_head"})
    (trial,) = live.search()
    assert trial.evidence["swapped"] == ["head.mhc_head", "head.lm_head"]
    assert trial.op == "lm_head"
    assert "together" in trial.sentence


def test_a_layer_that_kills_the_live_forward(
    request_: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = open_model("tiny")
    name = "layers.3.attn_norm.weight"
    monkeypatch.setenv("DSV4DBG_TEST_WEIGHT", f"{float(weights.tensor(name).double().sum()):.12g}")
    sites = [f"L{layer}.{role}" for layer in range(6) for role in ("attn.attn_norm", "ffn.ffn_norm", "attn.q_norm")]
    live = Live(
        Settings(request_, "one_layer", in_place=True), Journal(tmp_path / "j", {}), dict.fromkeys(sites, "rms_norm")
    )
    first, *rest = live.search()
    assert (first.verdict, first.site, rest) == (Verdict.FAULT, "L3.attn.attn_norm", [])
    assert first.evidence["forwards"] <= 2 + math.ceil(math.log2(len(sites)))


@pytest.mark.slow
def test_resumed_it_runs_nothing_twice(request_: Request, tmp_path: Path) -> None:
    settings = Settings(request_, "all_kinds", ("rms_norm", "moe_combine"), ("differential", "guards"))
    path = tmp_path / "journal.jsonl"
    whole = run(settings, tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: len(lines) // 2]) + b'{"event":"be')
    done = {trial.key for trial in read(path)[1]}
    again = run(settings, tmp_path, resume=True)
    assert {(t.key, t.verdict) for t in again.trials} == {(t.key, t.verdict) for t in whole.trials}
    begun = [
        (e["model"], e["site"], e["op"], e["check"])
        for e in list(events(path))[len(lines) // 2 :]
        if e["event"] == "begin"
    ]
    assert begun
    assert not done & set(begun)


def running_with(name: str, value: str) -> list[str]:
    """Processes whose environment says so."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{name}={value}".encode() in path.read_bytes().split(b"\0"):
                found.append((path.parent / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.mark.slow
def test_killed_at_any_moment_it_resumes(request_: Request, tmp_path: Path) -> None:
    """SIGKILL of the parent at 50 moments, resumed every time: nothing is lost or repeated, nothing left running."""
    path = tmp_path / "journal.jsonl"
    command = [
        sys.executable, "-m", "dsv4dbg", "bisect", "--candidate", "all_kinds", "--plugin", str(PLUGIN), "--workload",
        str(request_.workload), "--op", "rms_norm", "--op", "moe_combine", "--check", "differential",
        "--check", "guards",
    ]  # fmt: skip
    finished: set[tuple[str, ...]] = set()
    marked = {**os.environ, "DSV4DBG_TEST_RUN": str(tmp_path)}
    for number in range(50):
        mode = ["--resume", str(path)] if path.exists() and path.stat().st_size else ["-o", str(path)]
        process = subprocess.Popen([*command, *mode], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=marked)
        time.sleep(0.5 + 0.17 * number)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if path.exists() and path.stat().st_size:
            now = [trial.key for trial in read(path)[1]]
            assert finished <= set(now)
            finished = set(now)
    ends = [tuple(e["trial"][k] for k in ("model", "site", "op", "check")) for e in events(path) if e["event"] == "end"]
    assert len(ends) == len(set(ends))
    resumed = subprocess.run([*command, "--resume", str(path), "--json"], capture_output=True, text=True, timeout=300)
    straight = subprocess.run([*command, "-o", str(tmp_path / "straight"), "--json"], capture_output=True, text=True)
    assert resumed.returncode == straight.returncode == 1
    culprits = [
        [(c["op"], c["site"], c["verdict"], c["bad"]) for c in json.loads(ran.stdout)["culprits"]]
        for ran in (resumed, straight)
    ]
    assert culprits[0] == culprits[1]
    time.sleep(1)
    assert not running_with("DSV4DBG_TEST_RUN", str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"ops": ("rms_norm",), "candidate": "pair"}, DbgError, "rms_norm has no implementation 'pair'"),
        ({"candidate": "wrong_dtype"}, DbgError, r"returned y as float64 \[31, 256\], the op yields bfloat16"),
        ({"candidate": "wrong_shape"}, DbgError, r"returned y as bfloat16 \[31, 255\]"),
        ({"candidate": "no_tensor"}, DbgError, "returned 0 outputs, the contract has 1"),
        ({"candidate": "two_outputs"}, DbgError, "returned 2 outputs, the contract has 1"),
        ({"candidate": "wrong_signature"}, DbgError, "does not take eps"),
        ({"request": {"device": "cuda:7"}}, Untestable, "no GPU 'cuda:7'"),
    ],
)
def test_bad_input(request_: Request, tmp_path: Path, changes: dict, error: type[DbgError], words: str) -> None:
    if torch.cuda.device_count() > 7:
        pytest.skip("this machine has a GPU 7")
    more = dict(changes)
    request = replace(request_, **more.pop("request", {}))
    with pytest.raises(error, match=words):
        run(Settings(request, **{"candidate": "right", **more}), tmp_path)


def test_a_process_that_cannot_be_killed_ends_the_run(
    request_: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = subprocess.Popen.wait

    def stuck(self: subprocess.Popen, timeout: float | None = None) -> int:
        if "dsv4dbg.bisect.worker" in self.args and self.poll() is not None and timeout is not None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return wait(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", stuck)
    with pytest.raises(Untestable, match="cannot be killed"):
        run(Settings(request_, "all_kinds", ("silu_mul",), ("differential",)), tmp_path)
    assert read(tmp_path / "journal.jsonl")[0]["settings"]["candidate"] == "all_kinds"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("candidate", "verdict"),
    [("misspelt", Verdict.FAULT), ("plain", Verdict.SKIPPED)],
)
def test_offline_compilation(request_: Request, tmp_path: Path, candidate: str, verdict: Verdict) -> None:
    pytest.importorskip("triton")
    kernels = Path(__file__).parent.parent / "kernels" / "plugin_kernels.py"
    request = replace(request_, plugins=(kernels,))
    result = run(Settings(request, candidate, ("rms_norm",), ("compile",)), tmp_path)
    (trial,) = result.trials
    assert (trial.check, trial.verdict) == ("compile", verdict), trial
    assert "no_such_name" in trial.sentence or verdict != Verdict.FAULT
