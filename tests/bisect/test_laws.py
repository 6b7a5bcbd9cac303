"""Laws of the forward: they hold for the reference bit for bit, and catch implementations that break them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from dsv4dbg.bisect.laws import Setting, batch_invariance, block_permutation, serial_equivalence
from dsv4dbg.kernels import paged
from dsv4dbg.kernels.numerics import HF, OFFICIAL, Numerics
from dsv4dbg.kernels.registry import Implementation, registry
from dsv4dbg.model.cache import CacheFormat, CacheManager
from dsv4dbg.model.checkpoint import Checkpoint, open_model
from dsv4dbg.model.config import ModelConfig
from dsv4dbg.model.model import Model
from dsv4dbg.model.synthetic import Synthetic, wide_config
from dsv4dbg.model.weights import ModelWeights
from dsv4dbg.plan import Plan

CPU = torch.device("cpu")
SMALL = replace(
    wide_config(),
    vocab_size=256,
    hidden_size=128,
    num_attention_heads=2,
    head_dim=128,
    q_lora_rank=128,
    o_groups=1,
    o_lora_rank=128,
    moe_intermediate_size=128,
    n_routed_experts=4,
    num_experts_per_tok=2,
    index_n_heads=2,
    index_topk=3,
    sliding_window=8,
    hca_ratio=16,
    compress_ratios=(4, 16, 4, 0, 0),
    num_hash_layers=1,
)
SCALED = {
    "small": SMALL,
    "pro-like": replace(SMALL, compress_ratios=(16, 16, 4, 16, 0), index_topk=2, sliding_window=12),
    "four groups": replace(
        SMALL,
        num_attention_heads=8,
        head_dim=192,
        o_groups=4,
        hca_ratio=8,
        compress_ratios=(0, 4, 8, 4, 0),
        num_hash_layers=0,
    ),
}
LENGTH = 36


def setting(config: ModelConfig, numerics: Numerics = OFFICIAL, plan: str = "*=torch", caches: str = "fp8") -> Setting:
    checkpoint = Checkpoint(config, Synthetic(config, "laws", keep=True), "laws")
    model = Model(config, ModelWeights(checkpoint, CPU), numerics)
    return Setting(model, CPU, Plan.parse(plan), CacheFormat.parse(caches))


def tokens(config: ModelConfig, count: int = LENGTH, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, config.vocab_size, count).tolist()


@pytest.fixture(scope="module")
def small() -> Setting:
    return setting(SMALL)


@pytest.mark.parametrize("name", SCALED)
def test_serial_equivalence(name: str) -> None:
    assert serial_equivalence(setting(SCALED[name]), tokens(SCALED[name])) is None


@pytest.mark.parametrize(("numerics", "caches"), [(HF, "bf16"), (OFFICIAL, "fp8-fnuz")], ids=["hf", "fnuz"])
def test_serial_equivalence_in_other_formats(numerics: Numerics, caches: str) -> None:
    assert serial_equivalence(setting(SMALL, numerics, caches=caches), tokens(SMALL, 30)) is None


@pytest.mark.parametrize("name", SCALED)
def test_batch_invariance(name: str) -> None:
    ids = tokens(SCALED[name])
    assert batch_invariance(setting(SCALED[name]), [ids[:21], ids[3:4], [], ids[5:18]]) is None


@pytest.mark.parametrize("name", SCALED)
def test_block_permutation_also_beyond_4_gib(name: str) -> None:
    assert block_permutation(setting(SCALED[name]), tokens(SCALED[name], 30), high=True) is None


@pytest.mark.slow
@pytest.mark.parametrize(("model", "count"), [("tiny", 150), ("wide", 135)])
def test_laws_on_the_models(model: str, count: int) -> None:
    checkpoint = open_model(model)
    whole = Setting(Model(checkpoint.config, ModelWeights(checkpoint, CPU), OFFICIAL), CPU)
    ids = tokens(checkpoint.config, count)
    assert serial_equivalence(whole, ids) is None
    assert batch_invariance(whole, [ids[:40], ids[7:8], [], ids[: count // 2]]) is None
    assert block_permutation(whole, ids[:140], high=True) is None


@pytest.fixture
def broken() -> Iterator[Callable[[str, Callable], str]]:
    """Register a function as implementation ``broken`` of an op for one test; it gets the reference first."""
    added = []

    def register(op: str, function: Callable) -> str:
        reference = registry().op(op).reference
        registry().add(Implementation(op, "broken", lambda **kwargs: function(reference, **kwargs)))
        added.append((op, "broken"))
        return f"op:{op}=broken"

    yield register
    for key in added:
        del registry().implementations[key]


def _first_write_wins(cache: paged.Cache, slots: torch.Tensor) -> torch.Tensor:
    """Slots with those whose record is not empty any more set to -1: a rejected draft is never overwritten."""
    used = (torch.cat(paged.read_records(cache, slots.clamp_min(0)), 1) != 0).any(-1)
    return torch.where(used, -1, slots)


def test_a_compressor_that_keeps_rejected_rows_breaks_serial_equivalence(small: Setting, broken) -> None:
    def stale(reference, **kwargs):
        slots = _first_write_wins(kwargs["state_cache"], kwargs["state_slots"])
        return reference(**kwargs | {"state_slots": slots})

    found = serial_equivalence(replace(small, plan=Plan.parse(broken("compress_insert", stale))), tokens(SMALL))
    assert found is not None
    assert found.case in ("verify", "prefill, decode and verify")


def test_an_insert_that_keeps_rejected_rows_breaks_serial_equivalence(small: Setting, broken) -> None:
    def stale(reference, **kwargs):
        return reference(**kwargs | {"window_slots": _first_write_wins(kwargs["window_cache"], kwargs["window_slots"])})

    found = serial_equivalence(replace(small, plan=Plan.parse(broken("qnorm_rope_kv_insert", stale))), tokens(SMALL))
    assert found is not None
    assert found.case in ("verify", "prefill, decode and verify")


def test_a_top_k_that_drops_the_newest_entry_of_the_step_breaks_serial_equivalence(small: Setting, broken) -> None:
    def short(reference, *, logits, lens, k):
        return reference(logits, lens - (lens == logits.shape[1]).to(lens.dtype), k=k)

    found = serial_equivalence(replace(small, plan=Plan.parse(broken("indexer_topk", short))), tokens(SMALL))
    assert found is not None
    assert "position" in found.where


def test_a_rollback_that_forgets_breaks_serial_equivalence(small: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    right, kept = CacheManager.rollback, []

    def keeps_one_draft(self: CacheManager, sequence: int, length: int) -> None:
        if length < self.lengths[sequence] and self not in kept:
            kept.append(self)
            length += 1
        right(self, sequence, length)

    monkeypatch.setattr(CacheManager, "rollback", keeps_one_draft)
    found = serial_equivalence(small, tokens(SMALL))
    assert found is not None
    assert found.case == "verify"


def test_a_kernel_that_reads_the_first_sequence_s_table_breaks_batch_invariance(small: Setting, broken) -> None:
    def first_table(reference, **kwargs):
        return reference(**kwargs | {"sequence": torch.zeros_like(kwargs["sequence"])})

    plan = Plan.parse(broken("build_indices", first_table))
    ids = tokens(SMALL)
    found = batch_invariance(replace(small, plan=plan), [ids[:20], ids[20:40]])
    assert found is not None
    assert "sequence 1" in found.where


def test_a_kernel_with_32_bit_offsets_breaks_block_permutation(small: Setting, broken) -> None:
    def wraps(reference, **kwargs):
        indices, window = kwargs["indices"].clone(), kwargs["window"]
        layout = kwargs["window_cache"].layout
        pages = 2**31 // layout.page_bytes
        columns = indices[:, :window]
        indices[:, :window] = torch.where(columns < 0, columns, columns % (pages * layout.entries))
        return reference(**kwargs | {"indices": indices})

    plan = Plan.parse(broken("sparse_mla_decode", wraps))
    found = block_permutation(replace(small, plan=plan), tokens(SMALL, 30), high=True)
    assert found is not None
    assert found.case == "pages beyond 2^32 bytes"
