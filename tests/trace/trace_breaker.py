"""Breaks captures on purpose: kills a writer at the n-th call of the system, or fails that call.

Run as a program it forks one writer per case, without the threads that a test process may have:

    python trace_breaker.py boundaries DIR      # SIGKILL at every write, flush, close and removal
    python trace_breaker.py random DIR COUNT SEED   # SIGKILL at random moments

Each case is a folder with ``run.h5`` (or less) and ``done``, one byte per call that the writer saw finish.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

CALLS = ["open", "write", "pwrite", "ftruncate", "fsync", "unlink", "close"]
REAL = {name: getattr(os, name) for name in CALLS}


class Breaker:
    """Notes the calls that change files; at number ``at`` it acts ``before``, or ``half`` way through a write."""

    def __init__(self, at: int = -1, manner: str = "before", act: Callable[[], None] = lambda: None) -> None:
        self.seen: list[str] = []
        self._at, self._manner, self._act = at, manner, act

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self._wrap(name))

    @staticmethod
    def remove() -> None:
        for name in CALLS:
            setattr(os, name, REAL[name])

    def _wrap(self, name: str) -> Callable:
        def call(*args, **kwargs):
            self.seen.append(name)
            if len(self.seen) == self._at + 1:
                if self._manner == "half":
                    half = memoryview(args[1]).cast("B")
                    REAL[name](args[0], half[: len(half) // 2], *args[2:])
                self._act()
            return REAL[name](*args, **kwargs)

        return call


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def boundary_scenario():
    from trace_scenario import Scenario

    return Scenario(seed=3, steps=1, layers=1)


def random_scenario():
    from trace_scenario import Scenario

    return Scenario(seed=4, steps=6, layers=4, tokens=40)


def capture(scenario, folder: Path, breaker: Breaker | None = None) -> None:
    done = REAL["open"](folder / "done", os.O_WRONLY | os.O_CREAT)
    if breaker:
        breaker.install()
    scenario.capture(folder / "run.h5", lambda call: REAL["write"](done, b"."))


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    finally:
        os._exit(0)


def cases(scenario, root: Path) -> list[tuple[int, str]]:
    """(number of a call, manner) of every way to break the capture, found by making it once in ``root/whole``."""
    whole = Breaker()
    (root / "whole").mkdir()
    capture(scenario, root / "whole", whole)
    whole.remove()
    before = [(at, "before") for at in range(len(whole.seen))]
    return before + [(at, "half") for at, name in enumerate(whole.seen) if name in ("write", "pwrite")]


def boundaries(root: Path) -> None:
    scenario = boundary_scenario()
    for at, manner in cases(scenario, root):
        folder = root / f"{at}-{manner}"
        folder.mkdir()
        pid = fork(lambda folder=folder, at=at, manner=manner: capture(scenario, folder, Breaker(at, manner, die)))
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), f"case {at} {manner} was not killed"


def at_random(root: Path, count: int, seed: int) -> None:
    scenario = random_scenario()
    (root / "whole").mkdir()
    begin = time.perf_counter()
    capture(scenario, root / "whole")
    duration = time.perf_counter() - begin
    moments = random.Random(seed)
    for case in range(count):
        folder = root / str(case)
        folder.mkdir()
        pid = fork(lambda folder=folder: capture(scenario, folder))
        time.sleep(duration * moments.uniform(0, 1.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def limited(root: Path, limit: int) -> None:
    """Capture under a limit on the size of files, and print the sentence that comes of it."""
    from dsv4dbg.errors import DbgError

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        capture(random_scenario(), root)
    except DbgError as error:
        sys.stdout.write(error.message)


if __name__ == "__main__":
    verb, root, *numbers = sys.argv[1:]
    {"boundaries": boundaries, "random": at_random, "limited": limited}[verb](Path(root), *map(int, numbers))
