"""A case: one call of an op as files, and running an implementation on it. A reproducer consists of one.

``case.json`` says what the arguments are and when a run counts as wrong; ``inputs.safetensors`` and
``expected.safetensors`` hold the tensors. This module is copied into reproducers, where it runs in a child process
with torch, numpy and safetensors but without the rest of the tool.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from dsv4dbg.bisect.criteria import Criterion, broken
from dsv4dbg.bisect.guards import Arena, unwritten
from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.child import die_with_parent, parent
from dsv4dbg.kernels.numerics import profile
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.registry import Implementation, import_file, registry
from dsv4dbg.kernels.table import Call, device_arch
from dsv4dbg.pages import PageLayout
from dsv4dbg.site import Site

SCHEMA = "dsv4dbg.case/1"
MODES = {
    "values": "results are wrong",
    "runs": "results differ between runs on the same inputs, or are wrong in some of them",
    "fills": "results depend on memory that the call does not own or never wrote",
    "fault": "the call does not end with results",
}


@dataclass(frozen=True)
class Case:
    """One call with what came of it.

    Attributes:
        implementation: name of the implementation at fault.
        file: the file that declares it, in the case's directory; '' for one of this package.
        mode: how it fails, one of `MODES`.
        runs: how often it runs.
        timeout: seconds that one run may take.
        reference, oracle: results by name.
        finding: verdict, sentence, fingerprints and the like, for people.
    """

    call: Call
    implementation: str
    file: str
    mode: str
    runs: int
    timeout: float
    criteria: list[Criterion]
    reference: Mapping[str, Any]
    oracle: Mapping[str, np.ndarray]
    finding: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)


def save(case: Case, directory: Path) -> None:
    """Write a case's three files."""
    call, tensors = case.call, {}
    args = {name: _described(name, value, tensors) for name, value in call.args.items()}
    save_file(tensors, directory / "inputs.safetensors")
    expected: dict[str, torch.Tensor] = {}
    reference = {n: _described(f"reference.{n}", v, expected) for n, v in case.reference.items()}
    for name, value in case.oracle.items():
        expected[f"oracle.{name}"] = torch.from_numpy(np.ascontiguousarray(value, np.float64))
    save_file(expected, directory / "expected.safetensors")
    document = {
        "schema": SCHEMA, "op": call.op.name, "site": call.site.path, "numerics": call.numerics.name,
        "implementation": case.implementation, "file": case.file, "mode": case.mode, "runs": case.runs,
        "timeout": case.timeout, "criteria": [asdict(c) for c in case.criteria], "args": args, "reference": reference,
        "finding": dict(case.finding), "environment": dict(case.environment),
    }  # fmt: skip
    text = json.dumps(document, indent=1, ensure_ascii=False, default=str)
    (directory / "case.json").write_text(text, encoding="utf-8")


def load(directory: Path) -> Case:
    """Read a case; its op must be in the registry."""
    document = json.loads((directory / "case.json").read_text(encoding="utf-8"))
    if document["schema"] != SCHEMA:
        raise DbgError(f"{directory} holds a {document['schema']}, this script reads {SCHEMA}")
    inputs, expected = (load_file(directory / f"{n}.safetensors") for n in ("inputs", "expected"))
    op = registry().op(document["op"])
    step, _, name = document["site"].rpartition("/")
    args = {name: _restored(name, value, inputs) for name, value in document["args"].items()}
    call = Call(Site(name, op.name, step), op, document["implementation"], args, profile(document["numerics"]))
    reference = {n: _restored(f"reference.{n}", v, expected) for n, v in document["reference"].items()}
    oracle = {n.removeprefix("oracle."): t.numpy() for n, t in expected.items() if n.startswith("oracle.")}
    return Case(
        call, document["implementation"], document["file"], document["mode"], document["runs"], document["timeout"],
        [Criterion(**c) for c in document["criteria"]], reference, oracle, document["finding"],
        document["environment"],
    )  # fmt: skip


