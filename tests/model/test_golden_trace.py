"""The golden trace in traces/ stays readable, and what it holds is still what the forward computes."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import torch

from dsv4dbg.bisect.rejudge import Rejudge
from dsv4dbg.compare import Verdict
from dsv4dbg.diff import compare_traces, finished_in_both
from dsv4dbg.model.checkpoint import open_model
from dsv4dbg.model.recording import Request, record
from dsv4dbg.model.weights import ModelWeights
from dsv4dbg.site import Pattern
from dsv4dbg.trace.reader import Trace

GOLDEN = Path(__file__).parents[2] / "traces" / "golden-tiny.h5"


def test_it_is_small_complete_and_names_its_model() -> None:
    assert GOLDEN.stat().st_size < 1_000_000
    with Trace.open(GOLDEN) as trace:
        assert trace.complete
        assert trace.manifest["completion"] == " Paris."
        assert trace.manifest["weights"] == open_model("tiny").fingerprint
        assert trace.steps == ["prefill0", "decode0"]


def test_every_tensor_can_be_read_and_every_cache_rebuilt() -> None:
    with Trace.open(GOLDEN) as trace:
        read = sum(trace.read(r, name).nbytes for r in trace.sites() for name in r.tensors())
        caches = [trace.cache_at(r.site.step, r.site.name, arg) for r in trace.sites() for arg in r.caches]
    assert read > 500_000
    assert any(c.any() for c in caches)


def test_plain_h5py_reads_it() -> None:
    with h5py.File(GOLDEN) as file:
        y = file["/steps/decode0/L2.attn.wq_b/out/y"]
        assert y.attrs["dims"] == b"token out"
        assert (y.shape, y.dtype) == ((1, 512), np.dtype("uint16"))


def test_no_site_of_it_diverges_from_a_fresh_capture(tmp_path: Path) -> None:
    patterns = (Pattern("L2-3"), Pattern("L2-3.*"))
    record(Request(prompt="The capital of France is", decode=1, sites=patterns), tmp_path / "fresh.h5")
    weights = ModelWeights(open_model("tiny"), torch.device("cpu"))
    with Trace.open(GOLDEN) as golden, Trace.open(tmp_path / "fresh.h5") as fresh:
        fresh.manifest["environment"] = None  # another processor sums in another order: judge, do not compare bits
        pairs, result = finished_in_both(golden, fresh)
        result.sites += compare_traces(golden, fresh, pairs, judge=Rejudge(fresh, lambda: weights))
    assert len(result.sites) == len(golden.sites())
    assert result.missing == 0
    assert not result.unjudged
    assert result.count(Verdict.DIVERGED) == 0
