"""Verify steps: the completion is that of plain greedy decoding, whatever is proposed and accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsv4dbg.errors import DbgError
from dsv4dbg.model.recording import Request, load_model, open_session, prompt_ids
from dsv4dbg.model.run import generate, speculate
from dsv4dbg.trace.reader import Trace

PROMPT = "The capital of France is"
STEPS = 4


@pytest.fixture(scope="module")
def loaded():
    checkpoint, model, device = load_model(Request(prompt=PROMPT))
    return model, device, prompt_ids(Request(prompt=PROMPT), checkpoint)


@pytest.fixture(scope="module")
def greedy(loaded) -> list[int]:
    model, device, ids = loaded
    return generate(open_session(Request(decode=16), model, device, ids), ids, 16)


def drafted(loaded, count: int, drafts: list[int] | None) -> tuple[list[int], list[int]]:
    model, device, ids = loaded
    return speculate(open_session(Request(decode=STEPS, verify=count), model, device, ids), ids, STEPS, count, drafts)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_right_drafts_are_all_accepted(loaded, greedy: list[int], count: int) -> None:
    # each step feeds the last token and the next count - 1 of what will be said
    drafts = [greedy[1 + s * count + i] for s in range(STEPS) for i in range(count - 1)]
    tokens, accepted = drafted(loaded, count, drafts)
    assert accepted == [count] * STEPS
    assert tokens == greedy[: len(tokens)]
    assert len(tokens) == 1 + count * STEPS


@pytest.mark.parametrize("count", [2, 4])
def test_wrong_drafts_are_rejected_and_change_nothing(loaded, greedy: list[int], count: int) -> None:
    tokens, accepted = drafted(loaded, count, [3] * 12)
    assert accepted == [1] * STEPS
    assert tokens == greedy[: STEPS + 1]


def test_every_accepted_length(loaded, greedy: list[int]) -> None:
    drafts, at = [], 1
    for right in (0, 1, 2, 3):
        drafts += greedy[at : at + right] + [3] * (3 - right)
        at += right + 1
    tokens, accepted = drafted(loaded, 4, drafts)
    assert accepted == [1, 2, 3, 4]
    assert tokens == greedy[: len(tokens)]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_mtp_block_drafts(loaded, greedy: list[int], count: int) -> None:
    tokens, accepted = drafted(loaded, count, None)
    assert tokens == greedy[: len(tokens)]
    assert len(accepted) == STEPS
    assert sum(accepted) == len(tokens) - 1


def test_no_drafts_and_no_mtp_block(loaded) -> None:
    model, device, ids = loaded
    session = open_session(Request(decode=1, verify=2), model, device, ids)
    session.draft = False
    with pytest.raises(DbgError, match="no MTP block"):
        speculate(session, ids, 1, 2)


def test_capture_with_verify(dsv4dbg, tmp_path: Path) -> None:
    ran = dsv4dbg(
        "capture", "--prompt", PROMPT, "--verify", "3", "--decode", "2", "--json", "-o", tmp_path / "t.h5",
        "--drafts", "20,205,355,326",
    )  # fmt: skip
    document = json.loads(ran.out)
    with Trace.open(tmp_path / "t.h5") as trace:
        assert trace.steps == ["prefill0", "verify0", "verify1"]
        assert trace.manifest["workload"]["drafts"] == [20, 205, 355, 326]
        assert trace.site("verify0", "L2.attn.sparse_mla_decode").inputs["q"].shape[0] == 3
    assert len(document["completion_tokens"]) == 7
