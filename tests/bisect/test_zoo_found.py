"""Every planted fault of the zoo is found by a bisect that knows nothing of it, and blamed on the right op."""

from __future__ import annotations

from pathlib import Path

import pytest
from short_scans import Watcher

from dsv4dbg.bisect.run import bisect
from dsv4dbg.bisect.settings import Settings
from dsv4dbg.compare import Verdict
from dsv4dbg.kernels.zoo.case import Case, cases
from dsv4dbg.model.recording import Request

VERDICTS = {
    "values": {Verdict.DIVERGED},
    "state": {Verdict.DIVERGED, Verdict.UNSTABLE},
    "race": {Verdict.UNSTABLE},
    "memory": {Verdict.DIVERGED},
    "fault": {Verdict.FAULT},
    "hang": {Verdict.TIMEOUT},
    "together": {Verdict.DIVERGED},
}
ON_CPU = {name: case for name, case in cases().items() if not case.device}


@pytest.mark.slow
@pytest.mark.parametrize("case", ON_CPU.values(), ids=ON_CPU)
def test_a_planted_fault_is_blamed_on_its_op(case: Case, tmp_path: Path) -> None:
    request = Request(workload="coverage", model=case.model)
    settings = Settings(request, f"zoo:{case.name}", timeout=10, in_place=case.kind == "together")
    result = bisect(settings, tmp_path / "journal.jsonl", False, Watcher())
    assert [culprit.op for culprit in result.culprits] == [case.op]
    (culprit,) = result.culprits
    assert culprit.trial.verdict in VERDICTS[case.kind]
    prints = {print for trial in result.trials if trial.bad for print in trial.fingerprints}
    assert not case.fingerprint or any(case.fingerprint in print for print in prints)
