"""build_indices: the lists of spec 4.5, rings, rows of a workspace, and independence of tokens."""

import numpy as np
import pytest
import torch

from dsv4dbg.kernels.attention.build_indices import build_indices
from dsv4dbg.kernels.attention.sparse_samples import ragged
from dsv4dbg.kernels.dims import TINY
from dsv4dbg.kernels.oracle import to_numpy


def i32(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def window_list(position: int, table: torch.Tensor, block: int = 64) -> list[int]:
    lists = build_indices(
        torch.tensor([position]), i32(0), table, None, None, None,
        window=128, window_block=block, entry_block=1, width=0,
    )  # fmt: skip
    return lists[0].tolist()


@pytest.mark.parametrize("position", [0, 1, 2, 3, 126, 127, 128, 129, 255, 256])
def test_window_is_the_last_128_positions_oldest_first(position: int) -> None:
    """Positions max(0, p - 127)..p, then -1 (identity pages)."""
    expected = list(range(max(0, position - 127), position + 1))
    assert window_list(position, i32([0, 1, 2, 3, 4])) == expected + [-1] * (128 - len(expected))


@pytest.mark.parametrize("position", [127, 128, 129, 200, 255, 256, 300])
def test_ring_of_128_gives_the_official_decode_order(position: int) -> None:
    """Spec 4.5: rows p % 128 + 1 .. 127, then 0 .. p % 128, when the table repeats two pages of 64."""
    last = position % 128
    assert window_list(position, i32([0, 1, 0, 1, 0, 1])) == [*range(last + 1, 128), *range(last + 1)]


def test_selected_keep_their_order_and_places() -> None:
    lists = build_indices(
        torch.tensor([40]), i32(1), i32([0, 0], [7, 8]), i32([9, 9, 9], [5, 3, 4]), None, i32([2, 9, -1, 0, 4, -1]),
        window=4, window_block=32, entry_block=4, width=6,
    )  # fmt: skip
    assert lists.tolist() == [[8 * 32 + 5, 8 * 32 + 6, 8 * 32 + 7, 8 * 32 + 8, 22, 17, -1, 20, 12, -1]]


def test_all_entries_are_counted_per_token() -> None:
    """A token that completes an entry sees it; the token before, in the same step, does not."""
    positions = torch.tensor([126, 127, 128, 255])
    lists = build_indices(
        positions, i32(0, 0, 0, 0), i32(range(9)), i32([6, 2]), ((positions + 1) // 128).int(), None,
        window=1, window_block=32, entry_block=2, width=3,
    )  # fmt: skip
    assert lists[:, 1:].tolist() == [[-1, -1, -1], [12, -1, -1], [12, -1, -1], [12, 13, -1]]


def test_what_has_no_page_is_minus_one() -> None:
    """A freed page, and records behind the last page of the table: those never address other memory."""
    lists = build_indices(
        torch.tensor([13]), i32(0), i32([5, -1]), i32([-1, 3]), None, i32([1, 2, 3, 4, 9]),
        window=12, window_block=4, entry_block=2, width=5,
    )  # fmt: skip
    assert lists.tolist() == [[22, 23] + [-1] * 10 + [-1, 6, 7, -1, -1]]


def test_result_is_int32_and_may_be_empty() -> None:
    empty = build_indices(
        torch.empty(0, dtype=torch.int64), i32(), torch.empty(0, 0, dtype=torch.int32), None, None, None,
        window=128, window_block=64, entry_block=1, width=7,
    )  # fmt: skip
    assert empty.shape == (0, 135)
    assert empty.dtype == torch.int32


def example(name: str) -> dict:
    assert build_indices.examples_function is not None
    found = build_indices.examples_function(TINY, np.random.default_rng(0))
    return next(dict(e.args) for e in found if e.name == name)


@pytest.mark.parametrize("name", ["63 tokens, selected entries", "63 tokens, all entries"])
def test_each_token_has_its_own_list(name: str) -> None:
    """Rows in any order, or alone, get the same lists."""
    args = example(name)
    lists = build_indices(**args)
    for rows in (torch.randperm(63, generator=torch.manual_seed(0)), torch.tensor([17])):
        per_token = ("positions", "sequence", "entry_lens", "selected")
        some = {k: v[rows] if k in per_token and v is not None else v for k, v in args.items()}
        assert torch.equal(build_indices(**some), lists[rows])


def test_tables_of_block_1_address_a_workspace() -> None:
    """Rows of a workspace are the same records, seen through tables with one record a page."""
    args = example("63 tokens, selected entries")
    lists = build_indices(**args)
    tables = {}
    for kind, count in (("window", 320), ("entry", 80)):
        table, block = args[f"{kind}_table"].long(), args[f"{kind}_block"]
        number = torch.arange(min(count, table.shape[1] * block))
        slots = table[:, number // block] * block + number % block
        tables |= {f"{kind}_table": slots.clamp_min(-1).int(), f"{kind}_block": 1}
    assert torch.equal(build_indices(**{**args, **tables}), lists)


def test_slots_beyond_int32_bytes() -> None:
    """Slots of a pool of 2^40 bytes still fit; page times block is not formed in int32."""
    page = 2**31 // 64 - 1
    lists = build_indices(
        torch.tensor([63]), i32(0), i32([page]), None, None, None, window=2, window_block=64, entry_block=1, width=0
    )
    assert lists.tolist() == [[2**31 - 2, 2**31 - 1]]


def test_invariants_speak() -> None:
    args = example("63 tokens, all entries")
    call = {k: to_numpy(v) for k, v in args.items()} | {"indices": build_indices(**args).long().numpy()}
    own, twice, causal = (i.check for i in build_indices.invariants)
    assert (own(call), twice(call), causal(call)) == (None, None, None)
    row = int(np.flatnonzero((call["sequence"] == 3) & (call["positions"] > 130))[0])
    window = args["window"]

    def wrong(column: int, slot: int) -> dict:
        indices = call["indices"].copy()
        indices[row, column] = slot
        return {**call, "indices": indices}

    other = int(call["indices"][0, 0])  # of sequence 0
    assert own(wrong(5, other))
    assert twice(wrong(5, int(call["indices"][row, 6])))
    future = call["indices"][np.flatnonzero(call["sequence"] == 3)[-1], window - 1]
    assert causal(wrong(5, int(future)))
    assert causal(wrong(5, int(args["window_table"][3, 0]) * args["window_block"])), "before the window"
    assert causal(wrong(window + 3, int(args["entry_table"][3, 0]) * args["entry_block"] + 1)), "not yet completed"
    assert ragged(63).positions[row] > 130
