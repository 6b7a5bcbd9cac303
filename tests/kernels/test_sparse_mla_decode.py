"""sparse_mla_decode: the same bits as prefill over the gathered rows, and nothing but the listed records."""

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from dsv4dbg.kernels.attention.gather_kv import gather_kv
from dsv4dbg.kernels.attention.sparse_mla_decode import sparse_mla_decode
from dsv4dbg.kernels.attention.sparse_mla_prefill import sparse_mla_prefill
from dsv4dbg.kernels.attention.sparse_samples import paged_rows, queries, sinks
from dsv4dbg.kernels.contract import Example
from dsv4dbg.kernels.dims import TINY, WIDE, Dims
from dsv4dbg.kernels.numerics import HF, OFFICIAL, Numerics
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.pages import kv_layout

PROFILES = pytest.mark.parametrize("numerics", [OFFICIAL, HF], ids=["official", "hf"])
SIZES = pytest.mark.parametrize("dims", [TINY, WIDE], ids=["tiny", "wide"])


def examples(dims: Dims, seed: int = 0) -> Iterator[Example]:
    assert sparse_mla_decode.examples_function is not None
    yield from sparse_mla_decode.examples_function(dims, np.random.default_rng(seed))


def example(name: str, dims: Dims = TINY) -> dict:
    return next(dict(e.args) for e in examples(dims) if e.name == name)


def through_workspace(args: dict, numerics: Numerics) -> tuple[torch.Tensor, torch.Tensor]:
    """The listed records gathered into a workspace, and prefill over it."""
    window, indices = args["window"], args["indices"]
    parts, slots, base = [], [], 0
    for part in (indices[:, :window], indices[:, window:]):
        used = part[part >= 0].unique()
        parts.append(torch.where(part < 0, -1, torch.searchsorted(used, part.contiguous()) + base))
        slots.append(used.long())
        base += len(used)
    act = {torch.bfloat16: "bf16", torch.float32: "f32"}[args["q"].dtype]
    entries = (args["entry_cache"], slots[1]) if args["entry_cache"] is not None else (None, None)
    kv = gather_kv(args["window_cache"], slots[0], *entries, act=act)
    lists = torch.cat(parts, 1).to(torch.int32)
    return sparse_mla_prefill(args["q"], kv, lists, args["sink"], scale=args["scale"], numerics=numerics)


@SIZES
@PROFILES
def test_equals_prefill_over_the_gathered_rows_bit_for_bit(dims: Dims, numerics: Numerics) -> None:
    seen = set()
    for case in examples(dims):
        if len(case.args["q"]) > 63:
            continue
        o, lse = sparse_mla_decode(**case.args, numerics=numerics)
        o_rows, lse_rows = through_workspace(dict(case.args), numerics)
        assert torch.equal(o, o_rows), case.name
        assert torch.equal(lse, lse_rows), case.name
        seen.add((case.args["window_cache"].layout.format, case.args["window_cache"].layout.dialect))
    assert seen == {("fp8", "ocp"), ("fp8", "fnuz"), ("bf16", ""), ("f32", "")}


@PROFILES
@pytest.mark.parametrize("window", [0, 1, 63, 64, 65, 100, 150])
def test_border_between_the_caches_may_lie_anywhere(window: int, numerics: Numerics) -> None:
    """Also inside a block of 64 keys."""
    rng = np.random.default_rng(1)
    layout = kv_layout("fp8", "ocp", 128, 64, 16)
    caches = [paged_rows(rng, name, layout, [150]) for name in ("window", "entries")]
    lists = torch.cat((caches[0][1][0][:window], caches[1][1][0][window:])).to(torch.int32).expand(3, -1)
    args = {
        "q": queries(rng, 3, 4, 128), "window_cache": caches[0][0], "entry_cache": caches[1][0],
        "indices": lists, "sink": sinks(rng, 4), "window": window, "scale": 0.1,
    }  # fmt: skip
    o, lse = sparse_mla_decode(**args, numerics=numerics)
    o_rows, lse_rows = through_workspace(args, numerics)
    assert torch.equal(o, o_rows)
    assert torch.equal(lse, lse_rows)


