"""A process of our own that answers requests: the interpreter's worker, the compiler's.

Started with a fresh Python (never forked), it talks over a socket pair that only parent and child hold; its death is an
exception here that says how it died.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection

TAIL = 2000  # characters of the child's stderr that a message shows


class ChildDied(RuntimeError):
    """The process ended, or was ended because it took too long; the text says how, with the end of its stderr."""


class Child:
    """``python -m MODULE FD``: a process at the other end of ``connection``."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self.pid = os.getpid()  # of the parent: a copy of this object in a forked process is of no use there
        ours, theirs = Pipe()
        self.connection = ours
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self._stderr,
            stderr=self._stderr,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
        theirs.close()

    @property
    def usable(self) -> bool:
        return self.pid == os.getpid() and self._process.poll() is None

    def wait(self, seconds: float | None = None) -> None:
        """Wait for a message; a child that sends none in time is killed."""
        if not self.connection.poll(seconds):
            self.close(kill=True)
            raise ChildDied(f"no answer within {seconds:g} s")

    def died(self) -> ChildDied:
        """The exception for a connection that broke off."""
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._stderr.seek(0)
        text = self._stderr.read().decode(errors="replace")[-TAIL:].strip()
        return ChildDied(how + (f"; its last words:\n{text}" if text else ""))

    def close(self, kill: bool = False) -> None:
        """End the process: by closing the connection, or at once."""
        self.connection.close()
        if self.pid != os.getpid():
            return
        if kill:
            self._process.kill()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def parent() -> Connection:
    """In the child: the connection to the parent; what is printed goes to stderr."""
    return Connection(int(sys.argv[1]))
