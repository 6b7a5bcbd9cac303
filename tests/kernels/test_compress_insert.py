"""compress_insert: any split into calls gives the same bytes, and what an entry is made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressor_cases import EPS, KINDS, TABLE, C, Compressor, R, chunks, inputs, make, plain

from dsv4dbg.kernels import paged, samples
from dsv4dbg.kernels.attention.compress_insert import compress_insert, compressor_example
from dsv4dbg.kernels.numerics import OFFICIAL
from dsv4dbg.kernels.oracle import to_numpy
from dsv4dbg.kernels.paged import Cache

kinds = pytest.mark.parametrize("kind", KINDS)


# any split into calls gives the same bytes


@pytest.mark.parametrize("kind", ["csa", "hca", "index"])
@pytest.mark.parametrize("sizes", [[1], [5, 2], [129, 1, 1], [127, 2, 4]], ids=lambda s: "+".join(map(str, s)))
def test_every_split_into_calls_gives_the_same_bytes(kind, sizes):
    tokens = 261
    whole, split = make(kind), make(kind)
    kv, gate = inputs(whole, tokens)
    whole.feed(kv, gate, torch.arange(tokens))
    for part in chunks(tokens, sizes):
        split.feed(kv[part], gate[part], part)
    assert torch.equal(whole.state.data, split.state.data)
    assert torch.equal(whole.entries.data, split.entries.data)
    assert whole.rows(tokens // whole.ratio).isfinite().all()


@pytest.mark.parametrize("kind", ["csa", "hca", "index"])
def test_every_start_mod_4_and_around_128(kind):
    """One call for the first n tokens, one for the rest, for n at all positions mod 4 and around multiples of 128."""
    whole = make(kind)
    kv, gate = inputs(whole, 262)
    whole.feed(kv, gate, torch.arange(262))
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 126, 127, 128, 129, 130, 255, 256, 257):
        split = make(kind)
        split.feed(kv[:n], gate[:n], torch.arange(n))
        split.feed(kv[n:], gate[n:], torch.arange(n, 262))
        assert torch.equal(whole.state.data, split.state.data)
        assert torch.equal(whole.entries.data, split.entries.data)


@kinds
def test_sequences_and_row_order_do_not_matter(kind):
    """Several sequences in one call, rows shuffled, equal each sequence alone."""
    lengths = [261, 3, 128, 0, 130]
    batch, alone = make(kind, sequences=5), make(kind, sequences=5)
    data = [inputs(batch, n, seed=n) for n in lengths]
    for s, (n, (kv, gate)) in enumerate(zip(lengths, data, strict=True)):
        alone.feed(kv, gate, torch.arange(n), s)
    order = torch.from_numpy(np.random.default_rng(3).permutation(sum(lengths)))
    kv, gate = (torch.cat(parts)[order] for parts in zip(*data, strict=True))
    positions = torch.cat([torch.arange(n) for n in lengths])[order]
    sequence = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))[order]
    batch.feed(kv, gate, positions, sequence)
    assert torch.equal(batch.state.data, alone.state.data)
    assert torch.equal(batch.entries.data, alone.entries.data)


@pytest.mark.parametrize("kind", ["csa", "hca", "index"])
@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_rejected_drafts_leave_no_trace(kind, accepted):
    """Steps of 4 tokens of which the last are rejected and fed again as others: bytes as if they had never been."""
    clean, drafted = make(kind), make(kind)
    kv, gate = inputs(clean, 140)
    wrong = inputs(clean, 140, seed=9)
    clean.feed(kv[:136], gate[:136], torch.arange(136))
    start = 0
    if kind == "hca":
        start = 117
        drafted.feed(kv[:start], gate[:start], torch.arange(start))
    while start < 136:
        part, true = torch.arange(start, start + 4), (torch.arange(4) < accepted)[:, None]
        drafted.feed(torch.where(true, kv[part], wrong[0][part]), torch.where(true, gate[part], wrong[1][part]), part)
        start += accepted
    last = torch.arange(136, start + 4 - accepted)
    for compressor in (clean, drafted):  # what lies beyond the accepted tokens is the last step's own business
        compressor.feed(kv[last], gate[last], last)
    assert torch.equal(clean.state.data, drafted.state.data)
    assert torch.equal(clean.entries.data, drafted.entries.data)


@kinds
def test_repeating_the_last_token_changes_nothing(kind):
    """ape enters the state once, and reading the state leaves it as it is."""
    compressor = make(kind)
    kv, gate = inputs(compressor, 256)
    compressor.feed(kv, gate, torch.arange(256))
    before = compressor.state.data.clone(), compressor.entries.data.clone()
    compressor.feed(kv[255:], gate[255:], torch.tensor([255]))
    assert torch.equal(compressor.state.data, before[0])
    assert torch.equal(compressor.entries.data, before[1])


@kinds
def test_physical_pages_do_not_matter(kind):
    a, b = make(kind, seed=0), make(kind, seed=1)
    kv, gate = inputs(a, 256)
    for compressor in (a, b):
        compressor.feed(kv, gate, torch.arange(256))
    assert not torch.equal(a.table, b.table) or a.ratio == 128
    assert not torch.equal(a.state_table, b.state_table)
    assert torch.equal(a.rows(256 // a.ratio), b.rows(256 // b.ratio))


# what is written


@kinds
def test_one_entry_when_a_window_completes_and_none_before(kind):
    compressor = make(kind)
    kv, gate = inputs(compressor, 260)
    start = compressor.ratio - 4
    compressor.feed(kv[:start], gate[:start], torch.arange(start))
    assert (compressor.entries.data == 0xFF).all()
    for p in range(start, start + 14):
        before = compressor.entries.data.clone()
        compressor.feed(kv[p : p + 1], gate[p : p + 1], torch.tensor([p]))
        changed = (compressor.entries.data != before).any()
        assert changed == ((p + 1) % compressor.ratio == 0), p


@kinds
def test_state_row_is_kv_and_gate_with_ape(kind):
    compressor = make(kind)
    kv, gate = inputs(compressor, 131)
    compressor.feed(kv, gate, torch.arange(131))
    slots = samples.table_slots(compressor.state_table, torch.zeros(131), torch.arange(131), 8)
    row = paged.read(compressor.state, slots, torch.float32)
    assert torch.equal(row, torch.cat((kv, gate + compressor.ape[torch.arange(131) % compressor.ratio]), 1))


def test_bf16_inputs_are_stored_exactly():
    compressor = make("csa")
    kv, gate = (x.to(torch.bfloat16) for x in inputs(compressor, 8))
    compressor.feed(kv, gate, torch.arange(8))
    slots = samples.table_slots(compressor.state_table, torch.zeros(8), torch.arange(8), 8)
    row = paged.read(compressor.state, slots, torch.float32)
    assert torch.equal(row[:, : 2 * C], kv.float())
    assert torch.equal(row[:, 2 * C :], gate.float() + compressor.ape.repeat(2, 1))


# what an entry is made of


def affected(kind: str, token: int, columns: slice, value: float) -> list[int]:
    """Entries of 16 windows that change when ``columns`` of one token's kv become ``value``."""
    a, b = plain(kind), plain(kind)
    kv, gate = inputs(a, 64)
    a.feed(kv, gate, torch.arange(64))
    kv[token, columns] = value
    b.feed(kv, gate, torch.arange(64))
    return (a.rows(16) != b.rows(16)).any(1).nonzero().flatten().tolist()


