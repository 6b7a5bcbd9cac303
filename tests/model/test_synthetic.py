"""Synthetic weights: the same bytes everywhere, formats as published, nothing degenerate."""

from __future__ import annotations

import time

import pytest
import torch

from dsv4dbg.kernels.formats import block_dequantize, fp4_dequantize
from dsv4dbg.model.checkpoint import Checkpoint, open_model
from dsv4dbg.model.checkpoint_schema import full_schema, scale_key
from dsv4dbg.model.synthetic import Synthetic, wide_config


@pytest.fixture(scope="module")
def wide() -> Checkpoint:
    return open_model("wide")


def test_layers_of_wide(wide):
    c = wide.config
    kinds = [(c.layer_kind(i), c.is_hash(i)) for i in range(5)]
    assert kinds == [("csa", True), ("hca", True), ("csa", False), ("window", False), ("window", False)]
    assert list(wide.layer(0)["attn.wq_b.weight"].shape) == [64 * 512, 256]
    assert list(wide.layer(2)["attn.indexer.wq_b.weight"].shape) == [64 * 128, 256]
    assert list(wide.layer(1)["ffn.experts.w1.weight"].shape) == [32, 256, 128]


def test_bytes_are_the_same_everywhere(wide):
    assert wide.hash("layers.0.attn.wq_b.weight") == "e4f455f2735de0e613729fd1e1ca5613"
    assert wide.hash("layers.0.ffn.gate.tid2eid") == "938dc3506b3de777bf0a2902bcb84bff"
    assert wide.hash("embed.weight") == "4e9bd3b1b07ce61e189d02643bcb2687"
    assert wide.fingerprint == "b7a9b70486fc4cd371e2fa48e9d096d5"


def test_building_is_fast():
    model = open_model("wide")
    start = time.perf_counter()
    for i in range(4):
        model.layer(i)
    model.ends(), model.mtp(0)
    assert time.perf_counter() - start < 10  # 0.4 s on an idle core


def test_seed_and_name_decide():
    first, second = Synthetic(wide_config(), "a"), Synthetic(wide_config(), "b")
    read = [s.read(f"layers.{i}.attn.wkv.weight").view(torch.uint8) for s in (first, second) for i in (0, 1)]
    assert all(not torch.equal(a, b) for n, a in enumerate(read) for b in read[:n])
    assert torch.equal(first.read("embed.weight"), Synthetic(wide_config(), "a", keep=True).read("embed.weight"))


def test_kept_tensors_are_not_made_again():
    kept = Synthetic(wide_config(), "a", keep=True)
    assert kept.read("norm.weight") is kept.read("norm.weight")


def test_quantised_weights(wide):
    for key, expected in full_schema(wide.config).items():
        weight = wide.tensor(key)
        if expected.form not in ("linear", "experts"):
            if weight.is_floating_point():
                assert weight.isfinite().all()
            continue
        scale = wide.tensor(scale_key(key))
        if scale.numel() > 8:
            assert len(scale.unique()) == 4, key  # scales differ from block to block
        # a part says enough, and is fast
        if expected.form == "experts":
            weight, scale = weight[:1], scale[:1]
        else:
            weight, scale = weight[:512], scale[:4]
        dense = fp4_dequantize(weight, scale) if expected.form == "experts" else block_dequantize(weight, scale)
        assert dense.isfinite().all()
        assert 0.3 < float(dense.std()) * dense.shape[-1] ** 0.5 < 3, key  # few scales need not average out
        assert abs(float(dense.mean())) < 0.1 * float(dense.std()), key


def test_codes_that_occur(wide):
    layer = wide.layer(0)
    assert len(layer["ffn.experts.w1.weight"].unique()) == 256
    # all but the two NaN
    assert layer["attn.wq_b.weight"].view(torch.uint8).unique().tolist() == [*range(0x7F), *range(0x80, 0xFF)]


def test_routes(wide):
    routes = wide.layer(0)["ffn.gate.tid2eid"]
    assert list(routes.shape) == [2048, 6]
    assert all(len(set(row)) == 6 for row in routes.tolist())
    counts = routes.flatten().bincount(minlength=32)
    assert int(counts.min()) > 2048 * 6 / 32 * 0.8


def test_router_has_choices(wide):
    """On unit-variance input, scored layers use all experts and no expert takes more than half of the tokens."""
    x = torch.randn(500, 256, generator=torch.Generator().manual_seed(0))
    layer = wide.layer(2)
    scores = torch.nn.functional.softplus(x @ layer["ffn.gate.weight"].float().T).sqrt()
    chosen = (scores + layer["ffn.gate.bias"]).topk(6).indices.flatten().bincount(minlength=32)
    assert int(chosen.min()) > 20
    assert int(chosen.max()) < 250
    weights = scores.topk(6).values
    assert 1.05 < float((weights[:, 0] / weights[:, 5]).mean()) < 5
