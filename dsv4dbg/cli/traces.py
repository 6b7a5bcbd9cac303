"""What commands take from a trace: one call with its arguments, and the weights that it was made with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsv4dbg.errors import DbgError
from dsv4dbg.site import BLOCK

if TYPE_CHECKING:
    from dsv4dbg.kernels.table import Call
    from dsv4dbg.trace.reader import Trace


def open_weights(name: str):
    """Weights of a model, by name, on the CPU."""
    import torch

    from dsv4dbg.model.checkpoint import open_model
    from dsv4dbg.model.weights import ModelWeights

    return ModelWeights(open_model(name), torch.device("cpu"))


def open_call(trace: Trace, path: str, model: str | None) -> Call:
    """The call of a site, on the CPU.

    Args:
        path: ``decode3/L2.attn.wq_b``; without a step, the first call of that site.
        model: where the weights are (default: the model that the trace names).

    Raises:
        DbgError: there is no such site, it is a block, or its arguments are not at hand.
    """
    step, _, name = path.rpartition("/")
    if step:
        record = trace.site(step, name)
    else:
        record = next((r for r in trace.sites() if r.site.name == name), None)
        if record is None:
            raise DbgError(f"{trace.path} has no site {name}", "sites look like decode3/L2.attn.wq_b or L2.attn.wq_b")
    if record.site.op == BLOCK:
        raise DbgError(f"{record.site} is a block of ops, not an op", f"name an op in it, such as {name}.attn_norm")
    import torch

    from dsv4dbg.model.replay import load_call

    weights = open_weights(model or str(trace.manifest.get("model"))) if record.weights else None
    return load_call(trace, record, weights, torch.device("cpu"))
