"""Making a closed trace out of one whose capture was killed."""

from __future__ import annotations

import contextlib
import os

from dsv4dbg.errors import DbgError
from dsv4dbg.trace.reader import Trace
from dsv4dbg.trace.records import Mutation, SiteRecord, Tensor
from dsv4dbg.trace.writer import SiteCall, TraceWriter


def recover(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> str:
    """Write what ``path`` holds, in the order in which it was captured, as a closed trace ``out``.

    Every tensor is checked against its hash, and the first damaged one ends the copy. ``path`` is not
    changed. Returns one line on what is missing, or nothing; the new manifest keeps it as ``recovered``.
    """
    with Trace.open(path) as trace:
        images = {}
        for name in (name for name, spec in trace.caches.items() if spec.fill is None):
            with contextlib.suppress(DbgError):  # killed before the image was saved, so no site needs it
                images[name] = trace.first_content(name)
        missing = trace.notice
        with TraceWriter(out, trace.manifest, trace.caches, images) as writer:
            calls: dict[int, SiteCall] = {}
            for _, record, begins in _events(trace.sites()):
                try:
                    tensors = _load(trace, record, begins)
                except DbgError as error:
                    missing = error.message
                    break
                if begins:
                    calls[record.sequence] = _begin(writer, record, tensors)
                else:
                    _finish(calls[record.sequence], record, tensors)
            writer.close({"recovered": missing}, complete=not missing)
    return missing


def _events(records: list[SiteRecord]) -> list[tuple[int, SiteRecord, bool]]:
    """(tick, record, whether it begins there) in the order of the capture."""
    begins = [(record.sequence, record, True) for record in records]
    finishes = [(record.finished, record, False) for record in records if record.finished is not None]
    return sorted(begins + finishes, key=lambda event: event[0])


def _load(trace: Trace, record: SiteRecord, begins: bool) -> dict[str, Tensor]:
    """The tensors that the capture saved at this event, by `Trace.read` name."""
    return {
        name: Tensor(trace.read(record, name), spec.dtype, spec.dims)
        for name, spec in record.tensors().items()
        if name.startswith("in/") == begins
    }


def _begin(writer: TraceWriter, record: SiteRecord, tensors: dict[str, Tensor]) -> SiteCall:
    return writer.site(
        record.site,
        record.implementation,
        attrs=record.attrs,
        inputs=dict.fromkeys(record.absent) | {name.removeprefix("in/"): tensor for name, tensor in tensors.items()},
        weights=record.weights,
        caches={arg: ref.cache for arg, ref in record.caches.items()},
    )


def _finish(call: SiteCall, record: SiteRecord, tensors: dict[str, Tensor]) -> None:
    outputs = {name.removeprefix("out/"): tensor for name, tensor in tensors.items() if name.startswith("out/")}
    mutated = {
        arg: Mutation(**{part: tensors[f"mut/{arg}/{part}"].array for part in write.tensors})
        for arg, write in record.mutated.items()
    }
    call.finish(outputs, mutated)
