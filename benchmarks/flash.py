"""Four layers of DeepSeek-V4-Flash with seeded weights, for the benchmarks: two window-only layers, one CSA, one HCA.

Large tensors are drawn on the device itself: random bytes where the checkpoint has FP8 or MXFP4, so that a model of
13 GB is there in seconds. Scales, norms and mixes are those of `dsv4dbg.model.synthetic`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.numerics import OFFICIAL
from dsv4dbg.model.batch import Chunk, Step
from dsv4dbg.model.checkpoint import Checkpoint
from dsv4dbg.model.config import ModelConfig
from dsv4dbg.model.model import Model
from dsv4dbg.model.run import Session, open_device
from dsv4dbg.model.synthetic import SPREADS, Synthetic, wide_config
from dsv4dbg.model.weights import ModelWeights
from dsv4dbg.plan import Plan

LARGE = 1 << 20  # elements from which a tensor is drawn on the device
DRAWN_AT_ONCE = 1 << 26  # elements
TINY = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 128, "o_groups": 2, "n_routed_experts": 8}


def command_line(description: str | None) -> tuple[torch.device, bool, Path | None]:
    """Device, whether the model is the tiny one, and the file for the rows."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", choices=("flash", "tiny"), help="tiny: to try the script, and the default on a CPU")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    options = parser.parse_args()
    try:
        device = open_device(options.device)
    except DbgError as error:
        parser.error(str(error))
    tiny = (options.sizes or ("tiny" if device.type == "cpu" else "flash")) == "tiny"
    if tiny or device.type == "cpu":
        print(
            "a try with a small model, or on a CPU in Triton's interpreter: the numbers mean nothing", file=sys.stderr
        )
    return device, tiny, options.json


def flash_config(tiny: bool = False) -> ModelConfig:
    """Sizes of Flash (hidden 4096, 64 heads of 512, 256 experts); ``tiny``: of the same kinds, for a try on a CPU."""
    layers = {"num_hidden_layers": 4, "compress_ratios": (0, 0, 4, 128), "num_nextn_predict_layers": 0}
    if tiny:
        return replace(wide_config(), **layers, **TINY)
    return replace(
        wide_config(), **layers, vocab_size=129280, hidden_size=4096, num_attention_heads=64, head_dim=512,
        q_lora_rank=1024, o_groups=8, o_lora_rank=1024, index_topk=512, moe_intermediate_size=2048,
        n_routed_experts=256,
    )  # fmt: skip


class OnDevice(Synthetic):
    """Synthetic weights whose large tensors are drawn on a device."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__(config, "benchmark")
        self._random = torch.Generator(device).manual_seed(1)
        self._device = device

    def _make(self, name: str) -> torch.Tensor:
        dtype, shape = self.tensors[name].dtype, self.tensors[name].shape
        if torch.Size(shape).numel() < LARGE or dtype == "I64" or name.endswith(".scale"):
            return super()._make(name).to(self._device)
        if dtype in ("U8", "F8_E4M3"):
            codes = torch.randint(256, shape, dtype=torch.uint8, device=self._device, generator=self._random)
            if dtype == "U8":
                return codes
            codes[codes & 0x7F == 0x7F] = 0  # NaN
            return codes.view(torch.float8_e4m3fn)
        _, mean, spread, rule = next(entry for entry in SPREADS if name.endswith(entry[0]))
        spread /= shape[-1] ** 0.5 if rule == "rows" else 1.0
        values = torch.empty(shape, dtype=torch.bfloat16 if dtype == "BF16" else torch.float32, device=self._device)
        for rows in values.split(max(1, DRAWN_AT_ONCE // shape[-1])):
            rows.normal_(mean, spread, generator=self._random)
        return values


def flash_model(device: torch.device, tiny: bool = False) -> Model:
    """The model, all weights on the device."""
    config = flash_config(tiny)
    weights = ModelWeights(Checkpoint(config, OnDevice(config, device), "flash"), device)
    for layer in range(config.num_hidden_layers):
        weights.layer(layer)
    weights.ends()
    return Model(config, weights, OFFICIAL)


def session(model: Model, device: torch.device, plan: Plan, sequences: int, tokens: int, room: int = 64) -> Session:
    """A session for so many sequences of ``tokens`` tokens and ``room`` more."""
    return Session(model, max_tokens=[tokens + room] * sequences, step_tokens=tokens, device=device, plan=plan)


def prompt(config: ModelConfig, tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids."""
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(config.vocab_size, (tokens,), generator=random).tolist())


def prefill(run: Session, tokens: int) -> None:
    """Every sequence's prompt, one sequence per step."""
    for sequence in range(len(run.manager.lengths)):
        run.step(Step(f"prefill{sequence}", (Chunk(sequence, prompt(run.model.config, tokens, sequence)),)))


def decode_step(run: Session, number: int) -> Step:
    """One more token of every sequence."""
    return Step(f"decode{number}", tuple(Chunk(s, (7 + s,)) for s in range(len(run.manager.lengths))))


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Wall time of a call, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
