"""Paged caches: byte offsets of the published layouts, and the torch and numpy sides against each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4dbg.kernels import oracle, paged
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.pages import PageLayout, index_layout, kv_layout, state_layout

WINDOW, HCA = kv_layout("fp8", "ocp", 512, 64, 64), kv_layout("fp8", "ocp", 512, 64, 2)
INDEX_FP8, INDEX_FP4 = index_layout("fp8", "ocp", 128, 64, 576), index_layout("fp4", "", 128, 64, 576)
SIZES = {  # layout -> payload and page bytes of head_dim 512
    "window or CSA, 64 entries": (WINDOW, 37376, 37440),
    "HCA, 2 entries": (HCA, 1168, 1728),
    "256 entries": (kv_layout("fp8", "fnuz", 512, 64, 256), 149504, 149760),
    "index fp8": (INDEX_FP8, 8448, 8640),
    "index fp4": (INDEX_FP4, 4352, 4608),
    "CSA state, 4 tokens": (state_layout(1024, 4, 576), 32768, 32832),
    "index state, 4 tokens": (state_layout(256, 4, 576), 8192, 8640),
    "HCA state, 8 tokens": (state_layout(512, 8, 576), 32768, 32832),
}
SMALL = [
    kv_layout("fp8", "ocp", 128, 64, 4), kv_layout("fp8", "fnuz", 512, 64, 2), kv_layout("bf16", "", 128, 64, 3),
    kv_layout("f32", "", 128, 64, 2), index_layout("fp8", "ocp", 128, 4, 256), index_layout("fp8", "fnuz", 128, 4, 576),
    index_layout("fp4", "", 128, 4, 576), index_layout("bf16", "", 128, 2, 576), state_layout(128, 3, 576),
]  # fmt: skip
NAMES = [f"{x.kind} {x.format} {x.dialect}".strip() for x in SMALL]
layouts = pytest.mark.parametrize("layout", SMALL, ids=NAMES)
dialects = pytest.mark.parametrize("dialect", ["ocp", "fnuz"])


def noise(layout: PageLayout, pages: int = 5, extra: int = 0, seed: int = 0) -> torch.Tensor:
    """Random bytes ``[pages, page_bytes + extra]``."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(0, 256, (pages, layout.page_bytes + extra), dtype=np.uint8))


