"""Whatever ends a capture, what its trace calls complete is exact."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import trace_breaker
from trace_breaker import Breaker
from trace_scenario import MANIFEST, Scenario

from dsv4dbg.errors import DbgError
from dsv4dbg.site import Site
from dsv4dbg.trace.journal import journal_path
from dsv4dbg.trace.reader import Trace
from dsv4dbg.trace.recover import recover
from dsv4dbg.trace.writer import TraceWriter


def run_breaker(*args: object) -> str:
    command = [sys.executable, trace_breaker.__file__, *map(str, args)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=280, env=_env()).stdout


def _env() -> dict[str, str]:
    root = Path(__file__).parents[2]
    return {"PYTHONPATH": f"{root}:{Path(__file__).parent}", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def check_remains(scenario: Scenario, folder: Path) -> int:
    """What a killed writer left must open and be exact; returns the number of complete calls."""
    run = folder / "run.h5"
    before = {file: file.read_bytes() for file in folder.iterdir()}
    confirmed = len(before.get(folder / "done", b""))
    if not run.exists() and b"\n" not in before.get(journal_path(run), b""):
        assert confirmed == 0  # killed before anything was there; nothing pretends to be a trace
        return 0
    with Trace.open(run) as trace:
        complete = scenario.check(trace)
        assert complete >= confirmed
        assert trace.complete == (trace.manifest["complete"] is True)
        assert bool(trace.notice) == (not trace.complete)
        assert "\n" not in trace.notice
        assert not trace.running
        saved = len(trace.sites())
    assert {file: file.read_bytes() for file in folder.iterdir()} == before
    recover(run, folder / "recovered.h5")
    with Trace.open(folder / "recovered.h5") as trace:
        assert scenario.check(trace) == complete
        assert len(trace.sites()) == saved
        assert not journal_path(trace.path).exists()
    return complete


def test_killed_at_every_boundary(tmp_path):
    """Before each open, write, flush, close and unlink of a small capture, and half way through each write."""
    run_breaker("boundaries", tmp_path)
    scenario = trace_breaker.boundary_scenario()
    complete = [check_remains(scenario, folder) for folder in sorted(tmp_path.iterdir())]
    assert len(complete) > 100
    assert set(complete) == {0, 1, 2, 3}


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_at_random(tmp_path, count):
    run_breaker("random", tmp_path, count, 17)
    scenario = trace_breaker.random_scenario()
    complete = [check_remains(scenario, tmp_path / str(case)) for case in range(count)]
    assert len(set(complete)) > count // 4  # the moments were all over the capture


def test_disk_full_at_every_write(tmp_path):
    """ENOSPC at each call in turn: one sentence, the same again, and all that was confirmed stays readable."""
    scenario = trace_breaker.boundary_scenario()
    broken = trace_breaker.cases(scenario, tmp_path)
    last = max(at for at, _ in broken)
    for at, manner in broken:
        folder = tmp_path / f"{at}-{manner}"
        folder.mkdir()
        breaker = Breaker(at, manner, trace_breaker.fail)
        with pytest.raises((DbgError, OSError)) as error:
            trace_breaker.capture(scenario, folder, breaker)
        breaker.remove()
        if not isinstance(error.value, DbgError):
            assert at >= last - 1  # letting go of the two files at the very end
        else:
            assert re.fullmatch(r"cannot (create|write) \S+: No space left on device", error.value.message)
        check_remains(scenario, folder)
        assert (folder / "run.h5").exists() or not journal_path(folder / "run.h5").exists()


def test_disk_full_keeps_saying_so(tmp_path, monkeypatch):
    writer = TraceWriter(tmp_path / "run.h5", {})
    call = writer.site(Site("embed", "embed", "decode0"), "torch")
    breaker = Breaker(0, "before", trace_breaker.fail)
    breaker.install()
    try:
        with pytest.raises(DbgError, match="No space"):
            call.finish({})
    finally:
        breaker.remove()
    for again in (lambda: call.finish({}), lambda: writer.site(Site("L0", "block", "decode0"), "torch"), writer.close):
        with pytest.raises(DbgError, match="No space"):
            again()
    with Trace.open(tmp_path / "run.h5") as trace:
        assert "0 of 1" in trace.notice


@pytest.mark.parametrize("limit", [0, 2_000, 60_000, 150_000])
def test_file_size_limit(tmp_path, limit):
    """The same from the real system, which takes a part of the last write."""
    said = run_breaker("limited", tmp_path, limit)
    assert said.endswith("File too large")
    if limit:
        check_remains(trace_breaker.random_scenario(), tmp_path)


def test_cut_and_zeroed_data_file(tmp_path):
    """After a power failure the data may lack what the journal names: the rest is exact, and says what is lost."""
    scenario = Scenario(steps=4, tokens=40)
    writer = TraceWriter(tmp_path / "run.h5", MANIFEST, scenario.caches, scenario.images)
    scenario.write(writer)
    writer.abandon()
    data, journal = (tmp_path / "run.h5").read_bytes(), journal_path(tmp_path / "run.h5").read_bytes()
    complete = []
    for size in range(0, len(data), 4096):
        cut = tmp_path / "cut.h5"
        cut.write_bytes(data[:size])
        journal_path(cut).write_bytes(journal)
        with Trace.open(cut) as trace:
            complete.append(scenario.check(trace))
            assert "the rest is lost" in trace.notice
        zeroed = tmp_path / "zeroed.h5"
        zeroed.write_bytes(data[:size] + bytes(len(data) - size))
        journal_path(zeroed).write_bytes(journal)
        recover(zeroed, tmp_path / f"recovered{size}.h5")
        with Trace.open(tmp_path / f"recovered{size}.h5") as trace:
            assert scenario.check(trace) <= len(scenario.calls)
            assert "did not reach its end" in trace.notice
    assert complete == sorted(complete)
    assert complete[-1] > 10


def test_cut_journal(tmp_path):
    """Any prefix of the journal with a whole header is a trace."""
    scenario = Scenario(steps=1)
    writer = TraceWriter(tmp_path / "run.h5", MANIFEST, scenario.caches, scenario.images)
    scenario.write(writer)
    writer.abandon()
    journal = journal_path(tmp_path / "run.h5")
    text = journal.read_bytes()
    header = text.index(b"\n") + 1
    for size in [*range(header, len(text), 97), len(text)]:
        journal.write_bytes(text[:size])
        with Trace.open(tmp_path / "run.h5") as trace:
            scenario.check(trace)
    for size in (0, header - 1):
        journal.write_bytes(text[:size])
        with pytest.raises(DbgError, match="killed before it had saved anything"):
            Trace.open(tmp_path / "run.h5")
    for garbage in (b"\0" * 50 + b"\n", b'{"begin": 3}\n', b'{"finish": {"sequence": 99}}\n', b"[" * 9999 + b"\n"):
        journal.write_bytes(text + garbage)
        with Trace.open(tmp_path / "run.h5") as trace:
            assert scenario.check(trace) == len(scenario.calls)
            assert "the rest is lost" in trace.notice
