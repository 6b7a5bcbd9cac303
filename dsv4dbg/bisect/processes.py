"""The parent's side of walkers and workers: starting them, asking with a time limit, and burying them.

A worker that dies, hangs or raises becomes a `CandidateFault`; the next question starts a fresh one. A process that
cannot be killed (stuck in a driver) ends the run instead of blocking it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from dsv4dbg.bisect.faults import Fault, classify
from dsv4dbg.bisect.protocol import (
    Failed,
    Hello,
    Missing,
    Opened,
    Passing,
    Placed,
    Ran,
    Ready,
    Refused,
    Run,
    Shipped,
    Walk,
    Walked,
)
from dsv4dbg.bisect.shared import Memory
from dsv4dbg.errors import DbgError, Untestable
from dsv4dbg.kernels.child import Child

START = 120  # seconds in which a process must have started
LAUNCHES_ONE_BY_ONE = {"AMD_SERIALIZE_KERNEL": "3", "HIP_LAUNCH_BLOCKING": "1", "CUDA_LAUNCH_BLOCKING": "1"}


class CandidateFault(Exception):
    """A candidate's run ended in something other than results."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.text)
        self.fault = fault


class DeviceLost(Untestable):
    """A process cannot be killed: the device or its driver is stuck, and nothing more can be tested."""


def _child(module: str, memory: Memory, device: str, environment: Mapping[str, str]) -> Child:
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    interpret = {"TRITON_INTERPRET": "1"} if device.startswith("cpu") else {}
    return Child(module, threads | interpret | dict(environment), (memory.fd,), (str(memory.fd), str(memory.frames)))


def _bury(child: Child, kill: bool) -> None:
    if child.close(kill) is None:
        raise DeviceLost("a process of the candidate cannot be killed: the device is lost", "reboot, then use --resume")


class Worker:
    """A worker process that is started when it is needed.

    Args:
        timeout: seconds that one run may take.
        environment: of the process.
    """

    def __init__(
        self, memory: Memory, hello: Hello, timeout: float, environment: Mapping[str, str] | None = None
    ) -> None:
        self._memory, self._hello, self.timeout = memory, hello, timeout
        self._environment = dict(environment or {})
        self._child: Child | None = None

    def start(self) -> Ready:
        """Start the process anew.

        Raises:
            DbgError: the plug-in does not load, there is no such device, or the process died of loading it.
        """
        self.close(kill=True)
        self._child = _child("dsv4dbg.bisect.worker", self._memory, self._hello.device, self._environment)
        try:
            self._child.connection.send(self._hello)
            answer = self._receive(START)
        except (EOFError, OSError) as error:
            raise DbgError(f"loading '{self._hello.candidate}' ended the process: it {self._end()}") from error
        if isinstance(answer, Failed):
            self.close(kill=True)
            raise _wrong_use(answer)
        return answer

    def run(self, request: Run) -> Ran | Refused:
        """One run of the candidate.

        Raises:
            CandidateFault: it raised, died, or took too long.
            DbgError: the candidate does not keep to the op's signature.
        """
        if self._child is None:
            self.start()
        assert self._child is not None
        ranges: tuple[Any, ...] = ()
        try:
            self._child.connection.send(request)
            answer = self._receive(self.timeout)
            if isinstance(answer, Placed):
                ranges = answer.ranges
                answer = self._receive(self.timeout)
        except _TooLong as error:
            words = self._child.last_words
            self.close(kill=True)
            raise CandidateFault(classify(hang=self.timeout, words=words)) from error
        except (EOFError, OSError) as error:
            code = self._reaped()
            raise CandidateFault(classify(exitcode=code, words=self._last_words, ranges=ranges)) from error
        if isinstance(answer, Failed):
            if answer.wrong_use:
                raise _wrong_use(answer)
            words = self._child.last_words
            if not self._hello.device.startswith("cpu"):
                self.close(kill=True)  # a device error may leave the process unusable
            raise CandidateFault(classify(raised=answer.kind, text=answer.text, words=words, ranges=ranges))
        if isinstance(answer, Refused) and answer.spent:
            self.close(kill=True)
        return answer

    def _receive(self, seconds: float) -> Any:
        assert self._child is not None
        if not self._child.connection.poll(seconds):
            raise _TooLong
        return self._child.connection.recv()

    def _reaped(self) -> int:
        assert self._child is not None
        code = self._child.reap()
        self._last_words = self._child.last_words
        self._child = None
        if code is None:
            raise DeviceLost("the candidate's process cannot be killed: the device is lost", "then use --resume")
        return code

    def _end(self) -> str:
        assert self._child is not None
        text = str(self._child.died())
        self._child = None
        return text

    def close(self, kill: bool = False) -> None:
        child, self._child = self._child, None
        if child is not None:
            _bury(child, kill)


class _TooLong(Exception):
    pass


def _wrong_use(failed: Failed) -> DbgError:
    message, _, hint = failed.text.partition("\n hint: ")
    return (Untestable if failed.exit_code == Untestable.exit_code else DbgError)(message, hint)


class Walker:
    """A walk in a process of its own. Iterate over it for its messages; give every frame back with `free`.

    Args:
        timeout: seconds without a message after which a live walk counts as hanging.
    """

    def __init__(self, memory: Memory, walk: Walk, timeout: float | None = None) -> None:
        self._child = _child("dsv4dbg.bisect.walker", memory, walk.request.device if walk.live else "", {})
        self._child.connection.send(walk)
        self._live, self._timeout = bool(walk.live), timeout
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Opened | Shipped | Missing | Passing | Walked]:
        """Messages until the walk ends.

        Raises:
            DbgError: the request cannot be run.
            CandidateFault: of a live walk: it died of the candidate.
            Untestable: the reference's own forward died.
        """
        while True:
            try:
                if self._live and not self._child.connection.poll(self._timeout):
                    raise self._hangs()
                message = self._child.connection.recv()
            except (EOFError, OSError) as error:
                raise self._died() from error
            if isinstance(message, Failed):
                raise self._failed(message)
            yield message
            if isinstance(message, Walked):
                return

    def _died(self) -> Exception:
        code = self._child.reap()
        if code is None:
            return DeviceLost("the walker's process cannot be killed: the device is lost", "then use --resume")
        fault = classify(exitcode=code, words=self._child.last_words)
        return CandidateFault(fault) if self._live else Untestable(f"the reference's forward died: {fault.text}")

    def _failed(self, failed: Failed) -> Exception:
        if failed.wrong_use:
            return _wrong_use(failed)
        fault = classify(raised=failed.kind, text=failed.text, words=self._child.last_words)
        return CandidateFault(fault) if self._live else Untestable(f"the reference's forward failed: {fault.text}")

    def _hangs(self) -> CandidateFault:
        words = self._child.last_words
        self.close(kill=True)
        return CandidateFault(classify(hang=self._timeout, words=words))

    def free(self, frame: int) -> None:
        """Give a frame back; from any thread."""
        with self._lock, contextlib.suppress(OSError):  # it may have ended
            self._child.connection.send(frame)

    def close(self, kill: bool = False) -> None:
        _bury(self._child, kill)
