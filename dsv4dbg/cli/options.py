"""What options of several commands mean: text from files, token ids, names of new files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dsv4dbg.errors import DbgError


def read_text(path: Path) -> str:
    """A prompt file's text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DbgError(f"the prompt file {path} cannot be read: {error}") from error


def token_ids(text: str) -> tuple[int, ...]:
    """``1,2,3``, or what stands in a file of that name."""
    if not re.fullmatch(r"[\d\s,]*", text):
        text = read_text(Path(text))
    try:
        return tuple(int(part) for part in re.split(r"[\s,]+", text.strip()) if part)
    except ValueError as error:
        raise DbgError(f"--tokens holds something that is not a token id: {error}") from error


def free_path(stem: str, suffix: str) -> Path:
    """The first unused name in traces/: ``tiny-0001.h5``, ``tiny-0002.h5``..."""
    directory = Path("traces")
    try:
        directory.mkdir(exist_ok=True)
    except OSError as error:
        raise DbgError(f"cannot create {directory.resolve()}: {error.strerror}", "choose a file with -o") from error
    number = 1
    while any((directory / f"{stem}-{number:04d}{suffix}{more}").exists() for more in ("", ".journal")):
        number += 1
    return directory / f"{stem}-{number:04d}{suffix}"


def one_call(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: arguments and options of a command that runs one call of a trace with a candidate."""
    for decorate in reversed((
        click.argument("trace", type=click.Path(path_type=Path)),
        click.argument("site"),
        click.option("--candidate", default="triton", show_default=True, metavar="NAME", help="Its implementation."),
        click.option("--plugin", type=click.Path(path_type=Path), multiple=True, metavar="FILE", help="Load kernels."),
        click.option("--model", metavar="NAME|DIR", help="Where the weights are (default: the trace's model)."),
        click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N."),
        click.option("--timeout", default=60.0, show_default=True, help="Seconds that one run of it may take."),
    )):  # fmt: skip
        command = decorate(command)
    return command
