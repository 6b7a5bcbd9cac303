"""Workloads: the coverage workload reaches what it says, files are checked, and running one feeds the right tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.numerics import OFFICIAL
from dsv4dbg.model.checkpoint import open_model
from dsv4dbg.model.model import Model
from dsv4dbg.model.run import Session, StepResult
from dsv4dbg.model.weights import ModelWeights
from dsv4dbg.model.workload import Feed, Workload, WorkloadStep, coverage, load_workload, regimes

CPU = torch.device("cpu")


@pytest.mark.parametrize("model", ["tiny", "wide"])
def test_coverage_reaches_every_regime(model: str) -> None:
    config = open_model(model).config
    workload = coverage(config)
    reached = regimes(config, workload)
    assert len(reached) > 50
    assert all(reached.values()), [name for name, r in reached.items() if not r]
    assert max(workload.max_tokens) >= 4 * config.index_topk * config.csa_ratio
    assert {(len(f.tokens), f.accepted) for s in workload.steps if s.phase == "verify" for f in s.feeds} >= {
        (n, a) for n in (2, 3, 4) for a in range(1, n + 1)
    }


def test_regimes_tell_what_is_not_reached() -> None:
    config = open_model("tiny").config
    reached = regimes(config, Workload("one", 1, (WorkloadStep("prefill", (Feed.all_of(0, [1, 2, 3]),)),)))
    assert reached["prefill: a first token (position 0)"]
    assert not reached["prefill: 3 HCA entries"]
    assert not reached["empty sequence in a step"]


def test_rejected_drafts_are_wrong_and_positions_go_on_from_what_was_accepted() -> None:
    workload = coverage(open_model("tiny").config)
    true: dict[int, list[int]] = {}
    for _, feeds in workload.spans():
        for feed, start in feeds:
            assert start == len(true.setdefault(feed.sequence, []))
            true[feed.sequence] += feed.tokens[: feed.accepted]


def test_a_workload_survives_its_file(tmp_path: Path) -> None:
    config = open_model("tiny").config
    workload = coverage(config)
    (tmp_path / "w.json").write_text(json.dumps(workload.to_json()))
    assert load_workload(tmp_path / "w.json", config.vocab_size) == workload


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": [{"phase": "dream", "feeds": []}]}, "phase 'dream'"),
        ({"steps": [{"phase": "decode", "feeds": [[5, [1], 1]]}]}, "sequence 5 of 1"),
        ({"steps": [{"phase": "decode", "feeds": [[0, [1], 2]]}]}, "accepts 2"),
        ({"steps": [{"phase": "decode", "feeds": [[0, [9999], 1]]}]}, "outside 0..2047"),
        ({"steps": [{"phase": "decode", "feeds": [[0, [1], 1], [0, [1], 1]]}]}, "twice"),
        ({"steps": [{"feeds": []}]}, "malformed"),
        ({"steps": 3}, "malformed"),
    ],
)
def test_bad_workloads_are_one_sentence(tmp_path: Path, change: dict, words: str) -> None:
    (tmp_path / "w.json").write_text(json.dumps({"name": "w", "sequences": 1, "steps": []} | change))
    with pytest.raises(DbgError, match=words):
        load_workload(tmp_path / "w.json", 2048)


def test_a_file_that_is_no_workload(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text("{")
    for path in (tmp_path / "w.json", tmp_path / "no.json"):
        with pytest.raises(DbgError, match="cannot be read"):
            load_workload(path, 2048)


def test_running_a_workload_rolls_back_what_was_not_accepted() -> None:
    checkpoint = open_model("tiny")
    model = Model(checkpoint.config, ModelWeights(checkpoint, CPU), OFFICIAL)
    ids = list(range(100, 140))
    steps = [WorkloadStep("prefill", (Feed.all_of(0, ids[:30]),))]
    drafts = [
        WorkloadStep("verify", (Feed(0, (ids[30], 7, 8, 9), 1),)),
        WorkloadStep("verify", (Feed(0, (ids[31], ids[32], 5), 2),)),
        WorkloadStep("decode", (Feed.all_of(0, [ids[33]]),)),
    ]
    plain = [WorkloadStep("decode", (Feed.all_of(0, [ids[30 + i]]),)) for i in range(4)]
    last = []
    for tail in (drafts, plain):
        workload = Workload("w", 1, tuple(steps + tail))
        session = Session(model, max_tokens=workload.max_tokens, step_tokens=workload.step_tokens, device=CPU)
        results: list[StepResult] = []
        session.run(workload, results.append)
        assert session.manager.lengths == [34]
        last.append(results[-1])
    a, b = (r.logits for r in last)
    assert torch.equal(last[0].inputs.positions, last[1].inputs.positions)
    assert float((a - b).norm() / b.norm()) < 0.05  # FP8 flips; a stale draft row gives far more
    assert int(a.argmax()) == int(b.argmax())


def test_a_sequence_cannot_outgrow_its_plan() -> None:
    checkpoint = open_model("tiny")
    model = Model(replace(checkpoint.config), ModelWeights(checkpoint, CPU), OFFICIAL)
    workload = Workload("w", 1, (WorkloadStep("prefill", (Feed.all_of(0, [1, 2, 3]),)),))
    session = Session(model, max_tokens=[2], step_tokens=2, device=CPU)
    with pytest.raises(DbgError, match="3 tokens, 2 were planned"):
        session.run(workload)
