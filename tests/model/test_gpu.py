"""The forward on a GPU: the same code, site by site within rounding of the CPU on the same inputs.

pytest -m gpu tests/model/test_gpu.py -s
"""

from __future__ import annotations

import collections
from pathlib import Path

import pytest
import torch

from dsv4dbg.compare import Verdict
from dsv4dbg.kernels.arrays import CacheArray, to_array, to_arrays
from dsv4dbg.kernels.oracle import run_oracle
from dsv4dbg.kernels.registry import registry
from dsv4dbg.kernels.table import device_arch
from dsv4dbg.model.checkpoint import open_model
from dsv4dbg.model.environment import check_fp8
from dsv4dbg.model.recording import Request, record
from dsv4dbg.model.replay import load_call, run
from dsv4dbg.model.weights import ModelWeights
from dsv4dbg.plan import REFERENCE
from dsv4dbg.site import BLOCK
from dsv4dbg.trace.reader import Trace
from dsv4dbg.verdict.judge import judge

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


def request(model: str, tokens: int, numerics: str, device: str) -> Request:
    vocab = open_model(model).config.vocab_size
    ids = tuple(7919 * i % vocab for i in range(1, tokens + 1))
    cache = "fp8" if numerics == "official" else "bf16"
    return Request(
        tokens=ids, decode=3, chunk=tokens - 9, model=model, numerics=numerics, kv_cache=cache, device=device
    )


@pytest.mark.parametrize(
    ("model", "tokens", "numerics"), [("tiny", 300, "official"), ("tiny", 140, "hf"), ("wide", 140, "official")]
)
def test_every_site_agrees_with_the_cpu_on_the_same_inputs(
    model: str, tokens: int, numerics: str, tmp_path: Path
) -> None:
    record(request(model, tokens, numerics, "cpu"), tmp_path / "cpu.h5")
    weights = ModelWeights(open_model(model), GPU)
    on_host = ModelWeights(weights.source, torch.device("cpu"))
    verdicts: collections.Counter[str] = collections.Counter()
    broken = []
    with Trace.open(tmp_path / "cpu.h5") as trace:
        for site in trace.sites():
            if site.site.op == BLOCK:
                continue
            call = load_call(trace, site, weights, GPU)
            host = load_call(trace, site, on_host, torch.device("cpu"))
            found = run(call, registry().implementation(call.op.name, REFERENCE))
            expected = run(host, registry().implementation(call.op.name, REFERENCE))
            judgement = judge(
                call.op, to_arrays(host.args), to_arrays(expected), to_arrays(found),
                lambda h=host: run_oracle(h.op, h.args, h.numerics), call.numerics,
            )  # fmt: skip
            equal = all(_same(expected[n], found[n]) for n in expected)
            verdicts["bit-equal" if equal else judgement.verdict.name] += 1
            if judgement.verdict > Verdict.ROUNDING:
                broken.append(f"{site.site}: {judgement.sentence}")
    print(f"\n{model} {numerics} on {device_arch(GPU)}: {dict(verdicts)}")
    assert not broken


def _same(a, b) -> bool:
    a, b = to_array(a), to_array(b)
    if isinstance(a, CacheArray):
        a, b = a.data, b.data
    return a.tobytes() == b.tobytes()


@pytest.mark.parametrize("model", ["tiny", "wide"])
def test_a_run_on_the_gpu_is_captured_like_one_on_the_cpu(model: str, tmp_path: Path) -> None:
    recorded = {d: record(request(model, 140, "official", d), tmp_path / f"{d}.h5") for d in ("cpu", "cuda")}
    assert recorded["cpu"].sites == recorded["cuda"].sites
    with Trace.open(tmp_path / "cuda.h5") as trace:
        assert trace.complete
        assert trace.manifest["environment"]["arch"] == device_arch(GPU)


def test_the_tiny_model_answers_on_the_gpu(tmp_path: Path) -> None:
    recorded = record(Request(prompt="The capital of France is", device="cuda"), tmp_path / "t.h5")
    assert recorded.completion is not None
    assert recorded.completion.strip().startswith("Paris")


def test_fp8_conversions_of_this_gpu() -> None:
    assert check_fp8(GPU) == {"ocp": None, "fnuz": None}
