"""gather_kv: decoded rows of window and entry caches in one workspace, for prefill over earlier chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dsv4dbg.compare import Exact
from dsv4dbg.kernels.attention.sparse_core import read_rows
from dsv4dbg.kernels.attention.sparse_samples import WINDOW_BLOCK, paged_rows
from dsv4dbg.kernels.contract import Example, Invariant, Pointer, attr, cache, op, tensor
from dsv4dbg.kernels.dims import TINY, Dims
from dsv4dbg.kernels.invariants import finite, first
from dsv4dbg.kernels.oracle import OracleCache
from dsv4dbg.kernels.paged import DTYPES, Cache
from dsv4dbg.kernels.samples import TOKENS
from dsv4dbg.pages import kv_layout


def _slots_in_pool(call: Mapping[str, Any]) -> str | None:
    for name in ("window", "entry"):
        cache, slots = call[f"{name}_cache"], call[f"{name}_slots"]
        if cache is None or slots is None:
            continue
        count = cache.data.shape[0] * cache.layout.entries
        bad = (slots < -1) | (slots >= count)
        if bad.any():
            return f"{name} slot {slots[bad][0]} at {first(bad)} is not one of {count}"
    return None


@op(
    family="attention",
    args={
        "window_cache": cache("recent tokens", Pointer("window_slots")),
        "window_slots": tensor("window_row", "i64"),
        "entry_cache": cache("compressed entries", Pointer("entry_slots"), optional=True),
        "entry_slots": tensor("entry_row", "i64", optional=True),
        "act": attr("dtype of activations: bf16 or f32"),
    },
    outputs={"kv": tensor("entry channel", "act")},
    compare={"kv": Exact()},
    invariants=(Invariant("-1 <= slot < slots of the pool", _slots_in_pool), finite("kv")),
)
def gather_kv(
    window_cache: Cache,
    window_slots: torch.Tensor,
    entry_cache: Cache | None = None,
    entry_slots: torch.Tensor | None = None,
    *,
    act: str,
) -> torch.Tensor:
    """``kv = [window_cache[window_slots]; entry_cache[entry_slots]]``: rows decoded to the activation dtype.

    Args:
        window_slots: int64 ``[n]``; -1 gives a row of zeros.
        entry_slots: int64 ``[m]``, with ``entry_cache``.
    Returns:
        ``[n + m, channel]`` bf16 or float32. FP8 codes times power-of-two scales are exact in both.
    """
    parts = [read_rows(window_cache, window_slots, DTYPES[act])]
    if entry_cache is not None and entry_slots is not None:
        parts.append(read_rows(entry_cache, entry_slots, DTYPES[act]))
    return torch.cat(parts)


@gather_kv.oracle
def _(
    window_cache: OracleCache,
    window_slots: np.ndarray,
    entry_cache: OracleCache | None,
    entry_slots: np.ndarray | None,
    *,
    act: str,
) -> np.ndarray:
    wanted = [(window_cache, slot) for slot in window_slots]
    if entry_cache is not None and entry_slots is not None:
        wanted += [(entry_cache, slot) for slot in entry_slots]
    kv = np.zeros((len(wanted), window_cache.layout.channels))
    for row, (source, slot) in zip(kv, wanted, strict=True):
        if slot >= 0:
            row[:] = source.rows(np.array([slot]))[0]
    return kv


@gather_kv.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    fp8, fnuz, bf16, f32 = ("fp8", "ocp"), ("fp8", "fnuz"), ("bf16", ""), ("f32", "")

    def case(
        name: str,
        lengths: list[int],
        entries: list[int],
        formats: tuple[tuple[str, str], tuple[str, str]] = (fp8, fp8),
        act: str = "bf16",
        entry_block: int = 16,
        **changed: Any,
    ) -> Example:
        window_layout = kv_layout(*formats[0], dims.head_dim, dims.rope_dim, WINDOW_BLOCK)
        entry_layout = kv_layout(*formats[1], dims.head_dim, dims.rope_dim, entry_block)
        window_cache, recent, _ = paged_rows(rng, "window", window_layout, lengths)
        entry_cache, chosen, _ = paged_rows(rng, "entries", entry_layout, entries)
        args = {
            "window_cache": window_cache,
            "window_slots": torch.cat(recent),
            "entry_cache": entry_cache,
            "entry_slots": torch.cat(chosen),
            "act": act,
        }
        return Example(name, {**args, **{key: change(args[key]) for key, change in changed.items()}})

    for count in TOKENS if dims == TINY else (0, 1, 3, 129):
        yield case(f"{count} rows and {count // 4} entries", [count], [count // 4])
    lengths, entries = [130, 1, 0, 67], [32, 0, 0, 16]
    yield case("three sequences", lengths, entries)
    yield case("entries two a page", lengths, [3, 0, 1, 5], entry_block=2)
    yield case("window fnuz, entries ocp", lengths, entries, (fnuz, fp8))
    yield case("both fnuz", lengths, entries, (fnuz, fnuz))
    yield case("bf16 caches", lengths, entries, (bf16, bf16))
    yield case("fp8 to float32", lengths, entries, act="f32")
    yield case("bf16 to float32", lengths, entries, (bf16, bf16), act="f32")
    yield case("float32 caches", lengths, entries, (f32, f32), act="f32")
    yield case("no entry cache", lengths, entries, entry_cache=lambda cache: None, entry_slots=lambda slots: None)
    yield case("slots of -1", lengths, entries, window_slots=lambda s: torch.where(s % 3 == 0, -1, s))
    yield case("slots in any order and twice", lengths, entries, window_slots=lambda s: torch.cat((s.flip(0), s[:5])))
    yield case("only -1", [3], [1], window_slots=lambda s: s * 0 - 1, entry_slots=lambda s: s * 0 - 1)
