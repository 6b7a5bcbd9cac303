"""Caches as sites saw them, rebuilt from a trace's first contents and writes."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from dsv4dbg.trace.text import shorten

if TYPE_CHECKING:
    from dsv4dbg.trace.reader import Trace
    from dsv4dbg.trace.records import SiteRecord

BUDGET = 1 << 30  # bytes of caches that are kept


class CacheReplay:
    """The caches of a trace, moved on from one site to the next.

    A cache is kept as it was for the last site that asked and takes the writes since then when the next one asks, so
    sites in the order in which they ran cost every write once. An earlier state, or a cache that was
    dropped, starts over.

    Args:
        budget: bytes of caches to keep; those asked for longest ago are dropped first, the last one never.
    """

    def __init__(self, trace: Trace, budget: int = BUDGET) -> None:
        self._trace = trace
        self._budget = budget
        self._writes: dict[str, dict[int, tuple[SiteRecord, str]]] = {}
        for record in trace.sites():
            for arg, write in record.mutated.items():
                self._writes.setdefault(write.cache, {})[write.number] = (record, arg)
        self._kept: OrderedDict[str, tuple[int, np.ndarray]] = OrderedDict()  # name -> writes taken, content

    def at(self, record: SiteRecord, arg: str) -> np.ndarray:
        """The cache that a site saw in argument ``arg`` when it was called.

        Returns:
            ``uint8 [pages, page_stride]``, byte for byte. It is this object's own: not to be changed, and good until
            the next call.

        Raises:
            DbgError: the trace does not have all that is needed.
        """
        with self._trace.one_sentence():
            if arg not in record.caches:
                raise ValueError(f"site {record.site} has no cache {arg}")
            name, version = record.caches[arg].cache, record.caches[arg].version
            if name not in self._trace.caches:
                raise ValueError(f"cache {shorten(name)} of {record.site} is not in the manifest")
            taken, content = self._kept.pop(name, (version + 1, None))
            if content is None or taken > version:
                taken, content = 0, self._trace.first_content(name)
            writes = self._writes.get(name, {})
            for number in range(taken, version):
                if number not in writes:
                    raise ValueError(f"write {number} of cache {name}, which {record.site} had seen, is missing")
                self._trace.apply_write(content, *writes[number])
            self._kept[name] = (version, content)
            while len(self._kept) > 1 and sum(kept.nbytes for _, kept in self._kept.values()) > self._budget:
                self._kept.popitem(last=False)
            return content
