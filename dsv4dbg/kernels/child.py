"""A process of our own that answers requests: the interpreter's worker, the compiler's, those of a bisect.

Started with a fresh Python (never forked), it talks over a socket pair that only parent and child hold; its death is an
exception here that says how it died.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

TAIL = 2000  # bytes of the child's stderr that a message shows
PR_SET_PDEATHSIG = 1


class ChildDied(RuntimeError):
    """The process ended, or was ended because it took too long; the text says how, with the end of its stderr."""


class Child:
    """``python -m MODULE FD``: a process at the other end of ``connection``.

    Args:
        fds: file descriptors that it gets too, under the same numbers.
        arguments: after FD.
    """

    def __init__(
        self, module: str, environment: Mapping[str, str], fds: Sequence[int] = (), arguments: Sequence[str] = ()
    ) -> None:
        self.pid = os.getpid()  # of the parent: a copy of this object in a forked process is of no use there
        ours, theirs = Pipe()
        self.connection = ours
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._stderr,
            stderr=self._stderr,
            pass_fds=[theirs.fileno(), *fds],
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

    @property
    def last_words(self) -> str:
        """The end of what it printed."""
        size = os.fstat(self._stderr.fileno()).st_size
        return os.pread(self._stderr.fileno(), TAIL, max(0, size - TAIL)).decode(errors="replace").strip()

    def reap(self, seconds: float = 10) -> int | None:
        """Exit code of a process that is ending (negative: the signal), killed if it does not end by itself.

        None: it does not die even so, as one that is stuck in a driver.
        """
        for _ in range(2):
            try:
                return self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return None

    def died(self) -> ChildDied:
        """The exception for a connection that broke off."""
        code = self.reap()
        if code is None:
            return ChildDied("cannot be killed")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        text = self.last_words
        return ChildDied(how + (f"; its last words:\n{text}" if text else ""))

    def close(self, kill: bool = False) -> int | None:
        """End the process: by closing the connection, or at once. Returns what `reap` does."""
        self.connection.close()
        if self.pid != os.getpid():
            return None
        if kill:
            self._process.kill()
        return self.reap()


def parent() -> Connection:
    """In the child: the connection to the parent; what is printed goes to stderr."""
    return Connection(int(sys.argv[1]))


def die_with_parent() -> None:
    """In the child: be killed when the parent's thread that started this process ends, even in an endless loop."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
