"""What tests of bisects share: a short workload, a watcher, calls made of examples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsv4dbg.bisect.journal import Trial
from dsv4dbg.kernels.arrays import copied
from dsv4dbg.kernels.dims import TINY
from dsv4dbg.kernels.numerics import OFFICIAL
from dsv4dbg.kernels.registry import registry
from dsv4dbg.kernels.table import Call
from dsv4dbg.model.replay import run
from dsv4dbg.plan import REFERENCE
from dsv4dbg.site import Site

STEPS: list[dict[str, Any]] = [
    {"phase": "prefill", "feeds": [[0, list(range(10, 40)), 30], [1, [7], 1]]},
    {"phase": "decode", "feeds": [[0, [5], 1], [1, [6], 1]]},
    {"phase": "decode", "feeds": [[1, [8], 1], [0, [9], 1]]},
    {"phase": "verify", "feeds": [[0, [11, 12, 13], 2], [1, [14, 15], 1]]},
    {"phase": "decode", "feeds": [[0, [16], 1], [1, [17], 1]]},
]


def workload(folder: Path, steps: int = len(STEPS)) -> str:
    """A file with the first steps of two short sequences."""
    path = folder / "short.json"
    path.write_text(json.dumps({"name": "short", "sequences": 2, "steps": STEPS[:steps]}))
    return str(path)


class Watcher:
    """Remembers what a bisect told it."""

    def __init__(self) -> None:
        self.ops: tuple[str, ...] = ()
        self.trials: list[Trial] = []

    def opened(self, model: str, steps: tuple[str, ...], ops: tuple[str, ...]) -> None:
        self.ops = ops

    def trial(self, trial: Trial) -> None:
        self.trials.append(trial)


def example_calls(name: str, seed: int = 7) -> Iterator[Call]:
    """An op's examples as calls of the reference, with tensors of their own."""
    op = registry().ops[name]
    assert op.examples_function is not None
    for example in op.examples_function(TINY, np.random.default_rng(seed)):
        args = copied(op.bind((), example.args))
        yield Call(Site(f"L1.attn.{name}", name, "prefill0"), op, REFERENCE, args, OFFICIAL)


def call_of(name: str, tokens: int) -> Call:
    """The first example of an op with so many tokens and no empty tensor."""
    for call in example_calls(name, 3):
        first = next(n for n, arg in call.op.args.items() if arg.dims.startswith("token"))
        if len(call.args[first]) == tokens and all(v.numel() for v in call.args.values() if torch.is_tensor(v)):
            return call
    raise AssertionError(f"no example of {name} with {tokens} tokens")


def results(call: Call, implementation: str = REFERENCE) -> dict[str, Any]:
    """Outputs and mutated caches by name; the call stays as it was."""
    return run(call, registry().implementation(call.op.name, implementation))
