"""Making a closed trace out of one whose capture was killed."""

from __future__ import annotations

import os
from typing import Any

from dsv4dbg.errors import DbgError
from dsv4dbg.trace.reader import Trace
from dsv4dbg.trace.records import Mutation, SiteRecord, Tensor
from dsv4dbg.trace.writer import SiteCall, TraceWriter


def recover(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> str:
    """Write what ``path`` holds, in the order in which it was captured, as a closed trace ``out``.

    Every tensor is checked against its hash; the first one that is damaged ends the copy. ``path`` is not
    changed. Returns the notice on what is missing, which the new manifest keeps as ``recovered``.
    """
    with Trace.open(path) as trace:
        images = {name: trace.image(name) for name, spec in trace.caches.items() if spec.fill is None}
        notice = trace.notice
        with TraceWriter(out, trace.manifest, trace.caches, images) as writer:
            calls: dict[int, SiteCall] = {}
            for _, record, begins in sorted(_events(trace.sites())):
                try:
                    if begins:
                        calls[record.sequence] = _begin(trace, writer, record)
                    else:
                        _finish(trace, calls[record.sequence], record)
                except DbgError as error:
                    raise error
            writer.close({"recovered": notice}, complete=not notice)
    return notice
