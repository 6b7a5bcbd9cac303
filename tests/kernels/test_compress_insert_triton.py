"""compress_insert in Triton: any split into calls gives the same bytes."""

from __future__ import annotations

import compressor_cases
import pytest
import torch
from compressor_cases import chunks, inputs, make

from dsv4dbg.kernels.registry import registry

pytest.importorskip("triton")


@pytest.mark.parametrize("kind", ["csa", "hca", "index"])
def test_every_split_into_calls_gives_the_same_bytes(kind, monkeypatch):
    implementation = registry().implementation("compress_insert", "triton")
    monkeypatch.setattr(compressor_cases, "compress_insert", implementation.function)
    tokens = 133
    whole, split = make(kind), make(kind)
    kv, gate = inputs(whole, tokens)
    whole.feed(kv, gate, torch.arange(tokens))
    for part in chunks(tokens, [58, 3, 67, 1]):
        split.feed(kv[part], gate[part], part)
    assert torch.equal(whole.state.data, split.state.data)
    assert torch.equal(whole.entries.data, split.entries.data)
    assert whole.rows(tokens // whole.ratio).isfinite().all()
