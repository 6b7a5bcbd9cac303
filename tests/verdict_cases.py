"""Calls of four ops with any number of rows (prototypes of the judge), and the registry's examples as cases."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from verdict_variants import Case, case

from dsv4dbg.kernels import paged
from dsv4dbg.kernels.dims import PRESETS
from dsv4dbg.kernels.numerics import HF, OFFICIAL
from dsv4dbg.kernels.registry import registry
from dsv4dbg.kernels.samples import activations, cos_sin, fp8_weight, norm_weight, normal
from dsv4dbg.pages import kv_layout, state_layout


def fp8_linear(rng: np.random.Generator, rows: int) -> Case:
    weight, scale = fp8_weight(rng, 128, 256)
    return case(registry().op("fp8_linear"), {"x": activations(rng, rows, 256), "weight": weight, "scale": scale})


def compress_insert(rng: np.random.Generator, rows: int) -> Case:
    """``rows`` entries of ratio 2 without overlap in one FP8 buffer."""
    ratio, channels, tokens = 2, 128, 2 * rows
    state, entries = state_layout(channels, 64, 1), kv_layout("fp8", "ocp", channels, 64, 64)
    pages = -(-tokens // 64)
    positions = torch.arange(tokens)
    order = torch.from_numpy(rng.permutation(-(-rows // 64) * 64))[:rows]
    slots = torch.full((tokens,), -1)
    slots[ratio - 1 :: ratio] = order
    args = {
        "kv": normal(rng, tokens, channels), "gate": normal(rng, tokens, channels), "ape": normal(rng, ratio, channels),
        "norm_weight": norm_weight(rng, channels), "positions": positions,
        "sequence": torch.zeros(tokens, dtype=torch.int32), "cos_sin": cos_sin(tokens, 64),
        "state_cache": paged.Cache("state", torch.zeros(pages, state.page_bytes, dtype=torch.uint8), state),
        "state_slots": positions, "state_table": torch.arange(pages, dtype=torch.int32)[None],
        "cache": paged.Cache("entries", torch.zeros(-(-rows // 64), entries.page_bytes, dtype=torch.uint8), entries),
        "slots": slots, "ratio": ratio, "eps": 1e-6, "act": "bf16",
    }  # fmt: skip
    return case(registry().op("compress_insert"), args)


def moe_router(rng: np.random.Generator, rows: int) -> Case:
    args = {"logits": normal(rng, rows, 64, scale=2), "bias": normal(rng, 64, scale=0.1), "topk": 6, "scale": 1.5}
    return case(registry().op("moe_router"), args)


def indexer_topk(rng: np.random.Generator, rows: int) -> Case:
    """Scores as the official indexer gives them: bf16 values, so that ties are common."""
    logits = normal(rng, rows, 256).to(torch.bfloat16).float()
    lens = torch.from_numpy(rng.integers(0, 257, rows).astype(np.int32))
    return case(registry().op("indexer_topk"), {"logits": logits, "lens": lens, "k": 32})


PROTOTYPES = {f.__name__: f for f in (fp8_linear, compress_insert, moe_router, indexer_topk)}


def examples(size: str, seed: int, names: set[str] | None = None) -> Iterator[tuple[str, Case]]:
    """Every example of every op, in both numerics profiles where the op reads switches."""
    for name, op in registry().ops.items():
        if names and name not in names:
            continue
        for numerics in (OFFICIAL, HF) if op.switches else (OFFICIAL,):
            assert op.examples_function is not None
            for example in op.examples_function(PRESETS[size], np.random.default_rng(seed)):
                yield f"{name}, {numerics.name}, {size}: {example.name}", case(op, example.args, numerics)
