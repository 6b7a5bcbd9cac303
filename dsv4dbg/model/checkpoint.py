"""Checkpoint: the weights of a model, by key, one layer at a time.

Whatever the files look like (published or transformers names, one file or many shards, FP8 and MXFP4 or bf16), the
forward gets the same keys; see `dsv4dbg.model.names`. ``open_model`` takes what ``--model`` takes::

    model = open_model("tiny")              # or "wide", or a directory
    model.config.layer_kind(2)              # 'csa'
    weights = model.layer(2)                # {'attn.wq_a.weight': float8_e4m3fn [128, 256], 'attn.wq_a.scale': ...}
    model.hash("layers.2.attn.wq_a.weight") # content, dtype and shape, as 32 hex digits

Dtypes that are handed out: FP8 weights ``float8_e4m3fn``, packed MXFP4 and E8M0 scales ``uint8`` (the bytes as stored,
never a numeric cast), F32 scales of base checkpoints ``float32``, ids ``int64``, all else as stored (mHC parameters,
sinks, position biases and router biases always float32). Experts are stacked: ``[expert, out, in]``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
import xxhash

from dsv4dbg.errors import DbgError
from dsv4dbg.model import names
from dsv4dbg.model.checkpoint_files import Info, SafetensorsFiles, Source, StateDict, one_line
from dsv4dbg.model.checkpoint_schema import (
    Expected,
    Stored,
    ends_schema,
    find_problems,
    full_schema,
    layer_schema,
    mtp_schema,
    scale_key,
    scale_of,
)
from dsv4dbg.model.config import ModelConfig
from dsv4dbg.model.tokenizer import Tokenizer

TINY = Path(__file__).parent / "tiny"
MODELS = ("tiny", "wide")
MAX_PROBLEMS = 8


class Checkpoint:
    """The weights of one model; every tensor that its configuration implies is known to be there when this exists.

    Args:
        config: the model.
        source: named tensors; see `dsv4dbg.model.checkpoint_files`.
        name: what messages and manifests call it.
        tokenizer_dir: directory of tokenizer.json, if any.

    Raises:
        DbgError: one message that lists what is missing, misshaped, mistyped, foreign or unreadable.
    """

    def __init__(self, config: ModelConfig, source: Source, name: str, tokenizer_dir: Path | None = None) -> None:
        self.config = config
        self.name = name
        self._source = source
        self.tokenizer_dir = tokenizer_dir
        self._hashes: dict[str, str] = {}
        # key -> where its pieces are stored, by expert (None: not stacked by us)
        self._pieces: dict[str, dict[int | None, tuple[str, int | None]]] = {}
        self._collisions: list[str] = []
        for stored_name in source.tensors:
            for part in names.parts(stored_name):
                if self._unused(part.key):
                    continue
                pieces = self._pieces.setdefault(part.key, {})
                if part.expert in pieces or (pieces and (None in pieces) != (part.expert is None)):
                    self._collisions.append(f"{stored_name} and {next(iter(pieces.values()))[0]} are the same tensor")
                pieces[part.expert] = (stored_name, part.half)
        self._schema = full_schema(config)
        self.check()

    @classmethod
    def open(cls, directory: Path | str, name: str | None = None) -> Checkpoint:
        """Open a directory with config.json and safetensors; reads no weights, only headers."""
        directory = Path(directory)
        if not directory.is_dir():
            raise DbgError(f"{directory} is {'not a directory' if directory.exists() else 'not there'}")
        if not (directory / "config.json").exists():
            raise DbgError(f"{directory} has no config.json", "wanted a directory with config.json and *.safetensors")
        config = ModelConfig.from_file(directory / "config.json")
        return cls(config, SafetensorsFiles(directory), name or str(directory), directory)

    @classmethod
    def from_state_dict(cls, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
        """Wrap tensors in memory, under published or transformers names."""
        return cls(config, StateDict(tensors), "state_dict")

    def check(self) -> None:
        """Hold every stored tensor against the configuration (headers only).

        Raises:
            DbgError: all problems in one message of bounded length.
        """
        found = {key: self._stored(key) for key in self._pieces}
        problems = [*self._source.problems, *self._collisions]
        # a file that cannot be read explains tensors that are not there
        problems += find_problems(self._schema, found, missing=not self._source.problems)
        if problems:
            shown = [one_line(p, 240) for p in problems[:MAX_PROBLEMS]]
            rest = f"; and {len(problems) - MAX_PROBLEMS:,} more" if len(problems) > MAX_PROBLEMS else ""
            count = f"{len(problems):,} problems: " if len(problems) > 1 else ""
            raise DbgError(f"the checkpoint {self.name} cannot be used: {count}{'; '.join(shown)}{rest}")

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Every key of the model: ends, layers, MTP blocks; scales after their weights."""
        return tuple(k for key, expected in self._schema.items() for k in self._with_scale(key, expected))

    def layer(self, layer: int) -> dict[str, torch.Tensor]:
        """The tensors of main layer ``layer``, keys without the prefix ``layers.<layer>.``."""
        self._in_range("layers", layer, self.config.num_hidden_layers)
        return self._group(f"layers.{layer}.", layer_schema(self.config, layer))

    def mtp(self, block: int) -> dict[str, torch.Tensor]:
        """The tensors of MTP block ``block``, keys without the prefix ``mtp.<block>.``."""
        self._in_range("MTP blocks", block, self.config.num_nextn_predict_layers)
        return self._group(f"mtp.{block}.", mtp_schema(self.config, block))

    def ends(self) -> dict[str, torch.Tensor]:
        """Embedding, head, final norm and head mix."""
        return self._group("", ends_schema(self.config))

    def tensor(self, key: str) -> torch.Tensor:
        """One tensor by its full key. Files stay mapped: do not write to it.

        Raises:
            DbgError: no such key, or values that no forward can use: a NaN scale, a hash route to no expert.
        """
        if key not in self._pieces:
            raise DbgError(f"the model {self.name} has no tensor {key}")
        pieces = self._pieces[key]
        if None in pieces:
            tensor = self._read(*pieces[None])
        else:
            first = self._read(*pieces[0])
            tensor = torch.empty((len(pieces), *first.shape), dtype=first.dtype)
            for expert in range(len(pieces)):
                tensor[expert] = self._read(*pieces[expert])
        return self._checked(key, tensor)

    def hash(self, key: str) -> str:
        """Fingerprint of `tensor` for ``key``; computed once."""
        if key not in self._hashes:
            self._hashes[key] = fingerprint(self.tensor(key))
        return self._hashes[key]

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of configuration and all weights. Reads them all: the first use costs a pass over the files."""
        digest = xxhash.xxh3_128(json.dumps(self.config.to_json(), sort_keys=True).encode())
        for key in self.keys:
            digest.update(f"{key} {self.hash(key)}\n".encode())
        return digest.hexdigest()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that belongs to the model.

        Raises:
            DbgError: there is none; prompts must be given as token ids.
        """
        if self.tokenizer_dir is None:
            raise DbgError(f"the model {self.name} has no tokenizer", "give token ids with --tokens")
        return Tokenizer.from_dir(self.tokenizer_dir)

    def _unused(self, key: str) -> bool:
        """True for MTP blocks beyond the configuration's: setting num_nextn_predict_layers to 0 drops them."""
        return key.startswith("mtp.") and not key.startswith(
            tuple(f"mtp.{i}." for i in range(self.config.num_nextn_predict_layers))
        )

    def _in_range(self, what: str, index: int, count: int) -> None:
        if not 0 <= index < count:
            raise DbgError(f"the model {self.name} has {count} {what} (counted from 0), {index} is not one of them")

    def _with_scale(self, key: str, expected: Expected) -> list[str]:
        return [key, scale_key(key)] if scale_of(expected, self._stored(key).dtype) else [key]

    def _group(self, prefix: str, schema: dict[str, Expected]) -> dict[str, torch.Tensor]:
        keys = [k for name, e in schema.items() for k in self._with_scale(prefix + name, e)]
        return {key.removeprefix(prefix): self.tensor(key) for key in keys}

    def _info(self, stored_name: str, half: int | None) -> Stored:
        info: Info = self._source.tensors[stored_name]
        if half is None:
            return Stored(info.dtype, info.shape)
        if len(info.shape) < 2 or info.shape[-2] % 2:
            return Stored(info.dtype, info.shape, f"has shape {list(info.shape)}, wanted gate and up rows")
        return Stored(info.dtype, (*info.shape[:-2], info.shape[-2] // 2, info.shape[-1]))

    def _stored(self, key: str) -> Stored:
        """Dtype and shape of a key as stored, experts stacked."""
        pieces = self._pieces[key]
        kinds = {self._info(*piece) for piece in pieces.values()}
        kind = kinds.pop()
        if None in pieces:
            return kind
        count = self.config.n_routed_experts
        absent = [j for j in range(count) if j not in pieces]
        if absent or len(pieces) > count:
            which = f"lacks {len(absent)} of {count} experts (first: {absent[0]})" if absent else ""
            return Stored(kind.dtype, kind.shape, which or f"has {len(pieces)} experts, wanted {count}")
        if kinds:
            return Stored(kind.dtype, kind.shape, "differs between experts in shape or dtype")
        return Stored(kind.dtype, (count, *kind.shape))

    def _read(self, stored_name: str, half: int | None) -> torch.Tensor:
        tensor = self._source.read(stored_name)
        if half is not None:
            rows = tensor.shape[-2] // 2
            tensor = tensor.narrow(-2, half * rows, rows).contiguous()
        # bytes are viewed: a cast from E8M0 to uint8 would turn the scale 2^-5 into 0
        return tensor.view(torch.uint8) if tensor.dtype in (torch.float8_e8m0fnu, torch.int8) else tensor

    def _checked(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` widened where its form says so, its discrete values checked."""
        if key.endswith(".scale"):
            bad = tensor == 255 if tensor.dtype == torch.uint8 else ~tensor.isfinite()
            if bad.any():
                where = bad.nonzero()[0].tolist()
                raise DbgError(f"{key} of {self.name} holds {int(bad.sum()):,} NaN scales, the first at {where}")
            return tensor
        form = self._schema[key].form
        if form == "ids":
            tensor = tensor.long()
            if tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < self.config.n_routed_experts:
                raise DbgError(f"{key} of {self.name} names experts outside 0..{self.config.n_routed_experts - 1}")
        return tensor.float() if form == "float32" else tensor


def fingerprint(tensor: torch.Tensor) -> str:
    """xxh3-128 of dtype, shape and raw bytes, as 32 hex digits; equal for equal bits, -0 and 0 differ."""
    digest = xxhash.xxh3_128(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def open_model(spec: str) -> Checkpoint:
    """The model that ``--model`` names: ``tiny`` (shipped), ``wide`` (synthetic) or a directory.

    Raises:
        DbgError: no such model, or a checkpoint that cannot be used.
    """
    if spec == "tiny":
        return Checkpoint.open(TINY, name="tiny")
    if spec == "wide":
        from dsv4dbg.model.synthetic import Synthetic, wide_config

        return Checkpoint(wide_config(), Synthetic(wide_config(), "wide", keep=True), "wide", TINY)
    if not Path(spec).exists():
        raise DbgError(f"no model '{spec}': it is neither {' nor '.join(MODELS)} nor a directory")
    return Checkpoint.open(spec)
