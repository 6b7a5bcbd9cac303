"""The worker: a process that runs a candidate on single calls, inside guards, and may die of it.

It copies each call into an arena of its own on its device, so that what a kernel overruns is its own copy, and
answers with the results in shared memory. What a candidate prints goes to the process's stderr.
"""

from __future__ import annotations

import faulthandler
import inspect
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsv4dbg.bisect.capturing import NotCapturable, captured
from dsv4dbg.bisect.guards import Arena, unwritten
from dsv4dbg.bisect.guards import Placed as Placement
from dsv4dbg.bisect.launches import launched
from dsv4dbg.bisect.protocol import Failed, Hello, Placed, Ran, Ready, Refused, Run
from dsv4dbg.bisect.shared import Frame, Memory
from dsv4dbg.bisect.walker import interpret, on_device
from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.child import die_with_parent, parent
from dsv4dbg.kernels.contract import Op
from dsv4dbg.kernels.registry import Implementation, load_plugin, registry
from dsv4dbg.kernels.table import Call, device_arch
from dsv4dbg.model.run import open_device


@dataclass
class Bench:
    """Where candidates run: a device with an arena, and what implementations prepared from weights.

    Attributes:
        prepared: by site name and implementation, with the weights that it was made of.
    """

    memory: Memory
    device: torch.device
    arch: str
    arena: Arena
    prepared: dict[tuple[str, str], Any]

    def run(self, request: Run, connection: Any) -> Ran | Refused:
        *earlier, call = (self.memory.call(packed) for packed in (*request.earlier, request.call))
        implementation = registry().implementation(call.op.name, request.implementation)
        reason = implementation.why_not(self.device, self.arch, {**call.args, "numerics": call.numerics})
        if reason is None and request.launch and self.device.type == "cpu":
            reason = "Triton's interpreter has no warps or stages"
        if reason is not None:
            return Refused(reason)

        def place(call: Call) -> Placement:
            return self.arena.place(call, self.device, request.fill, request.seed)

        placed = place(earlier[0] if earlier else call)
        if self.device.type != "cpu":  # a CPU's signal names no address
            connection.send(Placed(tuple(placed.ranges())))
        kwargs = self._arguments(placed.call, call, implementation)

        def function() -> Any:
            with torch.inference_mode(), unwritten(request.fill, request.thorough):
                return implementation.function(**kwargs)

        with launched(request.launch) as otherwise:
            if earlier:
                try:
                    function = captured(function, self.device)
                except NotCapturable as error:
                    return Refused(f"it cannot be captured as a graph: {error}", spent=True)
                for other in earlier[1:] if self.device.type != "cpu" else []:
                    place(other)
                    function()
                placed = place(call)
            begin = self._now()
            result = function()
            seconds = self._now() - begin
        outputs = _outputs(call.op, implementation, result)
        damage = tuple(found.sentence for found in placed.damage())
        frame = Frame(self.memory, request.begin, request.end)
        results = frame.pack_all({**outputs, **{name: placed.call.args[name] for name in call.op.mutates}})
        return Ran(results, frame.begin, damage, seconds, len(otherwise))

    def _arguments(self, placed: Call, call: Call, implementation: Implementation) -> dict[str, Any]:
        kwargs = dict(placed.args)
        if call.op.reads_numerics:
            kwargs["numerics"] = call.numerics
        if implementation.prepare is not None:
            key = (call.site.name, implementation.name)
            if key not in self.prepared:
                still = on_device(call, self.device).args  # the arena's copies do not last
                weights = {name: still[name] for name, arg in call.op.args.items() if arg.kind == "weight"}
                self.prepared[key] = implementation.prepare(**weights)
            kwargs["prepared"] = self.prepared[key]
        return kwargs

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _outputs(op: Op, implementation: Implementation, result: Any) -> Mapping[str, torch.Tensor]:
    try:
        outputs = op.name_outputs(result)
    except TypeError as error:
        raise DbgError(f"candidate '{implementation.name}': {error}") from error
    for name, value in outputs.items():
        if not isinstance(value, torch.Tensor):
            raise DbgError(f"candidate '{implementation.name}' of {op.name} returned no tensor as {name}")
    return outputs


def candidates(name: str) -> dict[str, str]:
    """Ops that have an implementation of this name -> what is wrong with its signature, or ''."""
    found = {}
    for op in registry().ops.values():
        try:
            implementation = registry().implementation(op.name, name)
        except DbgError:
            continue
        found[op.name] = _signature(op, implementation)
    return found


def _signature(op: Op, implementation: Implementation) -> str:
    parameters = inspect.signature(implementation.function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return ""
    given = {*op.args, *(["numerics"] if op.reads_numerics else []), *(["prepared"] if implementation.prepare else [])}
    missing = given - {p.name for p in parameters}
    foreign = {p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL} - given
    if missing:
        return f"'{implementation.name}' of {op.name} does not take {', '.join(sorted(missing))}"
    if foreign:
        return f"'{implementation.name}' of {op.name} wants {', '.join(sorted(foreign))}, which the op does not have"
    return ""


def _serve(connection: Any, memory: Memory) -> None:
    hello: Hello = connection.recv()
    for plugin in hello.plugins:
        load_plugin(Path(plugin))
    device = open_device(hello.device)
    if device.type == "cpu":
        interpret()
    bench = Bench(memory, device, device_arch(device), Arena(), {})
    connection.send(Ready(candidates(hello.candidate), bench.arch))
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            answer = bench.run(request, connection)
        except Exception as error:
            answer = Failed.of(error)
        connection.send(answer)


def main() -> None:
    """Serve runs: ``python -m dsv4dbg.bisect.worker FD MEMORY_FD FRAMES``."""
    die_with_parent()
    faulthandler.enable()
    connection, memory = parent(), Memory(int(sys.argv[2]), int(sys.argv[3]))
    try:
        _serve(connection, memory)
    except EOFError:
        return
    except Exception as error:
        connection.send(Failed.of(error))


if __name__ == "__main__":
    main()
