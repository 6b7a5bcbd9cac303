"""A plug-in with implementations that are right but round otherwise, and some that are wrong on purpose.

What `dsv4dbg diff` is held to: the wrong ones are named, the right ones and all that follows either are not.
"""

from __future__ import annotations

from typing import Any

import torch

from dsv4dbg.kernels.registry import implements, registry


def reference(op: str, *args: Any, **kwargs: Any) -> Any:
    return registry().op(op).reference(*args, **kwargs)


@implements("rms_norm", "right")
def rms_norm_in_float64(x, weight, *, eps):
    wide = x.double()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()).to(x.dtype)


@implements("indexer_topk", "right")
def topk_in_another_order(logits, lens, *, k):
    return reference("indexer_topk", logits, lens, k=k).flip(-1)


@implements("moe_router", "right")
def router_in_another_order(logits, bias, **options):
    weights, experts = reference("moe_router", logits, bias, **options)
    return weights.flip(-1), experts.flip(-1)


@implements("rms_norm", "shifted")
def off_by_one_row(x, weight, *, eps):
    return reference("rms_norm", x, weight, eps=eps).roll(1, 0)


@implements("fp8_linear", "doubled")
def twice_the_scale(x, weight, scale):
    return 2 * reference("fp8_linear", x, weight, scale)


@implements("sparse_mla_prefill", "one_head")
def one_head_too_large(q, kv, indices, sink, **options):
    o, lse = reference("sparse_mla_prefill", q, kv, indices, sink, **options)
    o = o.clone()
    o[:, 1] = (o[:, 1].float() * 1.06).to(o.dtype)
    return o, lse


@implements("qnorm_rope_kv_insert", "stale")
def last_slot_not_written(q, kv, positions, cos_sin, window_cache, window_slots, **options):
    slots = window_slots.clone()
    slots[-1] = -1
    return reference("qnorm_rope_kv_insert", q, kv, positions, cos_sin, window_cache, slots, **options)


@implements("qnorm_rope_kv_insert", "stray")
def one_byte_elsewhere(q, kv, positions, cos_sin, window_cache, window_slots, **options):
    result = reference("qnorm_rope_kv_insert", q, kv, positions, cos_sin, window_cache, window_slots, **options)
    window_cache.data[-1, -1] ^= 1
    return result


@implements("silu_mul", "nan")
def one_nan(gate, up, **options):
    y = reference("silu_mul", gate, up, **options).clone()
    y[-1, 3] = torch.nan
    return y


@implements("indexer_topk", "wrong_index")
def one_index_wrong(logits, lens, *, k):
    chosen = reference("indexer_topk", logits, lens, k=k).clone()
    chosen[-1, 0] += 1
    return chosen


@implements("lm_head", "last_row")
def last_row_garbage(y, weight, **options):
    logits = reference("lm_head", y, weight, **options).clone()
    logits[-1] = logits[-1].flip(0)
    return logits
