"""Checkpoints: what comes out, and one sentence for everything that can be wrong with files."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4dbg.errors import DbgError
from dsv4dbg.model.checkpoint import MAX_PROBLEMS, Checkpoint, fingerprint, open_model
from dsv4dbg.model.checkpoint_files import INDEX, StateDict
from dsv4dbg.model.config import ModelConfig
from dsv4dbg.model.export import export, published_config, published_tensors
from dsv4dbg.model.names import hf_name
from dsv4dbg.model.synthetic import Synthetic, wide_config


def small_config() -> ModelConfig:
    return replace(
        wide_config(), vocab_size=32, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, head_dim=128,
        q_lora_rank=128, o_groups=2, o_lora_rank=64, compress_ratios=(4, 128, 0, 0), index_n_heads=2,
        moe_intermediate_size=128, n_routed_experts=4, num_experts_per_tok=2, num_hash_layers=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def small() -> Checkpoint:
    return Checkpoint(small_config(), Synthetic(small_config(), "small", keep=True), "small")


@pytest.fixture(scope="module")
def tensors(small) -> dict[str, torch.Tensor]:
    return published_tensors(small)


@pytest.fixture(scope="module")
def files(small, tensors, tmp_path_factory) -> Path:
    """The small model as published files."""
    folder = tmp_path_factory.mktemp("small")
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(published_config(small.config)))
    return folder


@pytest.fixture
def copy(files, tmp_path) -> Path:
    return Path(shutil.copytree(files, tmp_path / "copy"))


def refusal(what, *args) -> str:
    """The one sentence with which ``what(*args)`` is refused."""
    with pytest.raises(DbgError) as error:
        what(*args)
    text = error.value.message
    assert "\n" not in text
    assert len(text) < 3000
    return text


def change(tensors: dict[str, torch.Tensor], **changes: torch.Tensor | None) -> Checkpoint:
    changed = dict(tensors)
    for name, tensor in changes.items():
        changed.pop(name, None)
        if tensor is not None:
            changed[name] = tensor
    return Checkpoint.from_state_dict(small_config(), changed)


def test_dtypes_and_shapes_of_a_layer():
    layer = open_model("tiny").layer(2)
    found = {key: (str(t.dtype).removeprefix("torch."), list(t.shape)) for key, t in layer.items()}
    assert found["attn.wq_b.weight"] == ("float8_e4m3fn", [512, 128])
    assert found["attn.wq_b.scale"] == ("uint8", [4, 1])
    assert found["ffn.experts.w1.weight"] == ("uint8", [8, 128, 128])
    assert found["ffn.experts.w1.scale"] == ("uint8", [8, 128, 8])
    assert found["ffn.experts.w2.weight"] == ("uint8", [8, 256, 64])
    assert found["ffn.gate.bias"] == ("float32", [8])
    assert found["attn.compressor.ape"] == ("float32", [4, 256])
    assert found["attn.compressor.wkv.weight"] == ("bfloat16", [256, 256])
    assert found["attn.indexer.compressor.norm.weight"] == ("bfloat16", [128])
    assert found["hc_attn_fn"] == ("float32", [24, 1024])
    assert "ffn.gate.tid2eid" not in found
    assert open_model("tiny").layer(0)["ffn.gate.tid2eid"].dtype == torch.int64


def test_scales_are_bytes_not_numbers(files):
    stored = load_file(files / "model.safetensors")["layers.0.attn.wkv.scale"]
    assert stored.dtype == torch.float8_e8m0fnu
    scale = Checkpoint.open(files).layer(0)["attn.wkv.scale"]
    assert scale.dtype == torch.uint8
    assert torch.equal(scale, stored.view(torch.uint8))
    assert 100 < int(scale.min()) < 127


def test_experts_are_stacked_in_order(files):
    stored = load_file(files / "model.safetensors")
    stacked = Checkpoint.open(files).layer(1)["ffn.experts.w2.weight"]
    for j in range(4):
        assert torch.equal(stacked[j], stored[f"layers.1.ffn.experts.{j}.w2.weight"].view(torch.uint8))


def test_files_shards_and_memory_give_the_same_model(small, files, tensors, tmp_path):
    one = Checkpoint.open(files)
    shutil.copy(files / "config.json", tmp_path)
    names = sorted(tensors)
    weight_map = {name: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, tmp_path / file)
    without_index = Checkpoint.open(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    sharded = Checkpoint.open(tmp_path)
    memory = Checkpoint.from_state_dict(small.config, tensors)
    for other in (without_index, sharded, memory):
        assert other.fingerprint == one.fingerprint == small.fingerprint
        assert other.keys == small.keys


def test_keys_are_what_the_parts_hold(small):
    keys = set(small.ends()) | {f"mtp.0.{k}" for k in small.mtp(0)}
    keys |= {f"layers.{i}.{k}" for i in range(3) for k in small.layer(i)}
    assert keys == set(small.keys)


def test_hash_is_of_what_is_handed_out(small, files):
    opened = Checkpoint.open(files)
    for key in ("layers.0.ffn.experts.w1.weight", "layers.0.ffn.gate.tid2eid", "head.weight"):
        assert opened.hash(key) == fingerprint(opened.tensor(key)) == small.hash(key)
    assert len(opened.hash("head.weight")) == 32


def test_fingerprint_sees_dtype_shape_and_every_bit():
    zero = torch.zeros(4)
    different = [zero, zero.view(2, 2), zero.view(torch.int32), zero.clone().index_fill(0, torch.tensor([3]), -0.0)]
    assert len({fingerprint(t) for t in different}) == 4
    assert fingerprint(torch.eye(3)[:, :2]) == fingerprint(torch.eye(3)[:, :2].contiguous())
    assert len(fingerprint(torch.empty(0, 3))) == 32


def test_weights_are_views_of_the_file(files):
    opened = Checkpoint.open(files)
    assert opened.tensor("embed.weight").data_ptr() == opened.tensor("embed.weight").data_ptr()


def test_base_formats(tensors):
    """F32 scales, FP8 experts, bf16 experts, wo_a as the converter leaves it, int32 routes."""
    fp8 = torch.ones(128, 128).to(torch.float8_e4m3fn)
    changes: dict[str, torch.Tensor | None] = {"layers.2.attn.wkv.scale": torch.full((1, 1), 0.3)}
    changes |= {"layers.0.ffn.gate.tid2eid": tensors["layers.0.ffn.gate.tid2eid"].int()}
    changes |= {"layers.0.attn.wo_a.scale": None, "layers.0.attn.wo_a.weight": torch.ones(128, 256).bfloat16()}
    for j in range(4):
        changes |= {f"layers.2.ffn.experts.{j}.w1.weight": fp8, f"layers.2.ffn.experts.{j}.w1.scale": torch.ones(1, 1)}
        changes |= {f"layers.1.ffn.experts.{j}.w3.weight": torch.ones(128, 128).bfloat16()}
        changes |= {f"layers.1.ffn.experts.{j}.w3.scale": None}
    loaded = change(tensors, **changes)
    layers = [loaded.layer(i) for i in range(3)]
    assert layers[2]["attn.wkv.scale"].dtype == torch.float32
    assert layers[2]["ffn.experts.w1.weight"].dtype == torch.float8_e4m3fn
    assert list(layers[2]["ffn.experts.w1.scale"].shape) == [4, 1, 1]
    assert layers[1]["ffn.experts.w3.weight"].dtype == torch.bfloat16
    assert "ffn.experts.w3.scale" not in layers[1]
    assert "attn.wo_a.scale" not in layers[0]
    assert layers[0]["ffn.gate.tid2eid"].dtype == torch.int64


def test_float32_where_the_format_has_it(tensors):
    loaded = change(tensors, **{"layers.1.ffn.gate.bias": torch.arange(4).bfloat16()})
    assert torch.equal(loaded.layer(1)["ffn.gate.bias"], torch.arange(4, dtype=torch.float32))


def test_mtp_can_be_turned_off(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    opened = Checkpoint.open(copy)
    assert not any(key.startswith("mtp") for key in opened.keys)
    assert "0 MTP blocks" in refusal(opened.mtp, 0)
    assert "3 layers (counted from 0), 3 is not" in refusal(opened.layer, 3)
    assert "no tensor nonsense" in refusal(opened.tensor, "nonsense")


BAD = {
    "missing": ({"layers.0.attn.wq_a.weight": None}, "layers.0.attn.wq_a.weight is missing"),
    "missing scale": ({"layers.0.attn.wq_a.scale": None}, "layers.0.attn.wq_a.scale is missing (F8_E4M3 weights need"),
    "missing expert": (
        {"layers.0.ffn.experts.2.w1.weight": None},
        "layers.0.ffn.experts.w1.weight lacks 1 of 4 experts (first: 2)",
    ),
    "fifth expert": ({"layers.0.ffn.experts.4.w1.scale": torch.zeros(128, 4, dtype=torch.uint8)}, "has 5 experts"),
    "extra": ({"layers.2.attn.compressor.ape": torch.ones(3)}, "layers.2.attn.compressor.ape does not belong"),
    "shape": ({"norm.weight": torch.ones(127)}, "norm.weight has shape [127], wanted [128]"),
    "scalar": ({"norm.weight": torch.ones(())}, "norm.weight has shape [], wanted [128]"),
    "transposed": (
        {"layers.0.attn.wq_b.weight": torch.ones(128, 512).to(torch.float8_e4m3fn)},
        "layers.0.attn.wq_b.weight has shape [128, 512], wanted [512, 128]",
    ),
    "scale shape": ({"layers.0.attn.wq_b.scale": torch.ones(4, 2)}, "wq_b.scale has shape [4, 2], wanted [4, 1]"),
    "half precision": ({"norm.weight": torch.ones(128).half()}, "norm.weight is F16, wanted BF16 or F32"),
    "fnuz": (
        {"layers.0.attn.wkv.weight": torch.ones(128, 128).to(torch.float8_e4m3fnuz)},
        "layers.0.attn.wkv.weight is torch.float8_e4m3fnuz, wanted BF16 or F32 or F8_E4M3",
    ),
    "scale dtype": ({"layers.0.attn.wkv.scale": torch.ones(1, 1).half()}, "wkv.scale is F16, wanted F32 or F8_E8M0"),
    "one odd expert": (
        {"layers.0.ffn.experts.1.w2.weight": torch.ones(128, 128).bfloat16()},
        "layers.0.ffn.experts.w2.weight differs between experts",
    ),
    "both names": ({"model.norm.weight": torch.ones(128)}, "are the same tensor"),
    "odd gate_up": (
        {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(4, 3, 128)},
        "are the same tensor",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tensors(tensors, case):
    changes, wanted = BAD[case]
    text = refusal(lambda: change(tensors, **changes))
    assert wanted in text
    assert len(text) < 500


def test_gate_up_that_cannot_be_halved(tensors):
    kept = {n: t for n, t in tensors.items() if ".0.ffn.experts." not in n}
    kept["model.layers.0.mlp.experts.gate_up_proj"] = torch.ones(4, 255, 128)
    assert "has shape [4, 255, 128], wanted gate and up rows" in refusal(
        Checkpoint.from_state_dict, small_config(), kept
    )


def test_all_problems_in_one_bounded_message():
    empty = refusal(lambda: Checkpoint(small_config(), StateDict({}), "empty"))
    assert "problems: embed.weight is missing; head.weight is missing" in empty
    assert empty.count("is missing") == MAX_PROBLEMS
    assert empty.endswith(" more")
    escapes = refusal(Checkpoint.from_state_dict, small_config(), {"a\n\x1b[31mb": torch.ones(1)})
    assert escapes.isprintable()
    junk = {f"{'x' * 5000}.{i}": torch.ones(1) for i in range(1000)}
    assert len(refusal(Checkpoint.from_state_dict, small_config(), junk)) < 3000


def test_values_that_no_forward_can_use(tensors):
    nan = torch.full((1, 1), 255, dtype=torch.uint8)
    text = refusal(change(tensors, **{"layers.0.attn.wkv.scale": nan}).layer, 0)
    assert "layers.0.attn.wkv.scale of state_dict holds 1 NaN scales, the first at [0, 0]" in text
    text = refusal(change(tensors, **{"layers.0.attn.wkv.scale": torch.full((1, 1), torch.inf)}).layer, 0)
    assert "NaN scales" in text
    expert = tensors["layers.1.ffn.experts.3.w1.scale"].view(torch.uint8).clone()
    expert[7, 2] = 255
    text = refusal(change(tensors, **{"layers.1.ffn.experts.3.w1.scale": expert.view(torch.float8_e8m0fnu)}).layer, 1)
    assert "the first at [3, 7, 2]" in text
    for value in (-1, 4):
        routes = tensors["layers.0.ffn.gate.tid2eid"].clone()
        routes[5, 1] = value
        assert "experts outside 0..3" in refusal(change(tensors, **{"layers.0.ffn.gate.tid2eid": routes}).layer, 0)


def test_not_a_checkpoint(tmp_path, files, copy):
    assert "not there" in refusal(Checkpoint.open, tmp_path / "nowhere")
    assert "not a directory" in refusal(Checkpoint.open, files / "config.json")
    assert "has no config.json" in refusal(Checkpoint.open, tmp_path)
    assert "no model 'nonsense': it is neither tiny nor wide nor a directory" in refusal(open_model, "nonsense")
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").mkdir()
    assert "model.safetensors is not a file" in refusal(Checkpoint.open, copy)
    (copy / "model.safetensors").rmdir()
    assert "holds no weights" in refusal(Checkpoint.open, copy)
    (copy / "pytorch_model.bin").touch()
    assert "only pytorch_model.bin, which is not read" in refusal(Checkpoint.open, copy)
    (copy / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4096}))
    assert "is for model_type 'llama', not deepseek_v4" in refusal(Checkpoint.open, copy)


def header_length(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[:8], "little")


def test_truncated_anywhere(copy):
    path = copy / "model.safetensors"
    data = path.read_bytes()
    header = 8 + header_length(path)
    for size in (0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        text = refusal(Checkpoint.open, copy)
        assert "model.safetensors is cut short" in text
        assert "is missing" not in text
    path.write_bytes(data + b"\0")
    assert "1 bytes too many" in refusal(Checkpoint.open, copy)


@pytest.mark.parametrize(
    ("first", "wanted"),
    [
        ((2**63).to_bytes(8, "little"), "is not a safetensors file: its header would have 9,223,372,036,854,775,808"),
        ((10**8 + 1).to_bytes(8, "little"), "is not a safetensors file"),
        ((10**8).to_bytes(8, "little"), "is cut short"),
        (b"version ", "is a Git LFS pointer"),
    ],
    ids=["2^63", "over the limit", "at the limit", "lfs"],
)
def test_header_length(copy, first, wanted):
    path = copy / "model.safetensors"
    path.write_bytes(first + path.read_bytes()[8:])
    assert wanted in refusal(Checkpoint.open, copy)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS = {
    "empty": b"",
    "not JSON": b"{nonsense}",
    "a list": b"[1, 2]",
    "deep": b"[" * 100_000,
    "no dtype": {"a": {"shape": [2], "data_offsets": [0, 8]}},
    "entry is text": {"a": "b"},
    "unknown dtype": {"a": ENTRY | {"dtype": "F3"}},
    "dtype list": {"a": ENTRY | {"dtype": ["F32"]}},
    "negative": {"a": ENTRY | {"shape": [-2], "data_offsets": [0, -8]}},
    "huge shape": {"a": ENTRY | {"shape": [2**62, 2**62]}},
    "float shape": {"a": ENTRY | {"shape": [2.0]}},
    "bool shape": {"a": ENTRY | {"shape": [True, 2]}},
    "shape text": {"a": ENTRY | {"shape": "2"}},
    "three offsets": {"a": ENTRY | {"data_offsets": [0, 4, 8]}},
    "gap": {"a": ENTRY | {"data_offsets": [8, 16]}},
    "overlap": {"a": ENTRY, "b": ENTRY},
    "wrong size": {"a": ENTRY | {"shape": [3]}},
}


@pytest.mark.parametrize("case", HEADERS)
def test_damaged_header(copy, case):
    header = HEADERS[case]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (copy / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    assert "model.safetensors has a damaged header" in refusal(Checkpoint.open, copy)


def test_header_with_nothing_of_ours(copy):
    text = json.dumps({"a": ENTRY}).encode()
    (copy / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert "embed.weight is missing" in refusal(Checkpoint.open, copy)


def test_flipped_header_bytes_never_crash(copy):
    path = copy / "model.safetensors"
    data = path.read_bytes()
    rng = random.Random(0)
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 3))):
            damaged[rng.randrange(8 + header_length(path))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            opened = Checkpoint.open(copy)
            for i in range(3):
                opened.layer(i)
        except DbgError as e:
            message = e.message
        else:
            continue
        assert message.isprintable()
        assert len(message) < 3000
        path.write_bytes(data)


def test_missing_shard(copy, tensors):
    weight_map = {n: "a.safetensors" if n < "layers.1" else "b.safetensors" for n in tensors}
    (copy / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    save_file({n: t for n, t in tensors.items() if weight_map[n] == "a.safetensors"}, copy / "a.safetensors")
    text = refusal(Checkpoint.open, copy)
    assert text.endswith("cannot be used: b.safetensors is missing")
    save_file({"norm.weight": torch.ones(3)}, copy / "b.safetensors")
    text = refusal(Checkpoint.open, copy)
    assert "which does not have it" in text


INDEXES = {
    "empty": b"",
    "not JSON": b"{",
    "no map": b"{}",
    "map is a list": b'{"weight_map": [1]}',
    "deep": b'{"weight_map":' * 100_000,
    "no tensors": b'{"weight_map": {}}',
    "climbs": b'{"weight_map": {"norm.weight": "../other.safetensors"}}',
    "absolute": b'{"weight_map": {"norm.weight": "/etc/passwd"}}',
    "number": b'{"weight_map": {"norm.weight": 3}}',
    "null byte": b'{"weight_map": {"norm.weight": "a\\u0000.safetensors"}}',
    "surrogate": b'{"weight_map": {"norm.weight": "\\ud800.safetensors"}}',
    "pickle": b'{"weight_map": {"norm.weight": "pytorch_model.bin"}}',
}


@pytest.mark.parametrize("case", INDEXES)
def test_bad_index(copy, case):
    (copy / INDEX).write_bytes(INDEXES[case])
    text = refusal(Checkpoint.open, copy)
    assert INDEX in text or "not a name that a file can have" in text
    assert text.isprintable()


def test_the_same_tensor_in_two_files(copy, tensors):
    save_file({"norm.weight": tensors["norm.weight"]}, copy / "extra.safetensors")
    assert "norm.weight is both in extra.safetensors and in model.safetensors" in refusal(Checkpoint.open, copy)


def test_file_cut_short_while_it_is_open(copy):
    opened = Checkpoint.open(copy)
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert "model.safetensors cannot be read" in refusal(opened.layer, 0)


def test_transformers_files(files, tmp_path):
    """The same weights under transformers' names, in bf16, through its own kind of config.json."""
    opened = Checkpoint.open(files)
    stored: dict[str, torch.Tensor] = {}
    halves: dict[str, dict[int, torch.Tensor]] = {}
    for key in opened.keys:
        if key.startswith("mtp.") or key.endswith(".scale"):
            continue
        name, half = hf_name(key)
        tensor = opened.tensor(key)
        # any bf16 values do: what is tested is where they go
        if tensor.dtype in (torch.uint8, torch.float8_e4m3fn):
            columns = tensor.shape[-1] * (2 if tensor.dtype == torch.uint8 else 1)
            size = (*tensor.shape[:-1], columns)
            tensor = torch.from_numpy(np.random.default_rng(len(name)).standard_normal(size)).bfloat16()
        if half is None:
            stored[name] = tensor
        else:
            halves.setdefault(name, {})[half] = tensor
    stored |= {name: torch.cat((h[0], h[1]), 1) for name, h in halves.items()}
    save_file(stored, tmp_path / "model.safetensors")
    config = published_config(opened.config)
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    config["layer_types"] = [kinds[r] for r in config.pop("compress_ratios")[:3]]
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = Checkpoint.open(tmp_path)
    assert loaded.config.num_nextn_predict_layers == 0
    layer = loaded.layer(1)
    gate_up = stored["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(layer["ffn.experts.w1.weight"], gate_up[:, :128])
    assert torch.equal(layer["ffn.experts.w3.weight"], gate_up[:, 128:])
    assert torch.equal(layer["attn.wo_b.weight"], stored["model.layers.1.self_attn.o_b_proj.weight"])
    assert not any(key.endswith(".scale") for key in layer)
    assert torch.equal(loaded.ends()["head.weight"], opened.ends()["head.weight"])


def test_export_of_a_published_checkpoint_keeps_its_bytes(files, tmp_path):
    written = export(str(files), tmp_path / "again")
    assert written.fingerprint == Checkpoint.open(files).fingerprint
    reference, candidate = (load_file(d / "model.safetensors") for d in (files, tmp_path / "again"))
    assert reference.keys() == candidate.keys()
    assert all(reference[n].dtype == candidate[n].dtype for n in reference)
