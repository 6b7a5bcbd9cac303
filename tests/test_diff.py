"""`compare_traces` on a made-up forward of three layers in numpy: who is blamed, who is not, and what is not known."""

from __future__ import annotations

import json
import math
import os
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4dbg.compare import Verdict
from dsv4dbg.diff import (
    Decision,
    Diff,
    Intent,
    SiteDiff,
    add_fault,
    check_comparable,
    compare_traces,
    finished_in_both,
)
from dsv4dbg.errors import DbgError
from dsv4dbg.pages import state_layout
from dsv4dbg.site import BLOCK, Site
from dsv4dbg.trace import apart as apart_module
from dsv4dbg.trace.apart import FLOATS, Apart, Workspace, apart, row_dims
from dsv4dbg.trace.bits import Bits
from dsv4dbg.trace.caches import CacheReplay
from dsv4dbg.trace.reader import Trace
from dsv4dbg.trace.records import CacheSpec, Mutation, SiteRecord, Tensor
from dsv4dbg.trace.writer import TraceWriter

TOKENS, CHANNELS, LAYERS, STEPS = 3, 8, 3, ("prefill0", "decode0", "decode1")
LAYOUT = state_layout(CHANNELS // 2, 4, 8)  # one float32 row of CHANNELS per record
MANIFEST = {"model": "made-up", "prompt_tokens": [1], "workload": {"decode": 2}, "plan": "*=torch", "environment": {}}
Change = Callable[[np.ndarray], np.ndarray]


def nudge(values: np.ndarray) -> np.ndarray:
    values = values.copy()
    values.reshape(-1)[-1] += 1
    return values


# the ops: from inputs, weights, scalars and caches to outputs and written records
def embed(ids: np.ndarray) -> np.ndarray:
    return np.repeat(ids[:, None], CHANNELS, 1).astype(np.float32) + np.arange(CHANNELS, dtype=np.float32)


def mix(x: np.ndarray, gain: float) -> np.ndarray:
    return (x * np.float32(gain) + x.sum(axis=1, keepdims=True)) / np.float32(9)


def attend(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return x + rows.sum(axis=0) / np.float32(16)


@dataclass
class Forward:
    """Runs the made-up forward into a trace.

    Attributes:
        changes: what happens to an output or a written record: ``{"decode0/L1.attn.mix y": nudge}``.
        stray: sites that write a byte outside of their slots.
        implementations: names by site, where it is not ``torch``.
        skip: sites that are not captured (of those that write, only the writes are).
        slots: added to every slot.
    """

    changes: dict[str, Change] = field(default_factory=dict)
    stray: set[str] = field(default_factory=set)
    implementations: dict[str, str] = field(default_factory=dict)
    skip: Callable[[Site], bool] = lambda site: False
    manifest: dict[str, Any] = field(default_factory=dict)
    steps: tuple[str, ...] = STEPS
    gain: float = 2.0
    bias: bool = False
    spec: CacheSpec = field(default_factory=lambda: CacheSpec(LAYOUT, 8, LAYOUT.page_bytes, fill=0))
    slots: int = 0
    stop_in: str = ""

    def capture(self, path: Path) -> Path:
        self.caches = {
            f"L{i}.state": np.zeros((self.spec.pages, self.spec.page_stride), np.uint8) for i in range(LAYERS)
        }
        with TraceWriter(path, MANIFEST | self.manifest, dict.fromkeys(self.caches, self.spec)) as writer:
            self.writer = writer
            for number, step in enumerate(self.steps):
                self._step(step, number)
        return path

    def _call(
        self, site: Site, inputs: dict[str, Any], outputs: dict[str, Any], cache: str = "", written: Any = None
    ) -> dict[str, Any]:
        kept = not self.skip(site)
        outputs = {n: self.changes.get(f"{site.path} {n}", lambda v: v)(v) for n, v in outputs.items()}
        if not kept and written is None:
            return outputs
        given = {n: None if v is None else tensor(v) for n, v in inputs.items()} if kept else {}
        attrs = {"gain": self.gain} if site.op == "mix" else {}
        weights = {"w": {"tensor": f"{site.name}.w", "hash": "1"}} if site.op == "mix" else None
        call = self.writer.site(
            site, self.implementations.get(site.path, "torch" if site.op != BLOCK else ""), attrs=attrs, inputs=given,
            weights=weights, caches={"state": cache} if cache else None,
        )  # fmt: skip
        if site.path == self.stop_in:
            raise RuntimeError("the kernel died")
        mutated = {"state": self._write(site, cache, *written)} if written else None
        call.finish({n: tensor(v) for n, v in outputs.items()} if kept else {}, mutated)
        return outputs

    def _write(self, site: Site, cache: str, slots: np.ndarray, rows: np.ndarray) -> Mutation:
        rows = self.changes.get(f"{site.path} state", lambda v: v)(rows)
        slots = slots + self.slots
        records = np.ascontiguousarray(rows, np.float32).view(np.uint8)
        LAYOUT.write(self.caches[cache], slots, records)
        if site.path not in self.stray:
            return Mutation(slots, records)
        self.caches[cache][-1, -1] ^= 1
        place = np.array([self.caches[cache].size - 1])
        return Mutation(slots, records, place, self.caches[cache].reshape(-1)[place])

    def _step(self, step: str, number: int) -> None:
        ids = np.arange(TOKENS) + number
        x = self._call(Site("embed", "embed", step), {"ids": ids}, {"x": embed(ids)})["x"]
        for layer in range(LAYERS):
            scope, entered = f"L{layer}", x
            bias = np.zeros(1, np.float32) if self.bias else None
            y = self._call(
                Site(f"{scope}.attn.mix", "mix", step), {"x": x, "bias": bias}, {"y": mix(x, self.gain)}
            )["y"]  # fmt: skip
            slots = (np.arange(TOKENS) + number * 2) % 16  # steps overwrite a part of what earlier ones wrote
            cache = f"{scope}.state"
            self._call(
                Site(f"{scope}.attn.insert", "insert", step), {"y": y, "slots": slots}, {}, cache, (slots, y * 2)
            )  # fmt: skip
            seen = slots + self.slots
            rows = LAYOUT.read(self.caches[cache], seen).view(np.float32)
            o = self._call(
                Site(f"{scope}.attn.attend", "attend", step), {"y": y, "seen": slots}, {"o": attend(y, rows)}, cache
            )["o"]  # fmt: skip
            self._call(Site(f"{scope}.attn", BLOCK, step), {"x": x}, {"y": o})
            x = self._call(Site(f"{scope}.ffn.add", "add", step), {"x": x, "o": o}, {"y": x + o})["y"]
            self._call(Site(scope, BLOCK, step), {"x": entered}, {"x": x})


def tensor(values: np.ndarray) -> Tensor:
    return Tensor(values, values.dtype.name, " ".join(["token", "channel"][: values.ndim]))


class Recompute:
    """A judge: the ops again on the candidate's own inputs, equal bit for bit or at fault."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.caches, self.asked = trace, CacheReplay(trace), []

    def __call__(self, reference: SiteRecord, record: SiteRecord) -> Decision | str:
        self.asked.append(record.site.path)
        args = {name: self.trace.view(record, f"in/{name}") for name in record.inputs}
        op = record.site.op
        if op == "insert":
            written = self.trace.read(record, "mut/state/records").view(np.float32)
            right = np.array_equal(written, args["y"] * 2) and "stray_offsets" not in record.mutated["state"].tensors
        else:
            if op == "attend":
                cache = self.caches.at(record, "state")
                spec = self.trace.caches["L0.state"]
                shift = 0 if spec.pages == 8 else 16
                args["rows"] = LAYOUT.read(cache, args.pop("seen") + shift).view(np.float32)
                args["x"] = args.pop("y")
            if op == "mix":
                args.pop("bias", None)
                args["gain"] = record.attrs["gain"]
            made = {"embed": embed, "mix": mix, "attend": attend, "add": lambda x, o: x + o}[op](**args)
            (name,) = record.outputs
            right = np.array_equal(made, self.trace.view(record, f"out/{name}"), equal_nan=True)
        return Decision(Verdict.PASS, "as computed", True) if right else Decision(Verdict.DIVERGED, "not as computed")


def compared(reference: Path, candidate: Path, judged: bool = True, intent: Intent | None = None) -> Diff:
    with Trace.open(reference) as first, Trace.open(candidate) as second:
        check_comparable(first, second)
        pairs, result = finished_in_both(first, second)
        judge = Recompute(second) if judged else None
        result.sites.extend(compare_traces(first, second, pairs, intent, judge))
        add_fault(result, first, second)
        return result


def at(result: Diff, path: str) -> SiteDiff:
    return next(s for s in result.sites if s.record.site.path == path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Forward().capture(tmp_path_factory.mktemp("plain") / "run.h5")


SITES = [
    (f"{step}/{name} {output}")
    for step in STEPS
    for name, output in [
        ("embed", "x"),
        *((f"L{i}.{op}", out) for i in range(LAYERS) for op, out in (
            ("attn.mix", "y"), ("attn.insert", "state"), ("attn.attend", "o"), ("ffn.add", "y"))),
    ]
]  # fmt: skip


def test_equal_captures_are_identical(tmp_path: Path, plain: Path) -> None:
    result = compared(plain, Forward().capture(tmp_path / "again.h5"))
    assert result.identical
    assert result.exit_code == 0
    assert result.first is None
    assert len(result.sites) == len(STEPS) * (1 + 6 * LAYERS)
    assert len(result.judgeable) == len(SITES)
    assert not result.unjudged


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.sampled_from(SITES), judged=st.booleans())
def test_the_first_wrong_output_is_named_and_what_follows_is_not_blamed(tmp_path, plain, place, judged) -> None:
    changed = tmp_path / "changed.h5"
    changed.unlink(missing_ok=True)
    result = compared(plain, Forward(changes={place: nudge}).capture(changed), judged)
    site, output = place.split()
    first = result.first
    assert first is not None
    assert first.record.site.path == site
    assert first.verdict == Verdict.DIVERGED
    assert first is result.first_difference
    assert first.differs == [output]
    assert not first.inputs
    assert result.exit_code == 1
    others = [s for s in result.judgeable if s is not first]
    assert all(s.verdict in (Verdict.PASS, Verdict.DRIFT) for s in others)
    assert all(s.inputs for s in others if s.verdict == Verdict.DRIFT)
    assert bool(result.unjudged) == (not judged and any(s.inputs for s in others))


@pytest.mark.parametrize("judged", [True, False])
def test_a_cache_that_differs_is_an_input_also_of_blocks_until_it_is_overwritten(tmp_path, plain, judged) -> None:
    """A wrong record of the prefill is seen by the attention of that step and of the next, which overwrites it."""
    wrong = {"prefill0/L1.attn.insert state": nudge}  # the last token's record, slot 2; decode0 writes slots 2, 3, 4

    def other(values: np.ndarray) -> np.ndarray:
        values = values.copy()
        values[0] += 1  # slot 0, which nobody overwrites
        return values

    result = compared(plain, Forward(changes=wrong).capture(tmp_path / "a.h5"), judged)
    assert result.first is not None
    assert result.first.record.site.path == "prefill0/L1.attn.insert"
    assert "cache L1.state differs in 1 record" in at(result, "prefill0/L1.attn.attend").inputs
    assert not at(result, "prefill0/L1.attn").inputs  # the block's own op made it differ
    assert at(result, "decode0/L1.attn.insert").inputs == ("cache L1.state differs in 1 record",)
    assert at(result, "decode0/L1.attn").inputs == ("cache L1.state differs in 1 record",)
    assert at(result, "decode0/L1").inputs == ("cache L1.state differs in 1 record",)
    assert not at(result, "decode0/L1.attn.attend").inputs
    assert not at(result, "decode1/L1").inputs
    assert not at(result, "decode0/L0").inputs
    result = compared(
        plain, Forward(changes={"prefill0/L1.attn.insert state": other}).capture(tmp_path / "b.h5"), judged
    )
    assert at(result, "decode1/L1.attn.attend").inputs == ("cache L1.state differs in 1 record",)
    assert at(result, "decode1/L1").inputs


def test_a_site_whose_cache_differs_elsewhere_is_judged_though_its_output_is_equal(tmp_path, plain) -> None:
    changes = {"prefill0/L2.attn.insert state": lambda v: np.concatenate([v[:1] + 1, v[1:]])}
    path = Forward(changes=changes).capture(tmp_path / "a.h5")
    seen = at(compared(plain, path), "decode1/L2.attn.attend")  # it reads slots 4 to 6
    assert seen.inputs
    assert not seen.differs
    assert (seen.verdict, seen.unjudged) == (Verdict.PASS, "")
    unjudged = at(compared(plain, path, judged=False), "decode1/L2.attn.attend")
    assert (unjudged.verdict, unjudged.unjudged) == (Verdict.PASS, "no judge")


def test_an_output_that_does_not_follow_its_inputs_is_at_fault(tmp_path, plain) -> None:
    """The candidate's site yields what the reference yields, although its own input is another one: a stale result."""
    with Trace.open(plain) as trace:
        stale = trace.view(trace.site("decode0", "L1.attn.mix"), "out/y").copy()
    changes: dict[str, Change] = {"decode0/L0.ffn.add y": nudge, "decode0/L1.attn.mix y": lambda _: stale}
    path = Forward(changes=changes).capture(tmp_path / "a.h5")
    found = at(compared(plain, path), "decode0/L1.attn.mix")
    assert found.verdict == Verdict.DIVERGED
    assert "did not follow the inputs (x)" in found.sentence


def test_bytes_outside_the_slots(tmp_path, plain) -> None:
    result = compared(plain, Forward(stray={"decode0/L0.attn.insert"}).capture(tmp_path / "a.h5"))
    assert result.first is not None
    assert result.first.record.site.path == "decode0/L0.attn.insert"
    assert result.first.outputs["state"].reason == "bytes outside the call's slots changed"
    assert at(result, "decode1/L0.attn.attend").inputs == ("cache L0.state differs outside of its records",)
    assert result.count(Verdict.DIVERGED) == 1


def test_another_environment_is_judged_and_not_at_fault_for_bits_alone(tmp_path, plain) -> None:
    elsewhere = {"environment": {"gpu": "MI300X"}}
    path = Forward(changes={"decode0/L1.attn.mix y": nudge}, manifest=elsewhere).capture(tmp_path / "a.h5")
    with Trace.open(plain) as first, Trace.open(path) as second:
        pairs, result = finished_in_both(first, second)

        def lenient(reference: SiteRecord, record: SiteRecord) -> Decision:
            return Decision(Verdict.ROUNDING, "y is within rounding")

        result.sites.extend(compare_traces(first, second, pairs, judge=lenient))
    assert result.exit_code == 0
    assert at(result, "decode0/L1.attn.mix").verdict == Verdict.ROUNDING
    assert at(result, "decode0/L1.attn.attend").verdict == Verdict.DRIFT
    unjudged = compared(plain, path, judged=False)
    assert unjudged.exit_code == 125
    assert at(unjudged, "decode0/L1.attn.mix").sentence == "inputs are equal, implementation or environment are not"
    assert compared(plain, path).exit_code == 1


def test_another_implementation_is_judged(tmp_path, plain) -> None:
    mine = {"decode0/L1.attn.mix": "mine"}
    right = Forward(implementations=mine).capture(tmp_path / "right.h5")
    assert compared(plain, right).identical
    wrong = Forward(implementations=mine, changes={"decode0/L1.attn.mix y": nudge}).capture(tmp_path / "wrong.h5")
    result = compared(plain, wrong)
    assert result.first is not None
    assert (result.first.sentence, result.exit_code) == ("not as computed", 1)
    assert compared(plain, wrong, judged=False).exit_code == 125


def test_bits_that_the_judge_finds_right_point_at_the_reference(tmp_path, plain) -> None:
    """Same code, same place, equal inputs: one of the two is wrong, and the judge says which."""
    wrong = Forward(changes={"decode0/L1.attn.mix y": nudge}).capture(tmp_path / "wrong.h5")
    result = compared(wrong, plain)
    assert result.first is not None
    assert result.first.verdict == Verdict.DIVERGED
    assert "the candidate's is what torch yields here, the reference's is not" in result.first.sentence


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Forward(gain=2.5), "gain (2.5, not 2.0)"),
        (Forward(bias=True), "bias"),
        (Forward(spec=CacheSpec(LAYOUT, 9, LAYOUT.page_bytes, fill=0)), "cache L0.state has another size or fill"),
        (Forward(spec=CacheSpec(LAYOUT, 8, LAYOUT.page_bytes, fill=255)), "cache L0.state has another size or fill"),
    ],
    ids=["scalar", "absent against given", "pages", "fill"],
)
def test_inputs_that_are_not_tensors(tmp_path, plain, other: Forward, words: str) -> None:
    result = compared(plain, other.capture(tmp_path / "a.h5"), judged=False)
    site = "prefill0/L0.attn.attend" if "cache" in words else "prefill0/L0.attn.mix"
    assert words in at(result, site).inputs
    assert at(result, site).verdict in (Verdict.PASS, Verdict.DRIFT)
    assert result.exit_code in (0, 125)


