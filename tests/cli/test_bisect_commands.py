"""``bisect``, ``replay`` and ``reproduce`` from the command line: exit codes, one sentence, and what is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsv4dbg.bisect.journal import read

KERNELS = """
import ctypes
import torch
from dsv4dbg.kernels.norm.rms_norm import rms_norm
from dsv4dbg.kernels.registry import implements


@implements("rms_norm", "scaled")
def scaled(x, weight, *, eps):
    y = rms_norm(x, weight, eps=eps)
    y[-1] *= 2
    return y


@implements("rms_norm", "dying")
def dying(x, weight, *, eps):
    return ctypes.string_at(0)


@implements("rms_norm", "same")
def same(x, weight, *, eps):
    return rms_norm(x, weight, eps=eps)
"""
SITE = "prefill0/L2.attn.attn_norm"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plugin") / "norms.py"
    path.write_text(KERNELS)
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dsv4dbg.cli.main import main

    path = tmp_path_factory.mktemp("trace") / "short.h5"
    with pytest.raises(SystemExit) as end:
        main(["capture", "--tokens", "11,45,7,300,21", "--decode", "1", "-o", str(path)])
    assert not end.value.code
    return path


def test_bisect_finds_the_op_in_a_trace(dsv4dbg, trace: Path, plugin: Path, tmp_path: Path) -> None:
    """And writes a journal; the document holds what scripts need."""
    journal = tmp_path / "b.jsonl"
    ran = dsv4dbg(
        "bisect", "--trace", trace, "--candidate", "scaled", "--plugin", plugin, "--check", "differential", "--json",
        "-o", journal, "--reproducer", tmp_path / "found",
    )  # fmt: skip
    assert ran.code == 1, ran.err
    document = json.loads(ran.out)
    (culprit,) = document["culprits"]
    assert (culprit["op"], culprit["verdict"], culprit["check"]) == ("rms_norm", "DIVERGED", "differential")
    assert culprit["where"]["token"] == 4
    assert culprit["site"].startswith("prefill0/L0.")
    assert {"verdict", "sites", "coverage", "trials", "cost", "plan", "environment"} <= set(document)
    assert (Path(culprit["reproducer"]) / "reproduce.py").is_file()
    assert len(read(journal)[1]) == document["trials"]


def test_bisect_answers_first_and_says_what_to_type(dsv4dbg, trace: Path, plugin: Path, tmp_path: Path) -> None:
    common = ("bisect", "--trace", trace, "--plugin", plugin, "--check", "differential", "-o", tmp_path / "b.jsonl")
    bad = dsv4dbg(*common, "--candidate", "scaled").out.splitlines()
    assert bad[0].startswith("DIVERGED  rms_norm  first at prefill0/L0.")
    assert bad[-1].startswith("next     dsv4dbg bisect --candidate scaled")
    good = dsv4dbg(*common, "--candidate", "same")
    assert good.code == 0
    assert good.out.startswith("clean: 'same' agrees")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--op", "warp_drive"), 2, "unknown op 'warp_drive'"),
        (("--candidate", "nobody"), 2, "no op has an implementation 'nobody'"),
        (("--check", "horoscope"), 2, "there is no check 'horoscope'"),
        (("--trace", "no_such.h5"), 2, "no_such.h5"),
        (("--model", "no_such_model"), 2, "no_such_model"),
        (("--workload", "no_such.json"), 2, "no_such.json"),
        (("--plugin", "no_such.py"), 2, "no_such.py is not a file"),
        (("--prompt", "a", "--workload", "coverage"), 2, "were both given"),
        (("--resume", "no_such.jsonl"), 2, "no_such.jsonl is not the journal of a bisect"),
    ],
)
def test_bad_input_to_bisect(dsv4dbg, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    output = () if "--resume" in arguments else ("-o", tmp_path / "b.jsonl")
    ran = dsv4dbg("bisect", *arguments, *output)
    assert ran.code == code
    assert words in ran.err
    assert "Traceback" not in ran.err + ran.out


def test_a_plugin_that_does_not_import(dsv4dbg, trace: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_package\n")
    for command in (("bisect", "--trace", trace, "-o", tmp_path / "b"), ("replay", trace, SITE)):
        ran = dsv4dbg(*command, "--plugin", broken)
        assert ran.code == 2
        assert "does not import: ModuleNotFoundError: No module named 'no_such_package'" in ran.err


def test_no_gpu(dsv4dbg, trace: Path, tmp_path: Path) -> None:
    for command in (("bisect", "-o", tmp_path / "b"), ("replay", trace, SITE)):
        ran = dsv4dbg(*command, "--device", "cuda:99")
        assert ran.code == 125
        assert "no GPU 'cuda:99'" in ran.err


def test_nothing_tested_is_125(dsv4dbg, trace: Path, plugin: Path, tmp_path: Path) -> None:
    """The trace holds no call that the candidate could be tested on."""
    ran = dsv4dbg(
        "bisect", "--trace", trace, "--candidate", "triton", "--op", "merge_attn_states", "-o", tmp_path / "b.jsonl"
    )
    assert ran.code == 125
    assert "merge_attn_states" in ran.out


def test_replay(dsv4dbg, trace: Path, plugin: Path) -> None:
    right = dsv4dbg("replay", trace, SITE, "--candidate", "same", "--plugin", plugin)
    assert (right.code, right.out.splitlines()[0]) == (0, f"PASS: same at {SITE} (rms_norm)")
    wrong = json.loads(dsv4dbg("replay", trace, SITE, "--candidate", "scaled", "--plugin", plugin, "--json").out)
    assert (wrong["verdict"], wrong["where"]["token"], wrong["op"]) == ("DIVERGED", 4, "rms_norm")
    dead = dsv4dbg("replay", trace, SITE, "--candidate", "dying", "--plugin", plugin)
    assert dead.code == 1
    assert "SIGSEGV" in dead.out
    assert dead.out.splitlines()[-1].startswith("next: dsv4dbg reproduce")


@pytest.mark.parametrize(
    ("site", "words"),
    [
        ("prefill0/L9.attn.attn_norm", "L9.attn.attn_norm"),
        ("decode7/L2.attn.attn_norm", "decode7"),
        ("L2.attn.no_such", "has no site L2.attn.no_such"),
        ("prefill0/L2.attn", "is a block of ops"),
    ],
)
def test_replay_of_no_site(dsv4dbg, trace: Path, site: str, words: str) -> None:
    ran = dsv4dbg("replay", trace, site)
    assert ran.code == 2
    assert words in ran.err
    assert "Traceback" not in ran.err


def test_reproduce(dsv4dbg, trace: Path, plugin: Path, tmp_path: Path) -> None:
    common = ("reproduce", trace, SITE, "--plugin", plugin, "-o", tmp_path / "found")
    right = dsv4dbg(*common, "--candidate", "same")
    assert (right.code, (tmp_path / "found").exists()) == (0, False)
    wrong = dsv4dbg(*common, "--candidate", "scaled", "--json")
    assert wrong.code == 1
    assert json.loads(wrong.out)["confirmed"] is True
    again = dsv4dbg(*common, "--candidate", "scaled")
    assert again.code == 2
    assert "holds something already" in again.err
