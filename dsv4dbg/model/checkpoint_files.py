"""Where stored tensors come from: safetensors files, or a dictionary in memory.

A **source** has ``tensors`` (name -> `Info`, known without reading data), ``problems`` (phrases about files that
cannot be used) and ``read(name)``. Files are data: headers are checked before anything is read or allocated, and
tensors are views of the mapped file::

    source = SafetensorsFiles("DeepSeek-V4-Flash")
    source.tensors["norm.weight"]       # Info(dtype='BF16', shape=(4096,), file='model-00045-of-00046.safetensors')
    source.read("norm.weight")          # torch.bfloat16 [4096]
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from dsv4dbg.errors import DbgError

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_INDEX_BYTES = 100_000_000
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
DTYPE_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32", torch.int64: "I64", torch.float64: "F64",
}  # fmt: skip


@dataclass(frozen=True)
class Info:
    """What is known of a stored tensor without reading it; dtype as safetensors spells it."""

    dtype: str
    shape: tuple[int, ...]
    file: str = ""


class Source(Protocol):
    """Named tensors."""

    @property
    def tensors(self) -> Mapping[str, Info]: ...

    @property
    def problems(self) -> list[str]: ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype, contiguous; the caller must not write to it."""
        ...


class StateDict:
    """Tensors that are in memory already, such as the state_dict of a transformers model."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = {name: t.detach() for name, t in tensors.items()}
        self.tensors = {
            name: Info(DTYPE_NAMES.get(t.dtype, str(t.dtype)), tuple(t.shape)) for name, t in self._tensors.items()
        }
        self.problems: list[str] = []

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name].contiguous()


class SafetensorsFiles:
    """The ``*.safetensors`` of a directory: those that its index names, or all of them when it has none.

    Reads headers only. Files that are absent, cut short or damaged become ``problems``; nothing is raised for them.

    Raises:
        DbgError: the directory has no safetensors file, or its index is unusable.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.tensors: dict[str, Info] = {}
        self.problems: list[str] = []
        self._open: dict[str, Any] = {}
        index = self.directory / INDEX
        weight_map = _read_index(index) if index.exists() else None
        files = sorted(set(weight_map.values())) if weight_map is not None else self._all_files()
        broken = set()
        for file in files:
            try:
                header = read_header(self.directory / file)
            except DbgError as e:
                self.problems.append(e.message)
                broken.add(file)
                continue
            for name, info in header.items():
                if weight_map is not None and weight_map.get(name) != file:
                    continue
                if name in self.tensors:
                    self.problems.append(f"{one_line(name)} is both in {self.tensors[name].file} and in {file}")
                self.tensors[name] = info
        for name, file in (weight_map or {}).items():
            if name not in self.tensors and file not in broken:
                self.problems.append(f"{INDEX} says that {one_line(name)} is in {file}, which does not have it")

    def _all_files(self) -> list[str]:
        files = sorted(p.name for p in self.directory.glob("*.safetensors"))
        if not files:
            other = sorted(p.name for p in self.directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
            what = f"only {other[0]}, which is not read" if other else "no weights"
            raise DbgError(f"{self.directory} holds {what}; wanted model.safetensors or {INDEX}")
        return files

    def read(self, name: str) -> torch.Tensor:
        file = self.tensors[name].file
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.directory / file, framework="pt")
            return self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as e:
            raise DbgError(f"{self.directory / file} cannot be read at {one_line(name)}: {one_line(str(e))}") from e


def read_header(path: Path) -> dict[str, Info]:
    """Names, dtypes and shapes of a safetensors file, with all sizes checked against the file's.

    Raises:
        DbgError: one phrase that names the file and what is wrong with it.
    """
    try:
        if path.exists() and not path.is_file():
            raise DbgError(f"{path.name} is not a file")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            first = file.read(8)
            length = int.from_bytes(first, "little")
            if first == b"version ":
                raise DbgError(f"{path.name} is a Git LFS pointer, not the file itself (git lfs pull fetches it)")
            if size < 8 or (length > size - 8 and length <= MAX_HEADER_BYTES):
                raise DbgError(f"{path.name} is cut short: it ends inside its header, after {size:,} bytes")
            if length > MAX_HEADER_BYTES:
                raise DbgError(f"{path.name} is not a safetensors file: its header would have {length:,} bytes")
            text = file.read(length)
    except FileNotFoundError:
        raise DbgError(f"{path.name} is missing") from None
    except OSError as e:
        raise DbgError(f"{path.name} cannot be read: {e.strerror}") from None
    except ValueError:
        raise DbgError(f"{path.name} is not a name that a file can have") from None
    try:
        header = json.loads(text)
        entries = {n: v for n, v in header.items() if n != "__metadata__"}
        spans = {n: _entry(n, v) for n, v in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise DbgError(f"{path.name} has a damaged header: {one_line(str(e))}") from None
    end = 0
    for name, (start, stop, _, _) in sorted(spans.items(), key=lambda item: item[1][:2]):
        if start != end:
            raise DbgError(f"{path.name} has a damaged header: {one_line(name)} starts at {start:,}, wanted {end:,}")
        end = stop
    data = size - 8 - length
    if data < end:
        raise DbgError(f"{path.name} is cut short: its header promises {end:,} bytes of data, it has {data:,}")
    if data > end:
        raise DbgError(f"{path.name} has {data - end:,} bytes too many after its last tensor")
    return {name: Info(dtype, shape, path.name) for name, (_, _, dtype, shape) in spans.items()}


def _entry(name: str, entry: dict[str, Any]) -> tuple[int, int, str, tuple[int, ...]]:
    dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"{one_line(name)} has the unknown dtype {one_line(str(dtype))}")
    if not all(type(n) is int and 0 <= n < 2**63 for n in (*shape, start, stop)):
        raise ValueError(f"{one_line(name)} has a shape or offset that is not a whole number")
    if stop - start != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise ValueError(f"{one_line(name)} has {stop - start:,} bytes, wanted {dtype} {list(shape)}")
    return start, stop, dtype, shape


def _read_index(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_INDEX_BYTES + 1)
        if len(text) > MAX_INDEX_BYTES:
            raise DbgError(f"{path} is larger than {MAX_INDEX_BYTES:,} bytes")
        weight_map = json.loads(text)["weight_map"]
        if not weight_map:
            raise DbgError(f"{path} names no tensors")
        for name, file in weight_map.items():
            # a file name only: an index must not lead out of its directory
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise DbgError(
                    f"{path} names the file {one_line(str(file))} for {one_line(name)}, wanted a *.safetensors"
                )
    except OSError as e:
        raise DbgError(f"{path} cannot be read: {e.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise DbgError(f"{path} is damaged: wanted JSON with an object weight_map ({one_line(str(e))})") from None
    return weight_map


def one_line(text: str, limit: int = 100) -> str:
    """``text`` from a file, fit to be printed: no line breaks or terminal codes, at most ``limit`` characters."""
    text = "".join(c if c.isprintable() else " " for c in text[: limit + 1])
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