def test_other_slots_are_other_writes_that_a_judge_accepts(tmp_path, plain) -> None:
    spec = CacheSpec(LAYOUT, 12, LAYOUT.page_bytes, fill=0)
    path = Forward(slots=16, spec=spec).capture(tmp_path / "a.h5")
    result = compared(plain, path)
    written = at(result, "prefill0/L0.attn.insert")
    assert written.outputs["state"].reason == "written at other slots"
    assert written.verdict == Verdict.DRIFT
    assert result.exit_code == 0
    assert result.count(Verdict.DIVERGED) == 0


def test_blocks_are_views_of_the_ops_inside(tmp_path, plain) -> None:
    result = compared(plain, Forward(changes={"decode0/L1.attn.mix y": nudge}).capture(tmp_path / "a.h5"))
    block = at(result, "decode0/L1.attn")
    assert block.view
    assert block.verdict == Verdict.DIVERGED  # so the ribbon shows it, but it is not counted
    assert block.sentence == "3 of 3 ops inside differ"
    assert at(result, "decode0/L2").verdict == Verdict.DRIFT
    assert at(result, "decode0/L0").verdict == Verdict.PASS
    assert BLOCK not in {s.record.site.op for s in result.judgeable}


def test_a_block_whose_ops_were_not_captured_speaks_for_itself(tmp_path) -> None:
    only_blocks = lambda site: site.op != BLOCK  # noqa: E731
    plain = Forward(skip=only_blocks).capture(tmp_path / "plain.h5")
    changed = Forward(skip=only_blocks, changes={"decode0/L1.attn.attend o": nudge}).capture(tmp_path / "a.h5")
    result = compared(plain, changed)
    assert result.first is not None
    assert result.first.record.site.path == "decode0/L1.attn"
    assert result.first.sentence == "inputs are bit-equal, y is not; no op inside was captured"
    assert result.exit_code == 1
    later = at(result, "decode0/L2.attn")
    assert later.verdict == Verdict.DRIFT
    assert "a block cannot be judged" in later.unjudged
    assert at(result, "decode0/L1").view is False
    other = compared(plain, Forward(
        skip=only_blocks, changes={"decode0/L1.attn.attend o": nudge}, manifest={"plan": "*=mine"}
    ).capture(tmp_path / "b.h5"))  # fmt: skip
    assert other.exit_code == 125