@pytest.mark.parametrize("value", [7.0, torch.nan])
@pytest.mark.parametrize("token", [0, 3, 4, 6, 13, 59])
def test_first_columns_go_to_the_next_entry_last_columns_to_the_own(token, value):
    assert affected("csa", token, slice(0, C), value) == [token // 4 + 1]
    assert affected("csa", token, slice(C, 2 * C), value) == [token // 4]


def test_first_columns_of_an_unfinished_next_window_go_nowhere():
    assert affected("csa", 63, slice(0, C), 7.0) == []


def expected_entry(compressor: Compressor, values: torch.Tensor, gates: torch.Tensor, position: int) -> torch.Tensor:
    """Pooled, normed and rotated in float64; ``values`` and ``gates [row, c]``."""
    pooled = (torch.softmax(gates.double(), 0) * values.double()).sum(0)
    normed = compressor.weight.double() * pooled / torch.sqrt(pooled.square().mean() + EPS)
    cos, sin = TABLE[position].double().split(R // 2)
    pairs = torch.view_as_complex(normed[-R:].reshape(-1, 2)) * torch.complex(cos, sin)
    return torch.cat((normed[:-R], torch.view_as_real(pairs).flatten()))


def test_first_csa_window_pools_its_own_four_rows():
    """Nothing precedes it: a zero kv with gate 0 (instead of -inf) would show, and so would the NaN in the pages."""
    compressor = plain("csa")
    kv, gate = inputs(compressor, 8)
    compressor.feed(kv, gate, torch.arange(8))
    biased = gate + compressor.ape.repeat(2, 1)
    first = expected_entry(compressor, kv[:4, C:], biased[:4, C:], 0)
    second = expected_entry(
        compressor, torch.cat((kv[:4, :C], kv[4:, C:])), torch.cat((biased[:4, :C], biased[4:, C:])), 4
    )
    assert torch.allclose(compressor.rows(2).double(), torch.stack((first, second)), atol=2e-6)


def test_hca_entry_pools_128_rows_and_turns_at_the_first():
    compressor = plain("hca")
    kv, gate = inputs(compressor, 256)
    compressor.feed(kv, gate, torch.arange(256))
    biased = gate + compressor.ape.repeat(2, 1)
    expected = [expected_entry(compressor, kv[i : i + 128], biased[i : i + 128], i) for i in (0, 128)]
    assert torch.allclose(compressor.rows(2).double(), torch.stack(expected), atol=2e-6)


def test_equal_gates_give_the_mean_and_a_high_gate_its_row():
    compressor = plain("csa")
    kv, _ = inputs(compressor, 8)
    gate = -compressor.ape.repeat(2, 1)
    compressor.feed(kv, gate, torch.arange(8))
    mean = torch.cat((kv[:4, :C], kv[4:, C:])).mean(0, keepdim=True)
    assert torch.allclose(compressor.rows(2)[1].double(), expected_entry(compressor, mean, 0 * mean, 4), atol=2e-6)
    gate[1, :C] += 200
    compressor.feed(kv, gate, torch.arange(8))
    only = kv[1:2, :C]
    assert torch.allclose(compressor.rows(2)[1].double(), expected_entry(compressor, only, 0 * only, 4), atol=2e-6)


def test_shifting_all_gates_of_a_channel_changes_nothing():
    a, b = plain("csa"), plain("csa")
    kv, gate = inputs(a, 32)
    a.feed(kv, gate, torch.arange(32))
    b.feed(kv, gate + torch.arange(2 * C) % C / 4.0, torch.arange(32))
    assert torch.allclose(a.rows(8), b.rows(8), atol=1e-5)


def test_a_zero_window_gives_a_zero_entry():
    compressor = make("csa")
    kv, gate = inputs(compressor, 8)
    compressor.feed(0 * kv, gate, torch.arange(8))
    assert (compressor.rows(2) == 0).all()


@pytest.mark.parametrize("kind", ["csa", "hca", "index"])
@pytest.mark.parametrize("fill", [0x00, 0x7F, 0xFF])
def test_unused_bytes_never_reach_an_entry(kind, fill):
    """State rows that no window needs, and pages nobody owns, may hold anything; -1 in the table is never followed."""
    ratio, overlap, layout = KINDS[kind]
    results = []
    for byte in (0x3C, fill):
        example = compressor_example(
            np.random.default_rng(4), "", ((ratio - 2, 3), (0, 1), (3 * ratio - 1, 2)), layout, R, ratio, overlap
        )
        args = example.args
        state, reach = args["state_cache"], (2 if overlap else 1) * ratio
        owned = torch.zeros_like(state.data)
        mark = Cache("owned", owned, state.layout)
        ends = [int(args["positions"][args["sequence"] == s].max()) for s in range(3)]
        for s, end in enumerate(ends):
            needed = torch.arange(max(0, (end + 1) // ratio * ratio - reach), end + 1)
            slots = samples.table_slots(args["state_table"], torch.full_like(needed, s), needed, state.layout.entries)
            ones = torch.ones(len(needed), state.layout.record_bytes, dtype=torch.uint8)
            paged.write_records(mark, slots, (ones,))
        state.data[owned == 0] = byte
        compress_insert.reference(**args, numerics=OFFICIAL)
        slots = args["slots"][args["slots"] >= 0].numpy()
        results.append(to_numpy(args["cache"]).rows(slots))
    assert len(results[0]) == 2
    assert np.array_equal(results[0], results[1])
    assert np.isfinite(results[0]).all()
