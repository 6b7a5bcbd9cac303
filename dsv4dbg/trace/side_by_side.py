"""Two traces read side by side: which tensors differ, and which caches.

`SideBySide` compares pairs of tensors on threads of its own, each pair once. `CacheWatch` follows the writes of both
traces and knows, slot by slot, where the caches of one are not those of the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from dsv4dbg.trace.apart import FLOATS, Apart, Workspace, apart, row_dims
from dsv4dbg.trace.bits import Bits
from dsv4dbg.trace.reader import Trace
from dsv4dbg.trace.records import CacheRef, SiteRecord, TensorSpec
from dsv4dbg.trace.text import one_line

SMALL = 1 << 15  # bytes below which a pair is compared at once instead of by a thread


@dataclass(frozen=True)
class TensorDiff(Apart):
    """One tensor of a site in both traces.

    Attributes:
        reason: why the two cannot be compared element by element, or what to know about it; else empty.
        dims: names of the dims that ``row`` is made of.
        dtype: of the elements.
    """

    reason: str = ""
    dims: tuple[str, ...] = ()
    dtype: str = ""

    @property
    def equal(self) -> bool:
        return not self.different and not self.reason

    @property
    def numbers(self) -> bool:
        """Whether errors say something: indices, codes and bytes have none."""
        return self.dtype in FLOATS

    @property
    def at(self) -> dict[str, int]:
        """The row by names of dims."""
        return dict(zip(self.dims, self.row, strict=False))


EQUAL = TensorDiff()


class SideBySide:
    """Compares tensors of two traces; use it as a context.

    What lies at one place of a file is compared once: an input that links to an earlier output costs nothing.
    """

    def __init__(self, reference: Trace, candidate: Trace, threads: int = 2) -> None:
        self._traces = (reference, candidate)
        self._pool = ThreadPoolExecutor(threads, "compare")
        self._local = threading.local()
        self._known: dict[tuple[int, int, str, tuple[int, ...]], Future[Apart] | Apart] = {}

    def compare(
        self, a: SiteRecord, b: SiteRecord, name: str, first: TensorSpec, second: TensorSpec
    ) -> Callable[[], TensorDiff]:
        """Begin to compare tensor ``name`` (as in `Trace.read`) of two records; call what is returned for the result.

        Raises:
            DbgError: one of the traces cannot be read; also from the returned function.
        """
        bits = self._traces[0].bits(a, name, first), self._traces[1].bits(b, name, second)
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            x, y = (f"{s.dtype} {list(s.shape)}" for s in (second, first))
            return lambda: TensorDiff(reason=f"{x}, not {y}", dtype=second.dtype)
        key = (bits[0].place, bits[1].place, first.dtype, first.shape)
        if key not in self._known:
            small = first.nbytes < SMALL
            self._known[key] = self._apart(*bits, first) if small else self._pool.submit(self._apart, *bits, first)
        return lambda: self._result(key, second)

    def _result(self, key: tuple[int, int, str, tuple[int, ...]], spec: TensorSpec) -> TensorDiff:
        found = self._known[key]
        if isinstance(found, Future):
            found = self._known[key] = found.result()
        if found.equal:
            return EQUAL
        dims = tuple(one_line(spec.dims).split()[: row_dims(spec.shape)])
        return TensorDiff(**vars(found), dims=dims, dtype=spec.dtype)

    def _apart(self, a: Bits, b: Bits, spec: TensorSpec) -> Apart:
        if not hasattr(self._local, "work"):
            self._local.work = Workspace()
        sources = _Named(self._traces[0], a), _Named(self._traces[1], b)
        return apart(*sources, spec.dtype, spec.shape, self._local.work)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)


class _Named:
    """Bits whose errors name the trace that they are read from."""

    def __init__(self, trace: Trace, bits: Bits) -> None:
        self._trace, self._bits = trace, bits

    def fill(self, out: memoryview) -> None:
        try:
            self._bits.fill(out)
        except Exception as error:
            with self._trace.one_sentence():
                raise error


class CacheWatch:
    """Which caches of the candidate differ from the reference's by now.

    Kept slot by slot: a record that both overwrite with the same bytes is equal again. Bytes that changed
    outside of records, and writes that cannot be matched, make a cache differ for good.
    """

    def __init__(self, reference: Trace, candidate: Trace) -> None:
        self._traces = (reference, candidate)
        self._slots: dict[str, np.ndarray] = {}  # those that differ, sorted
        self._lost: dict[str, str] = {}  # caches that differ for good, and why
        for name, spec in candidate.caches.items():
            other = reference.caches.get(name)
            if other is None or other.layout != spec.layout:
                self._lost[name] = "has another format"
            elif other != spec:
                self._lost[name] = "has another size or fill"
            elif spec.fill is None and not self._same_image(name):
                self._lost[name] = "had another first content"

    def _same_image(self, name: str) -> bool:
        first, second = (trace.first_content(name) for trace in self._traces)
        return np.array_equal(first, second)

    def of_other_format(self, ref: CacheRef | None) -> bool:
        return ref is not None and self._lost.get(ref.cache) == "has another format"

    def differ(self, a: CacheRef | None, b: CacheRef | None) -> str:
        """How the caches that two records of a site refer to differ, in a few words that begin with the name; or ''."""
        if a is None or b is None:
            return f"{(a or b or CacheRef('', 0)).cache} is in one trace only"
        if a.cache != b.cache:
            return f"{b.cache} stands for {a.cache}"
        if b.cache in self._lost:
            return f"{b.cache} {self._lost[b.cache]}"
        if a.version != b.version:
            return f"{b.cache} was written {b.version} times, not {a.version}"
        count = len(self._slots.get(b.cache, ()))
        return f"{b.cache} differs in {count} record{'s' if count > 1 else ''}" if count else ""

    def wrote(self, a: SiteRecord, b: SiteRecord, arg: str, diff: TensorDiff) -> None:
        """Take the writes of two records to their argument ``arg`` into account; ``diff`` is how they differ."""
        write_a, write_b = a.mutated.get(arg), b.mutated.get(arg)
        name = (write_b or write_a).cache if (write_b or write_a) else ""  # type: ignore[union-attr]
        if name in self._lost or (diff.equal and name not in self._slots):
            return
        if write_a is None or write_b is None or write_a.cache != write_b.cache:
            self._lost[name] = "was written in one trace only"
            return
        strays = [{"stray_offsets", "stray_bytes"} & write.tensors.keys() for write in (write_a, write_b)]
        if not diff.equal and any(strays):
            self._lost[name] = "differs outside of its records"
            return
        slots, records = (
            [trace.read(r, f"mut/{arg}/{part}") for trace, r in zip(self._traces, (a, b), strict=True)]
            for part in ("slots", "records")
        )
        fit = all(r.ndim == 2 and s.shape == (len(r),) for s, r in zip(slots, records, strict=True))
        if not fit or records[0].shape[1] != records[1].shape[1]:
            self._lost[name] = "was written in a way that cannot be followed"
            return
        written = [_last(s, r) for s, r in zip(slots, records, strict=True)]
        common, at_a, at_b = np.intersect1d(written[0][0], written[1][0], assume_unique=True, return_indices=True)
        equal = common[(written[0][1][at_a] == written[1][1][at_b]).all(axis=1)]
        touched = np.union1d(written[0][0], written[1][0])
        differing = np.union1d(self._slots.get(name, np.zeros(0, np.int64)), touched)
        differing = np.setdiff1d(differing, equal, assume_unique=True)
        self._slots.pop(name, None)
        if len(differing):
            self._slots[name] = differing


def _last(slots: np.ndarray, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unique slots, sorted, with the record that was written last to each."""
    unique, back = np.unique(slots[::-1], return_index=True)
    return unique, records[len(slots) - 1 - back]
