"""Capture: complete, faithful, and without effect on the forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.registry import Implementation, registry
from dsv4dbg.kernels.table import Call
from dsv4dbg.model.capture import to_bits
from dsv4dbg.model.recording import Request, load_model, open_session, prompt_ids, record
from dsv4dbg.model.run import generate
from dsv4dbg.plan import Plan
from dsv4dbg.site import BLOCK, Pattern, Site
from dsv4dbg.trace.reader import Trace

PROMPT = "The capital of France is"
REQUEST = Request(prompt=PROMPT, decode=2)


class Watch:
    """A listener that keeps what it sees: site paths, and copies of all caches, inputs and outputs per site."""

    def __init__(self) -> None:
        self.calls: dict[str, Call] = {}
        self.inputs: dict[str, dict[str, Any]] = {}
        self.outputs: dict[str, dict[str, torch.Tensor]] = {}

    def before(self, call: Call) -> None:
        self.calls[call.site.path] = call
        self.inputs[call.site.path] = {
            n: v.data.clone() if isinstance(v, Cache) else v.clone() if isinstance(v, torch.Tensor) else v
            for n, v in call.args.items()
        }

    def after(self, call: Call, outputs: Mapping[str, torch.Tensor]) -> None:
        self.outputs[call.site.path] = {n: v.clone() for n, v in outputs.items()}

    def boundary(self, site: Site, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        self.outputs[site.path] = {n: v.clone() for n, v in outputs.items()}


def run_watched(request: Request, listener: Any = None) -> tuple[list[int], list[torch.Tensor]]:
    """Tokens and the logits of every step, with or without a listener."""
    checkpoint, model, device = load_model(request)
    ids = prompt_ids(request, checkpoint)
    session = open_session(request, model, device, ids)
    if listener is not None:
        session.listen(listener)
    logits = []
    step = session.step
    session.step = lambda *a, **k: logits.append((r := step(*a, **k)).logits) or r  # type: ignore[method-assign]
    return generate(session, ids, request.decode, request.chunk), logits


@pytest.fixture(scope="module")
def watched() -> Watch:
    watch = Watch()
    run_watched(REQUEST, watch)
    return watch


def test_every_call_of_every_step_is_in_the_trace(tiny_trace: Path, watched: Watch) -> None:
    with Trace.open(tiny_trace) as trace:
        assert trace.complete
        assert not trace.notice
        assert trace.steps == ["prefill0", "decode0", "decode1"]
        assert [r.site.path for r in trace.sites()] == list(watched.outputs)
        assert all(r.complete for r in trace.sites())
        per_step = [{r.site.name for r in trace.sites() if r.site.step == step} for step in trace.steps]
        assert per_step[1] == per_step[2]
        layers = {r.site.layer for r in trace.sites()} - {None}
        assert layers == set(range(6))


def test_inputs_outputs_and_attributes_are_the_live_bits(tiny_trace: Path, watched: Watch) -> None:
    with Trace.open(tiny_trace) as trace:
        for record_ in trace.sites():
            path = record_.site.path
            for name, tensor in watched.outputs[path].items():
                bits, dtype = to_bits(tensor)
                assert record_.outputs[name].dtype == dtype
                np.testing.assert_array_equal(trace.read(record_, f"out/{name}"), bits, err_msg=f"{path} {name}")
            if record_.site.op == BLOCK:
                continue
            call = watched.calls[path]
            assert record_.implementation == "torch"
            for name, arg in call.op.args.items():
                value = watched.inputs[path][name]
                where = [name in part for part in (record_.inputs, record_.weights, record_.caches, record_.attrs)]
                assert sum(where) + (name in record_.absent) == 1, f"{path} {name}"
                if arg.kind == "attr":
                    assert record_.attrs[name] == value
                elif name in record_.inputs:
                    np.testing.assert_array_equal(trace.read(record_, f"in/{name}"), to_bits(value)[0])
                elif name in record_.absent:
                    assert value is None


def test_every_cache_can_be_rebuilt_as_each_site_saw_it(tiny_trace: Path, watched: Watch) -> None:
    rebuilt = 0
    with Trace.open(tiny_trace) as trace:
        for record_ in trace.sites():
            for arg in record_.caches:
                seen = watched.inputs[record_.site.path][arg].numpy()
                live = trace.cache_at(record_.site.step, record_.site.name, arg)
                assert np.array_equal(live, seen), f"{record_.site} {arg}"
                rebuilt += 1
    assert rebuilt == 96


def test_weights_are_named_with_their_hashes(tiny_trace: Path) -> None:
    checkpoint, _, _ = load_model(REQUEST)
    with Trace.open(tiny_trace) as trace:
        found = trace.site("decode0", "L2.attn.wq_b")
        assert found.weights["weight"]["tensor"] == "layers.2.attn.wq_b.weight"
        assert found.weights["weight"]["hash"] == checkpoint.hash("layers.2.attn.wq_b.weight")
        assert set(found.inputs) == {"x"}
        assert trace.manifest["weights"] == checkpoint.fingerprint
        assert trace.manifest["completion"].strip().startswith("Paris")


def test_two_captures_are_the_same_file(tmp_path: Path) -> None:
    paths = [tmp_path / "a.h5", tmp_path / "b.h5"]
    for path in paths:
        record(Request(prompt=PROMPT, decode=1), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_capture_changes_no_bit_of_the_forward(tmp_path: Path) -> None:
    request = Request(prompt=PROMPT, decode=2, chunk=2)
    plain_tokens, plain = run_watched(request)
    watched_tokens, logits = run_watched(request, Watch())
    recorded = record(request, tmp_path / "t.h5")
    assert plain_tokens == watched_tokens == recorded.tokens
    with Trace.open(tmp_path / "t.h5") as trace:
        stored = [trace.read(trace.site(step, "head.lm_head"), "out/logits") for step in trace.steps]
    assert len(stored) == len(plain) == len(logits) == 5
    for a, b, c in zip(plain, logits, stored, strict=True):
        assert torch.equal(a, b)
        np.testing.assert_array_equal(a.numpy(), c)


def test_a_filter_keeps_its_sites_and_all_cache_writes(tmp_path: Path, watched: Watch) -> None:
    recorded = record(
        Request(prompt=PROMPT, decode=2, sites=(Pattern("L2.attn.sparse_mla_decode"),)), tmp_path / "t.h5"
    )
    assert recorded.sites == 2
    with Trace.open(tmp_path / "t.h5") as trace:
        site = trace.site("decode1", "L2.attn.sparse_mla_decode")
        assert site.inputs
        for arg in site.caches:
            seen = watched.inputs[site.site.path][arg].numpy()
            assert np.array_equal(trace.cache_at("decode1", site.site.name, arg), seen)
        others = [r for r in trace.sites() if r.site.name != site.site.name]
        assert others
        assert all(r.mutated and not r.inputs and not r.outputs for r in others)


@pytest.fixture
def scribbler() -> Iterator[str]:
    """An implementation of qnorm_rope_kv_insert that also changes a byte in a page that no token owns."""
    reference = registry().op("qnorm_rope_kv_insert").reference

    def scribble(q, kv, positions, cos_sin, window_cache, window_slots, *, eps, numerics):
        result = reference(q, kv, positions, cos_sin, window_cache, window_slots, eps=eps, numerics=numerics)
        page = next(p for p in range(len(window_cache.data)) if p not in window_slots // window_cache.layout.entries)
        window_cache.data[page, 7] ^= 0xFF
        return result

    registry().add(Implementation("qnorm_rope_kv_insert", "scribbler", scribble))
    yield "scribbler"
    del registry().implementations["qnorm_rope_kv_insert", "scribbler"]


def test_bytes_written_outside_the_contract_are_in_the_trace(tmp_path: Path, scribbler: str) -> None:
    plan = Plan.parse(f"L1.attn.qnorm_rope_kv_insert={scribbler}")
    record(Request(prompt=PROMPT, decode=1, plan=plan), tmp_path / "t.h5")
    watch = Watch()
    run_watched(Request(prompt=PROMPT, decode=1, plan=plan), watch)
    with Trace.open(tmp_path / "t.h5") as trace:
        write = trace.site("prefill0", "L1.attn.qnorm_rope_kv_insert")
        assert write.implementation == scribbler
        assert trace.read(write, "mut/window_cache/stray_offsets").size == 1
        seen = watch.inputs["decode0/L1.attn.sparse_mla_decode"]["window_cache"].numpy()
        assert np.array_equal(trace.cache_at("decode0", "L1.attn.sparse_mla_decode", "window_cache"), seen)
        clean = trace.site("prefill0", "L0.attn.qnorm_rope_kv_insert")
        assert "stray_offsets" not in clean.mutated["window_cache"].tensors
