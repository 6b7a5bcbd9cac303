"""The walker: a process that runs forwards for a bisect and ships the calls of their sites through shared memory.

Isolated, the reference runs everywhere and each call comes with the reference's results. Live, the candidate runs at
chosen sites of the forward itself, and each of their calls comes with its results and with what the reference
makes of the same inputs. A walk is deterministic: started again, it ships the same calls under the same numbers.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dsv4dbg.bisect.protocol import Failed, Missing, Opened, Passing, Shipped, Walk, Walked
from dsv4dbg.bisect.shared import Frame, Kept, Memory
from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.child import die_with_parent, parent
from dsv4dbg.kernels.interpreter import quicken
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.registry import load_plugin, registry
from dsv4dbg.kernels.table import Call
from dsv4dbg.model.environment import environment
from dsv4dbg.model.recording import load_model, open_session, open_workload, prompt_ids, run_request
from dsv4dbg.model.replay import load_call, run
from dsv4dbg.model.workload import regimes
from dsv4dbg.plan import REFERENCE, Plan
from dsv4dbg.site import Pattern, Site
from dsv4dbg.trace.caches import CacheReplay
from dsv4dbg.trace.reader import Trace


class Shipper:
    """Listener that copies calls and results to free frames and sends them; it waits while no frame is free."""

    def __init__(self, walk: Walk, memory: Memory, connection: Any, device: torch.device) -> None:
        self.calls = 0
        self.waited = 0.0
        self._walk, self._memory, self._connection, self._device = walk, memory, connection, device
        self._free = list(walk.frames)
        self._kept = Kept(Frame.number(memory, 0))
        self._probed: set[str] = set()
        self._open: tuple[int, Frame, Any] | None = None
        self._begin = 0.0

    def wants(self, call: Call) -> bool:
        if self._walk.live:
            return call.site.name in self._walk.live
        return call.op.name in self._walk.ops

    def before(self, call: Call) -> None:
        begin = time.perf_counter()
        self._open = None
        if self.wants(call):
            number = self._frame()
            frame = Frame.number(self._memory, number)
            self._open = number, frame, frame.pack_call(call, self._kept)
            if self._walk.live:
                self._connection.send(Passing(call.site.path))
        self._begin = self._now()
        self.waited += self._begin - begin

    def after(self, call: Call, outputs: Mapping[str, torch.Tensor]) -> None:
        end = self._now()
        if self._open is not None:
            results = {**outputs, **{name: call.args[name] for name in call.op.mutates}}
            self._ship(call, results, end - self._begin)
        self.calls += 1
        self.waited += time.perf_counter() - end

    def boundary(self, site: Site, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        pass

    def _ship(self, call: Call, results: Mapping[str, Any], seconds: float) -> None:
        assert self._open is not None
        number, frame, packed = self._open
        reference, candidate, repeatable = results, None, None
        if self._walk.live:
            reference, candidate = self._again(packed), frame.pack_all(results)
        elif call.op.name not in self._probed:
            self._probed.add(call.op.name)
            repeatable = same_results(self._again(packed), results)
        shipped = frame.pack_all(reference)
        self._connection.send(Shipped(self.calls, number, frame.begin, packed, shipped, seconds, candidate, repeatable))

    def _again(self, packed: Any) -> dict[str, Any]:
        """What the reference makes of a call as it was packed."""
        call = on_device(self._memory.call(packed), self._device)
        return run(call, registry().implementation(call.op.name, REFERENCE))

    def _frame(self) -> int:
        while self._connection.poll(0 if self._free else None):
            self._free.append(self._connection.recv())
        return self._free.pop()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def on_device(call: Call, device: torch.device) -> Call:
    """The call with its tensors on a device (itself if they are there)."""

    def moved(value: Any) -> Any:
        if isinstance(value, Cache):
            return replace(value, data=value.data.to(device))
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return replace(call, args={name: moved(value) for name, value in call.args.items()})


def same_results(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two runs gave the same bits; NaN equals itself."""

    def data(value: Any) -> torch.Tensor:
        value = value.data if isinstance(value, Cache) else value
        return value.contiguous().view(torch.uint8) if value.dim() and value.numel() else value

    pairs = [(data(first[name]), data(second[name])) for name in first]
    return all(a.shape == b.shape and bool((a == b).all()) for a, b in pairs)


def _walk(walk: Walk, memory: Memory, connection: Any) -> Walked:
    for plugin in walk.request.plugins:
        load_plugin(plugin)
    if walk.trace is not None:
        return _walk_trace(walk, memory, connection)
    request = replace(walk.request, plan=_plan(walk))
    checkpoint, model, device = load_model(request)
    workload = open_workload(request.workload, checkpoint) if request.workload else None
    ids = [] if workload else prompt_ids(request, checkpoint)
    session = open_session(request, model, device, ids, workload)
    steps = tuple(step.name for step, _ in workload) if workload else ()
    reached = regimes(checkpoint.config, workload) if workload else {}
    connection.send(Opened(steps, reached, environment(device), str(device)))
    shipper = Shipper(walk, memory, connection, device)
    session.listen(shipper)
    begin = time.perf_counter()
    run_request(request, session, ids, None, workload)
    return Walked(shipper.calls, time.perf_counter() - begin - shipper.waited)


def _plan(walk: Walk) -> Plan:
    rules = tuple((Pattern(name), walk.candidate) for name in sorted(walk.live))
    return Plan((*walk.request.plan.rules, *rules))


def _walk_trace(walk: Walk, memory: Memory, connection: Any) -> Walked:
    assert walk.trace is not None
    begin = time.perf_counter()
    with Trace.open(walk.trace) as trace:
        request = replace(walk.request, model=str(trace.manifest.get("model") or walk.request.model))
        _, model, device = load_model(request)
        connection.send(Opened(tuple(trace.steps), {}, environment(device), str(device)))
        shipper = Shipper(walk, memory, connection, device)
        caches = CacheReplay(trace)
        for record in (r for r in trace.sites() if r.site.op in walk.ops):
            try:
                call = load_call(trace, record, model.weights, device, caches)
            except DbgError as error:
                connection.send(Missing(shipper.calls, record.site, error.message))
                continue
            shipper.before(call)
            results = run(call, registry().implementation(call.op.name, REFERENCE))
            mutated = {name: results[name] for name in call.op.mutates}
            outputs = {name: results[name] for name in call.op.outputs}
            shipper.after(replace(call, args={**call.args, **mutated}), outputs)
    return Walked(shipper.calls, time.perf_counter() - begin - shipper.waited)


def main() -> None:
    """Serve one walk: ``python -m dsv4dbg.bisect.walker FD MEMORY_FD FRAMES``."""
    die_with_parent()
    connection, memory = parent(), Memory(int(sys.argv[2]), int(sys.argv[3]))
    walk: Walk = connection.recv()
    try:
        if walk.live and walk.request.device == "cpu":
            interpret()
        done = _walk(walk, memory, connection)
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        connection.send(Failed.of(error))
    else:
        connection.send(done)


def interpret() -> None:
    """Set up Triton's interpreter, which this process was started with."""
    np.seterr(all="ignore")  # inf - inf and log(0) are ordinary in masked lanes
    with contextlib.suppress(ImportError):  # no triton: there is nothing to interpret
        quicken()


if __name__ == "__main__":
    main()
