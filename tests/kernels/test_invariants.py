"""Invariants hold for the reference of every op on all its examples, and tell when they do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsv4dbg.kernels.arrays import copied, to_arrays
from dsv4dbg.kernels.dims import PRESETS, TINY
from dsv4dbg.kernels.invariants import violations
from dsv4dbg.kernels.linear.linear import linear
from dsv4dbg.kernels.numerics import HF, OFFICIAL
from dsv4dbg.kernels.registry import registry

OPS = sorted(name for name, op in registry().ops.items() if op.invariants)


@pytest.mark.parametrize("numerics", [OFFICIAL, HF], ids=lambda n: n.name)
@pytest.mark.parametrize("sizes", ["tiny", pytest.param("wide", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPS)
def test_hold_for_the_reference(name, sizes, numerics):
    op = registry().ops[name]
    if numerics is not OFFICIAL and not op.switches:
        pytest.skip("reads no switches")
    for example in op.examples_function(PRESETS[sizes], np.random.default_rng(11)):
        call = copied(op.bind((), example.args))
        outputs = op.name_outputs(op.reference(**call, **({"numerics": numerics} if op.switches else {})))
        assert violations(op, {**call, **outputs}) == {}, example.name


@pytest.mark.parametrize("as_given", [lambda call: call, to_arrays], ids=["torch", "numpy"])
def test_see_torch_tensors_and_arrays_alike(as_given):
    example = next(e for e in linear.examples_function(TINY, np.random.default_rng(0)) if "huge" in e.name)
    y = linear(**example.args)
    assert y.dtype == torch.bfloat16
    call = {**example.args, "y": y}
    assert violations(linear, as_given(call)) == {}
    y[1, 4] = 1e-30
    assert violations(linear, as_given(call)) == {
        "zero rows of x give zero rows of y": "row 1 of x is zero, of y is not"
    }
    y[1, 4] = float("-inf")
    assert violations(linear, as_given(call))["y finite"].startswith("y is -inf at (1, 4) (1 of ")
    call["x"] = call["x"].clone()
    call["x"][0, 0] = float("nan")
    assert "y finite" not in violations(linear, as_given(call))