def rows(layout: PageLayout, n: int, seed: int = 0) -> torch.Tensor:
    """float32 rows over many binades."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, layout.channels)) * np.exp2(
        rng.uniform(-20, 12, (n, layout.channels // 32)).repeat(32, 1)
    )
    return torch.from_numpy(x.astype(np.float32))


# byte offsets by hand


@pytest.mark.parametrize("name", SIZES)
def test_page_sizes(name):
    layout, payload, page = SIZES[name]
    assert layout.entries * layout.record_bytes == payload
    assert layout.page_bytes == page


@dialects
def test_kv_record_lies_where_the_layout_says(dialect):
    layout = kv_layout("fp8", dialect, 512, 64, 64)
    cache = Cache("window", torch.full((3, 37440), 0xFF, dtype=torch.uint8), layout)
    x = torch.zeros(1, 512)
    x[0, 0], x[0, 1], x[0, 63] = 448.0, 1.0, -2.0  # group 0: amax 448
    x[0, 64], x[0, 447] = 3.5, 7.03125  # group 1: amax 3.5, group 6: amax 7.03125
    x[0, 448], x[0, 511] = 1.5, -0.25
    paged.write(cache, torch.tensor([64 + 5]), x)
    data = cache.data.numpy().reshape(-1)
    record, scales = 37440 + 5 * 576, 37440 + 64 * 576 + 5 * 8
    # powers of two have the same code in both dialects, since the scale of FNUZ is twice as large
    expected = np.zeros(576, np.uint8)
    expected[[0, 1, 63, 64, 447]] = [0x7E, 0x38, 0xC0, 0x7E, 0x76]
    expected[448:450], expected[574:576] = [0xC0, 0x3F], [0x80, 0xBE]  # bf16 1.5 and -0.25, little endian
    assert np.array_equal(data[record : record + 576], expected)
    one_more = 0 if dialect == "ocp" else 1
    exponents = np.array([0, -7, -22, -22, -22, -22, -5]) + one_more
    assert data[scales : scales + 8].tolist() == [*(exponents + 127), 0]
    untouched = np.delete(data, np.r_[record : record + 576, scales : scales + 8])
    assert np.all(untouched == 0xFF)


def test_index_fp8_record_lies_where_the_layout_says():
    cache = Cache("index", torch.zeros(2, 8640, dtype=torch.uint8), INDEX_FP8)
    x = torch.zeros(1, 128)
    x[0, 0], x[0, 127] = 448.0, -1.0
    paged.write(cache, torch.tensor([64 + 7]), x)
    data = cache.data.numpy().reshape(-1)
    record, scale = 8640 + 7 * 128, 8640 + 64 * 128 + 7 * 4
    assert data[record] == 0x7E
    assert data[record + 127] == 0xB8
    assert data[scale : scale + 4].view("<f4") == 1.0
    assert np.flatnonzero(data).tolist() == [record, record + 127, scale + 2, scale + 3]


def test_index_fp4_record_lies_where_the_layout_says():
    cache = Cache("index", torch.zeros(2, 4608, dtype=torch.uint8), INDEX_FP4)
    x = torch.zeros(1, 128)
    x[0, :4] = torch.tensor([6.0, 1.0, -0.5, 3.0])
    x[0, 126:] = torch.tensor([-6.03125, 0.75])
    paged.write(cache, torch.tensor([64 + 9]), x)
    data = cache.data.numpy().reshape(-1)
    record, scales = 4608 + 9 * 64, 4608 + 64 * 64 + 9 * 4
    assert data[record : record + 2].tolist() == [0x27, 0x59]  # the even channel in the low nibble
    assert data[record + 63] == 0x1D  # scale 2: -3 and 0.375, a code of 0.5
    assert data[scales : scales + 4].tolist() == [127, 1, 1, 128]
    assert np.flatnonzero(data).tolist() == [record, record + 1, record + 63, *range(scales, scales + 4)]


def test_state_record_is_kv_then_gate():
    layout = state_layout(1024, 4, 576)
    cache = Cache("state", torch.zeros(2, 32832, dtype=torch.uint8), layout)
    x = torch.arange(2048, dtype=torch.float32)[None]
    paged.write(cache, torch.tensor([4 + 3]), x)
    start = 32832 + 3 * 8192
    assert np.array_equal(cache.data.numpy().reshape(-1)[start : start + 8192].view("<f4"), np.arange(2048))


def test_hca_pages_use_the_page_stride_not_the_payload():
    offsets = HCA.field_offsets(np.array([0, 1, 2, 3, 5]), 1728)
    assert offsets[0].tolist() == [0, 576, 1728, 2304, 2 * 1728 + 576]
    assert offsets[1].tolist() == [1152, 1160, 1728 + 1152, 1728 + 1160, 2 * 1728 + 1160]


# torch against numpy


@layouts
def test_readers_agree_byte_for_byte(layout):
    slots = np.random.default_rng(1).permutation(5 * layout.entries)
    for extra in (0, 37):
        data = noise(layout, extra=extra)
        fields = paged.read_records(Cache("c", data, layout), torch.from_numpy(slots))
        assert [f.shape for f in fields] == [(len(slots), size) for size in layout.fields]
        assert np.array_equal(torch.cat(fields, 1).numpy(), layout.read(data.numpy(), slots))


@layouts
def test_writers_agree_byte_for_byte(layout):
    slots = np.array([3, -1, 0, 2 * layout.entries + 1, -1, 4 * layout.entries])
    records = np.random.default_rng(2).integers(0, 256, (len(slots), layout.record_bytes), dtype=np.uint8)
    here, there = noise(layout, extra=5), noise(layout, extra=5).numpy()
    fields = torch.from_numpy(records).split(list(layout.fields), 1)
    paged.write_records(Cache("c", here, layout), torch.from_numpy(slots), fields)
    layout.write(there, slots, records)
    assert np.array_equal(here.numpy(), there)
    assert np.array_equal(layout.read(there, slots[slots >= 0]), records[slots >= 0])
    assert (there != noise(layout, extra=5).numpy()).sum() <= 4 * layout.record_bytes


@layouts
def test_strided_buffers(layout):
    """Pages inside a larger arena: the gaps stay as they are, and both sides see the same records."""
    slots = torch.tensor([1, -1, 3 * layout.entries, 2 * layout.entries + 1])
    records = torch.from_numpy(np.random.default_rng(4).integers(0, 256, (4, layout.record_bytes), dtype=np.uint8))
    arenas = [noise(layout, extra=96, seed=3), noise(layout, extra=96, seed=3)]
    inside = [arena[:, 32 : 32 + layout.page_bytes] for arena in arenas]
    packed = inside[0].clone()
    cache = Cache("c", inside[0], layout)
    paged.write_records(cache, slots, records.split(list(layout.fields), 1))
    layout.write(inside[1].numpy(), slots.numpy(), records.numpy())
    layout.write(packed.numpy(), slots.numpy(), records.numpy())
    assert torch.equal(inside[0], packed)
    assert torch.equal(arenas[0], arenas[1])
    gaps = noise(layout, extra=96, seed=3)
    assert torch.equal(arenas[0][:, :32], gaps[:, :32])
    assert torch.equal(arenas[0][:, 32 + layout.page_bytes :], gaps[:, 32 + layout.page_bytes :])
    kept = slots[slots >= 0]
    assert torch.equal(torch.cat(paged.read_records(cache, kept), 1), records[slots >= 0])
    assert np.array_equal(layout.read(inside[1].numpy(), kept.numpy()), records[slots >= 0].numpy())


@layouts
def test_minus_one_and_no_rows_write_nothing(layout):
    data = noise(layout)
    cache = Cache("c", data.clone(), layout)
    paged.write(cache, torch.full((3,), -1), rows(layout, 3))
    paged.write(cache, torch.zeros(0, dtype=torch.int64), rows(layout, 0))
    layout.write(cache.data.numpy(), np.full(3, -1), np.ones((3, layout.record_bytes), np.uint8))
    assert torch.equal(cache.data, data)
    assert paged.read(cache, torch.zeros(0, dtype=torch.int64), torch.float32).shape == (0, layout.channels)


@layouts
def test_decoders_agree_over_random_bytes(layout):
    """torch in float32 and the oracle in float64 decode the same bytes to the same values, NaN included."""
    n, rng = 600, np.random.default_rng(5)
    records = rng.integers(0, 256, (n, layout.record_bytes), dtype=np.uint8)
    if layout.format == "fp8" and layout.kind == "index":
        scale = np.exp(rng.uniform(-20, 20, n)).astype(np.float32)
        records[:, layout.channels :] = scale.view(np.uint8).reshape(n, 4)
    elif layout.format in ("fp8", "fp4"):  # keep scales where the products fit float32
        records[:, layout.fields[0] :] = rng.integers(20, 240, (n, layout.fields[1]))
    fields = torch.from_numpy(records).split(list(layout.fields), 1)
    ours = paged.decode(fields, layout, torch.float32).numpy()
    with np.errstate(invalid="ignore"):
        theirs = oracle.decode_records(records, layout)
        assert np.array_equal(ours, theirs.astype(np.float32), equal_nan=True)
    assert np.isnan(theirs).any() == (layout.format != "fp4")


def test_int32_slots_reach_beyond_four_gigabytes():
    """Addresses are formed in 64 bits. Only the touched pages of the arena become resident."""
    stride = 2**31 + 4096
    arena = torch.empty(2 * stride + HCA.page_bytes, dtype=torch.uint8)
    data = arena.as_strided((3, HCA.page_bytes), (stride, 1))
    x = rows(HCA, 1)
    paged.write(Cache("c", data, HCA), torch.tensor([5], dtype=torch.int32), x)
    small = Cache("c", torch.zeros(1, HCA.page_bytes, dtype=torch.uint8), HCA)
    paged.write(small, torch.tensor([1]), x)
    record = HCA.read(data[2:].contiguous().numpy(), np.array([1]))
    assert np.array_equal(record, HCA.read(small.data.numpy(), np.array([1])))
    assert HCA.field_offsets(np.array([5], dtype=np.int32), stride)[0] == 2 * stride + 576


# values


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([("kv", 128), ("kv", 512), ("index", 128)]))
def test_dialects_hold_the_same_values(seed, shape):
    """With maxima 448 and 224 both dialects decode to the same values bit for bit (FNUZ has no minus zero)."""
    kind, channels = shape
    pair = []
    for dialect in ("ocp", "fnuz"):
        layout = (
            kv_layout("fp8", dialect, channels, 64, 4)
            if kind == "kv"
            else index_layout("fp8", dialect, channels, 4, 576)
        )
        cache = Cache("c", torch.full((2, layout.page_bytes), 0xFF, dtype=torch.uint8), layout)
        paged.write(cache, torch.arange(8), rows(layout, 8, seed).to(torch.bfloat16))
        pair.append(paged.read(cache, torch.arange(8), torch.float32) + 0.0)
    assert torch.equal(pair[0].view(torch.int32), pair[1].view(torch.int32))
    assert pair[0].isfinite().all()


@layouts
def test_writing_what_was_read_changes_no_value(layout):
    cache = Cache("c", torch.zeros(2, layout.page_bytes, dtype=torch.uint8), layout)
    slots = torch.arange(2 * layout.entries)
    paged.write(cache, slots, rows(layout, len(slots)))
    once = paged.read(cache, slots, torch.float32)
    paged.write(cache, slots, once)
    assert torch.equal(paged.read(cache, slots, torch.float32), once)


@dialects
def test_kv_values_are_exact_in_bf16(dialect):
    layout = kv_layout("fp8", dialect, 512, 64, 4)
    cache = Cache("c", torch.zeros(2, layout.page_bytes, dtype=torch.uint8), layout)
    paged.write(cache, torch.arange(8), rows(layout, 8))
    exact = paged.read(cache, torch.arange(8), torch.float32)
    assert torch.equal(paged.read(cache, torch.arange(8), torch.bfloat16).float(), exact)


def test_num_slots_and_json():
    cache = Cache("c", torch.zeros(3, 37440, dtype=torch.uint8), WINDOW)
    assert cache.num_slots == 192
    for layout in SMALL:
        assert PageLayout.from_json(layout.to_json()) == layout
