"""Broken files and files made to harm: one sentence, no other file opened, no memory taken on their word."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import resource
import socket
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_scenario import Scenario

from dsv4dbg.errors import DbgError
from dsv4dbg.trace.journal import journal_path, parse_journal
from dsv4dbg.trace.reader import Trace
from dsv4dbg.trace.records import CacheSpec, SiteRecord
from dsv4dbg.trace.writer import TraceWriter

SITE = "steps/decode0/L0.attn.attend"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "run.h5"
    Scenario(steps=1).capture(path)
    return path.read_bytes()


def use(path: Path) -> None:
    """Everything that a reader may ask of a trace, up to the first error."""
    with Trace.open(path) as trace:
        for record in trace.sites():
            for name in record.tensors():
                trace.view(record, name)
            for arg in record.caches:
                trace.cache_at(record.site.step, record.site.name, arg)


def refused(path: Path) -> str:
    with pytest.raises(DbgError) as error:
        use(path)
    assert "\n" not in error.value.message
    assert len(error.value.message) < 700
    return error.value.message


def replace_text(file: h5py.File, name: str, text: bytes) -> None:
    del file[name]
    file[name] = np.bytes_(text)


def edit_json(file: h5py.File, name: str, edit) -> None:
    data = json.loads(file[name][()])
    replace_text(file, name, json.dumps(edit(data) or data).encode())


def entry(index: dict, site: str = "L0.attn.attend") -> dict:
    return next(entry for entry in index["sites"] if entry["site"] == site)


def swap_dataset(file: h5py.File, **options) -> None:
    """Replace one output by another dataset that carries the right attributes."""
    old = file[f"{SITE}/out/y"]
    options = {"shape": old.shape, "dtype": old.dtype} | options
    attrs = dict(old.attrs)
    del file[f"{SITE}/out/y"]
    file[f"{SITE}/out"].create_dataset("y", **options).attrs.update(attrs)


def huge(file: h5py.File, **options) -> None:
    swap_dataset(file, shape=(1 << 42, 8), **options)
    edit_json(file, "index", lambda index: entry(index)["outputs"]["y"].update(shape=[1 << 42, 8]))


def in_index(**fields):
    return lambda file: edit_json(file, "index", lambda index: entry(index).update(fields))


def in_output(**fields):
    return lambda file: edit_json(file, "index", lambda index: entry(index)["outputs"]["y"].update(fields))


def in_cache(**fields):
    return lambda file: edit_json(file, "manifest", lambda manifest: manifest["caches"]["L0.window"].update(fields))


def in_layout(**fields):
    return lambda file: edit_json(file, "manifest", lambda m: m["caches"]["L0.window"]["layout"].update(fields))


def link(path: str, made):
    def edit(file: h5py.File) -> None:
        del file[path]
        file[path] = made(file)

    return edit


def virtual(file: h5py.File) -> None:
    shape, dtype = file[f"{SITE}/out/y"].shape, file[f"{SITE}/out/y"].dtype
    layout = h5py.VirtualLayout(shape=shape, dtype=dtype)
    layout[:] = h5py.VirtualSource(str(Path(file.filename).with_name("trap")), "y", shape=shape)
    del file[f"{SITE}/out/y"]
    file[f"{SITE}/out"].create_virtual_dataset("y", layout)


def external_storage(file: h5py.File) -> None:
    swap_dataset(file, external=[(str(Path(file.filename).with_name("trap")), 0, h5py.h5f.UNLIMITED)])


def external_link(file: h5py.File) -> h5py.ExternalLink:
    return h5py.ExternalLink(str(Path(file.filename).with_name("trap")), "/x")


def wild_slots(file: h5py.File) -> None:
    file["steps/decode0/L0.attn.insert/mut/kv/slots"][0] = 1 << 40


def negative_slots(file: h5py.File) -> None:
    file["steps/decode0/L0.attn.insert/mut/kv/slots"][0] = -1


def wild_stray(file: h5py.File) -> None:
    file["steps/decode0/L0.attn.insert/mut/kv/stray_offsets"][0] = -5


def references(file: h5py.File) -> None:
    swap_dataset(file, dtype=h5py.ref_dtype)


def other_dialect(file: h5py.File) -> None:
    file[f"{SITE}/out/y"].attrs["dtype"] = np.bytes_("float16")


EDITS = {
    "no index": lambda f: f.__delitem__("index"),
    "no manifest": lambda f: f.__delitem__("manifest"),
    "no weights": lambda f: f.__delitem__("weights"),
    "no steps": lambda f: f.__delitem__("steps"),
    "index is a group": link("index", lambda f: f.create_group("other")),
    "index is a soft link": link("index", lambda f: h5py.SoftLink("/manifest")),
    "index is an external link": link("index", external_link),
    "manifest is a variable string": link("manifest", lambda f: "{}"),
    "weights are numbers": link("weights", lambda f: np.arange(3)),
    "index is a list of strings": link("index", lambda f: np.array([b"{}", b"{}"])),
    "steps is a soft link": link("steps", lambda f: h5py.SoftLink("/")),
    "steps is an external link": link("steps", external_link),
    "site is an external link": link(SITE, external_link),
    "site is a soft link": link(SITE, lambda f: h5py.SoftLink("/steps/decode0/L1.attn.attend")),
    "output is a soft link": link(f"{SITE}/out/y", lambda f: h5py.SoftLink(f"/{SITE}/in/q")),
    "output is an external link": link(f"{SITE}/out/y", external_link),
    "output is a group": link(f"{SITE}/out/y", lambda f: f.create_group("other")),
    "output is a type": link(f"{SITE}/out/y", lambda f: np.dtype("f8")),
    "output is text": link(f"{SITE}/out/y", lambda f: "text"),
    "output is gone": lambda f: f.__delitem__(f"{SITE}/out/y"),
    "external storage": external_storage,
    "virtual dataset": virtual,
    "object references": references,
    "other type": lambda f: swap_dataset(f, dtype="<f4"),
    "other byte order": lambda f: swap_dataset(f, dtype=">u2"),
    "other shape": lambda f: swap_dataset(f, shape=(8, 3)),
    "other dtype attribute": other_dialect,
    "no shape": lambda f: swap_dataset(f, shape=None, data=h5py.Empty("<u2")),
    "chunked": lambda f: swap_dataset(f, chunks=(1, 8)),
    "compressed": lambda f: swap_dataset(f, compression="gzip"),
    "huge and compressed": lambda f: huge(f, compression="gzip", chunks=(1 << 20, 8)),
    "huge and never written": huge,
    "huge in the index only": in_output(shape=[1 << 42, 8]),
    "negative size": in_output(shape=[-1, 8]),
    "sizes are not whole": in_output(shape=[3.5, True]),
    "rank 40": in_output(shape=[1] * 40),
    "unknown dtype": in_output(dtype="complex64"),
    "dtype of another size": in_output(dtype="float32"),
    "dtype is an object": in_output(dtype={}),
    "negative offset": in_output(offset=-1),
    "site name with a path": in_index(site="../L0"),
    "step name with a path": in_index(step="../../x"),
    "step is null": in_index(step=None),
    "tensor name with a path": in_index(outputs={"../in/q": {}}),
    "attrs are a list": in_index(attrs=[]),
    "weights out of range": in_index(weights=10**6),
    "weights negative": in_index(weights=-1),
    "sequence is text": in_index(sequence="1"),
    "finished before begun": in_index(finished=-1),
    "site twice": lambda f: edit_json(f, "index", lambda index: index["sites"].append(index["sites"][0])),
    "unknown cache": in_index(caches={"kv": {"cache": "L99.window", "version": 0}}),
    "cache version": in_index(caches={"kv": {"cache": "L0.window", "version": 10**15}}),
    "parts of a write": in_index(mutated={"kv": {"cache": "L0.window", "write": 1, "tensors": {}}}),
    "slots far outside": wild_slots,
    "slots negative": negative_slots,
    "stray bytes outside": wild_stray,
    "cache of a petabyte": in_cache(pages=1 << 50),
    "pages negative": in_cache(pages=-3),
    "stride too small": in_cache(page_stride=8),
    "stride of another cache": in_cache(page_stride=1 << 20, pages=0),
    "fill too large": in_cache(fill=256),
    "image missing": in_cache(fill=None),
    "layout without fields": in_layout(fields=[]),
    "layout with text": in_layout(entries="4"),
    "layout with zero": in_layout(align=0),
    "layout of other records": in_layout(fields=[1]),
    "index is not JSON": lambda f: replace_text(f, "index", b'{"sites": ['),
    "index is not text": lambda f: replace_text(f, "index", b"\xff\xfe\x01"),
    "index is a number": lambda f: replace_text(f, "index", b"3"),
    "index is deep": lambda f: replace_text(f, "index", b"[" * 200_000),
    "index has a huge number": lambda f: replace_text(f, "index", b'{"sites": [' + b"9" * 5000 + b"]}"),
    "index has sites of nothing": lambda f: replace_text(f, "index", b'{"sites": [null]}'),
    "weights are an object": lambda f: replace_text(f, "weights", b"{}"),
    "weights are a list of lists": lambda f: replace_text(f, "weights", b"[[]]"),
    "manifest without caches": lambda f: edit_json(f, "manifest", lambda m: m.__delitem__("caches")),
    "manifest without complete": lambda f: edit_json(f, "manifest", lambda m: m.__delitem__("complete")),
    "other schema": lambda f: edit_json(f, "manifest", lambda m: m.update(schema="safetensors")),
    "version 2": lambda f: edit_json(f, "manifest", lambda m: m.update(version=2)),
}


class Trap:
    """A file of numbers and HDF5 that links can point to, and the system's word on whether anyone opened it."""

    def __init__(self, path: Path) -> None:
        with h5py.File(path, "w") as file:
            file["x"] = file["y"] = np.zeros((3, 8), "<u2")
        libc = ctypes.CDLL(None)
        self._events = libc.inotify_init1(os.O_NONBLOCK)
        libc.inotify_add_watch(self._events, bytes(path), 0x20)  # IN_OPEN

    def close(self) -> None:
        os.close(self._events)

    def sprung(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            return bool(os.read(self._events, 4096))
        return False


@pytest.fixture
def trap(tmp_path):
    trap = Trap(tmp_path / "trap")
    yield trap
    trap.close()


def test_the_trap_works(tmp_path, good, trap):
    assert not trap.sprung()
    (tmp_path / "run.h5").write_bytes(good)
    with h5py.File(tmp_path / "run.h5", "r+") as file:
        EDITS["output is an external link"](file)
        assert file[f"{SITE}/out/y"].shape == (3, 8)
    assert trap.sprung()


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_hostile_edit(tmp_path, good, edit, trap):
    path = tmp_path / "run.h5"
    path.write_bytes(good)
    with h5py.File(path, "r+") as file:
        edit(file)
    trap.sprung()
    before = path.read_bytes()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 300_000  # KiB
    assert path.read_bytes() == before
    assert not trap.sprung()


def test_sentences(tmp_path, good):
    """A few of them word for word, because people read them."""
    path = tmp_path / "run.h5"
    said = {
        "version 2": "it has version 2 of the trace format, and this dsv4dbg reads version 1",
        "other schema": "its schema is safetensors, not dsv4dbg.trace",
        "no manifest": "it has no /manifest: not a trace, or an unfinished capture without its journal",
        "huge in the index only": f"/{SITE}/out/y has shape [3, 8], and the index says [4398046511104, 8]",
        "compressed": f"/{SITE}/out/y is chunked; traces are contiguous",
        "output is an external link": f"'y' in /{SITE}/out/y is a soft or external link, which is never followed",
    }
    for name, reason in said.items():
        path.write_bytes(good)
        with h5py.File(path, "r+") as file:
            EDITS[name](file)
        assert refused(path) == f"cannot read {path} as a trace: {reason}"


def test_not_a_trace_at_all(tmp_path, good):
    path = tmp_path / "x"
    assert "No such file" in refused(path)
    assert "is a directory" in refused(tmp_path)
    for content, reason in ((b"", "it is empty"), (b"PK\3\4 zip", "not an HDF5"), (bytes(9000), "not an HDF5")):
        path.write_bytes(content)
        assert reason in refused(path)
    with h5py.File(path, "w") as file:
        file["weights"] = np.zeros(3)
    assert "not a trace" in refused(path)
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in refused(path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        assert "not a regular file" in refused(tmp_path / "s")
    path.unlink()
    path.symlink_to(path)
    refused(path)
    refused(tmp_path / ("n" * 300))
    refused(Path("nul\0byte"))
    (tmp_path / "good").write_bytes(good)
    journal_path(tmp_path / "good").mkdir()
    refused(tmp_path / "good")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable(tmp_path, good):
    path = tmp_path / "run.h5"
    path.write_bytes(good)
    path.chmod(0)
    assert "Permission denied" in refused(path)


def test_truncated_everywhere(tmp_path):
    """A closed trace without its end is refused; its journal is gone, and HDF5 wants all of it."""
    Scenario(steps=4, tokens=40).capture(tmp_path / "run.h5")
    data = (tmp_path / "run.h5").read_bytes()
    for size in [*range(0, len(data), 4096), len(data) - 1]:
        (tmp_path / "cut.h5").write_bytes(data[:size])
        with pytest.raises(DbgError):
            Trace.open(tmp_path / "cut.h5")


@pytest.mark.parametrize(
    ("count", "seed"), [(150, 0), *(pytest.param(2000, s, marks=pytest.mark.slow) for s in range(1, 6))]
)
def test_flipped_bytes(tmp_path, good, count, seed):
    """Random damage anywhere is an answer or one sentence."""
    choose, path = random.Random(seed), tmp_path / "run.h5"
    for _ in range(count):
        data = bytearray(good)
        for _ in range(choose.choice([1, 1, 2, 8])):
            place = choose.randrange(len(data))
            data[place] = choose.choice([0, 255, data[place] ^ (1 << choose.randrange(8))])
        path.write_bytes(data)
        outcome = None
        try:
            use(path)
        except DbgError as error:
            outcome = error.message
        assert outcome is None or "\n" not in outcome


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KEYS = [
    "step",
    "site",
    "op",
    "sequence",
    "finished",
    "implementation",
    "attrs",
    "inputs",
    "absent",
    "weights",
    "caches",
]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_json_is_a_record_or_a_value_error(good_entries, data):
    """One or two fields of a good entry replaced by anything."""
    damaged = json.loads(json.dumps(data.draw(st.sampled_from(good_entries))))
    for key in data.draw(st.lists(st.sampled_from([*KEYS, "outputs", "mutated"]), min_size=1, max_size=2)):
        damaged[key] = data.draw(JSON)
    for parse in (lambda: SiteRecord.from_json(damaged, [{}]), lambda: CacheSpec.from_json(data.draw(JSON))):
        with contextlib.suppress(ValueError):
            parse()


@pytest.fixture(scope="module")
def good_entries(good, tmp_path_factory) -> list[dict]:
    path = tmp_path_factory.mktemp("entries") / "run.h5"
    path.write_bytes(good)
    with h5py.File(path) as file:
        return json.loads(file["index"][()])["sites"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()), max_size=5))
