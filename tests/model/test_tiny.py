"""The shipped model `tiny`: its tensors are the ones that were held against the published format's reference export."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open

from dsv4dbg.kernels.dims import TINY
from dsv4dbg.kernels.formats import block_dequantize, fp4_dequantize
from dsv4dbg.model import checkpoint
from dsv4dbg.model.checkpoint import open_model

# xxh3-128 of the raw bytes, dtype, shape, name; all but mtp.* were byte-equal to an independent export of the same
# training checkpoint when this list was made
TENSORS = [line.split() for line in Path(__file__).with_suffix(".txt").read_text().splitlines()]


def test_every_stored_tensor():
    with safe_open(checkpoint.TINY / "model.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == sorted(name for *_, name in TENSORS)
        for content, dtype, shape, name in TENSORS:
            tensor = file.get_tensor(name)
            assert file.get_slice(name).get_dtype() == dtype
            assert "x".join(map(str, tensor.shape)) == shape
            assert xxhash.xxh3_128_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy()) == content, name


def test_it_is_package_data():
    folder = importlib.resources.files("dsv4dbg.model") / "tiny"
    names = {p.name for p in folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_configuration():
    config = open_model("tiny").config
    assert config.compress_ratios == (0, 0, 4, 128, 4, 128, 0)
    assert (config.num_hash_layers, config.num_nextn_predict_layers) == (2, 1)
    assert config.dims.hidden == TINY.hidden
    assert config.dims.index_topk == TINY.index_topk


def test_fingerprint_is_stable():
    assert open_model("tiny").fingerprint == "d289c3411c843d8bd4d9e516901e8fba"


def test_mtp_block_is_of_sensible_size():
    model = open_model("tiny")
    block = model.mtp(0)
    for key, tensor in block.items():
        if key.endswith(".weight") and key.removesuffix("weight") + "scale" in block:
            scale = block[key.removesuffix("weight") + "scale"]
            fp8 = tensor.dtype == torch.float8_e4m3fn
            dense = block_dequantize(tensor, scale) if fp8 else fp4_dequantize(tensor, scale)
            # unit-variance input gives output of about unit variance; few scales need not average out
            assert 0.3 < float(dense.std()) * dense.shape[-1] ** 0.5 < 3, key
    assert all(tensor.isfinite().all() for tensor in block.values() if tensor.dtype in (torch.bfloat16, torch.float32))
