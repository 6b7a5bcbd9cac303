"""Recordings of the official inference code, and our forward run along them.

`Along` feeds a recording's tokens to the real forward while a few implementations, chosen by the plan like any
other, put the recording in its place:

* ``mhc_post`` takes the recorded sublayer output instead of ours and yields the recorded streams, where there are
  any, so that sublayers see recorded inputs (**forced**; `Along.judged` says which);
* ``indexer_topk`` takes the recorded selection, after it has been noted whether ours was the same or a tie;
* ``qnorm_rope_kv_insert`` and ``sparse_mla_*`` can repeat two traits of the program that made the recordings, which
  are not the official GPU code's (**as recorded**): one softmax maximum per row where the official kernel has a
  running one over blocks of 64 keys, so that P is rounded at another scale; and PyTorch's reciprocal square root of
  bf16 on a CPU, which rounds twice in the last ``n % 32`` elements of a tensor and once in the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from sites import Sites, put_in

from dsv4dbg.kernels import formats, paged
from dsv4dbg.kernels.attention.qnorm_rope_kv_insert import qnorm_rope_kv_insert
from dsv4dbg.kernels.attention.sparse_core import read_rows
from dsv4dbg.kernels.mhc.mhc_post import mhc_post
from dsv4dbg.kernels.numerics import OFFICIAL, Numerics
from dsv4dbg.kernels.registry import registry
from dsv4dbg.model.batch import Chunk, Step
from dsv4dbg.model.checkpoint import open_model
from dsv4dbg.model.model import Model
from dsv4dbg.model.run import Session, StepResult
from dsv4dbg.model.weights import ModelWeights

DATA = Path(__file__).parent / "data"
CPU = torch.device("cpu")
SIMD = 32  # bf16 values in a vector register of the machine that made the recordings


class Recording:
    """One file of recordings: prompt, greedy tokens, and tensors by step and official layer name."""

    def __init__(self, path: Path) -> None:
        self.tensors = load_file(path)
        self.prompt: list[int] = self.tensors["prompt"].tolist()
        self.decoded: list[int] = self.tensors["decoded"].tolist()

    def get(self, key: str) -> torch.Tensor | None:
        return self.tensors.get(key)

    def steps(self) -> Iterator[tuple[str, str, list[int]]]:
        """Our step's name, the recording's, and the tokens fed; every recorded step."""
        yield "prefill0", "prefill", self.prompt
        for i, token in enumerate(self.decoded):
            if f"decode{i}.layers.0.ffn.gate.indices" in self.tensors:
                yield f"decode{i}", f"decode{i}", [token]

    def selected(self, step: str, layer: int) -> torch.Tensor | None:
        """Which entries each token attends to, ``bool [token, 128]``."""
        bits = self.get(f"{step}.layers.{layer}.attn.indexer.topk")
        return None if bits is None else ((bits[..., None] >> torch.arange(8)) & 1).flatten(-2).bool()


@dataclass
class Along:
    """A run of ``model`` over a recording.

    Attributes:
        forced: sublayer outputs and selections are replaced by the recorded ones.
        as_recorded: repeat the traits of the program that made the recording.
        ties: tokens whose selection differs from the recorded one by entries of exactly equal score.
        wrong: (step, layer, token) whose selection differs otherwise.
        streams: (recorded step, layer) -> streams that we make of the recorded sublayer outputs.
    """

    model: Model
    recording: Recording
    forced: bool = True
    as_recorded: bool = True
    ties: int = 0
    wrong: list[tuple[str, int, int]] = field(default_factory=list)
    streams: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    results: dict[str, StepResult] = field(default_factory=dict)
    sites: Sites = field(default_factory=Sites)

    def __post_init__(self) -> None:
        length = len(self.recording.prompt) + len(self.recording.decoded)
        self.session = Session(
            self.model, max_tokens=[length], step_tokens=len(self.recording.prompt), device=CPU, draft=False
        )
        self.session.listen(self.sites)
        put_in(self.session, self._implementations())
        self._step = ""
        self._posts = 0  # calls of mhc_post in this step: two per layer
        self._csa_layers: list[int] = []  # whose selection indexer_topk takes next

    def run(self, steps: int | None = None) -> Along:
        """Feed all steps, or the first few."""
        config = self.model.config
        for name, recorded, ids in list(self.recording.steps())[:steps]:
            self._step, self._posts = recorded, 0
            self._csa_layers = [i for i in range(config.num_hidden_layers) if config.layer_kind(i) == "csa"]
            self.results[name] = self.session.step(Step(name, (Chunk(0, tuple(ids)),)))
        return self

    def judged(self, part: str) -> Iterator[tuple[str, int, torch.Tensor, torch.Tensor]]:
        """Step, layer, our output and the recorded one, wherever a part (attn, ffn, streams) had recorded inputs.

        Outputs are ``bf16 [token, channel]``, streams ``[token, stream, channel]``.
        """
        before = {"attn": (), "ffn": ("attn",), "streams": ("attn", "ffn")}[part]
        for name, step, _ in self.recording.steps():
            for layer in range(self.model.config.num_hidden_layers) if name in self.results else ():
                inputs = [f"{step}.layers.{layer}.{p}" for p in before]
                inputs += [f"{step}.layers.{layer - 1}"] if layer else []
                theirs = self.recording.get(f"{step}.layers.{layer}" + ("" if part == "streams" else f".{part}"))
                if theirs is None or any(self.recording.get(key) is None for key in inputs):
                    continue
                if part == "streams":
                    yield step, layer, self.streams[step, layer], theirs
                else:
                    yield step, layer, self.sites.outputs[name][f"L{layer}.{part}"]["y"], theirs

    def _implementations(self) -> dict[str, Any]:
        chosen: dict[str, Any] = {}
        if self.forced:
            chosen |= {"mhc_post": self._mhc_post, "indexer_topk": self._topk}
        if self.as_recorded:
            chosen |= {
                "qnorm_rope_kv_insert": _qnorm_rope_kv_insert,
                "sparse_mla_prefill": _sparse_mla_prefill,
                "sparse_mla_decode": _sparse_mla_decode,
            }
        return chosen

    def _mhc_post(self, y, streams, post, comb, *, numerics: Numerics) -> torch.Tensor:
        layer, second = divmod(self._posts, 2)
        self._posts += 1
        place = f"{self._step}.layers.{layer}"
        recorded = self.recording.get(f"{place}.{'ffn' if second else 'attn'}")
        mixed = mhc_post(y if recorded is None else recorded, streams, post, comb, numerics=numerics)
        if not second:
            return mixed
        self.streams[self._step, layer] = mixed
        recorded = self.recording.get(place)
        return mixed if recorded is None else recorded

    def _topk(self, logits: torch.Tensor, lens: torch.Tensor, *, k: int) -> torch.Tensor:
        layer = self._csa_layers.pop(0)
        ours = registry().ops["indexer_topk"](logits, lens, k=k)
        member = self.recording.selected(self._step, layer)
        if member is None:
            return ours
        member = member[:, : logits.shape[1]]
        ranked = logits.masked_fill(~member, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
        result = torch.full_like(ours, -1)
        for t, count in enumerate(member.sum(-1).tolist()):
            result[t, :count] = ranked[t, :count]
            if set(result[t].tolist()) != set(ours[t].tolist()):
                same = torch.equal(_scores(logits[t], result[t]), _scores(logits[t], ours[t]))
                self.ties += same
                self.wrong += [] if same else [(self._step, layer, t)]
        return result


def _scores(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return logits[chosen[chosen >= 0].long()].sort().values


def open_tiny(numerics: Numerics = OFFICIAL) -> Model:
    checkpoint = open_model("tiny")
    return Model(checkpoint.config, ModelWeights(checkpoint, CPU), numerics)


def cpu_rsqrt(x: torch.Tensor) -> torch.Tensor:
    """bf16 reciprocal square root as PyTorch computes it on a CPU with vectors of SIMD elements."""
    once = torch.rsqrt(x.float()).to(x.dtype)
    twice = (1 / x.float().sqrt().to(x.dtype).float()).to(x.dtype)
    tail = torch.arange(x.numel()) >= x.numel() // SIMD * SIMD
    return torch.where(tail.view(x.shape), twice, once)


def _qnorm_rope_kv_insert(
    q, kv, positions, cos_sin, window_cache, window_slots, *, eps: float, numerics: Numerics
) -> torch.Tensor:
    qnorm_rope_kv_insert(q, kv, positions, cos_sin, window_cache, window_slots, eps=eps, numerics=numerics)
    mean = q.square().float().mean(-1, keepdim=True).to(q.dtype)
    factor = cpu_rsqrt((mean.float() + eps).to(q.dtype))
    return formats.rotate(q * factor, cos_sin[positions])


def _one_pass(q: torch.Tensor, rows: torch.Tensor, absent: torch.Tensor, sink: torch.Tensor, scale: float):
    """``rows [token, key, channel]``, ``absent bool [token, key]``; the maximum of all keys at once."""
    logits = (torch.bmm(q.float(), rows.float().transpose(1, 2)) * scale).masked_fill(absent[:, None], -torch.inf)
    top = logits.amax(-1, keepdim=True)
    p = torch.exp(logits - top)
    total = p.sum(-1, keepdim=True) + torch.exp(sink[None, :, None] - top)
    o = (torch.bmm(p.to(q.dtype).float(), rows.float()) / total).to(q.dtype)
    return o, torch.zeros(q.shape[:2])


def _sparse_mla_prefill(q, kv, indices, sink=None, *, scale: float, numerics: Numerics):
    parts = []
    for start in range(0, len(q), 64):
        part = slice(start, start + 64)
        chosen = indices[part]
        rows = torch.where((chosen >= 0)[..., None], kv[chosen.clamp_min(0).long()], 0)
        parts.append(_one_pass(q[part], rows, chosen < 0, sink, scale))
    return tuple(torch.cat(side) for side in zip(*parts, strict=True))


def _sparse_mla_decode(
    q, window_cache, entry_cache, indices, sink=None, *, window: int, scale: float, numerics: Numerics
):
    rows = read_rows(window_cache, indices[:, :window], q.dtype)
    if entry_cache is not None:
        rows = torch.cat((rows, read_rows(entry_cache, indices[:, window:], q.dtype)), 1)
        return _one_pass(q, rows, indices < 0, sink, scale)
    return _one_pass(q, rows, indices[:, :window] < 0, sink, scale)


def official_caches(session: Session, layer: int) -> dict[str, torch.Tensor]:
    """Our pages of sequence 0 in the official code's arrangement.

    ``window``: ring rows, position p at row p % window, as far as they are used; ``entries`` and ``index``: all
    complete ones; ``kv_state`` and ``score_state``: for CSA the previous window's rows, then the current one's; for
    HCA the current window's; rows without a token are left out.
    """
    config, manager = session.model.config, session.manager
    ratio, length = config.compress_ratios[layer], manager.lengths[0]
    caches = manager.caches[f"L{layer}"]

    def read(role: str, kind: str, records: np.ndarray, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        slots = torch.from_numpy(manager.tables[kind].slots(0, records))
        return paged.read(caches[role], slots, dtype)

    rows = np.arange(min(length, config.sliding_window))
    newest = rows + (length - 1 - rows) // config.sliding_window * config.sliding_window
    result = {"window": read("window", "window", newest)}
    if not ratio:
        return result
    count = length // ratio
    result["entries"] = read("entries", f"entries{ratio}", np.arange(count))
    first = max(0, count - 1) * ratio if ratio == config.csa_ratio else count * ratio
    state = read("state", f"state{ratio}", np.arange(first, length), torch.float32)
    result["kv_state"], result["score_state"] = state.chunk(2, dim=-1)
    if ratio == config.csa_ratio:
        result["index"] = read("index", f"index{ratio}", np.arange(count))
    return result
