"""Launch configurations: launches are made otherwise, and results that follow the configuration are found."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from short_scans import Watcher

from dsv4dbg.bisect.journal import Trial
from dsv4dbg.bisect.launches import CHANGES, changed, launch_config
from dsv4dbg.bisect.run import bisect
from dsv4dbg.bisect.settings import Settings
from dsv4dbg.bisect.subject import Results, Subject
from dsv4dbg.compare import Verdict
from dsv4dbg.model.recording import Request

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("warps", "stages", "expected"),
    [
        (4, 3, [{"num_warps": 2}, {"num_warps": 8}, {"num_stages": 1}, {"num_stages": 4}]),
        (1, 1, [{}, {"num_warps": 2}, {}, {"num_stages": 2}]),
        (16, 2, [{"num_warps": 8}, {}, {"num_stages": 1}, {"num_stages": 3}]),
    ],
)
def test_changes(warps: int, stages: int, expected: list[dict[str, int]]) -> None:
    assert [changed(name, {"num_warps": warps, "num_stages": stages}) for name in CHANGES] == expected


def launch(name: str, monkeypatch: pytest.MonkeyPatch, most: int = 16) -> tuple[list[Any], list[str]]:
    """Options of two launches under a change, one with 2 warps and one with the default of 4, and which were changed.

    Args:
        most: warps that the device takes.
    """
    pytest.importorskip("triton")
    from triton import knobs

    if knobs.runtime.interpret:
        pytest.skip("Triton is its own interpreter here")
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.runtime.errors import OutOfResources
    from triton.runtime.jit import JITFunction

    from dsv4dbg.kernels.triton_run import launching, recording

    @triton.jit
    def kernel(x, BLOCK: tl.constexpr):
        tl.store(x + tl.arange(0, BLOCK), 0.0)

    x = torch.empty(64)
    with recording(GPUTarget("hip", "gfx942", 64)) as launches:
        record = JITFunction.run

        def device(self: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("num_warps", 4) > most:
                raise OutOfResources(2048, 1024, "threads")
            return record(self, *args, **kwargs)

        monkeypatch.setattr(JITFunction, "run", device)
        with launching(lambda options: changed(name, options)) as otherwise:
            kernel[(1,)](x, 64, num_warps=2)
            kernel[(1,)](x, 64)
        monkeypatch.undo()
    return [one.kwargs for one in launches], otherwise


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("half the warps", [{"num_warps": 1}, {"num_warps": 2}]),
        ("twice the warps", [{"num_warps": 4}, {"num_warps": 8}]),
        ("one stage", [{"num_warps": 2, "num_stages": 1}, {"num_stages": 1}]),
        ("one stage more", [{"num_warps": 2, "num_stages": 3}, {"num_stages": 3}]),
    ],
)
def test_launches_get_other_options(monkeypatch: pytest.MonkeyPatch, name: str, expected: list[dict[str, int]]) -> None:
    assert launch(name, monkeypatch) == (expected, ["kernel", "kernel"])


def test_a_launch_that_does_not_fit_is_made_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch("twice the warps", monkeypatch, most=4) == ([{"num_warps": 4}, {}], ["kernel"])


@dataclass
class Candidate:
    """What the check sees of a candidate whose result is 1, and under some changes another number.

    Attributes:
        results: by the change's name.
        without: changes under which no launch is made otherwise.
    """

    results: dict[str, float]
    without: frozenset[str] = frozenset()
    first: Results = field(init=False)

    def __post_init__(self) -> None:
        self.first = self.run()

    def run(self, launch: str = "") -> Results:
        value = torch.tensor([self.results.get(launch, 1.0)])
        return Results({"y": value}, (), int(bool(launch) and launch not in self.without))

    def judge(self, results: dict[str, torch.Tensor], call: Any = None, reference: Any = None) -> Any:
        from dsv4dbg.bisect.subject import judged as by_rule

        return by_rule(call_of(), {"y": torch.ones(1, 1)}, {"y": results["y"][None]})


def call_of() -> Any:
    from dsv4dbg.kernels.numerics import OFFICIAL
    from dsv4dbg.kernels.registry import registry
    from dsv4dbg.kernels.table import Call
    from dsv4dbg.site import Site

    args = {"x": torch.ones(1, 1), "weight": torch.ones(1), "eps": 0.0}
    return Call(Site("L0.norm", "rms_norm", "x"), registry().ops["rms_norm"], "torch", args, OFFICIAL)


@pytest.mark.parametrize(
    ("candidate", "verdict", "words"),
    [
        (Candidate({}), Verdict.PASS, "4 other launch configurations agree"),
        (Candidate({"one stage": 1.0 + 2**-23}), Verdict.ROUNDING, "with one stage"),
        (Candidate({"twice the warps": 2.0}), Verdict.DIVERGED, "with twice the warps"),
        (Candidate({"one stage": 2.0}, frozenset({"one stage"})), Verdict.PASS, "3 other launch configurations"),
        (Candidate({}, frozenset(CHANGES)), Verdict.SKIPPED, "no Triton kernel"),
    ],
)
def test_verdicts(candidate: Candidate, verdict: Verdict, words: str) -> None:
    found = launch_config(cast(Subject, candidate))
    assert found.verdict == verdict
    assert words in found.sentence


def trials(tmp_path: Path, candidate: str, device: str) -> list[Trial]:
    """Trials of the check at one op in a short forward."""
    plugins = (HERE / "faulty_kernels.py", *([HERE / "warp_kernels.py"] if device == "cuda" else []))
    request = Request(prompt="Paris", decode=0, plugins=plugins, device=device)
    settings = Settings(request, candidate, ("rms_norm",), ("launch-config",))
    return bisect(settings, tmp_path / "journal.jsonl", False, Watcher()).trials


def test_a_cpu_has_no_warps(tmp_path: Path) -> None:
    (trial, *_) = found = trials(tmp_path, "right", "cpu")
    assert {one.verdict for one in found} == {Verdict.SKIPPED}
    assert "no warps" in trial.sentence


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("candidate", "verdict"),
    [("triton", Verdict.PASS), ("by_warps", Verdict.DIVERGED), ("right", Verdict.SKIPPED)],
)
def test_on_a_gpu(tmp_path: Path, candidate: str, verdict: Verdict) -> None:
    assert {trial.verdict for trial in trials(tmp_path, candidate, "cuda")} == {verdict}
