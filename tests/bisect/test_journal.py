"""The journal: what was finished stays finished, wherever the file was cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsv4dbg.bisect.journal import Journal, Trial, read
from dsv4dbg.compare import Verdict
from dsv4dbg.errors import DbgError

SETTINGS = {"op": "rms_norm", "candidate": "mine"}


def trial(number: int, verdict: Verdict = Verdict.PASS) -> Trial:
    return Trial(
        number, f"decode{number}/L1.attn_norm", "rms_norm", "differential", verdict, "all is well", rate=(1, 6)
    )


def written(path: Path, count: int = 5) -> bytes:
    journal = Journal(path, SETTINGS)
    for number in range(count):
        journal.begin(number, trial(number).key)
        journal.end(trial(number, Verdict(number)))
    journal.close()
    return path.read_bytes()


def test_a_trial_comes_back_as_it_was(tmp_path: Path) -> None:
    written(tmp_path / "j")
    header, trials = read(tmp_path / "j")
    assert header["settings"] == SETTINGS
    assert trials == [trial(number, Verdict(number)) for number in range(5)]


def test_cut_anywhere_it_resumes_with_what_was_finished(tmp_path: Path) -> None:
    path = tmp_path / "j"
    whole = written(path)
    first_line = whole.index(b"\n") + 1
    for cut in range(first_line, len(whole) + 1, 37):
        path.write_bytes(whole[:cut])
        ends = sum(json.loads(line)["event"] == "end" for line in whole[:cut].split(b"\n")[:-1])
        journal = Journal(path, SETTINGS, resume=True)
        assert len(journal.finished) == ends
        journal.end(trial(7))
        journal.close()
        assert len(read(path)[1]) == ends + 1


def test_a_begun_trial_is_a_presumed_fault(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", SETTINGS)
    journal.begin(0, ("tiny", "L0.attn_norm", "rms_norm", "guards"))
    last = json.loads((tmp_path / "j").read_text().splitlines()[-1])
    assert (last["event"], last["presumed"]) == ("begin", "FAULT")


def test_another_run_is_not_resumed(tmp_path: Path) -> None:
    written(tmp_path / "j")
    with pytest.raises(DbgError, match="another run: candidate differ"):
        Journal(tmp_path / "j", SETTINGS | {"candidate": "triton"}, resume=True)


@pytest.mark.parametrize("content", [b"", b"\n", b"\x89HDF\r\n", b"{}\n", b"[1]\n", b'{"event":"run"}\n'])
def test_a_file_of_something_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "j").write_bytes(content)
    with pytest.raises(DbgError, match="not the journal of a bisect"):
        read(tmp_path / "j")
