"""A made-up capture that writers and checkers regenerate from a seed, so that a test knows every byte of a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from dsv4dbg.pages import PageLayout, index_layout, state_layout
from dsv4dbg.site import Site
from dsv4dbg.trace.reader import Trace
from dsv4dbg.trace.records import STORAGE, CacheSpec, Mutation, Tensor
from dsv4dbg.trace.writer import SiteCall, TraceWriter

MANIFEST = {"model": "made-up", "tokens": [1, 2, 3], "prompt": "Die Hauptstadt von 法国"}


def random_tensor(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Tensor:
    storage = STORAGE[dtype]
    bits = rng.integers(0, 256, (*shape, storage.itemsize), dtype=np.uint8)
    if dtype == "bool":
        bits &= 1
    return Tensor(np.ascontiguousarray(bits).view(storage).reshape(shape), dtype, " ".join("abcdefgh"[: len(shape)]))


@dataclass
class Call:
    """One planned site call: what goes in, what comes out, and the caches as it finds them."""

    site: Site
    inputs: dict[str, Tensor | None] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    caches: dict[str, str] = field(default_factory=dict)
    mutated: dict[str, Mutation] = field(default_factory=dict)
    seen: dict[str, np.ndarray] = field(default_factory=dict)
    attrs: dict[str, object] = field(default_factory=dict)


class Scenario:
    """Steps of layers; each layer is a block around an op that writes a cache and one that reads it."""

    def __init__(self, seed: int = 0, steps: int = 2, layers: int = 2, tokens: int = 3) -> None:
        self.rng = np.random.default_rng(seed)
        self.layouts: dict[str, PageLayout] = {}
        self.caches: dict[str, CacheSpec] = {}
        self.images: dict[str, np.ndarray] = {}
        self.live: dict[str, np.ndarray] = {}
        for layer in range(layers):
            layout = state_layout(2, 4, 8) if layer % 2 else index_layout("fp8", "ocp", 6, 5, 16)
            name, stride = f"L{layer}.window", layout.page_bytes + 16 * layer
            self.caches[name] = CacheSpec(layout, 3, stride, fill=0xA5)
            if layer % 2:
                self.images[name] = self.rng.integers(0, 256, (3, stride), dtype=np.uint8)
            self.live[name] = self.images.get(name, np.full((3, stride), 0xA5, np.uint8)).copy()
        self.events: list[tuple[str, Call]] = []
        dtypes = sorted(STORAGE)
        for step in range(steps):
            x = self._tensor("bfloat16", (tokens, 8))
            for layer in range(layers):
                x = self._layer(f"decode{step}", layer, x, dtypes[(step * layers + layer) % len(dtypes)])
        self.calls = {call.site.path: call for _, call in self.events}

    def _tensor(self, dtype: str, shape: tuple[int, ...]) -> Tensor:
        return random_tensor(self.rng, dtype, shape)

    def _layer(self, step: str, layer: int, x: Tensor, dtype: str) -> Tensor:
        cache = f"L{layer}.window"
        block = Call(Site(f"L{layer}", "block", step), {"x": x})
        insert = Call(
            Site(f"L{layer}.attn.insert", "qnorm_rope_kv_insert", step),
            {"x": Tensor(x.array, x.dtype, "token channel"), "positions": None},
            {"q": self._tensor(dtype, (2, 4)), "none": self._tensor("float32", (0, 4))},
            {"kv": cache},
            seen={"kv": self.live[cache].copy()},
            attrs={"eps": 1e-6, "starts": [0, 1], "note": "ü"},
        )
        insert.mutated["kv"] = self._write(cache, stray=layer == 0)
        attend = Call(
            Site(f"L{layer}.attn.attend", "sparse_mla_decode", step),
            {"q": insert.outputs["q"]},
            {"y": self._tensor("bfloat16", x.array.shape)},
            {"kv": cache},
            seen={"kv": self.live[cache].copy()},
        )
        block.outputs["x"] = attend.outputs["y"]
        self.events += [("begin", block)]
        for call in (insert, attend):
            self.events += [("begin", call), ("finish", call)]
        self.events += [("finish", block)]
        return block.outputs["x"]

    def _write(self, cache: str, stray: bool) -> Mutation:
        spec, buffer = self.caches[cache], self.live[cache]
        slots = self.rng.choice(spec.pages * spec.layout.entries, 3, replace=False).astype(np.int64)
        records = self.rng.integers(0, 256, (3, spec.layout.record_bytes), dtype=np.uint8)
        spec.layout.write(buffer, slots, records)
        if not stray:
            return Mutation(slots, records, np.empty(0, np.int64), np.empty(0, np.uint8))
        padding = np.array([spec.layout.page_bytes - 1, spec.page_stride * 2 - 1], np.int64)
        buffer.reshape(-1)[padding] += 1
        return Mutation(slots, records, padding, buffer.reshape(-1)[padding])

    def write(self, writer: TraceWriter, done: Callable[[Call], None] = lambda call: None) -> None:
        """Play all events into ``writer``; ``done`` is told of each finished call."""
        open_calls: dict[str, SiteCall] = {}
        for kind, call in self.events:
            if kind == "begin":
                open_calls[call.site.path] = writer.site(
                    call.site,
                    "torch",
                    attrs=call.attrs,
                    inputs=call.inputs,
                    weights={"w": {"tensor": f"layers.{call.site.layer}.w", "hash": "00", "dtype": "F8", "shape": [2]}},
                    caches=call.caches,
                )
            else:
                open_calls[call.site.path].finish(call.outputs, call.mutated)
                done(call)

    def capture(self, path, done: Callable[[Call], None] = lambda call: None, **options) -> None:
        with TraceWriter(path, MANIFEST, self.caches, self.images, **options) as writer:
            self.write(writer, done)
            writer.close({"completion": "Paris"})

    def check(self, trace: Trace) -> int:
        """Compare everything a trace claims with what was planned; returns the number of complete calls."""
        records = trace.sites()
        begun = [call.site.path for kind, call in self.events if kind == "begin"]
        assert [record.site.path for record in records] == begun[: len(records)]
        finished = [call.site.path for kind, call in self.events if kind == "finish"]
        complete = sorted((r for r in records if r.complete), key=lambda r: r.finished)
        assert [record.site.path for record in complete] == finished[: len(complete)]
        for record in records:
            call = self.calls[record.site.path]
            assert record.site.op == call.site.op
            assert record.attrs == call.attrs
            assert record.absent == tuple(name for name, value in call.inputs.items() if value is None)
            assert record.weights["w"]["tensor"] == f"layers.{call.site.layer}.w"
            for name, tensor in _expected(call, record.complete):
                spec, found = record.tensors()[name], trace.read(record, name)
                assert (spec.dtype, spec.dims, found.dtype) == (tensor.dtype, tensor.dims, tensor.array.dtype)
                assert found.shape == spec.shape == tensor.array.shape
                assert found.tobytes() == tensor.array.tobytes(), f"{record.site} {name}"
            for arg, seen in call.seen.items():
                assert trace.cache_at(record.site.step, record.site.name, arg).tobytes() == seen.tobytes()
        return len(complete)


def _expected(call: Call, complete: bool) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"in/{name}", tensor) for name, tensor in call.inputs.items() if tensor is not None)
    if complete:
        yield from ((f"out/{name}", tensor) for name, tensor in call.outputs.items())
        for arg, mutation in call.mutated.items():
            yield from ((f"mut/{arg}/{part}", tensor) for part, tensor in mutation.tensors().items())
