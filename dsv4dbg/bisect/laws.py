"""Laws of the forward that need no second implementation: serial equivalence, batch invariance, block permutation.

Each law runs the same tokens in two ways that must agree and reports the first place where they do not. In the
reference's batch-invariant mode (``row_wise``) they agree bit for bit; otherwise within a tolerance on logits
that the caller states. Compared are the logits of every position and every record that the caches hold in the
end (window, compressed entries, indexer keys, compressor states), in logical order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from dsv4dbg.kernels.paged import read_records
from dsv4dbg.model.batch import Chunk, Step
from dsv4dbg.model.cache import CacheFormat
from dsv4dbg.model.model import Model
from dsv4dbg.model.run import Session
from dsv4dbg.plan import Plan

HIGH = 2**32  # bytes that a pool exceeds in `block_permutation`


@dataclass(frozen=True)
class Setting:
    """What a law runs: a model, a plan and cache formats."""

    model: Model
    device: torch.device
    plan: Plan = field(default_factory=Plan)
    cache_format: CacheFormat = field(default_factory=CacheFormat)
    row_wise: bool = True
    tolerance: float = 0.0  # largest difference of logits, relative to the largest logit of the row

    def session(
        self,
        max_tokens: Sequence[int],
        step_tokens: int,
        seed: int = 0,
        placement: Mapping[str, Sequence[int]] | None = None,
    ) -> Session:
        session = Session(
            self.model, max_tokens=max_tokens, step_tokens=step_tokens, device=self.device, plan=self.plan,
            cache_format=self.cache_format, seed=seed, placement=placement,
        )  # fmt: skip
        session.ops = replace(session.ops, row_wise=self.row_wise)
        return session


@dataclass(frozen=True)
class Difference:
    """Where two runs that must agree do not."""

    law: str
    case: str
    where: str

    def __str__(self) -> str:
        return f"{self.law}, {self.case}: {self.where}"


@dataclass(frozen=True)
class Outcome:
    """What a run left behind: logits per sequence and position, and the records of all caches.

    Attributes:
        logits: for each sequence ``f32 [position, vocab]``.
        records: (cache, sequence) -> (record numbers, their bytes).
    """

    logits: list[torch.Tensor]
    records: dict[tuple[str, int], tuple[np.ndarray, torch.Tensor]]


@dataclass(frozen=True)
class Piece:
    """A step of one sequence: tokens fed, and how many of them stay."""

    phase: str
    tokens: tuple[int, ...]
    accepted: int


def one_piece(tokens: Sequence[int]) -> list[Piece]:
    return [Piece("prefill", tuple(tokens), len(tokens))]


def chunks(tokens: Sequence[int], rng: np.random.Generator) -> list[Piece]:
    """Prefill in random pieces of 1 to 40 tokens."""
    pieces, start = [], 0
    while start < len(tokens):
        size = int(rng.integers(1, 41))
        part = tuple(tokens[start : start + size])
        pieces.append(Piece("prefill", part, len(part)))
        start += size
    return pieces


def one_by_one(tokens: Sequence[int]) -> list[Piece]:
    return [Piece("decode", (token,), 1) for token in tokens]


def verified(tokens: Sequence[int], vocab: int, rng: np.random.Generator) -> list[Piece]:
    """Verify steps of 2 to 4 tokens with every accepted length; what is not accepted is a wrong draft."""
    pieces, start = [], 0
    while start < len(tokens):
        count = int(rng.integers(2, 5))
        accepted = min(int(rng.integers(1, count + 1)), len(tokens) - start)
        wrong = tuple(int(t) for t in rng.integers(0, vocab, count - accepted))
        pieces.append(Piece("verify", (*tokens[start : start + accepted], *wrong), accepted))
        start += accepted
    return pieces


def outcome(
    session: Session, streams: Sequence[Sequence[int]], steps: Sequence[Sequence[tuple[int, Piece]]]
) -> Outcome:
    """Feed steps, each a list of (sequence, piece), and collect what they leave behind.

    Args:
        streams: the tokens of each sequence that stay in the end; the MTP block is fed from them.
    """
    rows: list[list[torch.Tensor]] = [[] for _ in session.manager.lengths]

    def ahead(sequence: int, count: int) -> list[int]:
        start = session.manager.lengths[sequence] - count
        following = list(streams[sequence][start + 1 : start + 1 + count])
        return following + [0] * (count - len(following))

    for number, parts in enumerate(steps):
        chunk_list = tuple(Chunk(sequence, piece.tokens) for sequence, piece in parts)
        logits = session.step(
            Step(f"{parts[0][1].phase}{number}", chunk_list, all_rows=True),
            following=lambda _, p=parts: [token for s, piece in p for token in ahead(s, len(piece.tokens))],
        ).logits
        begin = 0
        for sequence, piece in parts:
            rows[sequence].append(logits[begin : begin + piece.accepted])
            begin += len(piece.tokens)
            length = session.manager.lengths[sequence] - len(piece.tokens) + piece.accepted
            session.manager.rollback(sequence, length)
    return Outcome([torch.cat(r) if r else torch.zeros(0) for r in rows], logical_records(session))


def logical_records(session: Session) -> dict[tuple[str, int], tuple[np.ndarray, torch.Tensor]]:
    """All records that later tokens may read, per cache and sequence, in logical order."""
    found = {}
    for cache in session.manager.all_caches():
        table = next(t for t in session.manager.tables.values() if t.kind.name == session.manager.kind_of[cache.name])
        for sequence, length in enumerate(session.manager.lengths):
            first = 0 if table.kind.keep is None else max(0, length - session.manager.needed(table.kind.name))
            numbers = np.arange(first, length // table.kind.ratio)
            slots = torch.from_numpy(table.slots(sequence, numbers)).to(cache.data.device)
            found[cache.name, sequence] = (numbers, torch.cat(read_records(cache, slots), 1))
    return found


def compare(law: str, case: str, first: Outcome, second: Outcome, tolerance: float = 0.0) -> Difference | None:
    """The first difference of two outcomes, logits before caches; caches are compared only when bits must agree."""
    for sequence, (a, b) in enumerate(zip(first.logits, second.logits, strict=True)):
        if a.shape != b.shape:
            return Difference(
                law, case, f"sequence {sequence} has {len(a)} rows of logits in one run, {len(b)} in the other"
            )
        bound = tolerance * a.abs().amax(-1, keepdim=True) if len(a) else 0
        bad = (~((a - b).abs() <= bound)).any(-1).nonzero()[:, 0] if len(a) else []
        if len(bad):
            row = int(bad[0])
            gap = float((a[row] - b[row]).abs().max())
            return Difference(
                law,
                case,
                f"logits of sequence {sequence} differ first at position {row} (by {gap:.3g}; {len(bad)} positions)",
            )
    if tolerance:
        return None
    for (cache, sequence), (numbers, records) in first.records.items():
        other = second.records[cache, sequence][1]
        bad = (records != other).any(-1).nonzero()[:, 0]
        if len(bad):
            return Difference(
                law, case, f"{cache} of sequence {sequence} differs first at record {numbers[int(bad[0])]}"
            )
    return None


def serial_equivalence(setting: Setting, tokens: Sequence[int], seed: int = 0) -> Difference | None:
    """One-piece prefill, any chunking, token-by-token decode and verify with any accepted prefix agree."""
    rng = np.random.default_rng(seed)
    vocab = setting.model.config.vocab_size
    half = len(tokens) // 2
    cases = {
        "chunked prefill": chunks(tokens, rng),
        "token by token": one_by_one(tokens),
        "verify": verified(tokens, vocab, rng),
        "prefill, decode and verify": [
            *one_piece(tokens[:half]), *one_by_one(tokens[half : half + 9]), *verified(tokens[half + 9 :], vocab, rng),
        ],
    }  # fmt: skip

    def run(pieces: Sequence[Piece]) -> Outcome:
        session = setting.session([len(tokens) + 4], max(len(p.tokens) for p in pieces))
        return outcome(session, [tokens], [[(0, piece)] for piece in pieces])

    whole = run(one_piece(tokens))
    return _first(compare("serial equivalence", case, whole, run(p), setting.tolerance) for case, p in cases.items())


def batch_invariance(setting: Setting, sequences: Sequence[Sequence[int]], seed: int = 0) -> Difference | None:
    """Each sequence alone agrees with itself in a ragged batch, in any order of the batch."""
    rng = np.random.default_rng(seed)
    lengths = [len(tokens) + 4 for tokens in sequences]
    parts = [
        [*one_piece(tokens[:-6]), *one_by_one(tokens[-6:])] if len(tokens) > 6 else one_piece(tokens)
        for tokens in sequences
    ]
    step_tokens = max((len(p.tokens) for part in parts for p in part), default=1)

    def together(order: Sequence[int]) -> Outcome:
        rounds = max(len(part) for part in parts)
        steps = [[(s, parts[s][i]) for s in order if i < len(parts[s])] for i in range(rounds)]
        return outcome(setting.session(lengths, step_tokens), sequences, [step for step in steps if step])

    def alone() -> Outcome:
        logits, records = [], {}
        for s, part in enumerate(parts):
            single = outcome(
                setting.session([lengths[s]], step_tokens), [sequences[s]], [[(0, piece)] for piece in part]
            )
            logits += single.logits
            records |= {(cache, s): found for (cache, _), found in single.records.items()}
        return Outcome(logits, records)

    base = alone()
    orders = {"in order": list(range(len(sequences))), "shuffled": rng.permutation(len(sequences)).tolist()}
    return _first(
        compare("batch invariance", case, base, together(order), setting.tolerance) for case, order in orders.items()
    )


def block_permutation(setting: Setting, tokens: Sequence[int], high: bool = False) -> Difference | None:
    """Other physical pages change nothing; with ``high``, pages beyond 2^32 bytes of every pool (sparse memory)."""
    pieces = [*one_piece(tokens[:-8]), *one_by_one(tokens[-8:])]
    steps = [[(0, piece)] for piece in pieces]
    first = setting.session([len(tokens)], len(tokens))

    def top(kind: str) -> list[int]:
        table = first.manager.tables[kind]
        last = HIGH // table.kind.layout.page_bytes + table.num_pages
        return [last - i for i in range(table.num_pages)]

    def reverse(kind: str) -> list[int]:
        return list(range(first.manager.tables[kind].num_pages))[::-1]

    def run(placement: dict[str, list[int]]) -> Outcome:
        return outcome(setting.session([len(tokens)], len(tokens), placement=placement), [tokens], steps)

    cases: dict[str, Callable[[str], list[int]]] = {"reversed pages": reverse}
    if high:
        cases["pages beyond 2^32 bytes"] = top
    placements = {case: {kind: order(kind) for kind in first.manager.tables} for case, order in cases.items()}
    base = outcome(first, [tokens], steps)
    return _first(compare("block permutation", case, base, run(placement)) for case, placement in placements.items())


def _first(differences: Iterable[Difference | None]) -> Difference | None:
    return next((d for d in differences if d is not None), None)
