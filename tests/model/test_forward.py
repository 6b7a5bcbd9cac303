"""What must not change the forward: where pages lie, what unowned bytes hold, dialects, how tokens are put together.

On the model `tiny` with official numerics, so that every quantiser and both kinds of compressed entries take part.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from sites import Float64Sums, Sites

from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.numerics import OFFICIAL
from dsv4dbg.kernels.paged import read_records
from dsv4dbg.model.batch import Chunk, Step
from dsv4dbg.model.cache import CacheFormat, CacheManager, cache_kinds
from dsv4dbg.model.checkpoint import Checkpoint, open_model
from dsv4dbg.model.model import Model
from dsv4dbg.model.run import Session, StepResult, generate
from dsv4dbg.model.synthetic import wide_config
from dsv4dbg.model.weights import ModelWeights

CPU = torch.device("cpu")
PARIS, ANSWER = (278, 355, 326, 2025, 276), 2019
LENGTH = 137  # beyond the window and one HCA entry
SPREAD = 24**0.5 * 2**-5.5  # of logits in a free run, relative: see test_golden_official, 6 layers of 4 quantisers


@pytest.fixture(scope="module")
def model() -> Model:
    checkpoint = open_model("tiny")
    return Model(checkpoint.config, ModelWeights(checkpoint, CPU), OFFICIAL)


def tokens(count: int = LENGTH, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(0, 2048, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def open_session(model: Model, lengths: Sequence[int] = (LENGTH,), fill: int = 0, **options) -> Session:
    """A session; ``fill`` is the byte that pages hold before they are written."""
    session = Session(model, max_tokens=list(lengths), step_tokens=max(lengths), device=CPU, **options)
    if fill:
        old = session.manager
        session.manager = CacheManager(
            model.config, max_tokens=list(lengths), step_tokens=max(lengths), device=CPU, fmt=old.format, fill=fill
        )
    return session


@dataclass
class Outcome:
    """Logits, streams and draft logits of every row of one sequence, in order."""

    logits: torch.Tensor
    streams: torch.Tensor
    draft: torch.Tensor

    def assert_same_bits(self, other: Outcome) -> None:
        for name in ("streams", "logits", "draft"):
            ours, theirs = getattr(self, name), getattr(other, name)
            unlike = (ours != theirs).flatten(1).any(1).nonzero().flatten().tolist()
            assert not unlike, f"{name} differ at positions {unlike[:5]}"


def next_tokens(ids: Sequence[int], start: int, count: int) -> list[int]:
    following = [*ids, 0][start + 1 : start + 1 + count]
    return following + [0] * (count - len(following))


def feed(session: Session, ids: Sequence[int], pieces: Sequence[int], float64: bool = False) -> Outcome:
    """``ids`` in pieces; a piece of one token is a decode step."""
    results: list[StepResult] = []
    with Float64Sums() if float64 else nullcontext():
        for number, size in enumerate(pieces):
            start = session.manager.lengths[0]
            name = f"{'decode' if size == 1 else 'prefill'}{number}"
            step = Step(name, (Chunk(0, tuple(ids[start : start + size])),), all_rows=True)
            results.append(session.step(step, lambda _, s=start, n=size: next_tokens(ids, s, n)))
    draft = [r.draft for r in results if r.draft is not None]
    parts = ([r.logits for r in results], [r.streams for r in results], draft)
    return Outcome(*(torch.cat(part) for part in parts))


def spread(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.fixture(scope="module")
def one_piece(model) -> Outcome:
    return feed(open_session(model), tokens(), [LENGTH])


@pytest.fixture(scope="module")
def serial(model) -> Outcome:
    """The prompt in one piece, sums in float64."""
    return feed(open_session(model), tokens(), [LENGTH], float64=True)


@pytest.mark.parametrize("seed", [1, 2])
def test_placement_changes_nothing(model, one_piece, seed):
    session = open_session(model, seed=seed)
    assert session.manager.tables["window"].free != open_session(model).manager.tables["window"].free
    feed(session, tokens(), [LENGTH]).assert_same_bits(one_piece)


def test_pages_far_apart_and_in_order(model, one_piece):
    """Every kind of cache at the top of a larger pool, pages in logical order with gaps."""
    kinds = open_session(model).manager.tables
    placement = {name: [3 * i + 50 for i in range(table.num_pages)] for name, table in kinds.items()}
    feed(open_session(model, placement=placement), tokens(), [LENGTH]).assert_same_bits(one_piece)


@pytest.mark.parametrize("fill", [0xFF, 0x7F])
def test_unowned_bytes_never_matter(model, fill):
    """0xFF is NaN in every format, 0x7F in OCP e4m3 and float32; chunks, decode, and pages handed out again."""
    pieces = [61, 66, 1, 1, 1]
    wanted = feed(open_session(model), tokens(), pieces)
    feed(open_session(model, fill=fill), tokens(), pieces).assert_same_bits(wanted)


@pytest.mark.parametrize("caches", ["fp8-fnuz", "fp8-fnuz-window", "bf16"])
def test_cache_formats_hold_the_same_values(model, caches):
    """Dialects and sim-quantised bf16 records give the same bits, though not the same bytes."""
    pieces = [LENGTH - 3, 1, 1, 1]
    plain, other = open_session(model), open_session(model, cache_format=CacheFormat.parse(caches))
    wanted = feed(plain, tokens(), pieces)
    feed(other, tokens(), pieces).assert_same_bits(wanted)
    if "fnuz" in caches:
        ocp, fnuz = (s.manager.caches["L0"]["window"] for s in (plain, other))
        records = torch.from_numpy(plain.manager.tables["window"].slots(0, np.arange(LENGTH - 128, LENGTH)))
        (ocp_data, ocp_scale), (fnuz_data, fnuz_scale) = (read_records(c, records) for c in (ocp, fnuz))
        assert (fnuz_scale[:, 0] == ocp_scale[:, 0] + 1).all()  # the same code stands for half the value
        assert torch.equal(fnuz_data[:, :64], torch.where(ocp_data[:, :64] == 0x80, 0, ocp_data[:, :64]))


CUTS = [1, 2, 3, 4, 5, 62, 63, 64, 65, 126, 127, 128, 129, 130, 131]


@pytest.mark.parametrize("cut", CUTS)
def test_two_chunks_are_one_piece(model, serial, cut):
    feed(open_session(model), tokens(), [cut, LENGTH - cut], float64=True).assert_same_bits(serial)


@pytest.mark.parametrize(
    "pieces", [[*[1] * 14, 123], [125, *[1] * 12], [4 * 7 + 1, 128 - 4 * 7 - 2, 10], [40, 1, 0, 50, 1, 1, 44]],
    ids=["tokens, then a prefill", "decode across 127, 128, 129", "cut at 4k+1 and 128k-1", "mixed, an empty chunk"],
)  # fmt: skip
def test_any_order_of_prefill_and_decode_is_one_piece(model, serial, pieces):
    feed(open_session(model), tokens(), pieces, float64=True).assert_same_bits(serial)


@pytest.mark.slow
def test_token_by_token(model, serial):
    feed(open_session(model), tokens(), [1] * LENGTH, float64=True).assert_same_bits(serial)


@pytest.mark.slow
def test_two_chunks_cut_anywhere(model, serial):
    for cut in range(1, LENGTH):
        feed(open_session(model), tokens(), [cut, LENGTH - cut], float64=True).assert_same_bits(serial)


@pytest.mark.parametrize("cut", [1, 63])
def test_order_of_sums_is_all_that_chunks_change(model, one_piece, cut):
    """As above with the float32 sums that run in earnest: the same within what quantisers make of rounding."""
    cut_up = feed(open_session(model), tokens(), [cut, LENGTH - cut])
    assert spread(cut_up.logits, one_piece.logits) < SPREAD
    assert spread(cut_up.draft, one_piece.draft) < SPREAD


@pytest.mark.parametrize("start", [6, 125, 126, 127, 128])
def test_rejected_drafts_leave_no_trace(model, serial, start):
    """Verify steps of 2 to 4 tokens with every accepted length, wrong drafts across entry, window and page borders."""
    ids, session = tokens(), open_session(model, [start + 40])
    feed(session, ids, [start], float64=True)
    number = 0
    with Float64Sums():
        for count in (2, 3, 4):
            for accepted in range(1, count + 1):
                here = session.manager.lengths[0]
                if here + accepted > LENGTH:
                    continue
                fed = (*ids[here : here + accepted], *[7] * (count - accepted))
                step = Step(f"verify{number}", (Chunk(0, fed),), all_rows=True)
                result = session.step(step, lambda _, h=here, n=count: next_tokens(ids, h, n))
                rows = slice(here, here + accepted)
                assert torch.equal(result.logits[:accepted], serial.logits[rows]), (here, count, accepted)
                assert torch.equal(result.draft[:accepted], serial.draft[rows]), (here, count, accepted)
                session.manager.rollback(0, here + accepted)
                number += 1
    assert number > 4


def test_taking_back_more_than_the_caches_hold_is_refused(model):
    """Window and state pages of older tokens went back to the pool; reading them would be silent garbage."""
    session = open_session(model)
    feed(session, tokens(), [100, 37])
    session.manager.rollback(0, 92)
    with pytest.raises(DbgError, match="92 tokens and cannot be taken back to 91"):
        session.manager.rollback(0, 91)
    with pytest.raises(DbgError, match="cannot be taken back to 93"):
        session.manager.rollback(0, 93)


def test_going_on_from_the_furthest_way_back(model, serial):
    session = open_session(model)
    feed(session, tokens(), [128, 9], float64=True)
    session.manager.rollback(0, 120)
    again = feed_from(session, 120)
    assert torch.equal(again, serial.logits[120:])


def feed_from(session: Session, start: int) -> torch.Tensor:
    """Logits of the prompt's rest, token by token."""
    rows = []
    with Float64Sums():
        for position in range(start, LENGTH):
            step = Step(f"decode{position}", (Chunk(0, (tokens()[position],)),))
            rows.append(session.step(step, lambda _, p=position: next_tokens(tokens(), p, 1)).logits)
    return torch.cat(rows)


