"""The side journal ``<trace>.journal``: what a capture has saved so far, one JSON line per event.

HDF5 makes a file readable only when it is closed. Until then the journal says where every tensor lies, so
that a capture killed at any instant can be read from the raw bytes. It exists exactly as long as the trace
is not closed, and its owner holds a lock on it.

Lines: a header ``{schema, version, manifest}``, then any of

    {"image": {name: tensor}}           first content of a cache
    {"weights": {arg: reference}}       the next set of weights, numbered from 0
    {"begin": site entry}               inputs of a call are in the file
    {"finish": {sequence, ...}}         outputs and cache writes of that call are in the file
    {"close": manifest}                 the capture is over; HDF5 may be half closed

A line counts when its newline is there and every byte it points to lies inside the file; the first one
that does not ends the trace.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4dbg.trace.records import SiteRecord, TensorSpec, load_specs
from dsv4dbg.trace.text import SCHEMA, VERSION, check_schema, from_json, shorten, take, to_json


def journal_path(path: Path) -> Path:
    return path.with_name(path.name + ".journal")


@dataclass(frozen=True)
class JournalText:
    """A journal as it was found: its lines, and whether its writer still runs."""

    text: bytes
    locked: bool


def read_journal(path: Path) -> JournalText | None:
    """The journal at ``path``, or None if there is none. Raises OSError."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:  # any other error: a file system without locks, which cannot tell
            return JournalText(file.read(), isinstance(error, BlockingIOError))
        return JournalText(file.read(), False)


class Journal:
    """The journal of a running capture: created and locked, appended to, removed at the very end."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        """Create ``path``, which must not exist, with its header. Raises OSError."""
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        with contextlib.suppress(OSError):  # some cluster file systems have no locks; only "still running" is lost
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            self.append({"schema": SCHEMA, "version": VERSION, "manifest": manifest})
        except OSError:
            self.remove()
            self.close()
            raise

    def append(self, line: dict[str, Any]) -> None:
        """Add one event. Raises OSError; the line is then cut short and will not count."""
        data = memoryview(to_json(line) + b"\n")
        while data:
            data = data[os.write(self._fd, data) :]

    def remove(self) -> None:
        """Say that the trace no longer needs a journal. Raises OSError."""
        os.unlink(self._path)

    def close(self) -> None:
        """Let go of the lock; the file stays unless it was removed."""
        os.close(self._fd)


@dataclass
class Contents:
    """All that a trace says about itself, from either source: a closed file or a journal.

    Attributes:
        manifest: what the capture was.
        weights: sets of weight references.
        images: first contents of caches by name.
        records: site calls in the order they began.
        problem: why the end is missing, or empty.
    """

    manifest: dict[str, Any]
    weights: list[dict[str, Any]] = field(default_factory=list)
    images: dict[str, TensorSpec] = field(default_factory=dict)
    records: list[SiteRecord] = field(default_factory=list)
    problem: str = ""


def parse_journal(text: bytes, data_size: int) -> Contents:
    """Everything that a journal vouches for, given the size of the trace file in bytes.

    ValueError when not even the header is there.
    """
    header, *lines = text.split(b"\n")
    if not lines:
        raise ValueError("the capture was killed before it had saved anything")
    start = from_json(header)
    check_schema(start)
    contents = Contents(take(start, "manifest", dict), problem="the capture was cut off")
    entries: dict[int, dict[str, Any]] = {}
    records: dict[int, SiteRecord] = {}
    for line in lines[:-1]:  # what follows the last newline was cut short
        try:
            _apply(from_json(line), contents, entries, records, data_size)
        except ValueError as error:
            contents.problem = f"the rest is lost, {error}"
            break
    contents.records = [record for _, record in sorted(records.items())]
    return contents


def _apply(
    event: Any,
    contents: Contents,
    entries: dict[int, dict[str, Any]],
    records: dict[int, SiteRecord],
    data_size: int,
) -> None:
    """Take one journal line into account; ValueError, and no change, if it cannot be trusted."""
    kind = next(iter(event), "") if isinstance(event, dict) else ""
    if kind in ("begin", "finish"):
        body = take(event, kind, dict)
        number = take(body, "sequence", int)
        entry = body if kind == "begin" else entries.get(number, {}) | body
        record = SiteRecord.from_json(entry, contents.weights)
        _check_extents(record.tensors(), data_size)
        entries[number], records[number] = entry, record
    elif kind == "weights":
        contents.weights.append(take(event, kind, dict))
    elif kind == "image":
        images = load_specs(event, kind)
        _check_extents(images, data_size)
        contents.images |= images
    elif kind == "close":
        contents.manifest, contents.problem = take(event, kind, dict), ""
    else:
        raise ValueError(f"unknown journal line {shorten(event)}")


def _check_extents(specs: dict[str, TensorSpec], data_size: int) -> None:
    for name, spec in specs.items():
        if spec.offset + spec.nbytes > data_size:
            raise ValueError(f"{name} ends at byte {spec.offset + spec.nbytes} of a file of {data_size}")
