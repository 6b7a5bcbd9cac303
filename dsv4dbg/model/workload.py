"""Workload: which tokens a run feeds, step by step, with drafts and how many of them are accepted.

A workload fixes every token beforehand, so that two implementations see the same sequence of steps whatever they
compute. `coverage` is the default one: it walks every edge that a public fault needed to show.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsv4dbg.errors import DbgError
from dsv4dbg.model.batch import Chunk, Step
from dsv4dbg.model.config import ModelConfig

PHASES = ("prefill", "decode", "verify")
DRAFTS = (2, 3, 4)  # tokens per verify step in `coverage`


@dataclass(frozen=True)
class Feed:
    """One sequence's part in a step.

    Attributes:
        tokens: what is fed, the drafts of a verify step included.
        accepted: how many of them stay; the sequence is taken back to that length after the step.
    """

    sequence: int
    tokens: tuple[int, ...]
    accepted: int

    @classmethod
    def all_of(cls, sequence: int, tokens: Sequence[int]) -> Feed:
        return cls(sequence, tuple(tokens), len(tokens))


@dataclass(frozen=True)
class WorkloadStep:
    phase: str
    feeds: tuple[Feed, ...]


@dataclass(frozen=True)
class Workload:
    """Steps over a number of sequences, each starting empty."""

    name: str
    num_sequences: int
    steps: tuple[WorkloadStep, ...]

    def __iter__(self) -> Iterator[tuple[Step, tuple[Feed, ...]]]:
        """Steps with their names (``prefill0``, ``decode0``...) and the feeds they came from."""
        count: dict[str, int] = dict.fromkeys(PHASES, 0)
        for step in self.steps:
            chunks = tuple(Chunk(f.sequence, f.tokens) for f in step.feeds)
            yield Step(f"{step.phase}{count[step.phase]}", chunks, all_rows=step.phase == "verify"), step.feeds
            count[step.phase] += 1

    def spans(self) -> Iterator[tuple[str, list[tuple[Feed, int]]]]:
        """For each step its phase and the feeds with the position at which each begins."""
        lengths = [0] * self.num_sequences
        for step in self.steps:
            yield step.phase, [(feed, lengths[feed.sequence]) for feed in step.feeds]
            for feed in step.feeds:
                lengths[feed.sequence] += feed.accepted

    @property
    def max_tokens(self) -> list[int]:
        """The largest length that each sequence reaches, drafts included."""
        most = [0] * self.num_sequences
        for _, feeds in self.spans():
            for feed, start in feeds:
                most[feed.sequence] = max(most[feed.sequence], start + len(feed.tokens))
        return most

    @property
    def step_tokens(self) -> int:
        return max((len(f.tokens) for step in self.steps for f in step.feeds), default=1)

    def to_json(self) -> dict[str, Any]:
        steps = [
            {"phase": s.phase, "feeds": [[f.sequence, list(f.tokens), f.accepted] for f in s.feeds]} for s in self.steps
        ]
        return {"name": self.name, "sequences": self.num_sequences, "steps": steps}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], vocab: int) -> Workload:
        """Read and check a workload.

        Raises:
            DbgError: what is wrong with it, in one sentence.
        """
        try:
            steps = tuple(
                WorkloadStep(s["phase"], tuple(Feed(int(q), tuple(map(int, t)), int(a)) for q, t, a in s["feeds"]))
                for s in data["steps"]
            )
            workload = cls(str(data["name"]), int(data["sequences"]), steps)
        except (KeyError, TypeError, ValueError) as error:
            raise DbgError(f"the workload is malformed: {type(error).__name__} {error}") from error
        for number, step in enumerate(workload.steps):
            if step.phase not in PHASES:
                raise DbgError(f"step {number} of the workload has phase '{step.phase}'", f"known: {', '.join(PHASES)}")
            for feed in step.feeds:
                if not 0 <= feed.sequence < workload.num_sequences:
                    raise DbgError(f"step {number} feeds sequence {feed.sequence} of {workload.num_sequences}")
                if not 0 <= feed.accepted <= len(feed.tokens) or any(not 0 <= t < vocab for t in feed.tokens):
                    raise DbgError(f"step {number} accepts {feed.accepted} tokens or feeds ids outside 0..{vocab - 1}")
            fed = [f.sequence for f in step.feeds]
            if len(set(fed)) != len(fed):
                raise DbgError(f"step {number} feeds a sequence twice")
        return workload


def load_workload(path: Path, vocab: int) -> Workload:
    """Read a workload file (JSON, as `Workload.to_json` writes it)."""
    try:
        return Workload.from_json(json.loads(Path(path).read_text(encoding="utf-8")), vocab)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DbgError(f"the workload {path} cannot be read: {error}") from error


class _Streams:
    """Fixed random token streams of all sequences, and how far each has been fed."""

    def __init__(self, num_sequences: int, length: int, vocab: int, seed: int) -> None:
        rng = np.random.Generator(np.random.Philox(key=seed))
        self._tokens = rng.integers(3, vocab, (num_sequences, length)).tolist()
        self._wrong = rng.integers(3, vocab, (num_sequences, length)).tolist()
        self._fed = [0] * num_sequences

    def take(self, sequence: int, count: int, accepted: int | None = None) -> Feed:
        """The next ``count`` tokens; with ``accepted``, those after it are wrong drafts."""
        start = self._fed[sequence]
        keep = count if accepted is None else accepted
        tokens = self._tokens[sequence][start : start + keep] + self._wrong[sequence][start + keep : start + count]
        self._fed[sequence] = start + keep
        return Feed(sequence, tuple(tokens), keep)


def coverage(config: ModelConfig, seed: int = 0) -> Workload:
    """The default workload of bisect and selftest.

    Seven ragged sequences: 0 longer than 4 x index_topk x ratio and 3 x the HCA ratio, prefilled in one piece; 1 in
    chunks split at 4k+1 and hca*k-1; 2 starts just below the window and decodes across its edge; 3 stays empty for
    a while; 4 has one token; 5 verifies across an HCA edge; 6 decodes from nothing. Then decode over all positions
    mod 4, and verify with 2 to 4 tokens and every accepted length, different ones side by side.
    """
    csa, hca = config.csa_ratio, config.hca_ratio
    window, topk = config.sliding_window, config.index_topk
    long = max(4 * topk * csa, 3 * hca) + csa + 2
    chunked = (
        [csa * 5 + 1, hca - 1 - (csa * 5 + 1), hca, hca * 2 + 7] if hca > csa * 5 + 2 else [csa + 1, hca - 1, hca * 3]
    )
    edge = max(1, min(window, hca) - 3)
    streams = _Streams(7, long + sum(chunked) + 64, config.vocab_size, seed)
    steps = [
        WorkloadStep(
            "prefill", (streams.take(0, long), streams.take(1, chunked[0]), streams.take(3, 0), streams.take(4, 1))
        ),
        *(WorkloadStep("prefill", (streams.take(1, count),)) for count in chunked[1:-1]),
        WorkloadStep("prefill", (streams.take(2, edge), streams.take(1, chunked[-1]), streams.take(5, hca - 5))),
    ]
    for number in range(2 * csa):
        feeds = [streams.take(s, 1) for s in (0, 1, 2, 4, 6)]
        steps.append(WorkloadStep("decode", tuple(feeds[::-1] if number % 2 else feeds)))
    steps.append(WorkloadStep("prefill", (streams.take(3, csa + 1), streams.take(4, 2))))
    cases = [(n, accepted) for n in DRAFTS for accepted in range(1, n + 1)]
    short_first = sorted(cases, key=lambda case: case[1])  # crosses the HCA edge first with drafts that are rejected
    for number, case in enumerate(cases):
        other = cases[(number + 4) % len(cases)]
        feeds = (
            streams.take(0, *case), streams.take(2, *other), streams.take(3, *case),
            streams.take(5, *short_first[number]),
        )  # fmt: skip
        steps.append(WorkloadStep("verify", feeds))
    steps.append(WorkloadStep("decode", tuple(streams.take(s, 1) for s in range(7))))
    return Workload("coverage", 7, tuple(steps))


def regimes(config: ModelConfig, workload: Workload) -> dict[str, bool]:
    """Which regimes of the ops a workload reaches: name -> reached, from positions alone."""
    csa, hca, window, topk = config.csa_ratio, config.hca_ratio, config.sliding_window, config.index_topk
    reached: dict[str, bool] = {}

    def mark(name: str, condition: bool) -> None:
        reached[name] = reached.get(name, False) or condition

    for phase, feeds in workload.spans():
        counts = [len(feed.tokens) for feed, _ in feeds]
        mark("ragged step (different tokens per sequence)", len(set(counts)) > 1)
        mark("empty sequence in a step", 0 in counts)
        for feed, start in feeds:
            count = len(feed.tokens)
            ends = [start + i + 1 for i in range(count)]  # lengths that the step's tokens see
            last = ends[-1] if ends else start
            if phase != "verify":
                mark(f"{phase}: a first token (position 0)", count > 0 and start == 0)
            for rest in range(csa):
                mark(f"{phase}: position = {rest} mod {csa}", any((e - 1) % csa == rest for e in ends))
            for length in (window - 1, window, window + 1):
                mark(f"{phase}: length {length}, around the window", length in ends)
            for length in (hca - 1, hca, hca + 1):
                mark(f"{phase}: length {length}, around the HCA ratio", length in ends)
            mark(f"{phase}: one entry more than index_topk", any(e // csa > topk for e in ends))
            mark(f"{phase}: 4 x index_topk entries", last // csa >= 4 * topk)
            mark(f"{phase}: 3 HCA entries", last // hca >= 3)
            if phase == "prefill":
                mark("prefill: chunk begins inside a CSA window", start % csa != 0 and count > 0)
                mark("prefill: chunk begins inside an HCA window", start % hca != 0 and count > 0)
                mark("prefill: one piece", start == 0 and count > window)
            if phase == "verify":
                mark(f"verify: {count} tokens, {feed.accepted} accepted", True)
                crosses = (start + count) // csa > (start + feed.accepted) // csa
                mark("verify: a rejected draft completed a CSA entry", crosses)
                mark(
                    "verify: a rejected draft completed an HCA entry",
                    (start + count) // hca > (start + feed.accepted) // hca,
                )
    return reached
