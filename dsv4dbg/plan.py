"""Plan: which implementation computes which site.

``*=torch, op:rms_norm=triton, L3.attn.*=mine``: rules in order, the last one that matches wins.
A plan holds names only; the registry turns them into code.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4dbg.errors import DbgError
from dsv4dbg.site import Pattern, Site

REFERENCE = "torch"


@dataclass(frozen=True)
class Plan:
    """Frozen map from site patterns to implementation names. Every site has one: the default rule is ``*=torch``."""

    rules: tuple[tuple[Pattern, str], ...] = ((Pattern("*"), REFERENCE),)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read ``PATTERN=NAME[, PATTERN=NAME...]``; rules that leave sites open come after ``*=torch``."""
        rules: list[tuple[Pattern, str]] = []
        for part in filter(None, (p.strip() for p in text.split(","))):
            pattern, equals, name = part.rpartition("=")
            if not equals or not pattern.strip() or not name.strip():
                raise DbgError(f"'{part}' is not a plan rule", "rules look like '*=torch' or 'op:rms_norm=triton'")
            rules.append((Pattern(pattern.strip()), name.strip()))
        if not rules or rules[0][0].text != "*":
            rules.insert(0, (Pattern("*"), REFERENCE))
        return cls(tuple(rules))

    def implementation(self, site: Site) -> str:
        return next(name for pattern, name in reversed(self.rules) if pattern.matches(site))

    def is_explicit(self, site: Site) -> bool:
        """Whether a rule other than the catch-all ``*`` chose this site's implementation."""
        return next(p.text != "*" for p, _ in reversed(self.rules) if p.matches(site))

    def __str__(self) -> str:
        return ", ".join(f"{pattern}={name}" for pattern, name in self.rules)
