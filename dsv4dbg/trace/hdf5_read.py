"""Finding things in a closed trace through HDF5, trusting nothing that the file says.

Only plain things are accepted: hard links, contiguous datasets inside the file, the expected stored type and shape.
Whatever else a file offers (soft and external links, virtual or external storage, chunks and filters, huge
shapes) is refused before HDF5 acts on it or memory is taken. HDF5 says where a dataset's bits lie; they are read
from there without it, as it would copy them once more and hold a lock. Errors are ValueError with a sentence, or
whatever h5py raises.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from h5py import h5a, h5d, h5f, h5g, h5l, h5o, h5p, h5s, h5t  # pyright: ignore[reportAttributeAccessIssue]

from dsv4dbg.trace.records import STORAGE

_LAYOUTS = {h5d.COMPACT: "compact", h5d.CHUNKED: "chunked", h5d.VIRTUAL: "virtual"}
_MOST_LINKS = 100_000  # of one step that are remembered
_CLEAR = {name for name, storage in STORAGE.items() if storage == name and storage not in ("uint8", "uint16")}
_MAX_ATTR = 64  # bytes of the dtype attribute


class Hdf5Reader:
    """A trace file opened for reading, without HDF5's own file locks (also on read-only file systems)."""

    def __init__(self, path: Path) -> None:
        access = h5p.create(h5p.FILE_ACCESS)
        access.set_file_locking(False, True)
        access.set_fclose_degree(h5f.CLOSE_STRONG)
        self._size = path.stat().st_size
        self._id = h5f.open(os.fsencode(path), h5f.ACC_RDONLY, access)
        self.fd: int = self._id.get_vfd_handle()  # HDF5's own; valid until `close`
        self._root = h5g.open(self._id, b"/")
        self._step = ("", self._root, dict[bytes, int]())  # the last step that was asked for: path, group, `_inside`
        self._kinds: dict[np.dtype, h5t.TypeID] = {}
        self._places: dict[int, tuple[str, tuple[int, ...], int]] = {}  # address of a dataset -> dtype, shape, place

    def close(self) -> None:
        if self._id.valid:
            self._id.close()

    def has(self, name: str) -> bool:
        """Whether the root has a member of this name."""
        return name.encode() in self._root

    def text(self, name: str) -> bytes:
        """A string dataset at the root."""
        base, member, _ = self._link(f"/{name}")
        dataset = self._dataset(base, member, f"/{name}")
        kind = dataset.get_type()
        if not isinstance(kind, h5t.TypeStringID) or kind.is_variable_str() or dataset.shape != ():
            raise ValueError(f"/{name} is not one string of fixed length")
        self._check_extent(dataset, f"/{name}", kind.get_size())
        out = np.empty((), f"S{kind.get_size()}")
        dataset.read(h5s.ALL, h5s.ALL, out, kind)
        return out.item()

    def place(self, path: str, dtype: str, storage: np.dtype, shape: tuple[int, ...]) -> int:
        """Offset in the file of the bits at ``path``, which must have this shape, stored type and ``dtype`` attribute.

        0 for an empty dataset. No two datasets that are not empty and not the same lie at one offset.
        """
        base, name, address = self._link(path)
        known = self._places.get(address)
        if known is not None and known[:2] == (dtype, shape):
            return known[2]
        dataset = self._dataset(base, name, path)
        if storage not in self._kinds:
            self._kinds[storage] = h5t.py_create(storage)
        # a stored float32 can be nothing else; the attribute says which kind of uint8 or uint16 it is
        known_kind = dtype in _CLEAR or self._dtype_attr(dataset) == dtype
        if not dataset.get_type().equal(self._kinds[storage]) or not known_kind:
            raise ValueError(f"{path} is not the {dtype} stored as {storage.name} that the index lists")
        if dataset.shape != shape:
            raise ValueError(f"{path} has shape {list(dataset.shape or ())}, and the index says {list(shape)}")
        self._check_extent(dataset, path, math.prod(shape) * storage.itemsize)
        place = dataset.get_offset() or 0
        self._places[address] = (dtype, shape, place)
        return place

    def _dataset(self, base: h5g.GroupID, name: bytes, path: str) -> h5d.DatasetID:
        """Open the contiguous dataset ``name`` in ``base``, to which `_link` found the way."""
        found = h5o.open(base, name)
        if not isinstance(found, h5d.DatasetID):
            raise ValueError(f"{path} is not a dataset")
        if found.get_offset() is not None:  # only contiguous storage inside this file has one
            return found
        plist = found.get_create_plist()
        if plist.get_layout() != h5d.CONTIGUOUS:
            raise ValueError(f"{path} is {_LAYOUTS.get(plist.get_layout(), 'strange')}; traces are contiguous")
        if plist.get_external_count():
            raise ValueError(f"{path} keeps its data in another file, which is never opened")
        return found

    def _link(self, path: str) -> tuple[h5g.GroupID, bytes, int]:
        """The way to ``path``: a group, the name in it, and the address of the object; by hard links only.

        HDF5 would follow soft and external links inside a name, so every part of it is looked at. Links to one object
        have one address.
        """
        parts = path.strip("/").split("/")
        base, start = self._root, 0
        if len(parts) > 2:
            step = "/".join(parts[:2])
            if self._step[0] != step:
                self._step = (step, *self._inside(*parts[:2]))
            _, base, inside = self._step
            start, name = 2, "/".join(parts[2:]).encode()
            if name in inside:
                return base, name, inside[name]
        for end in range(start + 1, len(parts)):
            self._hard_link(base, "/".join(parts[start:end]), "/".join(parts[:end]))
        name = "/".join(parts[start:])
        return base, name.encode(), self._hard_link(base, name, path)

    def _inside(self, *parts: str) -> tuple[h5g.GroupID, dict[bytes, int]]:
        """A group below the root, and the address of everything that hard links lead to in it, at any depth.

        One walk by HDF5 costs half of asking for every name. It stops after _MOST_LINKS; what is not in it then is
        looked up by name.
        """
        group = self._root
        for end, name in enumerate(parts, 1):
            self._hard_link(group, name, "/".join(parts[:end]))
            group = h5o.open(group, name.encode())
            if not isinstance(group, h5g.GroupID):
                raise ValueError(f"{'/'.join(parts[:end])} is not a group")
        found: dict[bytes, int] = {}

        def note(name: bytes, link: Any) -> bool | None:
            if link.type == h5l.TYPE_HARD:
                found[name] = link.u
            return True if len(found) >= _MOST_LINKS else None

        group.links.visit(note, info=True)
        return group, found

    @staticmethod
    def _hard_link(base: h5g.GroupID, name: str, path: str) -> int:
        """The address of the object that the link ``name`` leads to; all of the name but its last part is known."""
        try:
            link = base.links.get_info(name.encode())
        except (KeyError, RuntimeError) as error:
            raise ValueError(f"there is no {path}") from error
        if link.type != h5l.TYPE_HARD:
            last = name.rpartition("/")[2]
            raise ValueError(f"'{last}' in {path} is a soft or external link, which is never followed")
        return link.u

    def _check_extent(self, dataset: h5d.DatasetID, path: str, nbytes: int) -> None:
        offset = dataset.get_offset()
        if nbytes and (offset is None or offset + nbytes > self._size or dataset.get_storage_size() != nbytes):
            raise ValueError(f"{path} claims {nbytes} bytes that the file does not have")

    @staticmethod
    def _dtype_attr(dataset: h5d.DatasetID) -> str:
        if not h5a.exists(dataset, b"dtype"):
            return ""
        attr = h5a.open(dataset, b"dtype")
        kind = attr.get_type()
        if not isinstance(kind, h5t.TypeStringID) or kind.is_variable_str():
            return ""
        if not kind.get_size() == attr.get_storage_size() <= _MAX_ATTR:  # one string, and a short one
            return ""
        out = np.empty((), f"S{kind.get_size()}")
        attr.read(out, kind)
        return out.item().decode(errors="replace")
