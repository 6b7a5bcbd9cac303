"""Where Triton implementations run, what is seen of them, and how a plan chooses them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.dims import TINY
from dsv4dbg.kernels.numerics import HF, OFFICIAL
from dsv4dbg.kernels.registry import load_plugin, registry
from dsv4dbg.kernels.table import OpTable
from dsv4dbg.kernels.triton_run import observed
from dsv4dbg.plan import Plan

OP = registry().op("sparse_mla_decode")
TRITON = registry().implementation("sparse_mla_decode", "triton")


def arguments(name: str) -> dict:
    """Arguments of an example by name."""
    assert OP.examples_function is not None
    found = {e.name: e.args for e in OP.examples_function(TINY, np.random.default_rng(3))}
    return OP.bind((), found[name])


IN_PROCESS = """
import sys, torch
from dsv4dbg.kernels.registry import registry
from dsv4dbg.kernels.triton_run import INTERPRETED
assert INTERPRETED
from test_triton_run import OFFICIAL, TRITON, arguments
torch.save(TRITON.function(**arguments("both fnuz"), numerics=OFFICIAL), sys.argv[1])
"""


@pytest.mark.skipif(version("triton").startswith("3.6"), reason="outside our worker it fails with numpy 2.4")
def test_the_worker_gives_the_bits_of_an_interpreter_in_process(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", IN_PROCESS, str(tmp_path / "out.pt")], env=environment, check=True)
    expected = torch.load(tmp_path / "out.pt")
    for a, b in zip(TRITON.function(**arguments("both fnuz"), numerics=OFFICIAL), expected, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_launches_are_counted() -> None:
    few = observed(TRITON.function, (), {**arguments("1 tokens, 64 of the entries"), "numerics": OFFICIAL}, 0)[1]
    assert few.launches == ["_attend", "_merge"]  # split over the keys
    many = observed(TRITON.function, (), {**arguments("one token each at 124 to 131"), "numerics": OFFICIAL}, 0)[1]
    assert many.launches == ["_attend"]
    assert set(many.operators) <= {"empty", "empty_like"}
    none = observed(TRITON.function, (), {**arguments("0 tokens, 64 of the entries"), "numerics": OFFICIAL}, 0)[1]
    assert none.launches == []


CHEATING = """
import torch
from dsv4dbg.kernels.registry import implements
from dsv4dbg.kernels.triton_run import triton_implements

@triton_implements("rms_norm", "cheating")
def cheating(x, weight, *, eps):
    scratch = torch.empty(4)
    assert scratch.view(torch.uint8).unique().tolist() == [7]
    return (torch.softmax(x.float(), -1) @ torch.ones(x.shape[-1], 1)).expand(x.shape).to(x.dtype)
"""


def test_torch_operators_inside_are_seen(tmp_path: Path) -> None:
    (tmp_path / "cheating.py").write_text(CHEATING)
    (found,) = load_plugin(tmp_path / "cheating.py")
    try:
        x = torch.ones(2, 8, dtype=torch.bfloat16)
        result, seen = observed(found.function, (), {"x": x, "weight": x[0], "eps": 1e-6}, 7)
    finally:
        del registry().implementations["rms_norm", "cheating"]
    assert result.shape == x.shape
    assert {"_softmax", "mm"} <= set(seen.operators)
    assert seen.launches == []


def table(plan: str, numerics=OFFICIAL) -> OpTable:
    return OpTable(registry(), Plan.parse(plan), torch.device("cpu"), numerics, arch="cpu")


def test_a_choice_that_cannot_run_fails_with_its_reason() -> None:
    ops = table("*=torch, op:sparse_mla_decode=triton", HF)
    with pytest.raises(DbgError, match="attention=eager"):
        ops.sparse_mla_decode(**arguments("bf16 caches"))


def test_the_catch_all_falls_back_and_says_so() -> None:
    ops = table("*=triton", HF)
    ops.sparse_mla_decode(**arguments("bf16 caches"))
    assert "attention=eager" in ops.fallbacks["sparse_mla_decode", "triton"]


def test_odd_page_strides_are_refused_with_a_reason() -> None:
    args = arguments("both fnuz")
    cache = args["window_cache"]
    odd = torch.zeros(cache.data.shape[0], cache.data.shape[1] + 1, dtype=torch.uint8)[:, :-1]
    args["window_cache"] = type(cache)(cache.name, odd, cache.layout)
    reason = TRITON.why_not(torch.device("cpu"), "cpu", {**args, "numerics": OFFICIAL})
    assert reason is not None
    assert "multiple of 16" in reason


def test_without_triton_its_kernels_are_listed_and_a_choice_of_one_says_why() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = f"import sys; sys.modules['triton'] = None\nfrom dsv4dbg.cli.main import main\nmain({list(arguments)})"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    listed = run("ops")
    assert listed.returncode == 0, listed.stderr
    assert "unavailable: dsv4dbg.kernels.attention.sparse_mla_decode_triton: " in listed.stdout
    chosen = run("capture", "--prompt", "x", "--plan", "op:sparse_mla_prefill=triton", "-o", os.devnull)
    assert chosen.returncode == 2
    assert "sparse_mla_prefill_triton is unavailable: import of triton halted" in chosen.stderr


def test_capture_on_the_cpu_with_the_kernel(dsv4dbg, tmp_path: Path) -> None:
    plan = "*=torch,op:sparse_mla_decode=triton,op:sparse_mla_prefill=triton"
    arguments = ("--prompt", "The capital of France is", "--decode", 1, "--plan", plan, "-o", tmp_path / "t.h5")
    ran = dsv4dbg("capture", *arguments)
    assert ran.code == 0, ran.err
    assert "Paris" in ran.out
