"""What the processes of a bisect say to each other.

The parent asks; a *walker* runs forwards and ships the calls of its sites, a *worker* runs a candidate on one call.
Tensors lie in shared memory (`dsv4dbg.bisect.shared`); messages hold their places.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4dbg.bisect.shared import PackedCall
from dsv4dbg.errors import DbgError
from dsv4dbg.model.recording import Request
from dsv4dbg.site import Site


@dataclass(frozen=True)
class Walk:
    """To a walker: run the request's forward and ship calls.

    Attributes:
        request: model, workload or prompt, device, cache format.
        trace: ship this trace's calls instead of a forward's.
        ops: ops whose calls are shipped.
        live: sites (names without a step) at which the candidate runs in the forward itself; their calls are shipped
            with its results. Empty: the reference runs everywhere.
        candidate: name of the candidate.
        frames: numbers of the frames that the walker may fill.
    """

    request: Request
    ops: frozenset[str]
    frames: tuple[int, ...]
    trace: Path | None = None
    live: frozenset[str] = frozenset()
    candidate: str = ""


@dataclass(frozen=True)
class Opened:
    """From a walker: what it runs.

    Attributes:
        steps: their names in order, where they are known beforehand.
        regimes: name -> whether the workload reaches it.
    """

    steps: tuple[str, ...]
    regimes: Mapping[str, bool]
    environment: Mapping[str, Any]
    device: str


@dataclass(frozen=True)
class Shipped:
    """From a walker: one call in a frame.

    Attributes:
        number: of the call among all of the walk, from 0.
        used: bytes of the memory file up to here are taken in this frame.
        reference: outputs and mutated caches by name.
        candidate: the same of the candidate, where it ran live.
        repeatable: whether the reference gave the same bits twice (None: run once).
        seconds: the reference's time.
    """

    number: int
    frame: int
    used: int
    call: PackedCall
    reference: Mapping[str, Any]
    seconds: float
    candidate: Mapping[str, Any] | None = None
    repeatable: bool | None = None


@dataclass(frozen=True)
class Missing:
    """From a walker of a trace: a call whose inputs are not at hand, and why."""

    number: int
    site: Site
    reason: str


@dataclass(frozen=True)
class Passing:
    """From a walker whose candidate runs live: this site is next."""

    site: str


@dataclass(frozen=True)
class Walked:
    """From a walker: the end. ``seconds`` of the forward itself, ``calls`` of ops in it."""

    calls: int
    seconds: float


@dataclass(frozen=True)
class Failed:
    """From a walker or a worker: an exception, as names and text. ``wrong_use``: it is a `DbgError`'s message."""

    kind: str
    text: str
    traceback: str = ""
    wrong_use: bool = False
    exit_code: int = 2

    @classmethod
    def of(cls, error: Exception) -> Failed:
        if isinstance(error, DbgError):
            return cls(type(error).__name__, str(error), wrong_use=True, exit_code=error.exit_code)
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


@dataclass(frozen=True)
class Hello:
    """To a worker, once: what it will run, and on which device."""

    candidate: str
    plugins: tuple[Path, ...]
    device: str


@dataclass(frozen=True)
class Ready:
    """From a worker, once: ops that have the candidate -> what is wrong with its signature, or ''."""

    candidates: Mapping[str, str]
    arch: str


@dataclass(frozen=True)
class Run:
    """To a worker: run an implementation on a call.

    Attributes:
        begin, end: bytes of the memory file where results may go.
        fill: name of the pattern in memory that the candidate does not own.
        seed: of the order in which buffers lie in the worker's arena.
        thorough: fill also what C++ code allocates.
        earlier: calls that differ in nothing but contents, which the same buffers hold before, one after the other. On
            a GPU the first one is captured as a graph, and the others and this call are replays of it; a CPU runs the
            first one and this call.
        launch: name of the change of every Triton launch (see `dsv4dbg.bisect.launches`), or ''.
    """

    call: PackedCall
    implementation: str
    begin: int
    end: int
    fill: str = "nan"
    seed: int = 0
    thorough: bool = False
    earlier: tuple[PackedCall, ...] = ()
    launch: str = ""


@dataclass(frozen=True)
class Placed:
    """From a worker of a GPU, before it runs: device addresses of the call's buffers."""

    ranges: tuple[Any, ...]


@dataclass(frozen=True)
class Ran:
    """From a worker: results by name (places in shared memory), what guards found, and seconds of the call alone.

    Attributes:
        used: bytes of the memory file up to here are taken.
        launches: how many Triton launches were made otherwise than asked for.
    """

    results: Mapping[str, Any]
    used: int
    damage: tuple[str, ...]
    seconds: float
    launches: int = 0


@dataclass(frozen=True)
class Refused:
    """From a worker: the implementation does not support this call, or not to be run in this way.

    Attributes:
        spent: the process may be of no further use.
    """

    reason: str
    spent: bool = False
