"""A capture killed at any moment leaves a trace that opens, in which every finished call is exact."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dsv4dbg.trace.reader import Trace

CHILD = """
import sys
from pathlib import Path
from dsv4dbg.model.recording import Request, record
request = Request(prompt="The capital of France is", decode=2)
print("ready", flush=True)
sys.stdin.readline()
record(request, Path(sys.argv[1]))
print("done", flush=True)
"""


def killed_capture(path: Path, delay: float | None) -> float:
    """Run a capture in a child and kill it ``delay`` seconds after it began (None: let it end); seconds it took."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin
    assert child.stdout
    assert child.stdout.readline() == "ready\n"
    begin = time.perf_counter()
    child.stdin.write("go\n")
    child.stdin.flush()
    if delay is None:
        assert child.stdout.readline() == "done\n"
    else:
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
    seconds = time.perf_counter() - begin
    child.communicate()
    return seconds


def check(path: Path, whole: Trace) -> int:
    """Every call that the killed capture reports finished is the uninterrupted one's; how many there are."""
    if not path.exists():  # killed before the file was there
        return -1
    with Trace.open(path) as trace:
        found = trace.sites()
        assert [r.site for r in found] == [r.site for r in whole.sites()[: len(found)]]
        assert trace.complete or trace.notice
        for record in (r for r in found if r.complete):
            twin = whole.site(record.site.step, record.site.name)
            assert record.tensors().keys() == twin.tensors().keys()
            for name in record.tensors():
                np.testing.assert_array_equal(trace.read(record, name), whole.read(twin, name))
        return sum(r.complete for r in found)


def kill_many(tmp_path: Path, times: int) -> None:
    seconds = killed_capture(tmp_path / "whole.h5", None)
    moments = random.Random(times)
    counts = []
    with Trace.open(tmp_path / "whole.h5") as whole:
        for number in range(times):
            path = tmp_path / f"{number}.h5"
            killed_capture(path, moments.uniform(0, 1.05) * seconds)
            counts.append(check(path, whole))
            path.unlink(missing_ok=True)
    assert len(set(counts)) > times / 4  # the moments were different ones


def test_killed_a_few_times(tmp_path: Path) -> None:
    kill_many(tmp_path, 3)


@pytest.mark.slow
def test_killed_at_fifty_random_moments(tmp_path: Path) -> None:
    kill_many(tmp_path, 50)
