"""The journal of a bisect: one JSON line per event, written before and after every trial, so that nothing is lost.

Before a trial runs its line says ``FAULT`` (presumed); the line after it says what happened. A run that was killed is
resumed from its journal: trials with an end are not run again. Readers (the viewer, a second terminal) may follow the
file while it grows; a last line that was cut off is ignored.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4dbg.compare import Verdict
from dsv4dbg.errors import DbgError

SCHEMA = "dsv4dbg.journal/1"

Key = tuple[str, str, str, str]  # model, site, op, check


@dataclass(frozen=True)
class Trial:
    """One judged run of a check.

    Attributes:
        number: of the site's call in the walk (-1: the check has no single site).
        site: path of the site (``decode3/L2.attn.wq_b``), or what else was tried.
        where: coordinates of the worst place by dim name.
        fingerprints: known faults that fit.
        evidence: numbers behind the verdict; ``threshold``: the limit that decided, and its source.
        seconds: of the trial; ``candidate_s``, ``reference_s``, ``oracle_s`` of it.
        rate: runs that failed of those that were made, where a failure was repeated.
        model: whose forward the site is in.
    """

    number: int
    site: str
    op: str
    check: str
    verdict: Verdict
    sentence: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)
    fingerprints: tuple[str, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    threshold: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    candidate_s: float = 0.0
    reference_s: float = 0.0
    oracle_s: float = 0.0
    rate: tuple[int, int] | None = None
    model: str = ""

    @property
    def key(self) -> Key:
        return self.model, self.site, self.op, self.check

    @property
    def bad(self) -> bool:
        return Verdict.DIVERGED <= self.verdict <= Verdict.TIMEOUT


class Journal:
    """The file, open for writing; safe to use from several threads.

    Args:
        settings: what the run is: everything that decides its verdict. A resumed run must have the same.
    Attributes:
        finished: trials of the run that this one resumes, by key.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], resume: bool = False) -> None:
        self.path = path
        self.finished: dict[Key, Trial] = {}
        self._lock = threading.Lock()
        settings = json.loads(json.dumps(settings))
        if resume:
            header, trials = read(path)
            if header.get("settings") != settings:
                changed = [k for k in settings if header.get("settings", {}).get(k) != settings[k]]
                raise DbgError(f"{path} is the journal of another run: {', '.join(changed)} differ")
            self.finished = {trial.key: trial for trial in trials}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = path.read_bytes().rfind(b"\n") + 1 if resume else 0
            self._file = open(path, "r+b" if resume else "wb", buffering=0)  # noqa: SIM115 (open as long as the run)
            self._file.truncate(whole)
            self._file.seek(whole)
        except OSError as error:
            raise DbgError(f"the journal {path} cannot be written: {error.strerror}") from error
        if not resume:
            self.event("run", schema=SCHEMA, settings=settings, pid=os.getpid())
        else:
            self.event("resumed", pid=os.getpid(), finished=len(self.finished))

    def event(self, event: str, **more: Any) -> None:
        """Write one line. It is with the kernel when this returns: the process may be killed, the machine not."""
        line = json.dumps({"event": event, "time": round(time.time(), 3), **more}, separators=(",", ":")) + "\n"
        with self._lock:
            self._file.write(line.encode())

    def begin(self, number: int, key: Key) -> None:
        model, site, op, check = key
        self.event("begin", number=number, model=model, site=site, op=op, check=check, presumed=Verdict.FAULT.name)

    def end(self, trial: Trial) -> None:
        self.event("end", trial={**vars(trial), "verdict": trial.verdict.name})

    def close(self) -> None:
        self._file.close()


def events(path: Path) -> Iterator[dict[str, Any]]:
    """All whole lines of a journal.

    Raises:
        DbgError: it cannot be read, or is no journal.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
        found = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise DbgError(f"{path} is not the journal of a bisect: {error}") from error
    if not found or not isinstance(found[0], dict) or found[0].get("schema") != SCHEMA:
        raise DbgError(f"{path} is not the journal of a bisect")
    yield from found


def read(path: Path) -> tuple[dict[str, Any], list[Trial]]:
    """The header and the finished trials; of a trial that was run twice, the last."""
    header: dict[str, Any] = {}
    trials: dict[Key, Trial] = {}
    for event in events(path):
        if event["event"] == "run":
            header = event
        elif event["event"] == "end":
            trial = _trial(event["trial"], path)
            trials[trial.key] = trial
    return header, list(trials.values())


def _trial(fields: Mapping[str, Any], path: Path) -> Trial:
    try:
        rate = fields["rate"]
        return Trial(**{
            **fields, "verdict": Verdict[fields["verdict"]], "fingerprints": tuple(fields["fingerprints"]),
            "rate": (rate[0], rate[1]) if rate else None,
        })  # fmt: skip
    except (KeyError, TypeError) as error:
        raise DbgError(f"{path} holds a trial that this version does not understand: {error}") from error
