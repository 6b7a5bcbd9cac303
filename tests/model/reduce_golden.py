"""Cuts the recordings of the official inference code down to what tests/model/data holds.

    python tests/model/reduce_golden.py DIRECTORY_WITH_RECORDINGS

A recording is one safetensors file; data/README.md says what its keys mean and what this program keeps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

DATA = Path(__file__).parent / "data"
WINDOW = 128
NEEDLE_ROWS = 24  # tokens whose outputs of layer 0 are kept of the long recording

Tensors = dict[str, torch.Tensor]


def steps(tensors: Tensors) -> int:
    return sum(key.startswith("decode") and key.endswith(".logits") for key in tensors)


def ends(tensors: Tensors) -> set[str]:
    """The steps whose logits are kept where not all are."""
    return {"prefill", "decode0", f"decode{steps(tensors) - 1}"}


def offset(tensors: Tensors, key: str) -> int:
    """What the official code adds to the numbers of selected entries."""
    return len(tensors["prompt"]) if key.startswith("prefill") else WINDOW


def small(tensors: Tensors, key: str) -> torch.Tensor:
    """Without the batch dim; selected entries as bits, experts as uint8, token ids as int16."""
    value = tensors[key]
    if key.endswith("indexer.topk"):
        return bits(value[0] - offset(tensors, key))
    if key.endswith("gate.indices"):
        return value.to(torch.uint8)
    if (".layers." in key and "gate" not in key) or key.endswith("logits"):
        return value[0]
    return value.to(torch.int16) if value.dtype == torch.int32 else value


def whole(tensors: Tensors) -> Tensors:
    """Everything but rows of final caches and states that no token wrote (which must hold 0 and -inf)."""
    length = len(tensors["prompt"]) + steps(tensors)
    result = {}
    for key in tensors:
        value = small(tensors, key)
        name = key.rpartition(".")[2]
        if key.startswith("final") and name == "kv_cache" and "indexer" not in key:
            used = min(length, WINDOW)
            assert not value[used:WINDOW].any()
            value = torch.cat((value[:used], value[WINDOW:]))
        elif name in ("kv_state", "score_state") and len(value) == WINDOW:
            used = min(length, WINDOW) if length < WINDOW else length % WINDOW
            if len(tensors["prompt"]) // WINDOW == length // WINDOW:  # else they hold an earlier window's tokens
                assert (value[used:] == (0 if name == "kv_state" else -torch.inf)).all()
            value = value[:used]
        result[key] = value.contiguous()
    return result


def layers(tensors: Tensors) -> Tensors:
    """Attention of layer 0, layers 2 (CSA) and 3 (HCA) with their inputs, outputs and caches, logits of the prompt."""
    kept = {"layers.0.attn", "layers.1", "layers.2", "layers.2.attn", "layers.2.ffn", "layers.3.attn", "layers.3.ffn"}
    kept |= {f"layers.{i}.ffn.gate.{leaf}" for i in (0, 2, 3) for leaf in ("indices", "weights")}
    kept |= {"layers.2.attn.indexer.topk", "layers.2.indexer.kv_cache", "layers.2.kv_cache"}
    kept |= {f"layers.{i}.{leaf}" for i in (2, 3) for leaf in ("kv_state", "score_state")}
    result = {}
    for key, value in whole(tensors).items():
        step, _, rest = key.partition(".")
        if rest in kept or not rest or (rest == "logits" and step == "prefill"):
            result[key] = value
    result["final.layers.3.entries"] = whole(tensors)["final.layers.3.kv_cache"][WINDOW:].contiguous()
    return result


def choices(tensors: Tensors) -> Tensors:
    """Experts and selected entries (as bits) of all tokens, layer 0's sublayers of some, three steps' logits."""
    rows = torch.linspace(0, len(tensors["prompt"]) - 1, NEEDLE_ROWS).long()
    result = {"rows": rows.to(torch.int16)}
    for key in tensors:
        step, _, rest = key.partition(".")
        value = small(tensors, key)
        if rest in ("", "logits") or rest.endswith(("gate.indices", "indexer.topk")):
            if rest != "logits" or step in ends(tensors):
                result[key] = value
        elif key in ("prefill.layers.0.attn", "prefill.layers.0.ffn"):
            result[key] = value[rows].contiguous()
    return result


def bits(numbers: torch.Tensor) -> torch.Tensor:
    """Sets of numbers below 128 ``[token, k]`` (negative: none) as ``uint8 [token, 16]``, number n is bit n % 8."""
    member = torch.zeros(len(numbers), 128, dtype=torch.bool)
    token = torch.arange(len(numbers))[:, None].expand_as(numbers)
    member[token[numbers >= 0], numbers[numbers >= 0]] = True
    return (member.view(-1, 16, 8) << torch.arange(8)).sum(-1).to(torch.uint8)


def main(source: Path) -> None:
    for name, reduce in (("paris", whole), ("random-131", layers), ("needle-520", choices)):
        target = DATA / f"{name}.safetensors"
        save_file(reduce(load_file(source / f"{name}.safetensors")), target)
        target.chmod(0o644)
        print(f"{target.name} {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
