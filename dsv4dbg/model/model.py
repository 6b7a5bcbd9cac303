"""The DeepSeek-V4 forward, op by op, on paged caches.

Reads from the inside out: `attention` (with the indexer of CSA layers), `moe`, `block`, then `Model` with the
ends and the MTP block. It is written only in terms of ops (`OpTable`); which implementation runs at a site is
the plan's business. What is special about this network: four residual streams mixed by mHC around every
sublayer, one shared K = V head, compressed entries beside a sliding window (every ratio-4 layer picks its
entries with an indexer, ratio-128 layers attend to all), rotation undone on the attention output, and experts
chosen by token id in the first layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.table import OpTable
from dsv4dbg.model.batch import StepInputs
from dsv4dbg.model.config import ModelConfig, cos_sin_table
from dsv4dbg.model.weights import ModelWeights, Weights

Caches = Mapping[str, Cache]


@dataclass(frozen=True)
class Rope:
    """cos/sin tables ``f32 [position, rope_dim]``: plain for window-only layers, YaRN where the layer compresses."""

    plain: torch.Tensor
    compress: torch.Tensor

    @classmethod
    def build(cls, config: ModelConfig, max_position: int, device: torch.device) -> Rope:
        tables = (cos_sin_table(config, compress, max_position).to(device) for compress in (False, True))
        return cls(*tables)


@dataclass(frozen=True)
class Context:
    """What every layer of one forward shares."""

    config: ModelConfig
    inputs: StepInputs
    rope: Rope
    numerics: Numerics
    act: str  # dtype of activations: "bf16" or "f32"

    @property
    def decodes(self) -> bool:
        return self.inputs.step.phase != "prefill"


def project(ops: OpTable, x: torch.Tensor, w: Weights, name: str) -> torch.Tensor:
    """``x [token, in] @ weight[name].T``: FP8 with activation quantiser where the checkpoint holds FP8."""
    weight, scale = w[f"{name}.weight"], w.get(f"{name}.scale")
    role = name.partition(".")[2]
    if scale is None:
        return ops.linear(x, weight, out="act", role=role)
    return ops.fp8_linear(x, weight, scale, role=role)


def compress(
    ops: OpTable, ctx: Context, w: Weights, x: torch.Tensor, caches: Caches, ratio: int, indexer: bool = False
) -> None:
    """Store the tokens' compressor rows and emit the entries that they complete (main or indexer compressor)."""
    name = "attn.indexer.compressor" if indexer else "attn.compressor"
    role = name.partition(".")[2]
    state, target = ("index_state", "index") if indexer else ("state", "entries")
    inputs = ctx.inputs
    out = ctx.numerics.compressor_gemm
    kv = ops.linear(x, w[f"{name}.wkv.weight"], out=out, role=f"{role}.wkv")
    gate = ops.linear(x, w[f"{name}.wgate.weight"], out=out, role=f"{role}.wgate")
    ops.compress_insert(
        kv, gate, w[f"{name}.ape"], w[f"{name}.norm.weight"], inputs.positions, inputs.sequence, ctx.rope.compress,
        caches[state], inputs.slots[f"{state}{ratio}"], inputs.tables[f"{state}{ratio}"],
        caches[target], inputs.slots[f"{target}{ratio}"],
        ratio=ratio, eps=ctx.config.rms_norm_eps, act=ctx.act, role=f"{role}.compress_insert",
    )  # fmt: skip


def select_entries(
    ops: OpTable, ctx: Context, w: Weights, x: torch.Tensor, qr: torch.Tensor, caches: Caches, ratio: int
) -> torch.Tensor:
    """The lightning indexer: which compressed entries each token attends to, ``i32 [token, index_topk]``."""
    config, inputs = ctx.config, ctx.inputs
    compress(ops, ctx, w, x, caches, ratio, indexer=True)
    heads = config.index_n_heads
    q = project(ops, qr, w, "attn.indexer.wq_b").unflatten(-1, (heads, config.index_head_dim))
    weights = project(ops, x, w, "attn.indexer.weights_proj")
    layout = caches["index"].layout
    fmt = {"fp8": f"fp8_{layout.dialect}", "fp4": "fp4"}.get(layout.format, "plain")
    q, q_scale, weights = ops.indexer_q(
        q, weights, inputs.positions, ctx.rope.compress, format=fmt, role="indexer.indexer_q"
    )
    visible = inputs.visible[ratio]
    logits = ops.indexer_logits(
        q, q_scale, weights, caches["index"], inputs.tables[f"index{ratio}"], inputs.sequence, visible,
        width=inputs.most_visible[ratio], role="indexer.indexer_logits",
    )  # fmt: skip
    return ops.indexer_topk(logits, visible, k=config.index_topk, role="indexer.indexer_topk")


