"""Capture: a listener that writes every site's inputs, outputs and cache writes to a trace.

It changes no bit of the forward: inputs are copied before the op runs, outputs and written records after.
Weights are named, not copied. Of a mutated cache the records at the contract's slots are stored; a shadow copy
shows whether bytes changed anywhere else, and those are stored too, so that the trace's caches are the live ones
whatever an implementation does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dsv4dbg.kernels.paged import Cache, read_records, write_records
from dsv4dbg.kernels.table import Call
from dsv4dbg.model.cache import CacheManager
from dsv4dbg.model.weights import ModelWeights
from dsv4dbg.site import Pattern, Site
from dsv4dbg.trace.records import CacheSpec, Mutation, Tensor
from dsv4dbg.trace.writer import SiteCall, TraceWriter

MAX_EXAMPLES = 4
_BITS = {1: torch.uint8, 2: torch.uint16}


def to_bits(tensor: torch.Tensor) -> tuple[np.ndarray, str]:
    """A tensor as a numpy array of raw bits on the host (a copy), and the name of its dtype."""
    name = str(tensor.dtype).removeprefix("torch.")
    host = tensor.detach().to("cpu", copy=True).contiguous()
    if name == "bfloat16" or name.startswith("float8"):
        host = host.view(_BITS[host.element_size()])
    elif name == "bool":
        host = host.view(torch.uint8)
    return host.numpy(), name


def stored(tensor: torch.Tensor, dims: str) -> Tensor:
    """A tensor on its way into a trace."""
    array, name = to_bits(tensor)
    return Tensor(array, name, dims)


def cache_specs(manager: CacheManager) -> dict[str, CacheSpec]:
    """What a trace must know of the caches before the first step."""
    return {
        cache.name: CacheSpec(cache.layout, cache.data.shape[0], cache.data.stride(0), manager.fill)
        for cache in manager.all_caches()
    }


class Capture:
    """Listener that writes to a `TraceWriter`.

    Args:
        patterns: sites to keep; none keeps all. Of sites left out that write to a cache, the writes are kept, so
            that every cache can be rebuilt.
    Attributes:
        kept: calls kept so far because a pattern wants them.
        examples: names of a few sites that the forward has, for messages.
        seconds: time spent writing.
    """

    def __init__(
        self, writer: TraceWriter, manager: CacheManager, weights: ModelWeights, patterns: Sequence[Pattern] = ()
    ) -> None:
        self.kept = 0
        self.examples: list[str] = []
        self.seconds = 0.0
        self._writer = writer
        self._weights = weights
        self._patterns = tuple(patterns)
        self._shadow = {cache.name: cache.data.clone() for cache in manager.all_caches()}
        self._open: SiteCall | None = None

    def wants(self, site: Site) -> bool:
        if len(self.examples) < MAX_EXAMPLES and site.name not in self.examples:
            self.examples.append(site.name)
        return not self._patterns or any(pattern.matches(site) for pattern in self._patterns)

    def before(self, call: Call) -> None:
        begin = time.perf_counter()
        wanted = self.wants(call.site)
        self._open = None
        if wanted or call.op.mutates:
            self._open = self._begin(call, wanted)
        self.seconds += time.perf_counter() - begin

    def after(self, call: Call, outputs: Mapping[str, torch.Tensor]) -> None:
        begin = time.perf_counter()
        if self._open is not None:
            wanted = self.wants(call.site)
            self.kept += wanted
            kept = outputs if wanted else {}
            named = {name: stored(value, call.op.outputs[name].dims) for name, value in kept.items()}
            mutated = {arg: self._mutation(call, arg, slots) for arg, slots in call.op.mutates.items()}
            self._open.finish(named, mutated)
        self.seconds += time.perf_counter() - begin

    def boundary(self, site: Site, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        if not self.wants(site):
            return
        begin = time.perf_counter()
        given = {name: stored(value, _block_dims(value)) for name, value in inputs.items()}
        call = self._writer.site(site, "", inputs=given)
        call.finish({name: stored(value, _block_dims(value)) for name, value in outputs.items()})
        self.kept += 1
        self.seconds += time.perf_counter() - begin

    def _begin(self, call: Call, wanted: bool) -> SiteCall:
        inputs: dict[str, Tensor | None] = {}
        weights, caches, attrs = {}, {}, {}
        for name, arg in call.op.args.items():
            value = call.args[name]
            if isinstance(value, Cache):
                caches[name] = value.name
            elif isinstance(value, torch.Tensor):
                reference = self._weights.reference(value) if arg.kind == "weight" else None
                if reference is not None:
                    weights[name] = reference
                elif wanted:
                    inputs[name] = stored(value, arg.dims)
            elif arg.kind == "attr":
                attrs[name] = value
            elif wanted:
                inputs[name] = None
        if call.op.reads_numerics:
            attrs["numerics"] = call.numerics.name
        return self._writer.site(
            call.site, call.implementation, attrs=attrs, inputs=inputs, weights=weights, caches=caches
        )

    def _mutation(self, call: Call, arg: str, slots_arg: str) -> Mutation:
        cache: Cache = call.args[arg]
        slots = call.args[slots_arg]
        slots = slots[slots >= 0]
        fields = read_records(cache, slots)
        offsets, changed = self._stray(cache, slots, fields)
        return Mutation(slots.cpu().numpy().astype(np.int64), torch.cat(fields, dim=1).cpu().numpy(), offsets, changed)

    def _stray(
        self, cache: Cache, slots: torch.Tensor, fields: tuple[torch.Tensor, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Offsets and values of bytes that changed outside ``slots``; the shadow becomes a copy of the live buffer."""
        shadow = replace(cache, data=self._shadow[cache.name])
        write_records(shadow, slots, fields)
        if torch.equal(shadow.data, cache.data):
            return np.zeros(0, np.int64), np.zeros(0, np.uint8)
        page, byte = (shadow.data != cache.data).nonzero(as_tuple=True)
        values = cache.data[page, byte]
        shadow.data.copy_(cache.data)
        return (page * cache.data.stride(0) + byte).cpu().numpy(), values.cpu().numpy()


def _block_dims(tensor: torch.Tensor) -> str:
    return "token stream channel" if tensor.dim() == 3 else "token channel"
