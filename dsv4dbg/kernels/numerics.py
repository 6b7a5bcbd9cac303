"""Numerics profiles: where stacks differ on purpose, as data (spec section 15).

A switch is read by the reference ops that name it in their contract, and changes what it says and nothing else.
An intended difference is never reported as a fault. ``act`` means the dtype of the activations (bf16, or
float32 in exactness tests).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from dsv4dbg.errors import DbgError


@dataclass(frozen=True)
class Numerics:
    """One stack's choices. Each field is a switch."""

    name: str
    mhc_norm: str  # "after": rms factor multiplies the mix GEMM's result; "before": x is normalised first
    mhc_mix: str  # dtype of post, comb and the stream mix: "f32" (one rounding) or "act" (each step rounded)
    head_norm: (
        str  # per-head q norm: "act" (every step rounded), "mixed" (factor in f32, rounded, product in act), "f32"
    )
    rope_table: str  # cos and sin as "f32" or rounded to "act"
    kv_quant: bool  # round KV to FP8 also where the cache is bf16 (sim-quant)
    compressor_gemm: str  # output dtype of the compressor's wkv and wgate: "f32" or "act"
    compressor_pool: str  # softmax, product and sum in "f32", or probabilities and products rounded to "act"
    index_hadamard: bool  # rotate indexer q and k
    index_quant: bool  # round indexer q and k to FP4 also where the cache is bf16 (sim-quant)
    index_score: str  # indexer dot, product and head sum rounded to "act", or all "f32"
    attention: str  # "flash": unnormalised P rounded to act before PV, one division; "eager": as transformers
    router: str  # router logits, scores and weights in "f32" or "act"
    router_eps: float  # added to the sum of the chosen scores
    experts: str  # clamp and SiLU in "f32", or rounded to "act"
    routing_weight: str  # multiplied in "before" or "after" w2
    combine: str  # sum over experts in "f32", or rounded to "act" at every add
    logits: str  # lm_head result in "f32" or rounded to "act"


OFFICIAL = Numerics(
    name="official", mhc_norm="after", mhc_mix="f32", head_norm="act", rope_table="f32", kv_quant=True,
    compressor_gemm="f32", compressor_pool="f32", index_hadamard=True, index_quant=True, index_score="act",
    attention="flash", router="f32", router_eps=0.0, experts="f32", routing_weight="before", combine="f32",
    logits="f32",
)  # fmt: skip
HF = Numerics(
    name="hf", mhc_norm="before", mhc_mix="act", head_norm="mixed", rope_table="act", kv_quant=False,
    compressor_gemm="act", compressor_pool="act", index_hadamard=False, index_quant=False, index_score="f32",
    attention="eager", router="act", router_eps=1e-20, experts="act", routing_weight="after", combine="act",
    logits="act",
)  # fmt: skip
PROFILES = {p.name: p for p in (OFFICIAL, HF)}


def profile(name: str) -> Numerics:
    if name not in PROFILES:
        raise DbgError(f"unknown numerics profile '{name}'", f"known: {', '.join(PROFILES)}")
    return PROFILES[name]


def differences(a: Numerics, b: Numerics) -> dict[str, tuple[object, object]]:
    """Switches in which two profiles differ: name -> (value in a, value in b)."""
    return {
        f.name: (getattr(a, f.name), getattr(b, f.name))
        for f in fields(Numerics)
        if f.name != "name" and getattr(a, f.name) != getattr(b, f.name)
    }
