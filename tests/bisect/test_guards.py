"""The arena: what lies in it is what the call had, and planted trespasses are seen, on every op."""

from __future__ import annotations

import ctypes

import pytest
import torch
from short_scans import example_calls

from dsv4dbg.bisect.derive import caches_of, owned_entries
from dsv4dbg.bisect.guards import GAP, Arena, unwritten
from dsv4dbg.bisect.subject import digest
from dsv4dbg.kernels.numerics import OFFICIAL
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.registry import registry
from dsv4dbg.kernels.table import Call
from dsv4dbg.site import Site

CPU = torch.device("cpu")
OPS = registry().ops


def run_here(call: Call) -> dict:
    kwargs = dict(call.args) | ({"numerics": call.numerics} if call.op.reads_numerics else {})
    outputs = call.op.name_outputs(call.op.reference(**kwargs))
    return {**outputs, **{name: call.args[name] for name in call.op.mutates}}


@pytest.mark.parametrize("name", list(OPS))
def test_the_reference_trespasses_nowhere(name: str) -> None:
    """In the arena, under both fills and in any order of buffers, it computes the same bits as outside."""
    arena = Arena()
    for call in example_calls(name):
        digests = []
        for fill, seed in (("nan", 0), ("large", 1)):
            placed = arena.place(call, CPU, fill, seed)
            for arg, value in call.args.items():
                if isinstance(value, torch.Tensor):
                    assert placed.call.args[arg].stride() == value.stride()
            with unwritten(fill, thorough=seed == 1):
                found = run_here(placed.call)
            assert placed.damage() == []
            digests.append(digest(found))
        assert digests == [digest(run_here(call))] * 2


def call_of(name: str) -> Call:
    """A call of some size."""
    return max(
        example_calls(name), key=lambda c: sum(v.numel() for v in c.args.values() if isinstance(v, torch.Tensor))
    )


def poke(address: int) -> None:
    ctypes.memmove(address, b"\x11\x22\x33", 3)


@pytest.mark.parametrize(
    ("offset", "words"), [(64, "64 bytes past the end of x"), (-8, "8 bytes before the start of x")]
)
def test_a_write_outside(offset: int, words: str) -> None:
    placed = Arena().place(call_of("rms_norm"), CPU)
    x = placed.call.args["x"]
    end = x.data_ptr() + x.numel() * x.element_size()
    poke(end + offset if offset > 0 else x.data_ptr() + offset)
    (damage,) = placed.damage()
    assert (damage.where, damage.count) == ("x", 3)
    assert words in damage.sentence
    assert GAP > 64


def test_a_write_to_an_input() -> None:
    placed = Arena().place(call_of("rms_norm"), CPU)
    poke(placed.call.args["weight"].data_ptr() + 10)
    (damage,) = placed.damage()
    assert (damage.where, damage.offset, damage.count) == ("weight", 10, 3)


def test_a_write_between_rows() -> None:
    op = OPS["rms_norm"]
    args = {"x": torch.ones(4, 20)[:, :8], "weight": torch.ones(8), "eps": 1e-6}
    call = Call(Site("L0.n", "rms_norm", "x"), op, "torch", op.bind((), args), OFFICIAL)
    placed = Arena().place(call, CPU)
    poke(placed.call.args["x"].data_ptr() + 8 * 4)
    (damage,) = placed.damage()
    assert (damage.where, damage.offset) == ("x", 32)


def test_a_write_to_a_foreign_page_and_what_is_left_of_it() -> None:
    call = next(c for c in example_calls("qnorm_rope_kv_insert") if (~owned_entries(c, "window_cache")).any())
    placed = Arena().place(call, CPU)
    page, entry = (int(i) for i in (~owned_entries(call, "window_cache")).nonzero()[0])
    cache = placed.call.args["window_cache"]
    cache.data[page, entry * cache.layout.fields[0]] = 0
    found = run_here(placed.call)
    (damage,) = placed.damage()
    assert damage.where == "window_cache"
    assert f"page {page}, entry {entry}" in damage.sentence
    assert digest(found) == digest(run_here(call))  # the cache goes back as the reference leaves it


def test_a_write_between_pages() -> None:
    call = next(c for c in example_calls("compress_insert") if caches_of(c)["cache"].layout.page_bytes < 1 << 20)
    layout = call.args["cache"].layout
    data = torch.zeros(len(call.args["cache"].data), layout.page_bytes + 128, dtype=torch.uint8)
    data[:, : layout.page_bytes] = call.args["cache"].data[:, : layout.page_bytes]
    wide = Call(call.site, call.op, "torch", {**call.args, "cache": Cache("wide", data, layout)}, OFFICIAL)
    placed = Arena().place(wide, CPU)
    placed.call.args["cache"].data[0, layout.page_bytes + 1] = 7
    run_here(placed.call)
    (damage,) = placed.damage()
    assert (damage.where, damage.offset, damage.count) == ("cache", layout.page_bytes + 1, 1)


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("fill", ["nan", "large"])
def test_what_nobody_wrote(fill: str, thorough: bool) -> None:
    """Memory behind a buffer, and fresh memory, holds the fill in every format."""
    placed = Arena().place(call_of("rms_norm"), CPU, fill)
    x = placed.call.args["x"].view(torch.bfloat16)
    behind = torch.as_strided(x, (8,), (1,), x.storage_offset() + x.numel())
    with unwritten(fill, thorough):
        fresh = [torch.empty(3), torch.empty_like(x), x.new_empty((2, 2)), torch.empty_strided((2, 2), (1, 2))]
    for value in (behind, *fresh):
        assert value.isnan().all() if fill == "nan" else (value.isfinite() & (value > 1e30)).all()
    assert (torch.zeros(3) == 0).all()


def test_ranges_name_the_buffers() -> None:
    placed = Arena().place(call_of("sparse_mla_decode"), CPU)
    for known in placed.ranges():
        value = placed.call.args[known.name]
        assert known.begin == (value.data if isinstance(value, Cache) else value).data_ptr()