def attend(
    ops: OpTable, ctx: Context, w: Weights, q: torch.Tensor, selected: torch.Tensor | None, caches: Caches, ratio: int
) -> torch.Tensor:
    """Sparse attention of ``q [token, head, channel]`` over the window and the compressed entries.

    Decode and verify read pages; a prefill gathers the records it needs into rows first.
    """
    config, inputs = ctx.config, ctx.inputs
    window, entries = caches["window"], caches.get("entries")
    width = 0 if not ratio else inputs.most_visible[ratio] if selected is None else config.index_topk
    shared = {"window": config.sliding_window, "width": width}
    tokens = (inputs.positions, inputs.sequence)
    visible, sink, scale = inputs.visible.get(ratio), w["attn.attn_sink"], config.head_dim**-0.5
    if ctx.decodes:
        entry_table = inputs.tables[f"entries{ratio}"] if entries else None
        entry_block = entries.layout.entries if entries else 1
        indices = ops.build_indices(
            *tokens, inputs.tables["window"], entry_table, visible, selected,
            window_block=window.layout.entries, entry_block=entry_block, **shared,
        )  # fmt: skip
        return ops.sparse_mla_decode(q, window, entries, indices, sink, window=config.sliding_window, scale=scale)[0]
    space = inputs.workspace[ratio]
    indices = ops.build_indices(
        *tokens, space.window_table, space.entry_table, visible, selected, window_block=1, entry_block=1, **shared
    )
    kv = ops.gather_kv(window, space.window_slots, entries, space.entry_slots, act=ctx.act)
    return ops.sparse_mla_prefill(q, kv, indices, sink, scale=scale)[0]


def attention(ops: OpTable, ctx: Context, w: Weights, x: torch.Tensor, caches: Caches, ratio: int) -> torch.Tensor:
    """Attention sublayer: ``x act [token, hidden]`` (after attn_norm) to ``act [token, hidden]``."""
    config, inputs, eps = ctx.config, ctx.inputs, ctx.config.rms_norm_eps
    cos_sin = ctx.rope.compress if ratio else ctx.rope.plain
    qr = ops.rms_norm(project(ops, x, w, "attn.wq_a"), w["attn.q_norm.weight"], eps=eps, role="q_norm")
    q = project(ops, qr, w, "attn.wq_b").unflatten(-1, (config.num_attention_heads, config.head_dim))
    kv = ops.rms_norm(project(ops, x, w, "attn.wkv"), w["attn.kv_norm.weight"], eps=eps, role="kv_norm")
    q = ops.qnorm_rope_kv_insert(q, kv, inputs.positions, cos_sin, caches["window"], inputs.slots["window"], eps=eps)
    selected = select_entries(ops, ctx, w, x, qr, caches, ratio) if ratio == config.csa_ratio else None
    if ratio:
        compress(ops, ctx, w, x, caches, ratio)
    o = attend(ops, ctx, w, q, selected, caches, ratio)
    o = ops.inv_rope(o, inputs.positions, cos_sin)
    z = ops.o_proj_grouped(o, w["attn.wo_a.weight"], w.get("attn.wo_a.scale"), groups=config.o_groups, role="wo_a")
    return project(ops, z, w, "attn.wo_b")


