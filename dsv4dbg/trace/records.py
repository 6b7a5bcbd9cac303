"""What a trace holds: tensors as raw bits, cache writes, and the record of each site call.

Nouns: `Tensor` and `Mutation` go into a trace; `SiteRecord`, `TensorSpec`, `CacheRef`, `CacheWrite` and
`CacheSpec` come out of one. Everything here is numpy and JSON; nothing touches a file.

    Tensor(bits, "bfloat16", "token channel")     # bits: uint16 [tokens, channels]
    view_bits(bits, "bfloat16")                   # the same memory as ml_dtypes.bfloat16

JSON that comes from a file is untrusted: every ``from_json`` checks what it takes and raises ValueError
with a sentence that says which field is wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 and the fp8 names with numpy
import numpy as np

from dsv4dbg.errors import DbgError
from dsv4dbg.pages import PageLayout
from dsv4dbg.site import Site, check_name
from dsv4dbg.trace.text import shorten, take

PACKED_FP4 = "float4_e2m1fn_x2"  # two codes per byte, the even channel in the low half
_OWN = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
_BYTE = ["bool", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", PACKED_FP4]
STORAGE: dict[str, np.dtype] = {
    **{name: np.dtype(name).newbyteorder("<") for name in _OWN},
    **{name: np.dtype("uint8") for name in _BYTE},
    "bfloat16": np.dtype("<u2"),
}  # name of a tensor's dtype -> numpy dtype of its raw bits in the file

_STEP = re.compile(r"[a-z]+\d*")
_WORD = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*", re.ASCII)
_MAX_RANK = 32
_WRITE_PARTS = {"slots": "int64", "records": "uint8", "stray_offsets": "int64", "stray_bytes": "uint8"}


@dataclass(frozen=True)
class Tensor:
    """One tensor on its way into a trace.

    Attributes:
        array: raw bits, any shape; its numpy dtype is ``STORAGE[dtype]``.
        dtype: name of the real dtype, such as ``bfloat16``.
        dims: names of the dims in order, such as ``token head channel``; empty for a scalar.
    """

    array: np.ndarray
    dtype: str
    dims: str

    def __post_init__(self) -> None:
        if self.dtype not in STORAGE:
            raise DbgError(f"a trace cannot hold tensors of dtype {self.dtype} (it holds {', '.join(sorted(STORAGE))})")
        if self.array.dtype != STORAGE[self.dtype]:
            raise DbgError(f"raw bits of {self.dtype} are {STORAGE[self.dtype]}, got {self.array.dtype}")


@dataclass(frozen=True)
class Mutation:
    """What one call wrote to one cache.

    Attributes:
        slots: ``int64 [n]``, the contract's slots that are >= 0.
        records: ``uint8 [n, record_bytes]`` as `PageLayout.read` gives them after the call.
        stray_offsets: ``int64 [m]`` byte offsets in the buffer of changed bytes outside those slots, or None.
        stray_bytes: ``uint8 [m]``, their values after the call, or None.
    """

    slots: np.ndarray
    records: np.ndarray
    stray_offsets: np.ndarray | None = None
    stray_bytes: np.ndarray | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The datasets this becomes; stray bytes are left out where there are none."""
        found = {
            "slots": Tensor(self.slots, "int64", "entry"),
            "records": Tensor(self.records, "uint8", "entry byte"),
        }
        if self.stray_offsets is not None and self.stray_bytes is not None and len(self.stray_offsets):
            found["stray_offsets"] = Tensor(self.stray_offsets, "int64", "byte")
            found["stray_bytes"] = Tensor(self.stray_bytes, "uint8", "byte")
        return found


