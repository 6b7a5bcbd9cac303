"""What tests of the forward share: a listener that keeps outputs, implementations of a test, sums without order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from dsv4dbg.kernels.registry import Implementation, Registry, registry
from dsv4dbg.model.run import Session
from dsv4dbg.plan import Plan


class Sites:
    """Listener that keeps the outputs of every site: step, then site name, then output name."""

    def __init__(self) -> None:
        self.outputs: dict[str, dict[str, dict[str, torch.Tensor]]] = {}

    def before(self, call: Any) -> None: ...

    def after(self, call: Any, outputs: Any) -> None:
        self.boundary(call.site, {}, outputs)

    def boundary(self, site: Any, inputs: Any, outputs: Any) -> None:
        self.outputs.setdefault(site.step, {})[site.name] = dict(outputs)


def put_in(session: Session, implementations: Mapping[str, Callable[..., Any]]) -> None:
    """Run these functions, by op, wherever ``session`` calls the op; the registry of the process stays as it is."""
    known = Registry(dict(registry().ops), dict(registry().implementations))
    for op, function in implementations.items():
        known.add(Implementation(op, "test", function))
    session.ops = replace(session.ops, registry=known, plan=Plan.parse("*=test"))


class Float64Sums(TorchFunctionMode):
    """Within it, products, sums and functions of float32 tensors are computed in float64 and rounded to float32.

    The order of a sum then shows in no bit, whatever the shapes of a call, so that runs which differ only in how
    tokens are put together can be compared bit for bit.
    """

    WIDENED: ClassVar[set[Any]] = {
        F.linear, F.silu, F.softplus, torch.bmm, torch.exp, torch.log, torch.logsumexp, torch.matmul, torch.rsqrt,
        torch.sigmoid, torch.softmax, torch.Tensor.__matmul__, torch.Tensor.mean, torch.Tensor.sqrt, torch.Tensor.sum,
    }  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.WIDENED and any(_is_float32(a) for a in args):
            return func(*(a.double() if _is_float32(a) else a for a in args), **(kwargs or {})).float()
        return func(*args, **(kwargs or {}))


def _is_float32(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32
