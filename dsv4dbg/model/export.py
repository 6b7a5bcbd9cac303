"""Export: any checkpoint that we read, written in the published format.

``python -m dsv4dbg.model.export SRC DST [--add-mtp SEED]`` reads a model (a directory, or a name that ``--model``
takes) and writes ``config.json``, ``model.safetensors`` and, if there is one, the tokenizer. Weights that are FP8 or
MXFP4 already keep their bytes; bf16 and float32 weights are rounded:

- linears: e4m3fn, one power-of-two scale (E8M0) per 128 x 128, the smallest with ``amax / scale <= 448``;
- routed experts: e2m1, two per byte, low nibble first, one E8M0 scale per 32 input channels, the smallest with
  ``amax / scale <= 6``;
- both round to nearest even, and e2m1 has no minus zero; all else is bf16, or float32 where the published format has
  that.

The shipped model ``tiny`` was made with ``--add-mtp tiny`` (an untrained, seeded MTP block) from its training
checkpoint.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save

from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.formats import (
    E8M0_BIAS,
    FP8_MAX,
    fp4_pack,
    fp4_quantize,
    fp4_unpack,
    fp8_encode,
    power_of_two,
    scale_exponent,
)
from dsv4dbg.model import names
from dsv4dbg.model.checkpoint import Checkpoint, open_model
from dsv4dbg.model.checkpoint_files import StateDict
from dsv4dbg.model.checkpoint_schema import BLOCK, full_schema, scale_key
from dsv4dbg.model.config import ModelConfig
from dsv4dbg.model.synthetic import Synthetic

QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [BLOCK, BLOCK],
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def block_quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a linear's weight to FP8.

    Args:
        weight: ``[out, in]`` bf16 or float32; a partial last block has a scale of its own.
    Returns:
        ``float8_e4m3fn [out, in]`` and E8M0 bytes ``uint8 [ceil(out/128), ceil(in/128)]``.
    """
    out, inp = weight.shape
    rows, columns = -(-out // BLOCK), -(-inp // BLOCK)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[:out, :inp] = weight.float()
    blocks = padded.reshape(rows, BLOCK, columns, BLOCK)
    # the floor keeps the exponent of an all-zero block in range; any scale is right for it
    exponent = scale_exponent(blocks.abs().amax((1, 3)).clamp_min(2.0**-100), FP8_MAX["ocp"])
    codes = fp8_encode(blocks * power_of_two(-exponent)[:, None, :, None], "ocp").reshape(padded.shape)
    scale = (exponent + E8M0_BIAS).to(torch.uint8)
    return codes[:out, :inp].contiguous().view(torch.float8_e4m3fn), scale


def expert_quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round experts ``[expert, out, in]`` to MXFP4: ``uint8 [expert, out, in/2]``, ``uint8 [expert, out, in/32]``."""
    packed, scale = fp4_quantize(weight)
    codes = fp4_unpack(packed)
    return fp4_pack(torch.where(codes == 8, 0, codes)), scale


def published_tensors(model: Checkpoint) -> dict[str, torch.Tensor]:
    """All tensors of ``model`` under published names, in published dtypes."""
    result: dict[str, torch.Tensor] = {}
    for key, expected in full_schema(model.config).items():
        weight = model.tensor(key)
        scale = model.tensor(scale_key(key)) if scale_key(key) in model.keys else None
        if expected.form in ("linear", "experts") and scale is None:
            weight, scale = block_quantize(weight) if expected.form == "linear" else expert_quantize(weight)
        if expected.form == "plain":
            weight = weight.to(torch.bfloat16)
        if expected.form == "experts" and weight.dtype == torch.uint8:
            weight = weight.view(torch.int8)
        if scale is not None:
            scale = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
        for name, tensor in ((key, weight), (scale_key(key), scale)):
            if tensor is None:
                continue
            rows = names.expert_names(name, model.config.n_routed_experts)
            result |= {name: tensor} if rows is None else dict(zip(rows, tensor, strict=True))
    return {name: tensor.contiguous() for name, tensor in result.items()}


def add_mtp(model: Checkpoint, seed: str) -> Checkpoint:
    """``model`` with one synthetic MTP block, in place of what it has."""
    layers = model.config.num_hidden_layers
    ratios = (*model.config.compress_ratios[:layers], 0)
    config = replace(model.config, num_nextn_predict_layers=1, compress_ratios=ratios)
    synthetic = Synthetic(config, seed)
    tensors = {key: model.tensor(key) for key in model.keys if not key.startswith("mtp.")}
    tensors |= {key: synthetic.read(key) for key in synthetic.tensors if key.startswith("mtp.0.")}
    return Checkpoint(config, StateDict(tensors), model.name)


def published_config(config: ModelConfig) -> dict[str, object]:
    """config.json of an exported model."""
    extra = {"expert_dtype": "fp4", "quantization_config": QUANTIZATION, "torch_dtype": "bfloat16"}
    return config.to_json() | extra


def export(source: str, target: Path, mtp_seed: str | None = None) -> Checkpoint:
    """Write the model ``source`` to the directory ``target``, which must not hold a checkpoint yet.

    Returns:
        the written checkpoint, opened and checked.
    Raises:
        DbgError: unusable source, or ``target`` is taken.
    """
    model = open_model(source)
    if (target / "model.safetensors").exists() or (target / "config.json").exists():
        raise DbgError(f"{target} already holds a checkpoint", "give an empty or a new directory")
    written = add_mtp(model, mtp_seed) if mtp_seed is not None else model
    target.mkdir(parents=True, exist_ok=True)
    (target / "model.safetensors").write_bytes(save(published_tensors(written)))
    (target / "config.json").write_text(json.dumps(published_config(written.config), indent=2) + "\n")
    for file in TOKENIZER_FILES:
        if model.tokenizer_dir is not None and (model.tokenizer_dir / file).exists():
            shutil.copyfile(model.tokenizer_dir / file, target / file)
    return Checkpoint.open(target)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dsv4dbg.model.export", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("source", help="directory with config.json and *.safetensors, or: tiny, wide")
    parser.add_argument("target", type=Path, help="directory to write")
    parser.add_argument("--add-mtp", metavar="SEED", help="add one synthetic MTP block made from this seed")
    given = parser.parse_args(arguments)
    try:
        written = export(given.source, given.target, given.add_mtp)
    except DbgError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    size = sum(p.stat().st_size for p in given.target.glob("*.safetensors"))
    print(f"{given.target}: {len(written.keys)} tensors, {size / 1e6:.1f} MB, fingerprint {written.fingerprint}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