@dataclass(frozen=True)
class CacheSpec:
    """A paged cache: ``uint8 [pages, page_stride]``, at first filled with one byte or a stored image.

    Attributes:
        layout: where records lie in a page.
        pages: number of pages.
        page_stride: bytes from one page to the next, at least ``layout.page_bytes``.
        fill: value of every byte before the first write, or None if the trace stores the first image.
    """

    layout: PageLayout
    pages: int
    page_stride: int
    fill: int | None = 0

    @property
    def nbytes(self) -> int:
        return self.pages * self.page_stride

    def to_json(self) -> dict[str, Any]:
        return {
            "layout": self.layout.to_json(),
            "pages": self.pages,
            "page_stride": self.page_stride,
            "fill": self.fill,
        }

    @classmethod
    def from_json(cls, data: Any) -> CacheSpec:
        raw = take(data, "layout", dict)
        fields = take(raw, "fields", list)
        entries, align = take(raw, "entries", int), take(raw, "align", int)
        if not fields or not all(type(size) is int and size > 0 for size in fields) or entries < 1 or align < 1:
            raise ValueError("a cache layout has fields, entries or align that are not positive numbers")
        layout = PageLayout(
            kind=take(raw, "kind", str),
            format=take(raw, "format", str),
            dialect=take(raw, "dialect", str),
            entries=entries,
            channels=take(raw, "channels", int),
            rope_channels=take(raw, "rope_channels", int),
            fields=tuple(fields),
            align=align,
        )
        pages, stride = take(data, "pages", int), take(data, "page_stride", int)
        fill = data.get("fill")
        if pages < 0 or stride < layout.page_bytes:
            raise ValueError(f"{pages} pages, {stride} bytes apart, cannot hold pages of {layout.page_bytes} bytes")
        if fill is not None and not (type(fill) is int and 0 <= fill <= 255):
            raise ValueError(f"the fill of a cache is not a byte: {shorten(fill)}")
        return cls(layout, pages, stride, fill)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor in a trace, without its bits.

    Attributes:
        dtype: real dtype; the stored bits have dtype ``STORAGE[dtype]``.
        shape: sizes of the dims.
        dims: names of the dims as this site's contract calls them.
        hash: xxh3_128 of the raw bits, in hex.
        offset: first byte of the bits in the file (0 for an empty tensor).
        origin: for a link (an input, or what leaves a block), path of the earlier dataset that it equals; else empty.
    """

    dtype: str
    shape: tuple[int, ...]
    dims: str
    hash: str
    offset: int
    origin: str = ""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * STORAGE[self.dtype].itemsize

    def to_json(self) -> dict[str, Any]:
        data = {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "dims": self.dims,
            "hash": self.hash,
            "offset": self.offset,
        }
        return data | {"origin": self.origin} if self.origin else data

    @classmethod
    def from_json(cls, data: Any) -> TensorSpec:
        dtype, shape = take(data, "dtype", str), take(data, "shape", list)
        if dtype not in STORAGE:
            raise ValueError(f"unknown dtype {shorten(dtype)}")
        if len(shape) > _MAX_RANK or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"impossible shape {shorten(shape)}")
        offset = take(data, "offset", int)
        if offset < 0:
            raise ValueError(f"impossible offset {offset}")
        origin = take(data, "origin", str) if "origin" in data else ""
        return cls(dtype, tuple(shape), take(data, "dims", str), take(data, "hash", str), offset, origin)


@dataclass(frozen=True, slots=True)
class CacheRef:
    """A cache as a site saw it: its name and how many writes it had received before the call."""

    cache: str
    version: int


@dataclass(frozen=True, slots=True)
class CacheWrite:
    """One site's write to a cache: the cache, the write's number from 0, and the stored parts of the `Mutation`."""

    cache: str
    number: int
    tensors: dict[str, TensorSpec]

    @classmethod
    def from_json(cls, data: Any) -> CacheWrite:
        tensors = load_specs(data, "tensors")
        parts = {part: spec.dtype for part, spec in tensors.items()}
        if parts.items() - _WRITE_PARTS.items() or not {"slots", "records"} <= parts.keys():
            raise ValueError(f"these are not the parts of a cache write: {shorten(parts)}")
        return cls(take(data, "cache", str), take(data, "write", int), tensors)


@dataclass(frozen=True, slots=True)
class SiteRecord:
    """One site call in a trace, without tensor bits.

    Attributes:
        site: name, op and step.
        sequence: tick at which the call began; ticks count begins and finishes, so records sort by it.
        finished: tick at which it finished, or None for a call that never did.
        implementation: which implementation computed it.
        attrs: scalar arguments.
        inputs: tensor arguments by name.
        absent: optional arguments that were None.
        weights: weight arguments: ``{arg: {tensor, hash, dtype, shape}}``.
        caches: cache arguments by name.
        outputs: results by name; empty until finished.
        mutated: writes by cache argument; empty until finished.
    """

    site: Site
    sequence: int
    finished: int | None
    implementation: str
    attrs: dict[str, Any]
    inputs: dict[str, TensorSpec]
    absent: tuple[str, ...]
    weights: dict[str, Any]
    caches: dict[str, CacheRef]
    outputs: dict[str, TensorSpec]
    mutated: dict[str, CacheWrite]

    @property
    def complete(self) -> bool:
        return self.finished is not None

    @property
    def layer(self) -> int | None:
        return self.site.layer

    @property
    def phase(self) -> str:
        return self.site.phase

    def tensors(self) -> dict[str, TensorSpec]:
        """All stored tensors by the name that `Trace.read` takes: ``in/x``, ``out/y``, ``mut/cache/slots``."""
        found = {f"in/{name}": spec for name, spec in self.inputs.items()}
        found |= {f"out/{name}": spec for name, spec in self.outputs.items()}
        for arg, write in self.mutated.items():
            found |= {f"mut/{arg}/{part}": spec for part, spec in write.tensors.items()}
        return found

    @classmethod
    def from_json(cls, data: Any, weights: list[Any]) -> SiteRecord:
        """A record from its JSON entry; ``weights`` is the trace's table of weight sets."""
        try:
            return cls._checked(data, weights)
        except (ValueError, DbgError) as error:
            where = f"{data.get('step')}/{data.get('site')}" if isinstance(data, dict) else shorten(data)
            raise ValueError(f"the entry of site {shorten(where)} is damaged: {error}") from error

    @classmethod
    def _checked(cls, data: Any, weights: list[Any]) -> SiteRecord:
        name, step = take(data, "site", str), take(data, "step", str)
        if not _STEP.fullmatch(step):
            raise ValueError("its step is not a step name")
        number, finished = data.get("weights"), data.get("finished")
        if number is not None and not (type(number) is int and 0 <= number < len(weights)):
            raise ValueError(f"there is no weight set {shorten(number)}")
        if finished is not None and type(finished) is not int:
            raise ValueError(f"'finished' should be a number, got {shorten(finished)}")
        sequence = take(data, "sequence", int)
        if finished is not None and finished <= sequence:
            raise ValueError("it finished before it began")
        absent = take(data, "absent", list) if "absent" in data else []
        return cls(
            site=Site(check_name(name), take(data, "op", str), step),
            sequence=sequence,
            finished=finished,
            implementation=take(data, "implementation", str),
            attrs=take(data, "attrs", dict),
            inputs=load_specs(data, "inputs"),
            absent=tuple(str(arg) for arg in absent),
            weights={} if number is None else weights[number],
            caches={a: CacheRef(take(r, "cache", str), take(r, "version", int)) for a, r in _items(data, "caches")},
            outputs=load_specs(data, "outputs"),
            mutated={arg: CacheWrite.from_json(write) for arg, write in _items(data, "mutated")},
        )


