"""The JSON in a trace: written on one line, and read as the untrusted text that it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from dsv4dbg.errors import DbgError

SCHEMA = "dsv4dbg.trace"
VERSION = 1
_NAMES = {dict: "object", list: "array", str: "string", int: "whole number", bool: "boolean"}


def to_json(data: Any) -> bytes:
    """ASCII JSON on one line; numpy scalars count as numbers. DbgError for anything else that JSON lacks."""
    return json.dumps(data, separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise DbgError(f"a trace cannot hold {shorten(repr(value))} as JSON")


def from_json(text: bytes) -> Any:
    """Parse untrusted JSON; every way in which that can fail is a ValueError."""
    try:
        return json.loads(text.decode())
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def check_schema(data: Any) -> None:
    """ValueError unless ``data`` says that it follows this version of this schema."""
    schema, version = take(data, "schema", str), take(data, "version", int)
    if schema != SCHEMA:
        raise ValueError(f"its schema is {shorten(schema)}, not {SCHEMA}")
    if version != VERSION:
        raise ValueError(f"it has version {version} of the trace format, and this dsv4dbg reads version {VERSION}")


def take(data: Any, key: str, kind: type) -> Any:
    """``data[key]`` if it is there and of type ``kind``; ValueError with a sentence otherwise."""
    if not isinstance(data, dict):
        raise ValueError(f"expected a JSON object with '{key}', got {shorten(data)}")
    value = data.get(key)
    if type(value) is not kind:
        raise ValueError(f"'{key}' should be a JSON {_NAMES[kind]}, got {shorten(value)}")
    return value


def shorten(value: Any) -> str:
    """One short line that shows a value which may be anything."""
    text = one_line(str(value)[:200])
    return text if len(text) <= 60 else text[:57] + "..."


def one_line(text: str) -> str:
    """``text`` as one line without characters that a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first few of ``names``, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
