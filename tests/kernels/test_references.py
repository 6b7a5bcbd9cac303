"""Every op of the registry: its reference against its float64 oracle, over all examples, within derived bounds."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4dbg.compare import Verdict
from dsv4dbg.kernels.arrays import copied, to_arrays
from dsv4dbg.kernels.contract import Op
from dsv4dbg.kernels.dims import PRESETS
from dsv4dbg.kernels.numerics import HF, OFFICIAL, Numerics
from dsv4dbg.kernels.oracle import run_oracle
from dsv4dbg.kernels.registry import registry
from dsv4dbg.verdict.judge import judge_reference

OPS = sorted(registry().ops)


def run_reference(op: Op, args: dict, numerics: Numerics) -> dict:
    """Outputs and mutated caches as arrays."""
    call = copied(op.bind((), args))
    result = op.reference(**call, **({"numerics": numerics} if op.reads_numerics else {}))
    return to_arrays({**op.name_outputs(result), **{name: call[name] for name in op.mutates}})


def test_all_modules_import():
    assert not [u for u in registry().unavailable if "triton" not in u.reason]


@pytest.mark.parametrize("name", OPS)
def test_op_is_complete(name):
    op = registry().ops[name]
    assert op.oracle_function is not None
    assert op.examples_function is not None


@pytest.mark.parametrize("numerics", [OFFICIAL, HF], ids=lambda n: n.name)
@pytest.mark.parametrize("sizes", ["tiny", pytest.param("wide", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPS)
def test_reference_is_within_bounds(name, sizes, numerics):
    op = registry().ops[name]
    if numerics is not OFFICIAL and not op.switches:
        pytest.skip("reads no switches")
    failures, count = [], 0
    for example in op.examples_function(PRESETS[sizes], np.random.default_rng(7)):
        count += 1
        outputs = run_reference(op, example.args, numerics)
        oracle = run_oracle(op, example.args, numerics)
        judgement = judge_reference(op, to_arrays(op.bind((), example.args)), outputs, oracle, numerics)
        if judgement.verdict > Verdict.ROUNDING:
            failures.append(f"{example.name}: {judgement.sentence}")
    assert count
    assert not failures, "\n".join([f"{len(failures)} of {count} examples", *failures[:10]])