def test_a_block_whose_output_is_not_what_its_ops_made(tmp_path, plain) -> None:
    """A capture that stored something else at a boundary than the last op inside it yielded."""
    result = compared(plain, Forward(changes={"decode0/L1.attn y": nudge}).capture(tmp_path / "a.h5"))
    assert result.first is not None
    assert result.first.record.site.path == "decode0/L1.attn"
    assert "no op inside that differs was captured" in result.first.sentence
    assert result.count(Verdict.DIVERGED) == 1


def test_filters_leave_cache_writes_that_still_tell_what_caches_hold(tmp_path, plain) -> None:
    only_attend = lambda site: site.op != "attend"  # noqa: E731
    same = Forward(skip=only_attend).capture(tmp_path / "same.h5")
    result = compared(plain, same)
    assert not any(s.differs or s.inputs for s in result.sites)
    assert len(result.judgeable) == len(STEPS) * LAYERS
    assert result.missing == len(STEPS) * (1 + 4 * LAYERS)
    changes = {"prefill0/L1.attn.insert state": nudge}
    for reference in (plain, same):
        result = compared(
            reference, Forward(skip=only_attend, changes=changes).capture(tmp_path / f"{reference.name}.c")
        )
        assert result.first is not None
        assert result.first.record.site.path == "prefill0/L1.attn.attend"
        assert result.first.inputs == ("cache L1.state differs in 1 record",)
        assert result.exit_code == 0
        os.unlink(tmp_path / f"{reference.name}.c")