RAGGED = [(0, 70), (1, 1), (2, 0), (3, 131)]  # sequence, tokens of its first chunk


def ragged(session: Session, float64: bool) -> list[torch.Tensor]:
    """Four sequences in common steps: a prefill, one with other chunks in another order, decode; logits of each."""
    rest = {0: 20, 1: 66, 2: 5, 3: 3}
    plan = [("prefill0", RAGGED), ("prefill1", [(s, rest[s]) for s in (3, 1, 2, 0)])]
    plan += [(f"decode{i}", [(s, 1) for s in (2, 0, 3, 1)]) for i in range(3)]
    found: dict[int, list[torch.Tensor]] = {s: [] for s in rest}
    with Float64Sums() if float64 else nullcontext():
        for name, parts in plan:
            starts = [session.manager.lengths[s] for s, _ in parts]
            chunks = [Chunk(s, tokens(seed=s)[b : b + n]) for (s, n), b in zip(parts, starts, strict=True)]
            logits = session.step(Step(name, tuple(chunks), all_rows=True)).logits
            for (sequence, _), part in zip(parts, logits.split([n for _, n in parts]), strict=True):
                found[sequence].append(part)
    return [torch.cat(found[s]) for s in rest]


@pytest.mark.parametrize("float64", [True, False])
def test_sequences_in_one_step_are_as_each_alone(model, float64):
    lengths = [93, 70, 8, 137]
    together = ragged(open_session(model, lengths), float64)
    for sequence, (length, logits) in enumerate(zip(lengths, together, strict=True)):
        alone = feed(open_session(model, [length]), tokens(length, seed=sequence), [length], float64).logits
        assert logits.shape == alone.shape
        if float64:
            assert torch.equal(logits, alone), sequence
        else:
            assert spread(logits, alone) < SPREAD, sequence