def _described(name: str, value: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A value as JSON; the elements of tensors go into ``tensors``, float8 as bytes."""
    if isinstance(value, Cache):
        inner = _described(name, value.data, tensors)
        return {**inner, "cache": value.name, "layout": value.layout.to_json()}
    if not isinstance(value, torch.Tensor):
        return {"value": value}
    dtype = str(value.dtype).removeprefix("torch.")
    stored = value.detach().cpu().contiguous()
    tensors[name] = (stored.view(torch.uint8) if dtype.startswith("float8") else stored).clone()
    return {"dtype": dtype, "stride": list(_strides(value))}


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that a kernel shall meet: the tensor's own, unless it is a small part of a large buffer."""
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.stride() if tensor.numel() and span <= 2 * tensor.numel() else tensor.contiguous().stride()


def _restored(name: str, described: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    if "dtype" not in described:
        return described["value"]
    dtype = getattr(torch, described["dtype"])
    stored = tensors[name] if tensors[name].dtype == dtype else tensors[name].view(dtype)
    value = torch.empty_strided(stored.shape, described["stride"], dtype=dtype)
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in described["stride"])
    value[once] = stored[once]
    if "layout" not in described:
        return value
    return Cache(described["cache"], value, PageLayout.from_json(described["layout"]))


def candidate(case: Case, directory: Path, other: str) -> Implementation:
    """The implementation at fault, or the function that ``FILE:FUNCTION`` names.

    Raises:
        DbgError: it does not import, or there is none.
    """
    op = case.call.op.name
    if other:
        path, _, name = other.rpartition(":")
        module, declared = import_file(Path(path))
        function = vars(module).get(name)
        if not callable(function):
            raise DbgError(f"{path} has no function '{name}'", "name one as --implementation FILE:FUNCTION")
        mine = [i for i in declared if i.function is function and i.op == op]
        return mine[0] if mine else Implementation(op, name, function)
    if not case.file:
        return registry().implementation(op, case.implementation)
    _, declared = import_file(directory / case.file)
    return next(i for i in declared if (i.op, i.name) == (op, case.implementation))


def runs(case: Case, implementation: Implementation, device: torch.device) -> Iterator[tuple[str, Any]]:
    """Run a case: yields ``("ranges", buffers)`` before each run, and at last ``("wrong", sentences)``."""
    call, arena, first = case.call, Arena(), None
    fills = ("nan", "large") if case.mode == "fills" else ("nan",) * case.runs
    for number, fill in enumerate(fills):
        placed = arena.place(call, device, fill, seed=number if case.mode == "fills" else 0)
        yield "ranges", tuple(placed.ranges())
        kwargs = dict(placed.call.args)
        if call.op.reads_numerics:
            kwargs["numerics"] = call.numerics
        if implementation.prepare is not None:
            weights = {name: kwargs[name] for name, arg in call.op.args.items() if arg.kind == "weight"}
            kwargs["prepared"] = implementation.prepare(**weights)
        with torch.inference_mode(), unwritten(fill, case.mode == "fills"):
            returned = implementation.function(**kwargs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        outputs = call.op.name_outputs(returned)
        wrong = [damage.sentence for damage in placed.damage()]
        results = _on_cpu({**outputs, **{name: placed.call.args[name] for name in call.op.mutates}})
        wrong += broken(case.criteria, call, results, case.reference, case.oracle)
        first = first or results
        for name in results:
            if not wrong and not _same(results[name], first[name]):
                wrong = [f"{name} of run {number + 1} differs from that of run 1: {MODES[case.mode]}"]
        if wrong:
            yield "wrong", wrong
            return
    yield "wrong", []


def _on_cpu(results: Mapping[str, Any]) -> dict[str, Any]:
    """Copies: the arena is used again."""
    return {
        name: Cache(v.name, v.data.cpu().clone(), v.layout) if isinstance(v, Cache) else v.cpu().clone()
        for name, v in results.items()
    }


def _same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    a, b = (v.data if isinstance(v, Cache) else v for v in (one, other))
    a, b = (x.reshape(-1).clone() for x in (a, b))
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def main() -> None:
    """In the child: ``python -m dsv4dbg.bisect.case FD DIRECTORY DEVICE FILE:FUNCTION``."""
    die_with_parent()
    faulthandler.enable()
    connection, directory, name = parent(), Path(sys.argv[2]), sys.argv[3]
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"  # counts when Triton is first imported
        case = load(directory)
        implementation = candidate(case, directory, sys.argv[4])
        reason = implementation.why_not(device, device_arch(device), {**case.call.args, "numerics": case.call.numerics})
        if reason is not None:
            raise DbgError(f"'{implementation.name}' cannot run on {device}: {reason}")
        if "triton" in sys.modules and device.type == "cpu":
            from dsv4dbg.kernels.interpreter import quicken

            np.seterr(all="ignore")  # inf - inf and log(0) are ordinary in masked lanes
            quicken()
    except Exception as error:
        connection.send(("unusable", f"{type(error).__name__}: {error}"))
        return
    connection.send(("device", str(device)))
    try:
        for message in runs(case, implementation, device):
            connection.send(message)
    except Exception as error:
        connection.send(("raised", (type(error).__name__, str(error))))


if __name__ == "__main__":
    main()
