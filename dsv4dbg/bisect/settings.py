"""What a bisect is asked to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsv4dbg.model.recording import Request


@dataclass(frozen=True)
class Settings:
    """What a bisect tests; equal settings give equal verdicts.

    Attributes:
        request: model, workload or prompt, device, numerics, cache format, plug-ins.
        ops: by name; none for all that have the candidate.
        checks: by name; none for all.
        trace: take the calls from this trace instead of a forward.
        in_place: also swap the candidate into the live forward.
        timeout: seconds that one run of the candidate may take.
        workers: candidate processes side by side.
        reproducers: directory for a reproducer of every culprit.
        models: whose forwards are scanned too, after that of the request's model, for ops not found at fault there.
    """

    request: Request
    candidate: str = "triton"
    ops: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    trace: Path | None = None
    in_place: bool = False
    timeout: float = 120.0
    workers: int = 2
    reproducers: Path | None = None
    models: tuple[str, ...] = ()

    def identity(self) -> dict[str, Any]:
        """What decides a verdict, as JSON: a run is resumed only with the same."""
        request = asdict(self.request) | {"plan": str(self.request.plan), "plugins": [*map(str, self.request.plugins)]}
        return {
            "candidate": self.candidate, "models": [*self.models], "ops": sorted(self.ops),
            "checks": sorted(self.checks),
            "trace": str(self.trace) if self.trace else None, "in_place": self.in_place, "timeout": self.timeout,
            "workers": self.workers, "request": request,
        }  # fmt: skip