def test_runs_of_other_lengths_are_compared_where_both_went(tmp_path, plain) -> None:
    shorter = Forward(steps=STEPS[:2], manifest={"workload": {"decode": 1}}).capture(tmp_path / "a.h5")
    result = compared(plain, shorter)
    assert not any(s.differs or s.inputs for s in result.sites)
    assert not result.identical
    assert result.only_reference[0] == "decode1/embed"
    assert (len(result.only_reference), result.only_candidate) == (1 + 6 * LAYERS, [])
    assert compared(shorter, plain).only_candidate == result.only_reference


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ({"model": "other"}, "model is made-up"),
        ({"prompt_tokens": [2]}, "prompt tokens is [1]"),
        ({"workload": {"decode": 2, "chunk": 4}}, "workload is {}"),
        ({"workload": [1, 2]}, "workload is {}"),
    ],
)
def test_other_runs_are_refused(tmp_path, plain, manifest: dict[str, Any], words: str) -> None:
    with pytest.raises(DbgError, match="cannot be compared") as error:
        compared(plain, Forward(manifest=manifest).capture(tmp_path / "a.h5"))
    assert words in error.value.message


def test_equal_weights_are_the_same_model_under_any_name(tmp_path) -> None:
    paths = [
        Forward(manifest={"model": name, "weights": "abc"}).capture(tmp_path / f"{name}.h5") for name in ("one", "two")
    ]
    assert compared(*paths).identical


