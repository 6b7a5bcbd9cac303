"""transformers' DeepseekV4ForCausalLM with random weights, and our forward on the same weights and tokens.

`Pair.random` builds both from a few sizes; `Pair.theirs` and `Pair.ours` feed the same pieces of the same sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sites import Sites, put_in
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from dsv4dbg.kernels.mhc.mhc_post import mhc_post
from dsv4dbg.kernels.numerics import HF, Numerics
from dsv4dbg.model.batch import Chunk, Step
from dsv4dbg.model.cache import CacheFormat
from dsv4dbg.model.checkpoint import Checkpoint
from dsv4dbg.model.config import ModelConfig
from dsv4dbg.model.model import Model
from dsv4dbg.model.run import Session
from dsv4dbg.model.weights import ModelWeights

CPU = torch.device("cpu")
KINDS = {"w": "sliding_attention", "c": "compressed_sparse_attention", "h": "heavily_compressed_attention"}


@dataclass(frozen=True)
class Sizes:
    """A small model. Sixteen indexer heads make a score of exactly 0, and so a tie, a matter of 2^-16.

    Attributes:
        layers: one letter per layer: w (window only), c (CSA), h (HCA).
        yarn: factor, original length, beta_fast, beta_slow. theta: plain, compressing layers.
    """

    layers: str
    hidden: int = 64
    heads: int = 4
    groups: int = 2
    head_dim: int = 128
    rope: int = 64
    q_lora: int = 48
    o_lora: int = 24
    window: int = 16
    csa: int = 4
    hca: int = 8
    topk: int = 4
    index_heads: int = 16
    index_dim: int = 64
    experts: int = 8
    chosen: int = 2
    inner: int = 32
    hash_layers: int = 1
    streams: int = 4
    iters: int = 20
    hc_eps: float = 1e-6
    norm_eps: float = 1e-6
    limit: float = 10.0
    scale: float = 1.5
    yarn: tuple[float, int, float, float] = (16.0, 65536, 32.0, 1.0)
    theta: tuple[float, float] = (1e4, 1.6e5)
    vocab: int = 96

    def config(self) -> DeepseekV4Config:
        count = len(self.layers)
        factor, original, fast, slow = self.yarn
        hashed = min(self.hash_layers, count)
        config = DeepseekV4Config(
            vocab_size=self.vocab, hidden_size=self.hidden, moe_intermediate_size=self.inner,
            num_hidden_layers=count, num_attention_heads=self.heads, head_dim=self.head_dim,
            q_lora_rank=self.q_lora, num_experts_per_tok=self.chosen, n_routed_experts=self.experts,
            routed_scaling_factor=self.scale, max_position_embeddings=int(factor * original),
            rope_theta=self.theta[0], compress_rope_theta=self.theta[1],
            partial_rotary_factor=self.rope / self.head_dim,
            layer_types=[KINDS[letter] for letter in self.layers],
            compress_rates={KINDS["c"]: self.csa, KINDS["h"]: self.hca},
            mlp_layer_types=["hash_moe"] * hashed + ["moe"] * (count - hashed),
            hc_mult=self.streams, hc_sinkhorn_iters=self.iters, hc_eps=self.hc_eps, rms_norm_eps=self.norm_eps,
            swiglu_limit=self.limit, sliding_window=self.window, o_groups=self.groups, o_lora_rank=self.o_lora,
            index_n_heads=self.index_heads, index_head_dim=self.index_dim, index_topk=self.topk,
            rope_parameters={
                "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
                "beta_fast": fast, "beta_slow": slow,
            },
        )  # fmt: skip
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        return config

    def tokens(self, sequences: int, length: int, seed: int = 0) -> torch.Tensor:
        return torch.randint(0, self.vocab, (sequences, length), generator=torch.Generator().manual_seed(seed))


def _randomize(model: DeepseekV4ForCausalLM, generator: torch.Generator) -> None:
    """Weights for which nothing is neutral: no zero bias, unit norm weight, even mix or zero sink."""

    def normal(shape: torch.Size, mean: float, std: float) -> torch.Tensor:
        return mean + std * torch.randn(shape, generator=generator)

    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        leaf = name.rpartition(".")[2]
        if "inv_freq" in name:
            continue
        if leaf == "tid2eid":
            rows = torch.rand(tensor.shape[0], model.config.n_routed_experts, generator=generator)
            value = rows.argsort(-1)[:, : tensor.shape[1]]
        elif "norm" in name or leaf in ("scale", "hc_scale"):
            value = normal(tensor.shape, 1.0, 0.3)
        elif leaf in ("base", "hc_base", "sinks", "position_bias") or "embed" in name:
            value = normal(tensor.shape, 0.0, 1.0)
        elif leaf == "e_score_correction_bias":
            value = normal(tensor.shape, 0.0, 0.3)
        else:
            value = normal(tensor.shape, 0.0, tensor.shape[-1] ** -0.5)
        tensor.data.copy_(value)


def random_model(sizes: Sizes, seed: int) -> DeepseekV4ForCausalLM:
    """transformers' model in float32, eager."""
    model = DeepseekV4ForCausalLM(sizes.config())
    _randomize(model, torch.Generator().manual_seed(seed))
    return model.eval()


def _to_bf16(model: DeepseekV4ForCausalLM) -> None:
    """As `from_pretrained(dtype=bfloat16)` does: all but the modules that transformers keeps in float32."""
    for name, parameter in model.named_parameters():
        if not any(part in model._keep_in_fp32_modules_strict for part in name.split(".")):
            parameter.data = parameter.data.to(torch.bfloat16)


