"""Derived calls: the reference's own results say that the contracts' pointers and dims are complete."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from short_scans import example_calls, results

from dsv4dbg.bisect.derive import caches_of, compact_pages, keep_tokens, owned_entries, permute_pages, tokens_of
from dsv4dbg.bisect.subject import digest, judged
from dsv4dbg.compare import Verdict
from dsv4dbg.kernels.numerics import OFFICIAL
from dsv4dbg.kernels.paged import field_rows
from dsv4dbg.kernels.registry import registry
from dsv4dbg.kernels.table import Call
from dsv4dbg.site import Site

OPS = registry().ops
CACHED = [name for name, op in OPS.items() if any(arg.kind == "cache" for arg in op.args.values())]
TOKENS = [name for name, op in OPS.items() if any(arg.dims.startswith("token") for arg in op.args.values())]


@pytest.mark.parametrize("name", CACHED)
def test_pages_elsewhere_change_nothing(name: str) -> None:
    """And without renumbering the pointers, they change something."""
    rng, moved_any, broken = np.random.default_rng(1), 0, 0
    for call in example_calls(name):
        derived = permute_pages(call, rng)
        if derived is None:
            continue
        moved, back = derived
        first = results(call)
        assert digest(back(results(moved))) == digest(first), call
        moved_any += 1
        stale = {n: call.args[n] for arg in call.op.args.values() for n in (p.arg for p in arg.pointers)}
        wrong = Call(call.site, call.op, "torch", {**moved.args, **stale}, OFFICIAL)
        broken += digest(back(results(wrong))) != digest(first)
    assert moved_any > 1
    assert broken > 1


@pytest.mark.parametrize("name", CACHED)
def test_nothing_beyond_the_pointers_is_touched(name: str) -> None:
    """Entries that no pointer names may hold anything, and keep it."""
    filled = 0
    for call in example_calls(name):
        first, other = results(call), dict(call.args)
        for cache_name, cache in caches_of(call).items():
            free = ~owned_entries(call, cache_name)
            filled += int(free.sum())
            data = cache.data.clone()
            other[cache_name] = type(cache)(cache.name, data, cache.layout)
            for rows in field_rows(other[cache_name]):
                rows[free] = 0x5A
        filled_too = results(Call(call.site, call.op, "torch", other, OFFICIAL))
        for output in call.op.outputs:
            assert torch.equal(filled_too[output].nan_to_num(), first[output].nan_to_num())
    assert filled > 0


@pytest.mark.parametrize("name", CACHED)
def test_pages_that_nothing_names_go(name: str) -> None:
    fewer = 0
    for call in example_calls(name):
        compact = compact_pages(call)
        outputs = list(call.op.outputs)
        first, second = results(call), results(compact)
        assert digest({n: first[n] for n in outputs}) == digest({n: second[n] for n in outputs})
        for cache_name in caches_of(call):
            fewer += len(call.args[cache_name].data) - len(compact.args[cache_name].data)
    assert fewer > 0


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_taken_apart(name: str) -> None:
    """A token alone, and tokens in reversed order, give by the verdict rule the rows that the batch gives."""
    tested = 0
    for call in example_calls(name):
        tokens = tokens_of(call)
        if call.op.mutates or tokens is None or not 2 <= tokens <= 8:
            continue
        whole = results(call)
        for rows in ([tokens - 1], list(range(tokens))[::-1], [0, 1]):
            derived = keep_tokens(call, rows)
            assert derived is not None
            part = {n: v[rows] for n, v in whole.items()}
            judgement = judged(derived, part, results(derived))
            assert judgement.verdict <= Verdict.ROUNDING, judgement.sentence
            tested += 1
    assert tested or OPS[name].mutates


def test_rows_in_a_row_keep_their_strides() -> None:
    op = OPS["rms_norm"]
    wide = torch.arange(80.0).reshape(4, 20)[:, :8]
    args = {"x": wide, "weight": torch.ones(8), "eps": 1e-6}
    call = Call(Site("L0.norm", "rms_norm", "x"), op, "torch", op.bind((), args), OFFICIAL)
    kept = keep_tokens(call, [1, 2])
    assert kept is not None
    assert kept.args["x"].stride() == (20, 1)
    assert torch.equal(kept.args["x"], wide[1:3])
    assert torch.equal(keep_tokens(call, [2, 0]).args["x"], wide[[2, 0]])
