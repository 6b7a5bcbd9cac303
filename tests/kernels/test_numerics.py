"""Every switch of Numerics does what the contracts say: it changes the ops that list it, and no other op reads it."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import dsv4dbg
from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.contract import Example, Op
from dsv4dbg.kernels.dims import TINY
from dsv4dbg.kernels.numerics import HF, OFFICIAL, Numerics, differences, profile
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.registry import registry

OPS = registry().ops
SWITCHES = [f.name for f in fields(Numerics) if f.name != "name"]
SWITCHED = [(name, switch) for name, op in sorted(OPS.items()) for switch in op.switches]


@cache
def examples(name: str) -> tuple[Example, ...]:
    make = OPS[name].examples_function
    assert make is not None
    return tuple(make(TINY, np.random.default_rng(11)))


def run(op: Op, example: Example, numerics: Numerics) -> dict[str, torch.Tensor]:
    """Outputs and mutated caches by name; the example's own caches stay as they are."""
    args = {name: example.args.get(name) for name in op.args}
    for name in op.mutates:
        if args[name] is not None:
            args[name] = replace(args[name], data=args[name].data.clone())
    outputs = op.name_outputs(op(**args, numerics=numerics))
    caches = {name: args[name].data for name in op.mutates if isinstance(args[name], Cache)}
    return outputs | caches


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.flatten().clone().view(torch.uint8)


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(a[name].dtype == b[name].dtype and torch.equal(bits(a[name]), bits(b[name])) for name in a)


def read_switches(op: Op, numerics: Numerics, cases: tuple[Example, ...]) -> set[str]:
    """Switches that the op looks at in these cases."""
    seen: set[str] = set()

    class Watched(Numerics):
        def __getattribute__(self, name: str) -> object:
            if name in SWITCHES:
                seen.add(name)
            return super().__getattribute__(name)

    watched = Watched(**asdict(numerics))
    for example in cases:
        run(op, example, watched)
    return seen


def attributes_of_numerics(folder: Path) -> Iterator[str]:
    """Names read as ``numerics.<name>`` or ``<...>.numerics.<name>`` in the sources of a folder."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
                owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
                if owner == "numerics":
                    yield node.attr


@pytest.mark.parametrize(("name", "switch"), SWITCHED)
def test_switch_changes_every_op_that_lists_it(name: str, switch: str) -> None:
    op = OPS[name]
    toggled = replace(OFFICIAL, **{switch: getattr(HF, switch)})
    assert any(not same_bits(run(op, e, OFFICIAL), run(op, e, toggled)) for e in examples(name)), "in no example"


@pytest.mark.parametrize("name", sorted(OPS))
def test_op_reads_the_switches_that_it_lists_and_no_other(name: str) -> None:
    op = OPS[name]
    assert ("numerics" in inspect.signature(op.reference).parameters) == bool(op.switches)
    if op.switches:
        read = read_switches(op, OFFICIAL, examples(name)) | read_switches(op, HF, examples(name))
        assert read == set(op.switches)


def test_no_switch_is_unread() -> None:
    listed = {switch for _, switch in SWITCHED}
    assert listed <= set(SWITCHES)
    by_model = set(attributes_of_numerics(Path(dsv4dbg.__file__).parent / "model"))
    assert set(SWITCHES) - listed <= by_model


def test_profiles_differ_in_every_switch() -> None:
    assert set(differences(OFFICIAL, HF)) == set(SWITCHES)
    assert differences(OFFICIAL, OFFICIAL) == {}
    assert differences(OFFICIAL, replace(OFFICIAL, router="act")) == {"router": ("f32", "act")}
    assert profile("hf") is HF
    with pytest.raises(DbgError, match="official, hf"):
        profile("none")
