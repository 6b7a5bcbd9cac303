"""Cutting calls down: what is left is what the failure needs, in few trials, and the reference can run it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from short_scans import call_of

from dsv4dbg.bisect.protocol import Hello
from dsv4dbg.bisect.retry import Retry
from dsv4dbg.bisect.shrink import shrink
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.table import Call

MARK = 4096.0  # beyond anything in the examples


def marked(call: Call, arg: str, *places: tuple[int, ...]) -> Call:
    value = call.args[arg].clone()
    for place in places:
        value[place] = MARK
    return replace(call, args={**call.args, arg: value})


class Trials:
    """Fails where so many elements of an argument are marked, and counts."""

    def __init__(self, arg: str, marks: int = 1) -> None:
        self.arg, self.marks, self.count = arg, marks, 0

    def __call__(self, call: Call) -> bool:
        self.count += 1
        return int((call.args[self.arg] == MARK).sum()) >= self.marks


def test_one_token_and_one_head() -> None:
    fails = Trials("q")
    small = shrink(marked(call_of("qnorm_rope_kv_insert", 129), "q", (57, 2, 100)), fails)
    assert small.args["q"].shape[:2] == (1, 1)
    assert MARK in small.args["q"]
    assert all(len(small.args[name]) == 1 for name in ("kv", "positions", "window_slots"))
    assert fails.count <= 60


def test_a_failure_of_two_tokens_keeps_both() -> None:
    call = marked(call_of("qnorm_rope_kv_insert", 63), "kv", (5, 9), (40, 9))
    small = shrink(call, Trials("kv", 2))
    assert len(small.args["kv"]) == 2
    assert small.args["positions"].tolist() == call.args["positions"][[5, 40]].tolist()


def test_pages_that_nothing_points_to_are_dropped() -> None:
    call = call_of("qnorm_rope_kv_insert", 63)
    small = shrink(call, lambda c: True)
    cache, slots = small.args["window_cache"], small.args["window_slots"]
    assert isinstance(cache, Cache)
    assert len(cache.data) == 1 < len(call.args["window_cache"].data)
    assert slots.shape == (1,)
    assert slots[0] < cache.layout.entries


def test_the_budget_holds_and_the_result_is_the_same_every_time() -> None:
    call = marked(call_of("qnorm_rope_kv_insert", 129), "kv", (3, 0), (64, 0), (128, 0))
    results = []
    for _ in range(2):
        fails = Trials("kv", 3)
        results.append(shrink(call, fails, budget=12))
        assert fails.count <= 12
    assert torch.equal(results[0].args["kv"], results[1].args["kv"])
    assert int((results[0].args["kv"] == MARK).sum()) == 3
    assert shrink(call, fails, budget=0) is call


def test_with_a_candidate_in_a_worker(tmp_path: Path) -> None:
    """A kernel that is wrong for one token and head is cut down to them; calls that make no sense do not count."""
    plugin = tmp_path / "planted.py"
    plugin.write_text(
        "from dsv4dbg.kernels.attention.inv_rope import inv_rope\n"
        "from dsv4dbg.kernels.registry import implements\n"
        "@implements('inv_rope', 'planted')\n"
        "def planted(*, o, **others):\n"
        "    out = inv_rope(o=o, **others)\n"
        f"    return out.where(~(o == {MARK}).any(-1, keepdim=True), out * 2)\n"
        "@implements('inv_rope', 'raises')\n"
        "def raises(**call):\n"
        "    raise RuntimeError('no such grid')\n"
    )
    call = call_of("inv_rope", 128)
    call = marked(call, "o", (77, 3, 4))
    with Retry(Hello("planted", (plugin,), "cpu"), 30) as retry:
        failure = retry.failure(call)
        assert failure is not None
        assert (failure.mode, failure.outcome.where["token"]) == ("values", 77)
        small = shrink(call, lambda c: retry.same(c, failure))
        assert small.args["o"].shape[:2] == (1, 1)
        assert retry.failure(small).outcome.verdict == failure.outcome.verdict  # type: ignore[union-attr]
        broken = replace(small, args={**small.args, "positions": torch.tensor([10**6])})
        assert not retry.same(broken, failure)
    with Retry(Hello("raises", (plugin,), "cpu"), 30) as retry:
        failure = retry.failure(call)
        assert failure is not None
        assert retry.same(small, failure)
        for channels in (1, 33):  # fewer than are rotated
            cut = replace(call, args={**call.args, "o": call.args["o"][..., :channels]})
            assert not retry.same(cut, failure)
