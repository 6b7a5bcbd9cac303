"""One site of a trace again: its arguments as tensors, and any implementation run on them.

The arguments are what the site saw: inputs as stored, caches rebuilt byte for byte, weights by name from a
checkpoint whose hashes are the trace's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.numerics import profile
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.registry import Implementation, registry
from dsv4dbg.kernels.table import Call
from dsv4dbg.model.weights import ModelWeights
from dsv4dbg.trace.caches import CacheReplay
from dsv4dbg.trace.reader import Trace
from dsv4dbg.trace.records import SiteRecord

_TORCH = {
    name: getattr(torch, name)
    for name in (
        "bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e8m0fnu", "uint8",
        "int8", "int16", "int32", "int64", "bool",
    )
}  # fmt: skip


def to_tensor(bits: np.ndarray, dtype: str, device: torch.device) -> torch.Tensor:
    """Raw bits of a trace as a torch tensor."""
    if dtype not in _TORCH:
        raise DbgError(f"torch has no dtype {dtype}, which the trace holds")
    tensor = torch.from_numpy(np.ascontiguousarray(bits))
    if dtype == "bool":
        return tensor.bool().to(device)
    return tensor.view(_TORCH[dtype]).to(device)


def load_call(
    trace: Trace, record: SiteRecord, weights: ModelWeights | None, device: torch.device,
    caches: CacheReplay | None = None,
) -> Call:  # fmt: skip
    """Arguments of a site.

    Args:
        weights: the model that the trace was made with, for sites that have weights.
        caches: of the same trace, for walks through many sites: on the CPU the call's caches are then its own, good
            until the next call is loaded, and must not be written to (`run` does not).

    Raises:
        DbgError: the trace lacks something, the weights are not at hand or are not the trace's.
    """
    op = registry().op(record.site.op)
    known = {*record.inputs, *record.weights, *record.caches, *record.attrs}
    missing = [name for name, arg in op.args.items() if not arg.optional and name not in known]
    if missing:
        raise DbgError(
            f"the trace has no {' and no '.join(missing)} for {record.site}",
            "capture that site without --sites filters",
        )
    args: dict[str, Any] = dict.fromkeys(op.args)
    args |= {name: value for name, value in record.attrs.items() if name in op.args}
    for name, spec in record.inputs.items():
        args[name] = to_tensor(trace.read(record, f"in/{name}"), spec.dtype, device)
    for name, reference in record.weights.items():
        args[name] = _weight(reference, weights, record)
    for name, reference in record.caches.items():
        data = torch.from_numpy((caches or CacheReplay(trace)).at(record, name)).to(device)
        args[name] = Cache(reference.cache, data, trace.caches[reference.cache].layout)
    numerics = profile(record.attrs.get("numerics", trace.manifest.get("numerics", "official")))
    return Call(record.site, op, record.implementation, args, numerics)


def _weight(reference: Mapping[str, Any], weights: ModelWeights | None, record: SiteRecord) -> torch.Tensor:
    name = reference["tensor"]
    if weights is None:
        raise DbgError(f"{record.site} needs the weight {name}", "name the model with --model")
    if weights.source.hash(name) != reference["hash"]:
        raise DbgError(f"the weight {name} is not the one that the trace was made with")
    return weights.tensor(name)


def run(call: Call, implementation: Implementation, **changed: Any) -> dict[str, Any]:
    """Run an implementation on a call's arguments; returns its outputs, and the mutated caches, by name."""
    kwargs = dict(call.args) | changed
    mutated = {
        name: Cache(kwargs[name].name, kwargs[name].data.clone(), kwargs[name].layout) for name in call.op.mutates
    }
    kwargs |= mutated
    if call.op.reads_numerics:
        kwargs["numerics"] = call.numerics
    if implementation.prepare is not None:
        given = {n: kwargs[n] for n, a in call.op.args.items() if a.kind == "weight"}
        kwargs["prepared"] = implementation.prepare(**given)
    with torch.inference_mode():
        result = implementation.function(**kwargs)
    return {**call.op.name_outputs(result), **mutated}