def view_bits(array: np.ndarray, dtype: str) -> np.ndarray:
    """Raw bits as numbers: an ml_dtypes or numpy view of the same memory.

    Only ``bool`` (any byte but 0 is true) and packed fp4 (last dim doubled, ``float4_e2m1fn``) are copies.
    """
    if dtype == "bool":
        return array != 0
    if dtype == PACKED_FP4:
        *outer, channels = array.shape or (1,)
        codes = np.stack([array & 15, array >> 4], axis=-1).reshape(*outer, 2 * channels)
        return codes.view("float4_e2m1fn")
    return array.view(dtype)


def step_path(step: str) -> str:
    return f"/steps/{step}"


def site_path(site: Site) -> str:
    """Path of a site's group in the file: ``/steps/decode0/L2.attn.wq_b``."""
    return f"{step_path(site.step)}/{site.name}"


def check_site(site: Site) -> Site:
    """Return ``site`` if it can name a group in a trace: it has a step and a well-formed name."""
    if not _STEP.fullmatch(site.step):
        raise DbgError(f"site {site.name[:80]} has no step, so a trace has no place for it")
    check_name(site.name)
    return site


def check_word(name: str) -> str:
    """Return ``name`` if it can name an argument, an output or a cache: words joined by dots."""
    if not _WORD.fullmatch(name):
        raise DbgError(f"'{name[:80]}' cannot name an argument or a cache in a trace")
    return name


def _items(data: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    if key not in data:
        return []
    found = take(data, key, dict)
    for name in found:
        if not _WORD.fullmatch(name):
            raise ValueError(f"'{shorten(name)}' cannot name an argument or a cache")
    return list(found.items())


def load_specs(data: Mapping[str, Any], key: str) -> dict[str, TensorSpec]:
    """The tensors under ``data[key]`` by name; none if the key is missing."""
    return {name: TensorSpec.from_json(spec) for name, spec in _items(data, key)}