def refilled(cache: Cache, slots: torch.Tensor, fill: int) -> Cache:
    """The cache with every byte that is in none of the records ``slots`` set to ``fill``."""
    data = np.full(cache.data.shape, fill, dtype=np.uint8)
    used = slots[slots >= 0].unique().numpy()
    cache.layout.write(data, used, cache.layout.read(cache.data.numpy(), used))
    return Cache(cache.name, torch.from_numpy(data), cache.layout)


@SIZES
@pytest.mark.parametrize("name", ["one token each at 124 to 131", "both fnuz", "bf16 caches", "a token without keys"])
def test_unlisted_bytes_never_reach_the_result(dims: Dims, name: str) -> None:
    """Pages of other sequences, records of other positions, padding: NaN bytes, zeros or large numbers alike."""
    args = example(name, dims)
    o, lse = sparse_mla_decode(**args, numerics=OFFICIAL)
    assert o.isfinite().all()
    for fill in (0x00, 0x7E, 0x80, 0xFF):
        caches = {
            "window_cache": refilled(args["window_cache"], args["indices"][:, : args["window"]], fill),
            "entry_cache": refilled(args["entry_cache"], args["indices"][:, args["window"] :], fill),
        }
        filled, filled_lse = sparse_mla_decode(**{**args, **caches}, numerics=OFFICIAL)
        assert torch.equal(filled, o), hex(fill)
        assert torch.equal(filled_lse, lse), hex(fill)


def test_pages_may_stand_further_apart_than_their_size() -> None:
    args = example("one token each at 124 to 131")
    o, _ = sparse_mla_decode(**args, numerics=OFFICIAL)
    for name in ("window_cache", "entry_cache"):
        cache = args[name]
        wide = torch.full((len(cache.data), cache.data.shape[1] + 192), 0xFF, dtype=torch.uint8)
        wide[:, : cache.data.shape[1]] = cache.data
        args[name] = Cache(name, wide, cache.layout)
    assert torch.equal(sparse_mla_decode(**args, numerics=OFFICIAL)[0], o)


def test_dialect_is_each_cache_s_own() -> None:
    """The same values in either dialect give the same bits; the bytes read in the wrong one do not."""
    args = example("one token each at 124 to 131")
    results = []
    for dialect in ("ocp", "fnuz"):
        layout = kv_layout("fp8", dialect, TINY.head_dim, TINY.rope_dim, 16)
        cache, slots, _ = paged_rows(np.random.default_rng(3), "entries", layout, [64])
        args["indices"][:, args["window"] :] = slots[0].to(torch.int32)
        args["entry_cache"] = cache
        results.append(sparse_mla_decode(**args, numerics=OFFICIAL)[0])
    assert torch.equal(results[0], results[1])
    ocp = kv_layout("fp8", "ocp", TINY.head_dim, TINY.rope_dim, 16)
    args["entry_cache"] = Cache("entries", args["entry_cache"].data, ocp)
    assert not torch.equal(sparse_mla_decode(**args, numerics=OFFICIAL)[0], results[0])


def test_only_the_attention_switch_is_read() -> None:
    args = example("one token each at 124 to 131")
    o, _ = sparse_mla_decode(**args, numerics=OFFICIAL)
    for switch in (f.name for f in fields(Numerics)):
        other, _ = sparse_mla_decode(**args, numerics=replace(OFFICIAL, **{switch: getattr(HF, switch)}))
        assert torch.equal(other, o) != (switch == "attention"), switch


def test_invariants_speak() -> None:
    args = example("one token each at 124 to 131")
    o, lse = sparse_mla_decode(**args, numerics=OFFICIAL)
    call = {**args, "indices": args["indices"].long().numpy(), "o": o.double().numpy(), "lse": lse.double().numpy()}
    checks = sparse_mla_decode.invariants
    assert [i.check(call) for i in checks] == [None] * len(checks)
    beyond = call["indices"].copy()
    beyond[2, 3] = args["window_cache"].num_slots
    wrong = [{"indices": beyond}, {"lse": call["lse"] - np.inf}, {"o": call["o"] * np.nan}]
    for invariant, change in zip(checks, wrong, strict=True):
        assert invariant.check({**call, **change}), invariant.name
    entry = call["indices"].copy()
    entry[0, -1] = args["entry_cache"].num_slots
    assert checks[0].check({**call, "indices": entry})