def test_any_journal_is_contents_or_a_value_error(lines):
    header = b'{"schema":"dsv4dbg.trace","version":1,"manifest":{"caches":{}}}'
    assert not parse_journal(b"\n".join([header, *lines, b""]), 10_000).records
    with pytest.raises(ValueError):  # noqa: PT011  no line is a header
        parse_journal(b"\n".join(lines), 10_000)


def test_writer_refuses_bad_places(tmp_path, good):
    path = tmp_path / "run.h5"
    path.write_bytes(good)
    (tmp_path / "pipe").touch()
    (tmp_path / "pipe").unlink()
    os.mkfifo(tmp_path / "pipe")
    said = {
        tmp_path: "is a directory",
        path: "exists already",
        tmp_path / "pipe": "exists already",
        tmp_path / "no" / "run.h5": "No such file or directory",
        path / "run.h5": "Not a directory",
        Path("/proc/run.h5"): "cannot create /proc/run.h5",
        Path("nul\0byte"): "null byte",
    }
    for place, reason in said.items():
        with pytest.raises(DbgError, match=reason) as error:
            TraceWriter(place, {})
        assert "\n" not in error.value.message
    assert path.read_bytes() == good
    with pytest.raises(DbgError, match="not a regular file"):
        TraceWriter(tmp_path / "pipe", {}, overwrite=True)
    assert not journal_path(tmp_path / "pipe").exists()


def test_writer_leaves_a_running_capture_alone(tmp_path):
    with TraceWriter(tmp_path / "run.h5", {}), pytest.raises(DbgError, match="being written by another capture"):
        TraceWriter(tmp_path / "run.h5", {}, overwrite=True)
    with TraceWriter(tmp_path / "run.h5", {}, overwrite=True) as writer:
        writer.abandon()
    with pytest.raises(DbgError, match="exists already"):
        TraceWriter(tmp_path / "run.h5", {})
    (tmp_path / "run.h5").unlink()
    with pytest.raises(DbgError, match=r"journal exists already"):
        TraceWriter(tmp_path / "run.h5", {})
    with TraceWriter(tmp_path / "run.h5", {}, overwrite=True):
        pass
    with Trace.open(tmp_path / "run.h5") as trace:
        assert trace.complete