def test_an_error_in_a_call_is_a_fault_of_it(tmp_path, plain) -> None:
    path = tmp_path / "a.h5"
    with pytest.raises(RuntimeError):
        Forward(stop_in="decode0/L1.attn.attend").capture(path)
    result = compared(plain, path)
    assert result.first is not None
    assert (result.first.verdict, result.first.record.site.path) == (Verdict.FAULT, "decode0/L1.attn.attend")
    assert "RuntimeError: the kernel died" in result.first.sentence
    assert result.exit_code == 1
    back = compared(path, plain)
    assert back.exit_code == 0
    assert "decode0/L1.attn.attend" in back.only_candidate


def test_a_capture_that_was_killed_is_compared_as_far_as_it_went(tmp_path, plain) -> None:
    """The journal holds what was finished; the call in which it ended is nobody's fault that we know of."""
    journal, path = tmp_path / "a.h5.journal", tmp_path / "a.h5"
    with pytest.raises(RuntimeError):
        Forward(stop_in="decode1/L0.attn.mix").capture(tmp_path / "whole.h5")
    writer = Forward(changes={"decode0/L2.attn.mix y": nudge})
    original = TraceWriter.close

    def killed(self: TraceWriter, *_: Any, **__: Any) -> None:
        shutil.copy(self.path, path)
        shutil.copy(self.path.with_name(self.path.name + ".journal"), journal)
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TraceWriter, "close", killed)
        writer.capture(tmp_path / "whole2.h5")
    text = journal.read_bytes()
    for share, code in ((0.3, 0), (1.0, 1)):
        journal.write_bytes(text[: int(len(text) * share)])
        result = compared(plain, path)
        assert result.exit_code == code
        assert 0 < len(result.judgeable) <= len(SITES)
        if code:
            assert result.first is not None
            assert result.first.record.site.path == "decode0/L2.attn.mix"


