"""Every implementation besides the reference, from the registry: verdict, repeatability, fills, canaries, launches.

On the CPU, Triton kernels run in its interpreter; small examples by default, all of them in the slow suite. The same
tests run on a GPU with ``-m gpu``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from guards import LARGE, NAN, Guarded, guarded, packed

from dsv4dbg.compare import Verdict
from dsv4dbg.kernels.arrays import copied, to_array, to_arrays
from dsv4dbg.kernels.contract import Example, Op
from dsv4dbg.kernels.dims import PRESETS
from dsv4dbg.kernels.numerics import HF, OFFICIAL, Numerics
from dsv4dbg.kernels.oracle import run_oracle
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.registry import Implementation, registry
from dsv4dbg.kernels.table import device_arch
from dsv4dbg.kernels.triton_run import Observation, observed
from dsv4dbg.plan import REFERENCE
from dsv4dbg.verdict.judge import judge

IMPLEMENTATIONS = [i for i in registry().implementations.values() if i.name != REFERENCE]
SMALL = 8  # tokens of an example that is run on the CPU by default
MEMORY_AND_VIEWS = {
    "alias", "as_strided", "clone", "copy_", "detach", "empty", "empty_like", "empty_permuted", "empty_strided",
    "expand", "fill_", "lift_fresh", "new_empty", "new_empty_strided", "new_zeros", "permute", "select", "slice",
    "split", "split_with_sizes", "squeeze", "t", "transpose", "unsqueeze", "view", "_unsafe_view", "_reshape_alias",
    "zero_", "zeros", "zeros_like",
}  # fmt: skip
ALLOWED = {"triton": MEMORY_AND_VIEWS}  # torch operators by implementation name; others may do what they like

EVERYTHING = [
    pytest.param("cpu", "tiny", id="cpu-tiny"),
    pytest.param("cpu-all", "tiny", id="cpu-tiny-all", marks=pytest.mark.slow),
    pytest.param("cpu-all", "wide", id="cpu-wide-all", marks=pytest.mark.slow),
    pytest.param("cuda", "tiny", id="gpu-tiny", marks=pytest.mark.gpu),
    pytest.param("cuda", "wide", id="gpu-wide", marks=pytest.mark.gpu),
]


def examples(op: Op, sizes: str, where: str, seed: int) -> Iterator[Example]:
    assert op.examples_function is not None
    for example in op.examples_function(PRESETS[sizes], np.random.default_rng(seed)):
        if where != "cpu" or tokens(op, example) <= SMALL:
            yield example


def tokens(op: Op, example: Example) -> int:
    named = [example.args[n] for n, a in op.args.items() if a.dims.startswith("token") and n in example.args]
    return max((len(t) for t in named if isinstance(t, torch.Tensor)), default=0)


def call(
    op: Op, implementation: Implementation, at: Guarded, fill: int, numerics: Numerics
) -> tuple[dict[str, Any], Observation]:
    """Outputs and mutated caches on the CPU, and what the implementation did."""
    kwargs = dict(at.args)
    if op.reads_numerics:
        kwargs["numerics"] = numerics
    if implementation.prepare is not None:
        kwargs["prepared"] = implementation.prepare(**{n: kwargs[n] for n, a in op.args.items() if a.kind == "weight"})
    result, seen = observed(implementation.function, (), kwargs, fill)
    outputs: dict[str, Any] = {n: v.cpu() for n, v in op.name_outputs(result).items()}
    return {**outputs, **{n: at.args[n] for n in op.mutates}}, seen


def reference(op: Op, args: dict[str, Any], numerics: Numerics) -> dict[str, Any]:
    bound = copied(op.bind((), args))
    result = op.reference(**bound, **({"numerics": numerics} if op.reads_numerics else {}))
    return {**op.name_outputs(result), **{n: bound[n] for n in op.mutates}}


def differs(op: Op, args: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> str | None:
    """Name of an output, or of a cache at its written slots, that has other bits."""
    for name in op.outputs:
        a, b = (x[name] for x in (first, second))
        if a.shape != b.shape or to_array(a).tobytes() != to_array(b).tobytes():
            return name
    for name, slots in op.mutates.items():
        if first[name] is None:
            continue
        kept = args[slots].cpu().numpy().ravel()
        kept = kept[kept >= 0]
        rows = [
            x[name].layout.read(packed(x[name], args[name].data.shape[1]).data.numpy(), kept) for x in (first, second)
        ]
        if not np.array_equal(*rows):
            return name
    return None


def check(
    op: Op, implementation: Implementation, example: Example, device: torch.device, numerics: Numerics
) -> str | None:
    """None, or what is wrong with one example."""
    args = op.bind((), example.args)
    first = guarded(op, args, NAN, device)
    outputs, seen = call(op, implementation, first, NAN, numerics)
    if damage := first.damage():
        return damage
    plain = {n: packed(v, args[n].data.shape[1]) if isinstance(v, Cache) else v for n, v in outputs.items()}
    verdict = judge(
        op, to_arrays(args), to_arrays(reference(op, args, numerics)), to_arrays(plain),
        lambda: run_oracle(op, args, numerics), numerics,
    )  # fmt: skip
    if verdict.verdict > Verdict.ROUNDING:
        return f"{verdict.verdict.name}: {verdict.sentence}"
    foreign = set(seen.operators) - ALLOWED.get(implementation.name, set(seen.operators))
    if foreign:
        return f"torch operators inside: {', '.join(sorted(foreign))}"
    if implementation.name in ALLOWED and not seen.launches and any(plain[n].numel() for n in op.outputs):
        return "no kernel was launched"
    repeats = [LARGE] if device.type == "cpu" else [NAN, NAN, NAN, LARGE]
    for fill in repeats:
        again = guarded(op, args, fill, device)
        more, _ = call(op, implementation, again, fill, numerics)
        if damage := again.damage():
            return f"fill 0x{fill:02x}: {damage}"
        if name := differs(op, args, outputs, more):
            return f"{name} differs in a second run with fill 0x{fill:02x} (first: 0x{NAN:02x})"
    return None


@pytest.mark.parametrize(("where", "sizes"), EVERYTHING)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: f"{i.op}={i.name}")
def test_implementation(implementation: Implementation, where: str, sizes: str) -> None:
    run(implementation, where, sizes, 7)


def run(implementation: Implementation, where: str, sizes: str, seed: int) -> None:
    op, device = registry().op(implementation.op), torch.device(where.removesuffix("-all"))
    arch, failures, count, reasons = device_arch(device), [], 0, set()
    for numerics in (OFFICIAL, HF) if op.switches else (OFFICIAL,):
        for example in examples(op, sizes, where, seed):
            args = {**op.bind((), example.args), "numerics": numerics}
            reason = implementation.why_not(device, arch, args)
            if reason is not None:
                reasons.add(reason)
                continue
            count += 1
            if wrong := check(op, implementation, example, device, numerics):
                failures.append(f"{example.name}, {numerics.name}: {wrong}")
    assert not failures, "\n".join([f"{len(failures)} of {count} examples", *failures[:10]])
    assert count, f"no example can run: {reasons}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: f"{i.op}={i.name}")
def test_more_seeds(implementation: Implementation, seed: int) -> None:
    run(implementation, "cpu", "tiny", 100 + seed)
