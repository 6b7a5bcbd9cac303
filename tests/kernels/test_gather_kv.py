"""gather_kv: what was written comes back, window first, in any dialect; nothing else is read."""

import numpy as np
import pytest
import torch

from dsv4dbg.kernels import paged
from dsv4dbg.kernels.attention.gather_kv import gather_kv
from dsv4dbg.kernels.attention.sparse_samples import paged_rows
from dsv4dbg.kernels.oracle import to_numpy
from dsv4dbg.kernels.samples import activations
from dsv4dbg.pages import kv_layout


def cache(dialect: str = "ocp", fmt: str = "fp8", entries: int = 16, seed: int = 0, count: int = 40) -> tuple:
    layout = kv_layout(fmt, dialect, 512, 64, entries)
    made, slots, _ = paged_rows(np.random.default_rng(seed), "cache", layout, [count])
    return made, slots[0]


def test_bf16_rows_come_back_bit_for_bit_window_first() -> None:
    rows = activations(np.random.default_rng(0), 24, 512)
    window, window_slots = cache(fmt="bf16", dialect="", count=20)
    entry, entry_slots = cache(fmt="bf16", dialect="", count=4)
    paged.write(window, window_slots, rows[:20].float())
    paged.write(entry, entry_slots, rows[20:].float())
    assert torch.equal(gather_kv(window, window_slots, entry, entry_slots, act="bf16"), rows)
    assert torch.equal(gather_kv(window, window_slots, act="bf16"), rows[:20])


def test_fp8_rows_are_the_same_in_both_dialects_and_both_dtypes() -> None:
    """Codes times powers of two: exact in bf16, and FNUZ with maximum 224 holds the same values."""
    ocp, slots = cache("ocp")
    fnuz, fnuz_slots = cache("fnuz")
    kv = gather_kv(ocp, slots, act="bf16")
    assert kv.dtype == torch.bfloat16
    assert torch.equal(gather_kv(fnuz, fnuz_slots, act="bf16"), kv)
    assert torch.equal(gather_kv(ocp, slots, act="f32"), kv.float())
    assert not torch.equal(ocp.data, fnuz.data)


def test_golden_record() -> None:
    """One record by hand: byte 0x38 is 1.0 (0x40: 2.0), scale byte 127 + g is 2^g, rope is bf16 little endian."""
    layout = kv_layout("fp8", "ocp", 512, 64, 2)
    data = torch.full((3, layout.page_bytes), 0xFF, dtype=torch.uint8)
    page = data[1]
    page[576:1024] = 0x38  # codes of entry 1 stand behind the 576 bytes of entry 0
    page[576 + 65] = 0xC0  # channel 65: -2.0
    page[1024:1152] = torch.tensor([0x80, 0x3F], dtype=torch.uint8).repeat(64)  # 0x3F80 is 1.0
    page[1152 + 8 : 1152 + 15] = torch.arange(127, 134, dtype=torch.uint8)
    page[1152 + 15] = 0
    expected = torch.cat((torch.exp2(torch.arange(7.0)).repeat_interleave(64), torch.ones(64)))
    expected[65] = -4.0
    kv = gather_kv(paged.Cache("c", data, layout), torch.tensor([3, -1]), act="bf16")
    assert torch.equal(kv.float(), torch.stack((expected, torch.zeros(512))))


@pytest.mark.parametrize("fill", [0x00, 0x80, 0xFF])
def test_only_the_named_records_are_read(fill: int) -> None:
    source, slots = cache()
    chosen = slots[[3, 7, 7, 39]]
    data = np.full(source.data.shape, fill, dtype=np.uint8)
    used = chosen.unique().numpy()
    source.layout.write(data, used, source.layout.read(source.data.numpy(), used))
    emptied = paged.Cache("c", torch.from_numpy(data), source.layout)
    kv = gather_kv(emptied, chosen, act="bf16")
    assert torch.equal(kv, gather_kv(source, chosen, act="bf16"))
    assert kv.isfinite().all()


def test_minus_one_is_a_row_of_zeros_even_without_pages() -> None:
    """And even where record 0, which a careless gather reads instead, is NaN."""
    layout = kv_layout("fp8", "ocp", 512, 64, 16)
    for pages in (0, 2):
        nan = paged.Cache("c", torch.full((pages, layout.page_bytes), 0xFF, dtype=torch.uint8), layout)
        kv = gather_kv(nan, torch.tensor([-1, -1]), act="bf16")
        assert torch.equal(kv, torch.zeros(2, 512, dtype=torch.bfloat16))


def test_invariants_speak() -> None:
    source, slots = cache()
    call = {"window_cache": source, "window_slots": to_numpy(slots), "entry_cache": None, "entry_slots": None}
    call["kv"] = gather_kv(source, slots, act="bf16").double().numpy()
    pool, finite = (i.check for i in gather_kv.invariants)
    assert (pool(call), finite(call)) == (None, None)
    assert pool({**call, "window_slots": np.array([source.num_slots])})
    assert pool({**call, "window_slots": np.array([-2])})
    assert finite({**call, "kv": call["kv"] * np.nan})