def test_intended_differences_are_named_and_nobodys_fault(tmp_path, plain) -> None:
    path = Forward(changes={"prefill0/L0.attn.mix y": nudge}).capture(tmp_path / "a.h5")
    with Trace.open(plain) as first, Trace.open(path) as second:
        pairs, result = finished_in_both(first, second)

        def right(reference: SiteRecord, record: SiteRecord) -> Decision:
            return Decision(Verdict.PASS, "y is right", True)

        result.sites.extend(compare_traces(first, second, pairs, Intent({"mix": ("mix_norm",)}), right))
    assert result.first is not None
    assert (result.first.verdict, result.first.intended) == (Verdict.DRIFT, ("mix_norm",))
    assert result.first.sentence == "differs on purpose: mix_norm"
    assert result.exit_code == 0


def test_every_place_of_a_file_is_read_once(tmp_path, plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links cost nothing: the bytes read are those of the datasets, not those of all inputs and outputs."""
    read: list[tuple[int, int]] = []
    fill = Bits.fill

    def counting(self: Bits, out: memoryview) -> None:
        read.append((self.place, len(out)))
        fill(self, out)

    monkeypatch.setattr(Bits, "fill", counting)
    assert compared(plain, Forward().capture(tmp_path / "a.h5")).identical
    with Trace.open(plain) as trace:
        specs = [s for r in trace.sites() for s in r.tensors().values() if s.nbytes]
    assert sum(size for _, size in read) == 2 * sum({s.offset: s.nbytes for s in specs}.values())
    assert sum(s.nbytes for s in specs) > 1.3 * sum({s.offset: s.nbytes for s in specs}.values())


def test_an_input_that_is_no_longer_the_output_it_came_from(tmp_path, plain) -> None:
    """What the index calls a link is looked at in the file: an edited copy may hold a dataset of its own there."""
    path = tmp_path / "a.h5"
    shutil.copy(plain, path)
    with h5py.File(path, "r+") as file:
        group = file["steps/decode0/L1.attn.mix/in"]
        values, attrs = group["x"][()], dict(group["x"].attrs)
        del group["x"]
        group.create_dataset("x", data=nudge(values), track_times=False).attrs.update(attrs)
    result = compared(plain, path)
    assert at(result, "decode0/L1.attn.mix").inputs == ("x",)
    assert at(result, "decode0/L1.attn.mix").verdict == Verdict.DIVERGED  # the output is not that of this input


# tensors


class Memory:
    """A tensor's bytes as `apart` reads them."""

    def __init__(self, values: np.ndarray) -> None:
        self._bytes, self._at = np.ascontiguousarray(values).reshape(-1).view(np.uint8), 0

    def fill(self, out: memoryview) -> None:
        out[:] = self._bytes[self._at : self._at + len(out)].data
        self._at += len(out)


def measured(a: np.ndarray, b: np.ndarray, dtype: str = "") -> Apart:
    return apart(Memory(a), Memory(b), dtype or a.dtype.name, a.shape, Workspace())


SHAPES = [
    (), (7,), (5, 3), (5, 4, 64), (9000,), (3, 20_000), (2, 3, 7000), (100, 65), (7000, 2), (4, 4, 4), (0, 5),
    (33, 2000),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "float16", "int32", "uint8"])
