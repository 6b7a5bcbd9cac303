"""OpTable: what the model calls instead of kernels.

``ops.rms_norm(x, w, eps=eps, role="q_norm")`` resolves the plan for the site ``<scope>.q_norm``, calls the
implementation, and hands arguments and results to the listener (capture, replay, checks). The model never
chooses an implementation, and nothing is global.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.contract import Op
from dsv4dbg.kernels.numerics import OFFICIAL, Numerics
from dsv4dbg.kernels.registry import Implementation, Registry
from dsv4dbg.plan import REFERENCE, Plan
from dsv4dbg.site import BLOCK, Site


@dataclass(frozen=True)
class Call:
    """One call of an op, as a listener sees it before it runs."""

    site: Site
    op: Op
    implementation: str
    args: Mapping[str, Any]
    numerics: Numerics


class Listener(Protocol):
    """Watches the forward; must not change a bit of it."""

    def before(self, call: Call) -> None: ...

    def after(self, call: Call, outputs: Mapping[str, torch.Tensor]) -> None: ...

    def boundary(self, site: Site, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None: ...


def device_arch(device: torch.device) -> str:
    """``gfx942``, ``sm_90`` or ``cpu``."""
    if device.type == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    arch = getattr(properties, "gcnArchName", "")
    if torch.version.hip and arch:
        return arch.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@dataclass(frozen=True)
class OpTable:
    """Ops bound to a scope (``L17.attn``), a step, a plan and a numerics profile.

    Attributes:
        prepared: what implementations made of weights, by (site name, implementation).
        fallbacks: (op, implementation) that the plan's catch-all asked for -> why the reference ran instead.
        row_wise: call every op once per token, so that a row's bits cannot depend on what it is batched with: the
            batch-invariant mode of the reference.
    """

    registry: Registry
    plan: Plan
    device: torch.device
    numerics: Numerics = OFFICIAL
    listener: Listener | None = None
    step: str = ""
    scope: str = ""
    arch: str = ""
    prepared: dict[tuple[str, str], Any] = field(default_factory=dict)
    fallbacks: dict[tuple[str, str], str] = field(default_factory=dict)
    row_wise: bool = False

    def at(self, scope: str) -> OpTable:
        """The same table for another scope."""
        return replace(self, scope=scope)

    def in_step(self, step: str) -> OpTable:
        return replace(self, step=step)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        op = self.registry.ops.get(name)
        if op is None:
            raise AttributeError(f"no op named {name}")

        def call(*args: Any, role: str = name, **kwargs: Any) -> Any:
            return self.call(op, role, op.bind(args, kwargs))

        return call

    def call(self, op: Op, role: str, args: dict[str, Any]) -> Any:
        """Run ``op`` at site ``<scope>.<role>`` with all its arguments by name."""
        site = Site(f"{self.scope}.{role}" if self.scope else role, op.name, self.step)
        implementation = self.resolve(site, args)
        call = Call(site, op, implementation.name, args, self.numerics)
        if self.listener is None:
            return self._run(implementation, call)
        self.listener.before(call)
        result = self._run(implementation, call)
        self.listener.after(call, op.name_outputs(result))
        return result

    def resolve(self, site: Site, args: dict[str, Any]) -> Implementation:
        """The implementation that the plan gives a site.

        A choice by a rule for this site or op that cannot run raises; the catch-all rule ``*=NAME`` falls back to the
        reference there and notes it in ``fallbacks``.
        """
        name = self.plan.implementation(site)
        implementation = self.registry.find(site.op, name)
        seen = {**args, "numerics": self.numerics}
        if implementation is not None:
            reason = implementation.why_not(self.device, self.arch, seen)
        else:
            reason = self.registry.broken(site.op, name) or "the op has none"
        if implementation is not None and reason is None:
            return implementation
        if self.plan.is_explicit(site):
            known = ", ".join(self.registry.names(site.op))
            raise DbgError(f"'{name}' cannot run at {site} ({site.op}): {reason}", f"implementations there: {known}")
        self.fallbacks[site.op, name] = str(reason)
        return self.registry.implementation(site.op, REFERENCE)

    def _run(self, implementation: Implementation, call: Call) -> Any:
        kwargs = dict(call.args)
        if call.op.reads_numerics:
            kwargs["numerics"] = self.numerics
        if implementation.prepare is not None:
            key = (call.site.name, implementation.name)
            if key not in self.prepared:
                weights = {n: kwargs[n] for n, a in call.op.args.items() if a.kind == "weight"}
                self.prepared[key] = implementation.prepare(**weights)
            kwargs["prepared"] = self.prepared[key]
        if self.row_wise:
            return _row_by_row(call.op, implementation, kwargs)
        return implementation.function(**kwargs)

    def boundary(self, name: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Report a block's inputs and outputs under its own site (``L17``, ``L17.attn``)."""
        if self.listener is not None:
            self.listener.boundary(Site(name, BLOCK, self.step), inputs, outputs)


def _row_by_row(op: Op, implementation: Implementation, kwargs: dict[str, Any]) -> Any:
    """An op on one token after the other; arguments and outputs whose first dim is ``token`` are cut and joined."""
    cut = [n for n, a in op.args.items() if a.dims.startswith("token") and isinstance(kwargs[n], torch.Tensor)]
    tokens = len(kwargs[cut[0]]) if cut else 0
    if tokens <= 1:
        return implementation.function(**kwargs)
    rows = [implementation.function(**kwargs | {n: kwargs[n][t : t + 1] for n in cut}) for t in range(tokens)]
    if not op.outputs:
        return None
    parts = [tuple(op.name_outputs(row).values()) for row in rows]
    joined = tuple(torch.cat(column) for column in zip(*parts, strict=True))
    (only,) = joined[:1]
    return joined if len(joined) > 1 else only
