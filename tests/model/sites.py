"""What tests of the forward share: a listener that keeps outputs, and a session with implementations of a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

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
