"""What tests share: the tiny model, a captured trace, and running commands in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PROMPT = "The capital of France is"


@dataclass(frozen=True)
class Ran:
    """A finished command."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True, scope="module")
def no_plug_in_outlives_its_module() -> Iterator[None]:
    """What one test file loads with ``--plugin`` is not in the registry that the next one sees."""
    yield
    if "dsv4dbg.kernels.registry" in sys.modules:
        from dsv4dbg.kernels.registry import registry

        known = registry().implementations
        for key in [key for key, i in known.items() if i.function.__module__.startswith("dsv4dbg_plugin_")]:
            del known[key]


@pytest.fixture
def dsv4dbg(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run ``dsv4dbg ARGS`` in this process."""
    from dsv4dbg.cli.main import main

    def run(*args: str | Path) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(a) for a in args])
        out, err = capsys.readouterr()
        return Ran(int(end.value.code or 0), out, err)

    return run


@pytest.fixture(scope="session")
def tiny_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full capture of the tiny model: the prompt and two decode steps."""
    from dsv4dbg.model.recording import Request, record

    path = tmp_path_factory.mktemp("traces") / "tiny.h5"
    record(Request(prompt=PROMPT, decode=2), path)
    return path
