"""Errors that a person is meant to read: one sentence that says what is wrong and what to do.

The command line prints them without a traceback and ends with their exit code. Anything that is
not a `DbgError` is a bug of ours.
"""

from __future__ import annotations


class DbgError(Exception):
    """Wrong use or bad input: a message, an optional hint, and exit code 2."""

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n hint: {self.hint}" if self.hint else self.message


class Untestable(DbgError):
    """Nothing could be tested (no GPU, reference not repeatable): exit code 125, which git bisect skips."""

    exit_code = 125