@pytest.mark.parametrize("block", [1 << 12, 1 << 17])
def test_metrics_against_plain_numpy(monkeypatch: pytest.MonkeyPatch, dtype: str, block: int) -> None:
    """Blocks smaller than a row, than a tensor, and larger than both."""
    monkeypatch.setattr(apart_module, "BLOCK", block)
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        if dtype in FLOATS:
            a = np.asarray(rng.standard_normal(shape)).astype(FLOATS[dtype])
            b = np.where(rng.random(shape) < 0.3, (a.astype(np.float64) * 1.01).astype(a.dtype), a)
        else:
            a = np.asarray(rng.integers(0, 9, shape), dtype)
            b = np.where(rng.random(shape) < 0.01, a + 1, a).astype(dtype)
        found, leading = measured(a, b, dtype), row_dims(shape)
        rows = math.prod(shape[:leading])
        x, y = (v.astype(np.float64).reshape(max(rows, 1), -1) for v in (a, b))
        d = y - x
        assert found.elements == a.size
        assert found.different == np.count_nonzero(d)
        assert found.equal == (found.different == 0)
        assert (found.rows, found.rows_different) == (rows, np.count_nonzero(d.any(axis=1)))
        if not found.different:
            continue
        if dtype not in FLOATS:
            assert np.ravel_multi_index(found.row, shape[:leading]) == np.argmax(d.any(axis=1)) if shape else True
            continue
        norms = np.sqrt(np.square(d).sum(axis=1)), np.sqrt(np.square(x).sum(axis=1))
        errors = norms[0] / np.maximum(norms[1], 1e-300)
        assert found.row_error == pytest.approx(errors.max(), rel=1e-4)
        assert found.error == pytest.approx(np.linalg.norm(d) / np.linalg.norm(x), rel=1e-4)
        assert found.largest == pytest.approx(np.abs(d).max(), rel=1e-6)
        assert found.similarity == pytest.approx((x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y), abs=1e-5)
        assert found.scale == pytest.approx((x * y).sum() / np.square(x).sum(), abs=1e-5)
        assert errors[np.ravel_multi_index(found.row, shape[:leading]) if shape else 0] == pytest.approx(errors.max())


def test_infinities_and_nan() -> None:
    """Equal masks of -inf hide nothing; what is finite in the reference only is broken; all NaN are one value."""
    a = np.arange(600, dtype=np.float32).reshape(6, 100) + 1
    a[:, 50:] = -np.inf
    b = a.copy()
    b[2, 3] *= 2
    found = measured(a, b)
    assert (found.different, found.rows_different, found.row, found.broken) == (1, 1, (2,), 0)
    assert found.largest == a[2, 3]
    assert 0 < found.error < 1
    b[4, 0] = np.nan
    b[5, 60] = 7.0
    found = measured(a, b)
    assert (found.row, found.row_error, found.broken, found.different) == ((4,), math.inf, 1, 3)
    assert found.largest == a[2, 3]
    assert math.isnan(found.similarity)
    quiet, other = (np.array([bits, 0x3F800000], np.uint32).view(np.float32) for bits in (0x7FC00000, 0x7FC00001))
    found = measured(quiet, other)
    assert (found.equal, found.different, found.error, found.broken) == (False, 1, 0.0, 0)


