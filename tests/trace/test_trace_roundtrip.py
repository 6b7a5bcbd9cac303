"""What goes into a trace comes out of it, through our reader and through plain h5py."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_scenario import MANIFEST, Scenario, random_tensor

from dsv4dbg.errors import DbgError
from dsv4dbg.pages import state_layout
from dsv4dbg.site import Site
from dsv4dbg.trace.reader import Trace
from dsv4dbg.trace.records import STORAGE, CacheSpec, Mutation, Tensor, view_bits
from dsv4dbg.trace.recover import recover
from dsv4dbg.trace.writer import TraceWriter


@pytest.mark.parametrize("seed", range(3))
def test_scenario_round_trip(tmp_path, seed):
    scenario = Scenario(seed, steps=3)
    scenario.capture(tmp_path / "run.h5")
    assert [file.name for file in tmp_path.iterdir()] == ["run.h5"]
    with Trace.open(tmp_path / "run.h5") as trace:
        assert scenario.check(trace) == len(scenario.calls)
        assert trace.complete
        assert not trace.notice
        assert trace.steps == ["decode0", "decode1", "decode2"]
        assert trace.manifest["completion"] == "Paris"
        assert trace.manifest["prompt"] == MANIFEST["prompt"]
        assert trace.manifest["level"] == "full"
        assert {record.site.layer for record in trace.sites("decode1/L1.*")} == {1}
        assert len(trace.sites("op:block")) == 6


def test_running_and_recovered(tmp_path):
    """A running capture reads up to its last journal line; a recovered copy of it says the same."""
    scenario = Scenario(steps=1)
    with TraceWriter(tmp_path / "run.h5", MANIFEST, scenario.caches, scenario.images) as writer:
        scenario.write(writer)
        with Trace.open(tmp_path / "run.h5") as trace:
            assert trace.running
            assert not trace.complete
            assert "still running: 6 of 6 site calls are complete, the last whole block is decode0/L1" in trace.notice
            assert scenario.check(trace) == 6
        notice = recover(tmp_path / "run.h5", tmp_path / "copy.h5")
    assert "running" in notice
    with Trace.open(tmp_path / "copy.h5") as trace:
        assert scenario.check(trace) == 6
        assert not trace.complete
        assert trace.manifest["recovered"] == notice


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors=st.lists(
        st.tuples(st.sampled_from(sorted(STORAGE)), st.lists(st.integers(0, 4), max_size=4).map(tuple)), max_size=8
    ),
    attrs=st.dictionaries(
        st.text(max_size=5), st.none() | st.integers() | st.floats(allow_nan=False) | st.text() | st.booleans()
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_site_round_trips(tmp_path, tensors, attrs, seed):
    rng = np.random.default_rng(seed)
    made = {f"t{i}": random_tensor(rng, dtype, shape) for i, (dtype, shape) in enumerate(tensors)}
    with TraceWriter(tmp_path / "run.h5", {}, overwrite=True) as writer:
        call = writer.site(Site("embed", "embed", "prefill0"), "triton", attrs=attrs, inputs={**made, "bias": None})
        call.finish(made)
    with Trace.open(tmp_path / "run.h5") as trace:
        record = trace.site("prefill0", "embed")
        assert (record.attrs, record.absent, record.implementation) == (attrs, ("bias",), "triton")
        for name, tensor in made.items():
            for part in ("in", "out"):
                assert trace.read(record, f"{part}/{name}").tobytes() == tensor.array.tobytes()
                seen = trace.view(record, f"{part}/{name}")
                assert seen.tobytes() == view_bits(tensor.array, tensor.dtype).tobytes()


def test_views_are_real_numbers():
    assert view_bits(np.array([0x3FC0], "<u2"), "bfloat16").astype(float) == 1.5
    assert view_bits(np.array([0x80], np.uint8), "float8_e8m0fnu").astype(float) == 2.0
    assert view_bits(np.array([0x40], np.uint8), "float8_e4m3fnuz").astype(float) == 1.0
    assert view_bits(np.array([2, 0], np.uint8), "bool").tolist() == [True, False]
    packed = view_bits(np.array([[0x21]], np.uint8), "float4_e2m1fn_x2")
    assert (packed.dtype, packed.astype(float).tolist()) == (np.dtype(ml_dtypes.float4_e2m1fn), [[0.5, 1.0]])


def test_links_are_by_content(tmp_path):
    """An equal input, or output of a block, is a hard link whatever memory it lives in; an op's output and other bits
    never are."""
    bits = np.arange(12, dtype="<u2").reshape(3, 4)
    tensor = Tensor(bits, "bfloat16", "token channel")
    with TraceWriter(tmp_path / "run.h5", {}) as writer:
        writer.site(Site("embed", "embed", "prefill0"), "torch").finish({"y": tensor})
        same = Tensor(bits.T.copy().T, "bfloat16", "row column")
        other_shape = Tensor(bits.reshape(4, 3), "bfloat16", "token channel")
        other_dtype = Tensor(bits, "uint16", "token channel")
        inputs = {"same": same, "shape": other_shape, "dtype": other_dtype}
        writer.site(Site("L0", "block", "prefill0"), "torch", inputs=inputs).finish({"y": same})
        writer.site(Site("head.norm", "rms_norm", "prefill0"), "torch", inputs=inputs).finish({"y": tensor})
    with Trace.open(tmp_path / "run.h5") as trace:
        record = trace.site("prefill0", "L0")
        assert record.inputs["same"].origin == "/steps/prefill0/embed/out/y"
        assert record.inputs["same"].dims == "row column"
        assert not record.inputs["shape"].origin
        assert not record.inputs["dtype"].origin
        assert record.outputs["y"].origin == "/steps/prefill0/embed/out/y"
        assert record.outputs["y"].dims == "row column"
        assert not trace.site("prefill0", "head.norm").outputs["y"].origin
    with h5py.File(tmp_path / "run.h5") as file:
        site = file["steps/prefill0/L0"]
        assert site["in/same"] == file["steps/prefill0/embed/out/y"]
        assert site.get("in/same", getlink=True).__class__ is h5py.HardLink
        assert site["out/y"] == site["in/same"]
        assert file["steps/prefill0/head.norm/out/y"] != site["in/same"]
        assert json.loads(site.attrs["links"])["same"]["dims"] == "row column"
        assert json.loads(site.attrs["output_links"])["y"]["origin"] == "/steps/prefill0/embed/out/y"


def test_plain_h5py_reads_everything(tmp_path):
    scenario = Scenario()
    scenario.capture(tmp_path / "run.h5")
    with h5py.File(tmp_path / "run.h5") as file:
        assert json.loads(file["manifest"][()])["completion"] == "Paris"
        weights = json.loads(file["weights"][()])
        assert list(file["steps"]) == ["decode0", "decode1"]
        assert list(file["steps/decode1"]) == [c.site.name for c in scenario.calls.values() if c.site.step == "decode1"]
        for path, call in scenario.calls.items():
            site = file["steps"][path]
            assert site.attrs["op"].decode() == call.site.op
            assert json.loads(site.attrs["attrs"]) == call.attrs
            assert weights[site.attrs["weights"]]["w"]["tensor"] == f"layers.{site.attrs['layer']}.w"
            for name, tensor in call.outputs.items():
                dataset = site["out"][name]
                assert dataset.chunks is None
                assert dataset.attrs["dtype"].decode() == tensor.dtype
                assert dataset[()].tobytes() == tensor.array.tobytes()


def test_the_documented_way_to_read_one(tmp_path, monkeypatch, capsys):
    """The Python example in docs/trace-format.md, as it stands there."""
    Scenario().capture(tmp_path / "run.h5")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "trace-format.md").read_text()
    exec(page.split("```python\n")[1].split("```")[0], {})
    assert "q a b [[" in capsys.readouterr().out


def test_equal_captures_make_equal_files(tmp_path):
    digests = set()
    for name in ("a", "b"):
        Scenario(seed=5).capture(tmp_path / name)
        time.sleep(1.1)  # HDF5 keeps times in seconds, if it keeps any
        digests.add(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())
    assert len(digests) == 1


def test_edited_copy_shows_its_edits(tmp_path):
    scenario = Scenario(steps=1, layers=1)
    scenario.capture(tmp_path / "run.h5")
    with h5py.File(tmp_path / "run.h5", "r+") as file:
        file["steps/decode0/L0.attn.attend/out/y"][1, 2] ^= 1
    with Trace.open(tmp_path / "run.h5") as trace:
        seen = trace.read(trace.site("decode0", "L0.attn.attend"), "out/y")
    planned = scenario.calls["decode0/L0.attn.attend"].outputs["y"].array
    assert np.argwhere(seen != planned).tolist() == [[1, 2]]


def test_two_arguments_write_one_cache(tmp_path):
    layout = state_layout(1, 2, 8)
    spec = CacheSpec(layout, 2, layout.page_bytes, fill=0)
    ones = np.ones((1, layout.record_bytes), np.uint8)
    with TraceWriter(tmp_path / "run.h5", {}, {"c": spec}) as writer:
        call = writer.site(Site("L0", "block", "decode0"), "torch", caches={"a": "c", "b": "c"})
        call.finish({}, {"a": Mutation(np.array([0]), ones), "b": Mutation(np.array([3]), 2 * ones)})
        writer.site(Site("L1", "block", "decode0"), "torch", caches={"a": "c"}).finish({})
    with Trace.open(tmp_path / "run.h5") as trace:
        seen = layout.read(trace.cache_at("decode0", "L1", "a"), np.arange(4))
        assert seen[:, 0].tolist() == [1, 0, 0, 2]


def test_op_that_raises_leaves_a_begun_site(tmp_path):
    def capture():
        with TraceWriter(tmp_path / "run.h5", {}) as writer:
            writer.site(Site("embed", "embed", "decode0"), "torch").finish({})
            writer.site(Site("L0", "block", "decode0"), "torch")
            raise RuntimeError("kernel died")

    with pytest.raises(RuntimeError):
        capture()
    with Trace.open(tmp_path / "run.h5") as trace:
        assert "1 of 2 site calls are complete; begun but not finished: decode0/L0" in trace.notice
        assert trace.manifest["error"] == "RuntimeError: kernel died"
        assert [record.complete for record in trace.sites()] == [True, False]


def test_very_long_attributes_and_weights(tmp_path):
    """HDF5 keeps attributes over 64 KiB elsewhere; they must work too."""
    attrs = {"starts": list(range(40_000))}
    weights = {"experts": [{"tensor": f"experts.{i}.w1", "hash": "0" * 32} for i in range(3000)]}
    with TraceWriter(tmp_path / "run.h5", {}) as writer:
        for step in ("decode0", "decode1"):
            writer.site(Site("L0", "block", step), "torch", attrs=attrs, weights=weights).finish({})
    with Trace.open(tmp_path / "run.h5") as trace:
        assert trace.site("decode1", "L0").attrs == attrs
        assert trace.site("decode1", "L0").weights == weights
    with h5py.File(tmp_path / "run.h5") as file:
        assert json.loads(file["steps/decode0/L0"].attrs["attrs"]) == attrs
        assert len(json.loads(file["weights"][()])) == 1


WRONG_CALLS = {
    "no step": lambda w: w.site(Site("L0", "block"), "torch"),
    "twice": lambda w: [w.site(Site("L0", "block", "decode0"), "torch") for _ in range(2)],
    "unknown cache": lambda w: w.site(Site("L0", "block", "decode0"), "torch", caches={"kv": "L9.window"}),
    "path in a name": lambda w: w.site(Site("L0", "block", "decode0"), "torch", inputs={"../x": None}),
    "not JSON": lambda w: w.site(Site("L0", "block", "decode0"), "torch", attrs={"x": object()}),
    "not its cache": lambda w: w.site(Site("L0", "block", "decode0"), "torch").finish({}, {"kv": None}),
    "finished twice": lambda w: [c := w.site(Site("L0", "block", "decode0"), "torch"), c.finish({}), c.finish({})],
    "unknown dtype": lambda w: Tensor(np.zeros(1), "complex64", "x"),
    "wrong bits": lambda w: Tensor(np.zeros(1), "bfloat16", "x"),
    "closed": lambda w: [w.close(), w.site(Site("L0", "block", "decode0"), "torch")],
}


@pytest.mark.parametrize("wrong", WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_wrong_use_is_one_sentence(tmp_path, wrong):
    with TraceWriter(tmp_path / "run.h5", {}) as writer:
        with pytest.raises(DbgError) as error:
            wrong(writer)
        assert "\n" not in error.value.message
    with Trace.open(tmp_path / "run.h5") as trace:
        assert "lost" not in trace.notice


def test_questions_a_trace_cannot_answer(tmp_path):
    Scenario(steps=1).capture(tmp_path / "run.h5")
    with Trace.open(tmp_path / "run.h5") as trace:
        record = trace.sites()[0]
        for ask in (
            lambda: trace.site("decode9", "L0"),
            lambda: trace.read(record, "out/nothing"),
            lambda: trace.cache_at("decode0", "L0", "kv"),
            lambda: trace.first_content("L9.window"),
            lambda: trace.sites("a b"),
        ):
            with pytest.raises(DbgError):
                ask()