def test_a_sequence_of_one_token_and_a_step_of_none(model):
    session = open_session(model, [5])
    nothing = session.step(Step("prefill0", (Chunk(0, ()),)))
    assert nothing.logits.shape == (0, 2048)
    assert nothing.streams.shape == (0, 4, 256)
    one = session.step(Step("prefill1", (Chunk(0, (3,)),)))
    fresh = open_session(model, [1]).step(Step("decode0", (Chunk(0, (3,)),)))
    assert one.logits.isfinite().all()
    assert spread(one.logits, fresh.logits) < SPREAD


def test_logits_of_last_rows_are_those_of_all_rows(model):
    chunks = tuple(Chunk(s, tokens(n, seed=s)) for s, n in ((0, 9), (1, 0), (2, 5)))
    every = open_session(model, [9, 1, 5]).step(Step("prefill0", chunks, all_rows=True))
    last = open_session(model, [9, 1, 5]).step(Step("prefill0", chunks))
    assert last.inputs.logit_rows.tolist() == [8, 13]
    torch.testing.assert_close(last.logits, every.logits[[8, 13]], rtol=1e-5, atol=1e-5)


def test_lengths_that_are_refused(model):
    short = replace(model, config=replace(model.config, max_position_embeddings=64))
    with pytest.raises(DbgError, match="65 tokens; the model's maximum is 64"):
        open_session(short, [65])
    session = open_session(short, [64])
    feed(session, tokens(), [60])
    with pytest.raises(DbgError, match="would grow to 65 tokens"):
        session.step(Step("prefill1", (Chunk(0, tokens(5)),)))


