"""Names of places in a forward, and patterns that select them.

A *Site* is one call of one op, named by its role: ``L17.attn.wq_b``. With a step in front it is one
call in one step of a run: ``decode3/L17.attn.wq_b``. Block boundaries (``L17``, ``L17.attn``,
``L17.ffn``) are sites too; the ends are ``embed``, ``head.norm``, ``mtp0.attn.wq_b``.

A pattern selects sites by name (``L16-17.*.wq_*``, shell wildcards, layer ranges) or by op
(``op:fp8_linear``). Without a step a pattern matches every step.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass

from dsv4dbg.errors import DbgError

BLOCK = "block"  # the op name of a block boundary, where several ops' work is seen as one
_LAYER = re.compile(r"^(?:L|mtp)(\d+)(?:\.|$)")
_RANGE = re.compile(r"^L(\d+)-(\d+)(?=\.|$)")
_NAME = re.compile(r"^(?:[a-z]+\d*/)?[A-Za-z][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*")


@dataclass(frozen=True)
class Site:
    """One call of one op.

    Attributes:
        name: role without the step, such as ``L17.attn.wq_b``.
        op: name of the op, or ``block`` for a block boundary.
        step: name of the step, such as ``prefill0`` or ``decode3``; empty outside a run.
    """

    name: str
    op: str
    step: str = ""

    @property
    def path(self) -> str:
        return f"{self.step}/{self.name}" if self.step else self.name

    @property
    def layer(self) -> int | None:
        """Main layer number, or None at the ends and in the MTP block."""
        match = _LAYER.match(self.name)
        return int(match[1]) if match and self.name.startswith("L") else None

    @property
    def phase(self) -> str:
        """``prefill``, ``decode`` or ``verify``: the step's name without its number."""
        return self.step.rstrip("0123456789")

    def __str__(self) -> str:
        return self.path


def op_name(text: str) -> str:
    """Canonical op name: on the command line ``-`` and ``_`` are the same."""
    return text.replace("-", "_")


@dataclass(frozen=True)
class Pattern:
    """A selection of sites: by op (``op:NAME``) or by name (wildcards, ``L16-17`` ranges)."""

    text: str

    def __post_init__(self) -> None:
        body = self.text.removeprefix("op:")
        if not body or re.search(r"[^\w.*?\[\]!/:+-]", self.text):
            raise DbgError(
                f"'{self.text}' is not a site pattern",
                "patterns look like 'L16-17.*.wq_*', 'decode*/L3.attn.*' or 'op:fp8_linear'",
            )

    def matches(self, site: Site) -> bool:
        if self.text.startswith("op:"):
            return fnmatch.fnmatchcase(site.op, op_name(self.text[3:]))
        step, _, name = self.text.rpartition("/")
        if step and not fnmatch.fnmatchcase(site.step, step):
            return False
        layers = _RANGE.match(name)
        if layers:
            if site.layer is None or not int(layers[1]) <= site.layer <= int(layers[2]):
                return False
            return fnmatch.fnmatchcase(site.name, f"L{site.layer}{name[layers.end() :]}")
        return fnmatch.fnmatchcase(site.name, name)

    def __str__(self) -> str:
        return self.text


def check_name(name: str) -> str:
    """Return ``name`` if it is a well-formed site name; raise otherwise (names come from files too)."""
    if not _NAME.fullmatch(name):
        raise DbgError(f"'{name[:80]}' is not a site name")
    return name