def moe(ops: OpTable, ctx: Context, w: Weights, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Mixture-of-experts sublayer: ``x act [token, hidden]`` (after ffn_norm) to ``act [token, hidden]``."""
    config = ctx.config
    limit, scale = config.swiglu_limit, config.routed_scaling_factor
    logits = ops.linear(x, w["ffn.gate.weight"], out=ctx.numerics.router, role="gate")
    if "ffn.gate.tid2eid" in w:
        weights, experts = ops.hash_router(logits, w["ffn.gate.tid2eid"], token_ids, scale=scale)
    else:
        weights, experts = ops.moe_router(logits, w["ffn.gate.bias"], topk=config.num_experts_per_tok, scale=scale)
    parts = [w.get(f"ffn.experts.{m}.{part}") for m in ("w1", "w3", "w2") for part in ("weight", "scale")]
    routed = ops.moe_experts(x, experts, weights, *parts, limit=limit)
    gate = project(ops, x, w, "ffn.shared_experts.w1")
    up = project(ops, x, w, "ffn.shared_experts.w3")
    inner = ops.silu_mul(gate, up, limit=limit, role="shared_experts.silu_mul")
    shared = project(ops, inner, w, "ffn.shared_experts.w2")
    return ops.moe_combine(routed, shared)


def block(
    ops: OpTable, ctx: Context, w: Weights, streams: torch.Tensor, caches: Caches, scope: str, ratio: int,
    token_ids: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """One layer on the residual streams ``act [token, hc_mult, hidden]``."""
    config, entered = ctx.config, streams

    def sublayer(name: str, run, streams: torch.Tensor) -> torch.Tensor:
        inner = ops.at(f"{scope}.{name}")
        y, post, comb = inner.mhc_pre(
            streams, w[f"hc_{name}_fn"], w[f"hc_{name}_scale"], w[f"hc_{name}_base"],
            norm_eps=config.rms_norm_eps, hc_eps=config.hc_eps, iters=config.hc_sinkhorn_iters,
        )  # fmt: skip
        x = inner.rms_norm(y, w[f"{name}_norm.weight"], eps=config.rms_norm_eps, role=f"{name}_norm")
        y = run(inner, x)
        inner.boundary(f"{scope}.{name}", {"x": x}, {"y": y})
        return inner.mhc_post(y, streams, post, comb)

    streams = sublayer("attn", lambda o, x: attention(o, ctx, w, x, caches, ratio), streams)
    streams = sublayer("ffn", lambda o, x: moe(o, ctx, w, x, token_ids), streams)
    ops.boundary(scope, {"streams": entered}, {"streams": streams})
    return streams


def head(ops: OpTable, ctx: Context, ends: Weights, lm_head: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """Logits ``f32 [row, vocab]`` of the wanted rows."""
    eps = ctx.config.rms_norm_eps
    y = ops.mhc_head(
        streams[ctx.inputs.logit_rows], ends["hc_head_fn"], ends["hc_head_scale"], ends["hc_head_base"],
        norm_eps=eps, hc_eps=ctx.config.hc_eps,
    )  # fmt: skip
    return ops.lm_head(ops.rms_norm(y, ends["norm.weight"], eps=eps, role="norm"), lm_head)


@dataclass(frozen=True)
class Model:
    """A configuration with its weights; holds no caches and no state of a run."""

    config: ModelConfig
    weights: ModelWeights
    numerics: Numerics

    @property
    def act(self) -> str:
        return "f32" if self.weights.ends()["embed.weight"].dtype == torch.float32 else "bf16"

    def _context(self, inputs: StepInputs, rope: Rope) -> Context:
        return Context(self.config, inputs, rope, self.numerics, self.act)

    def forward(
        self, ops: OpTable, inputs: StepInputs, rope: Rope, caches: Mapping[str, Caches]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step through all main layers.

        Returns:
            logits ``f32 [row, vocab]`` of the step's logit rows and the streams ``act [token, hc_mult, hidden]``
            after the last layer, which the MTP block takes.
        """
        ctx, ends = self._context(inputs, rope), self.weights.ends()
        streams = ops.embed(inputs.ids, ends["embed.weight"], hc_mult=self.config.hc_mult)
        for i in range(self.config.num_hidden_layers):
            scope, ratio = f"L{i}", self.config.compress_ratios[i]
            streams = block(ops, ctx, self.weights.layer(i), streams, caches[scope], scope, ratio, inputs.ids)
        return head(ops.at("head"), ctx, ends, ends["head.weight"], streams), streams

    def draft(
        self, ops: OpTable, inputs: StepInputs, rope: Rope, caches: Mapping[str, Caches],
        streams: torch.Tensor, next_ids: torch.Tensor, depth: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """MTP block ``depth``: logits for the token after next.

        Args:
            streams: ``act [token, hc_mult, hidden]``, the main model's, before its head.
            next_ids: ``int64 [token]``, for each row the token that follows it.
        Returns:
            logits ``f32 [row, vocab]`` and the block's streams, from which a further block can draft.
        """
        ctx, ends, w = self._context(inputs, rope), self.weights.ends(), self.weights.mtp(depth)
        scope, layer = f"mtp{depth}", self.config.num_hidden_layers + depth
        ops = ops.at(scope)
        streams = ops.mtp_input(
            next_ids, streams, ends["embed.weight"], w["enorm.weight"], w["hnorm.weight"],
            w["e_proj.weight"], w.get("e_proj.scale"), w["h_proj.weight"], w.get("h_proj.scale"),
            eps=self.config.rms_norm_eps,
        )  # fmt: skip
        ratio = self.config.compress_ratios[layer]
        streams = block(ops, ctx, w, streams, caches[scope], scope, ratio, next_ids)
        return head(ops, ctx, w, ends["head.weight"], streams), streams
