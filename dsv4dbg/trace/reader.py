"""Reading a trace: closed, cut off, or still being written.

    with Trace.open("run.h5") as trace:
        for record in trace.sites("L2.*"):
            y = trace.view(record, "out/y")     # numpy, as bfloat16, float8_e4m3fn, ...

A closed trace is read through HDF5. While its journal exists, the raw bytes are read where the journal says, and
checked against their hashes. Opening reads no tensors and never writes. A file that is broken or
made to harm is an error of one sentence (`DbgError`).
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from dsv4dbg.errors import DbgError
from dsv4dbg.site import BLOCK, Pattern, Site
from dsv4dbg.trace.bits import Bits
from dsv4dbg.trace.caches import CacheReplay
from dsv4dbg.trace.hdf5_read import Hdf5Reader
from dsv4dbg.trace.journal import Contents, journal_path, parse_journal, read_journal
from dsv4dbg.trace.records import STORAGE, CacheSpec, SiteRecord, TensorSpec, load_specs, site_path, view_bits
from dsv4dbg.trace.storage import raw
from dsv4dbg.trace.text import check_schema, from_json, one_line, take

# what h5py, numpy and json raise on broken files, and we on what we refuse
_BROKEN = (ArithmeticError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)


class _Source(Protocol):
    """Where tensors come from: `_ClosedFile` or `_RawFile`."""

    def bits(self, path: str, spec: TensorSpec) -> Bits: ...
    def close(self) -> None: ...


class _ClosedFile:
    """A closed trace: HDF5 says where datasets are."""

    def __init__(self, path: Path) -> None:
        self._hdf5 = Hdf5Reader(path)

    def contents(self) -> Contents:
        if not self._hdf5.has("manifest"):
            raise ValueError("it has no /manifest: not a trace, or an unfinished capture without its journal")
        manifest = from_json(self._hdf5.text("manifest"))
        check_schema(manifest)
        weights = from_json(self._hdf5.text("weights"))
        if not isinstance(weights, list) or not all(isinstance(refs, dict) for refs in weights):
            raise ValueError("/weights is not a list of objects")
        index = from_json(self._hdf5.text("index"))
        records = [SiteRecord.from_json(entry, weights) for entry in take(index, "sites", list)]
        problem = "" if take(manifest, "complete", bool) else "the capture did not reach its end"
        return Contents(manifest, weights, load_specs(index, "images"), records, problem)

    def bits(self, path: str, spec: TensorSpec) -> Bits:
        place = self._hdf5.place(path, spec.dtype, STORAGE[spec.dtype], spec.shape)
        return Bits(self._descriptor, place, spec.nbytes, path)

    def _descriptor(self) -> int:
        return _still_open(self._hdf5.fd)

    def close(self) -> None:
        self._hdf5.close()
        self._hdf5.fd = -1


class _RawFile:
    """A trace that is not closed: bytes at offsets, each tensor checked against its hash. The file may be missing."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(_regular(path) if path.exists() else os.devnull, os.O_RDONLY)

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def bits(self, path: str, spec: TensorSpec) -> Bits:
        if spec.offset + spec.nbytes > self.size:
            raise ValueError(f"{path} claims {spec.nbytes} bytes that the file does not have")
        return Bits(self._descriptor, spec.offset if spec.nbytes else 0, spec.nbytes, path, spec.hash)

    def _descriptor(self) -> int:
        return _still_open(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class Trace:
    """An open trace.

    Attributes:
        path: the file.
        manifest: what was captured, under which plan, where.
        caches: the caches of the run by name.
        notice: one line about what is missing, or empty.
        running: whether the capture was still going on when the trace was opened.
    """

    def __init__(self, path: Path, source: _Source, contents: Contents, running: bool) -> None:
        self.path = path
        self.manifest = contents.manifest
        self.running = running
        self.caches = {name: CacheSpec.from_json(spec) for name, spec in take(self.manifest, "caches", dict).items()}
        self._source = source
        self._images = contents.images
        self._records = sorted(contents.records, key=lambda record: record.sequence)
        self._by_path = {record.site.path: record for record in self._records}
        if len(self._by_path) != len(self._records):
            raise ValueError("it lists a site twice")
        self.notice = _notice(self._records, contents.problem, running)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a trace for reading; DbgError with one sentence if that cannot be done."""
        path = Path(path)
        with _one_sentence(path), contextlib.ExitStack() as on_error:
            journal = read_journal(journal_path(path))
            if journal is None:
                closed = _ClosedFile(_trace_file(path))
                on_error.callback(closed.close)
                trace = cls(path, closed, closed.contents(), False)
            else:
                raw = _RawFile(path)
                on_error.callback(raw.close)
                trace = cls(path, raw, parse_journal(journal.text, raw.size), journal.locked)
            on_error.pop_all()
            return trace

    @property
    def complete(self) -> bool:
        """Whether the capture saw all it was meant to see."""
        return self.manifest.get("complete") is True and not self.notice

    @property
    def steps(self) -> list[str]:
        """Names of the steps in the order in which they ran."""
        return list(dict.fromkeys(record.site.step for record in self._records))

    def sites(self, pattern: str | Pattern | None = None) -> list[SiteRecord]:
        """Site calls in the order in which they began, all or those that a site pattern matches."""
        if pattern is None:
            return list(self._records)
        if isinstance(pattern, str):
            pattern = Pattern(pattern)
        return [record for record in self._records if pattern.matches(record.site)]

    def site(self, step: str, name: str) -> SiteRecord:
        """The call of site ``name`` in ``step``."""
        path = Site(name, "", step).path
        if path not in self._by_path:
            raise DbgError(f"{self.path} has no site {path} (it has {len(self._records)} site calls)")
        return self._by_path[path]

    def read(self, record: SiteRecord, name: str) -> np.ndarray:
        """Raw bits of one tensor of a site: ``in/x``, ``out/y`` or ``mut/cache/slots``.

        Returns:
            A new array of the tensor's shape and dtype ``STORAGE[spec.dtype]``.
        """
        specs = record.tensors()
        if name not in specs:
            there = ", ".join(specs) or "nothing"
            raise DbgError(f"{self.path}: site {record.site} has no {name} (it has {there})")
        with self.one_sentence():
            return self._read(f"{site_path(record.site)}/{name}", specs[name])

    def bits(self, record: SiteRecord, name: str, spec: TensorSpec) -> Bits:
        """The same bits to be read in pieces; ``spec`` is the one of ``record.tensors()[name]``.

        Errors of the reading itself are not yet sentences: read inside `one_sentence`.
        """
        with self.one_sentence():
            return self._source.bits(f"{site_path(record.site)}/{name}", spec)

    def one_sentence(self) -> contextlib.AbstractContextManager[None]:
        """Around reading: whatever goes wrong becomes a `DbgError` of one sentence about this trace."""
        return _one_sentence(self.path)

    def _read(self, path: str, spec: TensorSpec) -> np.ndarray:
        bits = self._source.bits(path, spec)
        out = np.empty(spec.shape, STORAGE[spec.dtype])
        bits.fill(raw(out))
        return out

    def view(self, record: SiteRecord, name: str) -> np.ndarray:
        """Like `read`, as numbers of the real dtype (numpy or ml_dtypes; packed fp4 is unpacked)."""
        return view_bits(self.read(record, name), record.tensors()[name].dtype)

    def cache_at(self, step: str, site: str, arg: str) -> np.ndarray:
        """The cache that a site saw in argument ``arg`` when it was called.

        `dsv4dbg.trace.caches.CacheReplay` does this for many sites without starting over for each.

        Returns:
            ``uint8 [pages, page_stride]``, byte for byte as it was, rebuilt from all earlier writes.
        """
        return CacheReplay(self).at(self.site(step, site), arg)

    def first_content(self, cache: str) -> np.ndarray:
        """A cache of the run before any write: ``uint8 [pages, page_stride]``."""
        if cache not in self.caches:
            raise DbgError(f"{self.path} has no cache {cache}")
        spec = self.caches[cache]
        with self.one_sentence():
            if spec.fill is None:
                if cache not in self._images or self._images[cache].shape != (spec.pages, spec.page_stride):
                    raise ValueError(f"the first content of cache {cache} is missing")
                return self._read(f"/caches/{cache}", self._images[cache])
            if spec.nbytes > _free_memory():
                raise ValueError(f"cache {cache} has {spec.nbytes} bytes, more than this machine has free")
            return np.full((spec.pages, spec.page_stride), spec.fill, np.uint8)

    def apply_write(self, buffer: np.ndarray, record: SiteRecord, arg: str) -> None:
        """Put what a site wrote through its cache argument ``arg`` into ``buffer`` (``uint8 [pages, page_stride]``)."""
        with self.one_sentence():
            self._apply_write(buffer, record, arg)

    def _apply_write(self, buffer: np.ndarray, record: SiteRecord, arg: str) -> None:
        spec = self.caches[record.mutated[arg].cache]
        parts = {part: self.read(record, f"mut/{arg}/{part}") for part in record.mutated[arg].tensors}
        slots, records = parts.get("slots"), parts.get("records")
        where = f"the write of {record.site} to {record.mutated[arg].cache}"
        if slots is None or records is None or records.shape != (slots.size, spec.layout.record_bytes):
            raise ValueError(f"{where} does not fit the cache's records")
        if slots.size and not 0 <= slots.min() <= slots.max() < spec.pages * spec.layout.entries:
            raise ValueError(f"{where} names slots outside the cache")
        spec.layout.write(buffer, slots, records)
        if "stray_offsets" in parts:
            offsets, values = parts["stray_offsets"], parts.get("stray_bytes")
            if values is None or values.shape != offsets.shape:
                raise ValueError(f"{where} has stray bytes without values")
            if offsets.size and not 0 <= offsets.min() <= offsets.max() < spec.nbytes:
                raise ValueError(f"{where} has stray bytes outside the cache")
            buffer.reshape(-1)[offsets] = values

    def close(self) -> None:
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def _one_sentence(path: Path) -> Iterator[None]:
    """Turn whatever reading a file raises into one sentence about it."""
    try:
        yield
    except DbgError:
        raise
    except (FileNotFoundError, PermissionError) as error:
        raise DbgError(f"cannot open {path}: {error.strerror or error}") from error
    except _BROKEN as error:
        reason = one_line(str(error))[:300] or type(error).__name__
        raise DbgError(f"cannot read {path} as a trace: {reason}") from error


def _still_open(descriptor: int) -> int:
    """ValueError for the number of a closed file, which the system may have given to another one."""
    if descriptor < 0:
        raise ValueError("it was closed")
    return descriptor


def _regular(path: Path) -> Path:
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise ValueError("it is a directory")
    if not stat.S_ISREG(mode):
        raise ValueError("it is not a regular file")
    return path


def _trace_file(path: Path) -> Path:
    """``path`` if it is a regular file that starts like HDF5."""
    with _regular(path).open("rb") as file:
        start = file.read(8)
    if start != b"\x89HDF\r\n\x1a\n":
        raise ValueError("it is not an HDF5 file" if start else "it is empty")
    return path


def _notice(records: list[SiteRecord], problem: str, running: bool) -> str:
    """One line about the calls that are not there, or empty if nothing is missing."""
    finished = [record for record in records if record.complete]
    open_sites = [str(record.site) for record in records if not record.complete]
    if running and problem:
        start = "the capture is still running"
    elif problem:
        start = problem
    elif open_sites:
        start = "not every call finished"
    else:
        return ""
    blocks = [record for record in finished if record.site.op == BLOCK]
    last = f", the last whole block is {max(blocks, key=lambda r: r.finished or 0).site}" if blocks else ""
    begun = f"; begun but not finished: {', '.join(open_sites[:4])}" if open_sites else ""
    more = f" and {len(open_sites) - 4} more" if len(open_sites) > 4 else ""
    return one_line(f"{start}: {len(finished)} of {len(records)} site calls are complete{last}{begun}{more}")


def _free_memory() -> int:
    """Bytes of memory that can be had now; all of the machine's where the system does not say."""
    with contextlib.suppress(OSError, LookupError, ValueError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
