"""The exporter: rounding against independent casts, and a transformers checkpoint from end to end."""

from __future__ import annotations

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4dbg.kernels.formats import block_dequantize, fp4_dequantize
from dsv4dbg.model.checkpoint import TINY, Checkpoint, open_model
from dsv4dbg.model.checkpoint_schema import full_schema, scale_key
from dsv4dbg.model.config import ModelConfig
from dsv4dbg.model.export import block_quantize, expert_quantize, main, published_config
from dsv4dbg.model.names import hf_name
from dsv4dbg.model.synthetic import Synthetic, wide_config


def weights(*shape: int) -> torch.Tensor:
    """bf16 weights whose blocks differ in size, some of them exactly at a scale's edge."""
    rng = np.random.default_rng(7)
    x = torch.from_numpy(rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 3, (*shape[:-1], 1))).bfloat16()
    x[..., 0, :8] = torch.tensor([448.0, -448, 6, -6, 0, -0.0, 0.25, 450]).bfloat16()
    return x


def smallest_scale(amax: np.ndarray, maximum: float) -> np.ndarray:
    """Exponent of the smallest power of two >= amax / maximum, by trying them."""
    exponents = np.arange(-127, 128)
    return exponents[np.argmax(2.0**exponents >= amax[..., None].astype(np.float64) / maximum, axis=-1)]


def test_linears_are_fp8_with_the_smallest_power_of_two():
    w = weights(256, 384)
    codes, scale = block_quantize(w)
    blocks = w.double().numpy().reshape(2, 128, 3, 128)
    exponent = smallest_scale(np.abs(blocks).max((1, 3)), 448)
    assert np.array_equal(scale.numpy().astype(int) - 127, exponent)
    scaled = (blocks / 2.0 ** exponent[:, None, :, None]).reshape(256, 384)
    reference = scaled.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(codes.view(torch.uint8).numpy(), reference)


def test_experts_are_mxfp4_with_the_smallest_power_of_two():
    w = weights(3, 64, 96)
    packed, scale = expert_quantize(w)
    groups = w.double().numpy().reshape(3, 64, 3, 32)
    exponent = smallest_scale(np.abs(groups).max(-1), 6)
    assert np.array_equal(scale.numpy().astype(int) - 127, exponent)
    scaled = (groups / 2.0 ** exponent[..., None]).reshape(3, 64, 96).astype(np.float32)
    reference = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    reference[reference == 8] = 0  # no minus zero
    assert np.array_equal(packed.numpy() & 15, reference[..., 0::2])
    assert np.array_equal(packed.numpy() >> 4, reference[..., 1::2])


def test_partial_blocks_and_zeros():
    codes, scale = block_quantize(torch.ones(130, 5))
    assert list(scale.shape) == [2, 1]
    assert torch.equal(block_dequantize(codes, scale), torch.ones(130, 5))
    for rounded, back in (
        (block_quantize(torch.zeros(4, 4)), block_dequantize),
        (expert_quantize(torch.zeros(1, 2, 32)), fp4_dequantize),
    ):
        assert int(rounded[1].max()) < 255
        assert not back(*rounded).any()


def small_config() -> ModelConfig:
    return replace(
        wide_config(), vocab_size=32, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, head_dim=128,
        q_lora_rank=128, o_groups=2, o_lora_rank=64, compress_ratios=(4, 128, 0, 0), index_n_heads=2,
        moe_intermediate_size=128, n_routed_experts=4, num_experts_per_tok=2, num_hash_layers=1,
    )  # fmt: skip


@pytest.fixture
def transformers_checkpoint(tmp_path):
    """A small model under transformers' names in bf16 (norms float32), and its dense weights by key."""
    model = Checkpoint(small_config(), Synthetic(small_config(), "export"), "small")
    dense, stored = {}, {}
    halves: dict[str, dict[int, torch.Tensor]] = {}
    for key in full_schema(model.config):
        if key.startswith("mtp."):
            continue
        w = model.tensor(key)
        if scale_key(key) in model.keys:
            unpack = fp4_dequantize if w.dtype == torch.uint8 else block_dequantize
            w = unpack(w, model.tensor(scale_key(key))).bfloat16()
        dense[key] = w
        name, half = hf_name(key)
        if half is None:
            stored[name] = w.float() if "norm" in name else w
        else:
            halves.setdefault(name, {})[half] = w
    stored |= {name: torch.cat((h[0], h[1]), 1) for name, h in halves.items()}
    source = tmp_path / "source"
    source.mkdir()
    save_file(stored, source / "model.safetensors")
    config = published_config(model.config)
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    config["layer_types"] = [kinds[r] for r in config.pop("compress_ratios")[:3]]
    (source / "config.json").write_text(json.dumps(config))
    return source, dense


def test_transformers_checkpoint_end_to_end(transformers_checkpoint, tmp_path, capsys):
    source, dense = transformers_checkpoint
    target = tmp_path / "target"
    assert main([str(source), str(target), "--add-mtp", "seed"]) == 0
    assert "tensors" in capsys.readouterr().out
    written = Checkpoint.open(target)
    assert written.config.num_nextn_predict_layers == 1
    for key, w in dense.items():
        got = written.tensor(key)
        if scale_key(key) in written.keys:
            unpack = fp4_dequantize if got.dtype == torch.uint8 else block_dequantize
            # values that were FP8 or MXFP4 before are so again: another scale, the same numbers
            assert torch.equal(unpack(got, written.tensor(scale_key(key))), w.float()), key
        else:
            assert got.dtype == w.dtype, key
            assert torch.equal(got, w), key
    stored = load_file(target / "model.safetensors")
    assert stored["layers.0.ffn.experts.3.w1.weight"].dtype == torch.int8
    assert stored["layers.0.ffn.experts.3.w1.scale"].dtype == torch.float8_e8m0fnu
    assert stored["layers.1.attn.wo_a.weight"].dtype == torch.float8_e4m3fn
    assert stored["mtp.0.e_proj.scale"].dtype == torch.float8_e8m0fnu
    assert stored["layers.2.attn_norm.weight"].dtype == torch.bfloat16


def test_export_refuses_to_overwrite(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(["tiny", str(tmp_path)]) == 2
    assert "already holds a checkpoint" in capsys.readouterr().err
    assert main(["nonsense", str(tmp_path / "x")]) == 2


def test_tiny_exports_to_itself(tmp_path):
    assert main(["tiny", str(tmp_path / "tiny")]) == 0
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "tiny" / name).read_bytes() == (TINY / name).read_bytes(), name


def test_tiny_mtp_is_the_seeded_one():
    model = open_model("tiny")
    synthetic = Synthetic(model.config, "tiny")
    for key in model.keys:
        if key.startswith("mtp."):
            assert torch.equal(model.tensor(key), synthetic.read(key)), key