@dataclass
class Theirs:
    """What transformers computed: per piece, and per layer within it, ``[sequence, token, ...]``."""

    streams: list[list[torch.Tensor]] = field(default_factory=list)
    attn: list[list[torch.Tensor]] = field(default_factory=list)
    ffn: list[list[torch.Tensor]] = field(default_factory=list)
    experts: list[list[torch.Tensor]] = field(default_factory=list)
    selected: list[list[torch.Tensor | None]] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Ours:
    """What our forward computed: streams and logits as in `Theirs`, and every site's outputs."""

    streams: list[list[torch.Tensor]]
    logits: list[torch.Tensor]
    sites: list[dict[str, dict[str, torch.Tensor]]]


class Pair:
    """transformers' model and ours on the same weights."""

    def __init__(self, model: DeepseekV4ForCausalLM) -> None:
        self.model = model
        self.config = ModelConfig.from_json(model.config.to_dict())
        self.bf16 = model.model.embed_tokens.weight.dtype == torch.bfloat16
        self.weights = ModelWeights(Checkpoint.from_state_dict(self.config, model.state_dict()), CPU)

    @classmethod
    def random(cls, sizes: Sizes, seed: int = 1, bf16: bool = False) -> Pair:
        model = random_model(sizes, seed)
        if bf16:
            _to_bf16(model)
        return cls(model)

    @torch.no_grad()
    def theirs(self, ids: torch.Tensor, pieces: Sequence[int]) -> Theirs:
        """transformers with its cache on ``ids [sequence, token]``, ``pieces`` tokens at a time."""
        run = Theirs()
        hooks = []

        def keep(module: torch.nn.Module, target: list[list[Any]], pick: Callable[[Any], Any]) -> None:
            hooks.append(module.register_forward_hook(lambda _, args, out: target[-1].append(pick(out))))

        for layer in self.model.model.layers:
            keep(layer, run.streams, lambda out: out)
            keep(layer.self_attn, run.attn, lambda out: out[0])
            keep(layer.mlp, run.ffn, lambda out: out)
            keep(layer.mlp.gate, run.experts, lambda out: out[2])
            indexer = getattr(layer.self_attn.compressor, "indexer", None)
            if indexer is None:
                keep(layer.self_attn, run.selected, lambda out: None)
            else:
                keep(indexer, run.selected, lambda out: out)
        cache = DynamicCache(config=self.model.config)
        try:
            for piece in ids.split(list(pieces), dim=1):
                for target in (run.streams, run.attn, run.ffn, run.experts, run.selected):
                    target.append([])
                out = self.model(input_ids=piece, cache=cache, use_cache=True)
                run.logits.append(out.logits.float())
        finally:
            for hook in hooks:
                hook.remove()
        return run

    def ours(
        self, ids: torch.Tensor, pieces: Sequence[int], names: Sequence[str] | None = None,
        forced: Theirs | None = None, numerics: Numerics = HF,
    ) -> Ours:  # fmt: skip
        """Our forward, all sequences in one step per piece.

        Args:
            names: steps' names (default: prefills); decode steps read pages where prefills gather a workspace.
            forced: every sublayer and every layer gets the inputs it had in this run, instead of what ours made of
                them; the streams in the result are ours.
        """
        names = names or [f"prefill{i}" for i in range(len(pieces))]
        session = Session(
            Model(self.config, self.weights, numerics), max_tokens=[ids.shape[1]] * len(ids), step_tokens=max(pieces),
            device=CPU, cache_format=CacheFormat.parse("bf16" if self.bf16 else "f32"), draft=False,
        )  # fmt: skip
        sites, run = Sites(), Ours([], [], [])
        session.listen(sites)
        sublayers: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # output, and streams after a layer's second
        mixed: list[torch.Tensor] = []

        def forced_mhc_post(y, streams, post, comb, *, numerics: Numerics) -> torch.Tensor:
            y, after = sublayers.pop(0)
            mixed.append(mhc_post(y, streams, post, comb, numerics=numerics))
            return mixed[-1] if after is None else after

        if forced is not None:
            put_in(session, {"mhc_post": forced_mhc_post})
        for number, (name, piece) in enumerate(zip(names, ids.split(list(pieces), dim=1), strict=True)):
            if forced is not None:
                layers = zip(forced.attn[number], forced.ffn[number], forced.streams[number], strict=True)
                for attn, ffn, after in layers:
                    sublayers += [(attn.flatten(0, 1), None), (ffn.flatten(0, 1), after.flatten(0, 1))]
                mixed.clear()
            chunks = tuple(Chunk(s, tuple(row.tolist())) for s, row in enumerate(piece))
            result = session.step(Step(name, chunks, all_rows=True))
            here = sites.outputs[name]
            run.sites.append(here)
            count = self.config.num_hidden_layers
            streams = mixed[1::2] if forced is not None else [here[f"L{i}"]["streams"] for i in range(count)]
            run.streams.append([x.unflatten(0, piece.shape) for x in streams])
            run.logits.append(result.logits.unflatten(0, piece.shape))
        return run


def decode_names(pieces: Sequence[int]) -> list[str]:
    """Names under which pieces of one token are decode steps."""
    return [f"decode{i}" if size == 1 else f"prefill{i}" for i, size in enumerate(pieces)]