def test_published_sizes():
    """Pages and bytes per token of the published head_dim, ratios and window; rows that the next token still reads."""
    kinds = cache_kinds(wide_config(), CacheFormat(index="fp8"), rollback=0)
    pages = {"window": (64, 37440), "entries4": (64, 37440), "entries128": (2, 1728), "index4": (64, 8640)}
    pages |= {"state4": (4, 32832), "state128": (8, 32832)}
    assert {name: (kinds[name].layout.entries, kinds[name].layout.page_bytes) for name in pages} == pages
    per_token = {"window": 584, "entries4": 146, "index4": 33, "entries128": 4.5625}
    assert {name: kinds[name].layout.record_bytes / kinds[name].ratio for name in per_token} == per_token
    read = {"window": 127, "state4": 7, "state128": 127, "index_state4": 7}
    assert {name: kinds[name].keep for name in read} == read


def test_mtp_block_runs(model, one_piece):
    session, sites = open_session(model, [LENGTH]), Sites()
    session.listen(sites)
    result = session.step(Step("prefill0", (Chunk(0, tokens()),)))
    assert one_piece.draft.shape == (LENGTH, 2048)
    assert one_piece.draft.isfinite().all()
    assert result.draft is not None
    torch.testing.assert_close(result.draft[0], session_draft_of_last(model), rtol=1e-5, atol=1e-5)
    names = [name for name in sites.outputs["prefill0"] if name.startswith("mtp0")]
    assert {"mtp0", "mtp0.attn", "mtp0.ffn", "mtp0.mtp_input", "mtp0.mhc_head"} <= set(names)
    # the block must depend on the next token and on the streams alike
    other = session_draft_of_last(model, following=5)
    assert spread(other, result.draft[0]) > 0.05


def session_draft_of_last(model: Model, following: int | None = None) -> torch.Tensor:
    """Draft logits after the last token; ``following``: the token that comes next (default: the most likely)."""
    session = open_session(model)
    ahead = None if following is None else lambda _: next_tokens((*tokens(), following), 0, LENGTH)
    result = session.step(Step("prefill0", (Chunk(0, tokens()),)), ahead)
    assert result.draft is not None
    return result.draft[0]


@pytest.mark.parametrize("caches", ["fp8", "f32"])
def test_float32_activations(caches):
    """The same weights with a float32 embedding: nothing is rounded to bf16, FP8 and FP4 quantisers stay."""
    source = open_model("tiny")
    tensors = {key: source.tensor(key) for key in source.keys}
    tensors["embed.weight"] = tensors["embed.weight"].float()
    model = Model(source.config, ModelWeights(Checkpoint.from_state_dict(source.config, tensors), CPU), OFFICIAL)
    session = open_session(model, [len(PARIS) + 6], cache_format=CacheFormat.parse(caches))
    assert generate(session, PARIS, 1)[0] == ANSWER
    assert session.last.streams.dtype == torch.float32
    assert session.last.draft.isfinite().all()
