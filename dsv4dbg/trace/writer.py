"""Writing a trace while a forward runs.

    with TraceWriter("run.h5", manifest, caches={"L2.window": CacheSpec(layout, 9, 1152)}) as writer:
        call = writer.site(Site("L2.attn.wq_b", "fp8_linear", "decode0"), "torch", inputs={"x": x})
        ...                                    # the op runs, and may die
        call.finish({"y": y})

Inputs are saved before an op runs and outputs after it, each confirmed by a line in the journal (see
`journal`), so that whatever kills the process, the saved calls can be read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import xxhash
from h5py import h5g  # pyright: ignore[reportAttributeAccessIssue]

from dsv4dbg.errors import DbgError
from dsv4dbg.site import BLOCK, Site
from dsv4dbg.trace.hdf5_read import Hdf5Reader
from dsv4dbg.trace.hdf5_write import Hdf5Writer
from dsv4dbg.trace.journal import Journal, journal_path, read_journal
from dsv4dbg.trace.records import CacheSpec, Mutation, Tensor, TensorSpec, check_site, check_word, site_path
from dsv4dbg.trace.storage import DataFile, raw, write_error
from dsv4dbg.trace.text import SCHEMA, VERSION, to_json


class SiteCall:
    """One site call between its begin and its finish."""

    def __init__(
        self, writer: TraceWriter, site: Site, sequence: int, group: h5g.GroupID, caches: dict[str, str]
    ) -> None:
        self._writer = writer
        self.site = site
        self.sequence = sequence
        self.group = group
        self.caches = caches

    def finish(self, outputs: Mapping[str, Tensor], mutated: Mapping[str, Mutation] | None = None) -> None:
        """Save what the call made: its outputs by name, and its writes by cache argument. Once per call."""
        self._writer.finish(self, outputs, mutated or {})


class TraceWriter:
    """An open trace file; see the module's docstring. Errors are `DbgError` with one sentence.

    After a failed write (disk full) the writer takes nothing more and every method raises that same
    sentence again; what was saved before stays readable through the journal.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        manifest: Mapping[str, Any],
        caches: Mapping[str, CacheSpec] | None = None,
        images: Mapping[str, np.ndarray] | None = None,
        overwrite: bool = False,
    ) -> None:
        """Create the trace.

        Args:
            path: a file that does not exist yet, unless ``overwrite``.
            manifest: JSON; ``schema``, ``version``, ``level``, ``caches`` and ``complete`` are filled in.
            caches: the caches that sites refer to, by name.
            images: first contents, ``uint8 [pages, page_stride]``, of caches that do not start with one byte value.
            overwrite: replace an earlier trace.
        """
        self.path = Path(path)
        self._caches, images = dict(caches or {}), images or {}
        self.manifest = {"level": "full", **manifest, "schema": SCHEMA, "version": VERSION, "complete": False}
        self.manifest["caches"] = {
            check_word(name): spec.to_json() | ({"fill": None} if name in images else {})
            for name, spec in self._caches.items()
        }
        self._writes = dict.fromkeys(self._caches, 0)
        self._stored: dict[tuple[str, tuple[int, ...], bytes], tuple[str, int]] = {}
        self._weights: dict[bytes, int] = {}
        self._entries: dict[int, dict[str, Any]] = {}
        self._images: dict[str, Any] = {}
        self._steps: dict[str, h5g.GroupID] = {}
        self._seen: set[tuple[str, str]] = set()
        self._tick = 0
        self._failure: DbgError | None = None
        self._closed = False
        to_json(self.manifest)  # raises, before there is a file, if JSON cannot hold it
        try:
            _make_way(self.path, overwrite)
            self._journal = Journal(journal_path(self.path), self.manifest)
        except (OSError, ValueError) as error:
            raise _creation_error(self.path, error) from error
        try:
            self._file = DataFile(self.path)
        except OSError as error:
            self._journal.remove()
            self._journal.close()
            raise _creation_error(self.path, error) from error
        self._hdf5 = Hdf5Writer(self._file)
        self._root = self._hdf5.root
        try:
            with self._saving():
                self._hdf5.text_attr(self._root, "schema", SCHEMA)
                self._hdf5.int_attr(self._root, "version", VERSION)
                self._step_root = self._hdf5.group(self._root, "steps")
                self._store_images(images)
        except DbgError:
            self.abandon()
            raise

    def site(
        self,
        site: Site,
        implementation: str,
        *,
        attrs: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Tensor | None] | None = None,
        weights: Mapping[str, Any] | None = None,
        caches: Mapping[str, str] | None = None,
    ) -> SiteCall:
        """Save that a call begins, with all that goes into it.

        Args:
            site: which call; a name may occur once per step.
            implementation: what computes it.
            attrs: scalar arguments, JSON.
            inputs: tensor arguments; None for an optional one that was not given.
            weights: references to weights by argument: ``{tensor, hash, dtype, shape}`` or a list of these.
            caches: name of the cache by argument.
        """
        path = site_path(check_site(site))
        if (site.step, site.name) in self._seen:
            raise DbgError(f"site {site} is already in {self.path}")
        inputs, caches = inputs or {}, dict(caches or {})
        for arg in (*inputs, *caches):
            check_word(arg)
        unknown = [name for name in caches.values() if name not in self._caches]
        if unknown:
            raise DbgError(f"site {site} uses cache {unknown[0]}, which {self.path} was not told about")
        entry: dict[str, Any] = {
            "step": site.step,
            "site": site.name,
            "op": site.op,
            "sequence": self._tick,
            "implementation": implementation,
            "attrs": dict(attrs or {}),
        }
        absent = [arg for arg, tensor in inputs.items() if tensor is None]
        if absent:
            entry["absent"] = absent
        if caches:
            entry["caches"] = {arg: {"cache": name, "version": self._writes[name]} for arg, name in caches.items()}
        attrs_text = to_json(entry["attrs"])
        with self._saving():
            if weights:
                entry["weights"] = self._weight_set(weights)
            group = self._hdf5.group(self._step(site.step), site.name)
            given = {arg: tensor for arg, tensor in inputs.items() if tensor is not None}
            entry["inputs"] = self._store_all(group, f"{path}/in", given, link=True)
            self._describe(group, site, entry, attrs_text)
            self._confirm({"begin": entry})
        self._seen.add((site.step, site.name))
        self._entries[self._tick] = entry
        self._tick += 1
        return SiteCall(self, site, entry["sequence"], group, caches)

    def finish(self, call: SiteCall, outputs: Mapping[str, Tensor], mutated: Mapping[str, Mutation]) -> None:
        """Save what a call made (`SiteCall.finish`)."""
        entry = self._entries[call.sequence]
        if "finished" in entry:
            raise DbgError(f"site {call.site} has finished already")
        for name in (*outputs, *mutated):
            check_word(name)
        unknown = [arg for arg in mutated if arg not in call.caches]
        if unknown:
            raise DbgError(f"site {call.site} wrote to {unknown[0]}, which is not one of its caches")
        path = site_path(call.site)
        finish: dict[str, Any] = {"sequence": call.sequence, "finished": self._tick}
        with self._saving():
            # what leaves a block is what its last op made: a view, not one more copy
            finish["outputs"] = self._store_all(call.group, f"{path}/out", outputs, link=call.site.op == BLOCK)
            links = _links(finish["outputs"])
            if links:
                self._hdf5.text_attr(call.group, "output_links", to_json(links))
            if mutated:
                finish["mutated"] = self._store_mutations(call, path, mutated)
            self._hdf5.int_attr(call.group, "finished", self._tick)
            self._confirm({"finish": finish})
        for arg in mutated:
            self._writes[call.caches[arg]] += 1
        entry |= finish
        self._tick += 1

    def close(self, extra: Mapping[str, Any] | None = None, complete: bool = True) -> None:
        """Turn the file into closed HDF5 and remove the journal; nothing happens if it is closed already.

        Args:
            extra: more for the manifest, such as the completion.
            complete: whether the capture saw all it was meant to see.
        """
        if self._closed:
            return
        self.manifest |= dict(extra or {}) | {"complete": complete}
        texts = {
            "manifest": to_json(self.manifest),
            "weights": b"[" + b",".join(self._weights) + b"]",
            "index": to_json({"images": self._images, "sites": list(self._entries.values())}),
        }
        try:
            with self._saving():
                self._confirm({"close": self.manifest})
                for name, text in texts.items():
                    self._file.put(np.frombuffer(text, np.uint8), self._hdf5.text(name, len(text)))
                self._hdf5.int_attr(self._root, "complete", int(complete))
                self._hdf5.close()
            with self._saving():
                self._file.sync()
                self._verify(texts)
                self._journal.remove()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let go of the file as it is: the journal stays, and readers take what it confirms."""
        if self._closed:
            return
        self._closed = True
        self._file.discard(OSError("abandoned"))
        with contextlib.suppress(OSError, RuntimeError):
            self._hdf5.close()
        self._file.close()
        self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._failure is not None:
            self.abandon()
        elif error is None:
            self.close()
        else:
            self.close({"error": f"{type(error).__name__}: {error}"}, complete=False)

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Around everything that writes: the first failure is kept, and raised again ever after."""
        if self._failure is not None:
            raise DbgError(self._failure.message, self._failure.hint)
        if self._closed:
            raise DbgError(f"{self.path} is closed, nothing more can be saved in it")
        try:
            yield
            if self._file.failure is not None:
                raise self._file.failure
        except OSError as error:
            self._file.discard(error)
            self._failure = write_error(self.path, error, "what was saved until then can still be read")
            raise self._failure from error

    def _confirm(self, event: dict[str, Any]) -> None:
        """Add a journal line, unless HDF5 already met an error."""
        if self._file.failure is None:
            self._journal.append(event)

    def _verify(self, texts: dict[str, bytes]) -> None:
        """Read back what makes the file a trace before the journal goes. Raises OSError."""
        reader = Hdf5Reader(self.path)
        try:
            if any(reader.text(name) != text for name, text in texts.items()):
                raise OSError("what HDF5 wrote does not read back")
        except (RuntimeError, ValueError, LookupError) as error:
            raise OSError(f"what HDF5 wrote does not read back ({error})") from error
        finally:
            reader.close()

    def _step(self, step: str) -> h5g.GroupID:
        if step not in self._steps:
            self._steps[step] = self._hdf5.group(self._step_root, step)
        return self._steps[step]

    def _weight_set(self, weights: Mapping[str, Any]) -> int:
        """Number of this set of references in the table of weights; every step of a run uses the same sets."""
        text = to_json(dict(weights))
        if text not in self._weights:
            self._confirm({"weights": dict(weights)})
            self._weights[text] = len(self._weights)
        return self._weights[text]

    def _describe(self, group: h5g.GroupID, site: Site, entry: dict[str, Any], attrs: bytes) -> None:
        """Put the entry on the site's group, for readers that know only HDF5."""
        objects = {"absent": entry.get("absent"), "caches": entry.get("caches"), "links": _links(entry["inputs"])}
        texts = {
            "op": site.op,
            "implementation": entry["implementation"],
            "phase": site.phase,
            "attrs": attrs,
            **{name: to_json(value) for name, value in objects.items() if value},
        }
        numbers = {"sequence": entry["sequence"], "layer": site.layer, "weights": entry.get("weights")}
        for name, text in texts.items():
            self._hdf5.text_attr(group, name, text)
        for name, number in numbers.items():
            if number is not None:
                self._hdf5.int_attr(group, name, number)

    def _store_all(
        self, parent: h5g.GroupID, path: str, tensors: Mapping[str, Tensor], link: bool = False
    ) -> dict[str, Any]:
        """Save tensors in a new group at ``path`` under ``parent``; returns their specs as JSON by name."""
        if not tensors:
            return {}
        group = self._hdf5.group(parent, path.rpartition("/")[2])
        return {name: self._store(group, path, name, tensor, link).to_json() for name, tensor in tensors.items()}

    def _store(self, group: h5g.GroupID, path: str, name: str, tensor: Tensor, link: bool = False) -> TensorSpec:
        """Save one tensor, or with ``link`` give an equal one that is in the file a second name."""
        array = np.ascontiguousarray(tensor.array).reshape(tensor.array.shape)
        digest = xxhash.xxh3_128(raw(array))
        key = (tensor.dtype, array.shape, digest.digest())
        known = self._stored.get(key) if link else None
        if known is not None and self._file.holds(array, known[1]):
            self._hdf5.link(group, name, known[0])
            return TensorSpec(tensor.dtype, array.shape, tensor.dims, digest.hexdigest(), known[1], known[0])
        attrs = {"dims": tensor.dims, "dtype": tensor.dtype}
        offset = self._hdf5.dataset(group, name, array.dtype, array.shape, attrs)
        self._file.put(array, offset)
        self._stored.setdefault(key, (f"{path}/{name}", offset))
        return TensorSpec(tensor.dtype, array.shape, tensor.dims, digest.hexdigest(), offset)

    def _store_mutations(self, call: SiteCall, path: str, mutated: Mapping[str, Mutation]) -> dict[str, Any]:
        group = self._hdf5.group(call.group, "mut")
        writes: dict[str, dict[str, Any]] = {}
        for arg in mutated:
            cache = call.caches[arg]
            earlier = sum(write["cache"] == cache for write in writes.values())
            writes[arg] = {"cache": cache, "write": self._writes[cache] + earlier}
        self._hdf5.text_attr(call.group, "mutated", to_json(writes))
        return {
            arg: writes[arg] | {"tensors": self._store_all(group, f"{path}/mut/{arg}", mutation.tensors())}
            for arg, mutation in mutated.items()
        }

    def _store_images(self, images: Mapping[str, np.ndarray]) -> None:
        if not images:
            return
        group = self._hdf5.group(self._root, "caches")
        for name, image in images.items():
            spec = self._store(group, "/caches", name, Tensor(image, "uint8", "page byte")).to_json()
            self._images[name] = spec
            self._confirm({"image": {name: spec}})


def _links(specs: Mapping[str, Any]) -> dict[str, Any]:
    """Where tensors that are links come from, and how this site calls their dims."""
    return {name: {"origin": s["origin"], "dims": s["dims"]} for name, s in specs.items() if "origin" in s}


def _make_way(path: Path, overwrite: bool) -> None:
    """Remove an earlier trace if that is wished; raises DbgError if anything else is in the way, and OSError."""
    if path.is_dir():
        raise DbgError(f"{path} is a directory, a trace is a file", f"write to {path / 'trace.h5'}")
    journal = journal_path(path)
    earlier = read_journal(journal)
    if earlier is not None and earlier.locked:
        raise DbgError(f"{path} is being written by another capture")
    if not overwrite and (path.exists() or earlier is not None):
        raise DbgError(f"{path if path.exists() else journal} exists already", "choose another name, or remove it")
    if path.exists() and not path.is_file():
        raise DbgError(f"{path} is not a regular file, a trace cannot be written there")
    path.unlink(missing_ok=True)
    journal.unlink(missing_ok=True)


def _creation_error(path: Path, error: Exception) -> DbgError:
    reason = error.strerror if isinstance(error, OSError) else error
    return DbgError(f"cannot create {path}: {reason}")
