"""Creating groups, datasets and attributes in a trace through h5py's low-level interface.

The high-level one costs about ten times as much per dataset, and a forward has thousands. Objects carry no times, so
two equal captures make equal files; groups remember the order in which their members were made.
"""

from __future__ import annotations

import numpy as np
from h5py import h5a, h5d, h5f, h5fd, h5g, h5i, h5p, h5s, h5t  # pyright: ignore[reportAttributeAccessIssue]

from dsv4dbg.trace.storage import DataFile

_ORDER = h5p.CRT_ORDER_TRACKED | h5p.CRT_ORDER_INDEXED


class Hdf5Writer:
    """HDF5's side of a `DataFile`. Any method may leave an error in the file's ``failure`` instead of raising."""

    def __init__(self, file: DataFile) -> None:
        access = h5p.create(h5p.FILE_ACCESS)
        access.set_fileobj_driver(h5fd.fileobj_driver, file)
        # The 1.8 form keeps small groups and attributes inside object headers: a third of the size of the earliest.
        access.set_libver_bounds(h5f.LIBVER_V18, h5f.LIBVER_V18)
        access.set_fclose_degree(h5f.CLOSE_STRONG)
        creation = h5p.create(h5p.FILE_CREATE)
        creation.set_link_creation_order(_ORDER)
        h5i.inc_ref(creation)  # a second owner, as the root is a group, whose times h5py can only switch off through
        h5p.PropGCID(creation.id).set_obj_track_times(False)  # the class for groups
        self._id = h5f.create(b"trace", h5f.ACC_TRUNC, creation, access)
        self.root = h5g.open(self._id, b"/")
        self._group_plist = h5p.create(h5p.GROUP_CREATE)
        self._group_plist.set_obj_track_times(False)
        self._group_plist.set_link_creation_order(_ORDER)
        self._group_plist.set_attr_phase_change(32, 16)  # a site has up to 12; dense storage costs 1.8 kB per group
        self._dataset_plist = h5p.create(h5p.DATASET_CREATE)
        self._dataset_plist.set_layout(h5d.CONTIGUOUS)
        self._dataset_plist.set_alloc_time(h5d.ALLOC_TIME_EARLY)
        self._dataset_plist.set_fill_time(h5d.FILL_TIME_NEVER)
        self._dataset_plist.set_obj_track_times(False)
        self._scalar = h5s.create(h5s.SCALAR)
        self._texts: dict[int, h5t.TypeID] = {}
        self._types: dict[np.dtype, h5t.TypeID] = {}

    def group(self, parent: h5g.GroupID, name: str) -> h5g.GroupID:
        return h5g.create(parent, name.encode(), gcpl=self._group_plist)

    def dataset(
        self, parent: h5g.GroupID, name: str, storage: np.dtype, shape: tuple[int, ...], attrs: dict[str, str]
    ) -> int:
        """Make an empty dataset with its place in the file; returns the offset of its first byte (0 if it has none)."""
        if storage not in self._types:
            self._types[storage] = h5t.py_create(storage)
        created = h5d.create(parent, name.encode(), self._types[storage], h5s.create_simple(shape), self._dataset_plist)
        for key, value in attrs.items():
            self.text_attr(created, key, value)
        return created.get_offset() or 0

    def text(self, name: str, length: int) -> int:
        """Make a scalar string dataset of ``length`` bytes at the root; returns the offset of its first byte."""
        return h5d.create(self.root, name.encode(), self._text(length), self._scalar, self._dataset_plist).get_offset()

    def link(self, parent: h5g.GroupID, name: str, path: str) -> None:
        """Give the dataset at ``path`` a second name (a hard link)."""
        parent.links.create_hard(name.encode(), self._id, path.encode())

    def text_attr(self, owner: h5g.GroupID | h5d.DatasetID, name: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        kind = self._text(max(1, len(data)))
        h5a.create(owner, name.encode(), kind, self._scalar).write(np.array(data, dtype=f"S{max(1, len(data))}"), kind)

    def int_attr(self, owner: h5g.GroupID, name: str, value: int) -> None:
        h5a.create(owner, name.encode(), h5t.STD_I64LE, self._scalar).write(np.array(value), h5t.NATIVE_INT64)

    def close(self) -> None:
        """Write all structures out. Afterwards the file is HDF5, unless its ``failure`` is set."""
        if self._id.valid:
            self._id.close()

    def _text(self, length: int) -> h5t.TypeID:
        if length not in self._texts:
            kind = h5t.C_S1.copy()
            kind.set_size(length)
            kind.set_strpad(h5t.STR_NULLPAD)
            self._texts[length] = kind
        return self._texts[length]
