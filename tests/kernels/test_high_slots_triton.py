"""Triton kernels on pools beyond 4 GiB: records at the highest slots are the same as in a small pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dsv4dbg.kernels.arrays import copied
from dsv4dbg.kernels.dims import WIDE
from dsv4dbg.kernels.numerics import OFFICIAL
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.registry import registry

pytest.importorskip("triton")

BEYOND = 2**32 + 2**20
CACHES = {  # op -> cache -> arguments that hold its slots, arguments that hold its pages
    "gather_kv": {"window_cache": (["window_slots"], []), "entry_cache": (["entry_slots"], [])},
    "qnorm_rope_kv_insert": {"window_cache": (["window_slots"], [])},
    "compress_insert": {"state_cache": (["state_slots"], ["state_table"]), "cache": (["slots"], [])},
}


def shifted(numbers: torch.Tensor, by: int) -> torch.Tensor:
    return torch.where(numbers >= 0, numbers + by, numbers)


def at_the_top(args: dict[str, Any], cache: str, slots: list[str], pages: list[str]) -> int:
    """Move a cache to the end of a pool of more than 4 GiB; returns its first page there."""
    small = args[cache]
    first = BEYOND // small.data.stride(0) + 1
    pool = torch.empty(first + len(small.data), small.data.stride(0), dtype=torch.uint8, device="cuda")
    pool[:, : small.data.shape[1]][first:] = small.data
    args[cache] = Cache(small.name, pool[:, : small.data.shape[1]], small.layout)
    args |= {name: shifted(args[name], first * small.layout.entries) for name in slots}
    args |= {name: shifted(args[name], first) for name in pages}
    return first


@pytest.mark.gpu
@pytest.mark.parametrize("name", CACHES)
def test_records_beyond_4_gib(name):
    op, function = registry().ops[name], registry().implementation(name, "triton").function
    numerics = {"numerics": OFFICIAL} if op.reads_numerics else {}
    count = 0
    for example in op.examples_function(WIDE, np.random.default_rng(5)):
        if not any(word in example.name for word in ("ragged", "emissions", "three sequences", "fnuz")):
            continue
        on_gpu = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in op.bind((), example.args).items()}
        for key, value in on_gpu.items():
            if isinstance(value, Cache):
                on_gpu[key] = Cache(value.name, value.data.cuda(), value.layout)
        small, high = copied(on_gpu), copied(on_gpu)
        firsts = {cache: at_the_top(high, cache, *names) for cache, names in CACHES[name].items()}
        expected = op.name_outputs(function(**small, **numerics))
        got = op.name_outputs(function(**high, **numerics))
        for output in expected:
            assert torch.equal(expected[output], got[output]), (example.name, output)
        for cache in op.mutates:
            assert torch.equal(small[cache].data, high[cache].data[firsts[cache] :]), (example.name, cache)
        count += 1
    assert count
