"""Printers that commands share: JSON documents, sizes, progress on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def print_json(schema: str, document: dict[str, Any]) -> None:
    """One JSON document on stdout, with its schema name first."""
    print(json.dumps({"schema": f"dsv4dbg.{schema}/1", **document}, indent=2, ensure_ascii=False))


def size(count: int) -> str:
    """Bytes for people: ``634 MB``."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def note(text: str) -> None:
    """A diagnostic line on stderr."""
    print(text, file=sys.stderr)


def columns(rows: list[tuple[str, ...]], indent: str = "") -> str:
    """Left-aligned columns, two blanks apart; the last one is not padded."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
    return "\n".join(f"{indent}{line}".rstrip() for line in lines)


def progress(items: Iterable[T], total: int | None, what: str) -> Iterator[T]:
    """The same items, with a progress bar on stderr when that is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, what, total=total, console=Console(stderr=True), transient=True)