def test_zeros_and_their_signs() -> None:
    zero = np.zeros((4, 64), ml_dtypes.bfloat16)
    minus = -zero
    found = measured(zero, minus)
    assert (found.different, found.error, found.row_error) == (256, 0.0, 0.0)
    one = zero.copy()
    one[3, 5] = 1
    assert measured(zero, one).error == math.inf
    assert measured(one, zero).error == 1.0
    assert measured(one, zero).row == (3,)


def test_large_values_do_not_hide_a_difference() -> None:
    a = np.full((2, 64), 3e38, np.float32)
    b = a.copy()
    b[1, 1] = -3e38
    found = measured(a, b)
    assert (found.row, found.row_error, found.different) == ((1,), math.inf, 1)


@pytest.mark.parametrize(
    ("shape", "dims"),
    [((), 0), ((5,), 1), ((5, 4), 1), ((5, 4, 64), 2), ((5, 4, 4), 1), ((2, 3, 4, 64), 3), ((3, 1), 1)],
)
def test_rows_are_what_the_leading_dims_name(shape: tuple[int, ...], dims: int) -> None:
    assert row_dims(shape) == dims


# caches


def test_caches_move_on_from_site_to_site(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order every write is applied once; back in time, or once dropped, a cache starts over; always the same."""
    applied = 0
    apply_write = Trace.apply_write

    def counting(self: Trace, *args: Any) -> None:
        nonlocal applied
        applied += 1
        apply_write(self, *args)

    with Trace.open(plain) as trace:
        expected = {
            r.site.path: trace.cache_at(r.site.step, r.site.name, "state").copy() for r in trace.sites() if r.caches
        }
        monkeypatch.setattr(Trace, "apply_write", counting)
        records = [r for r in trace.sites() if r.caches]
        replay = CacheReplay(trace)
        for record in records:
            np.testing.assert_array_equal(replay.at(record, "state"), expected[record.site.path])
        assert applied == sum(len(r.mutated) for r in trace.sites())
        for walk in (records[::-1], sorted(records, key=lambda r: hash(r.site.path))):
            for budget in (1 << 30, 1):
                small = CacheReplay(trace, budget)
                for record in walk:
                    np.testing.assert_array_equal(small.at(record, "state"), expected[record.site.path])
                assert len(small._kept) <= (1 if budget == 1 else LAYERS)


def test_a_write_that_is_missing_is_a_sentence(tmp_path, plain) -> None:
    path = tmp_path / "a.h5"
    shutil.copy(plain, path)
    with h5py.File(path, "r+") as file:
        index = json.loads(file["index"][()])
        index["sites"] = [e for e in index["sites"] if e["step"] != "decode0" or e["op"] != "insert"]
        del file["index"]
        file["index"] = np.bytes_(json.dumps(index).encode())
    with Trace.open(path) as trace, pytest.raises(DbgError, match=r"write 1 of cache L0\.state, which"):
        trace.cache_at("decode1", "L0.attn.attend", "state")
    result = compared(plain, path, judged=False)
    assert "was written" not in "".join(at(result, "decode0/L0.attn.attend").inputs)


def test_memory_is_a_few_blocks_however_large_the_tensors(tmp_path: Path) -> None:
    """Two traces of 64 MB in four tensors, all different, compared on two threads."""
    rng, paths = np.random.default_rng(0), [tmp_path / "a.h5", tmp_path / "b.h5"]
    values = rng.standard_normal((1 << 22,), np.float32)
    shapes = ((1 << 12, 1 << 10), (1, 1 << 22), (1 << 20, 4), (1 << 22,))
    for path in paths:
        with TraceWriter(path, MANIFEST) as writer:
            for number, shape in enumerate(shapes):
                output = tensor((values * (1.01 if path == paths[1] else 1) + number).reshape(shape).astype(np.float32))
                writer.site(Site(f"L{number}.attn.op", "op", "prefill0"), "torch").finish({"y": output})
    tracemalloc.start()
    result = compared(*paths, judged=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [s.outputs["y"].rows for s in result.sites] == [1 << 12, 1, 1 << 20, 1 << 22]
    assert all(s.outputs["y"].similarity == pytest.approx(1, abs=1e-3) for s in result.sites)
    assert peak < 24e6
