"""A forward of four layers at Flash shapes: PyTorch reference, Triton kernels, Hugging Face transformers, in one run.

    python benchmarks/forward.py --device cuda
    python benchmarks/forward.py --device cpu --sizes tiny      # a try: its numbers mean nothing

Two window-only layers, one CSA, one HCA, seeded weights. ``quantised``: FP8 linears and MXFP4 experts, as the
checkpoint has them. ``bf16``: the weights of the transformers model, which has no others; reference and kernels run on
the same values, in the official numerics, which the kernels are made for: transformers' differ in roundings. Prefill
of one prompt in one piece and a decode step after it, the best of several runs; logits of the last row only. An op
that has no kernel runs on the reference, which is said. Without transformers, or without memory for its model, the
quantised part is measured all the same.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from flash import command_line, decode_step, flash_config, flash_model, prompt, seconds, session

from dsv4dbg.kernels.numerics import OFFICIAL
from dsv4dbg.model.batch import Chunk, Step
from dsv4dbg.model.checkpoint import Checkpoint
from dsv4dbg.model.config import ModelConfig
from dsv4dbg.model.environment import environment
from dsv4dbg.model.model import Model
from dsv4dbg.model.run import Session
from dsv4dbg.model.weights import ModelWeights
from dsv4dbg.plan import Plan

KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
REFERENCE, TRITON, THEIRS = "torch reference", "triton", "transformers eager"
PLANS = {REFERENCE: Plan(), TRITON: Plan.parse("*=triton")}
RUNS = 6  # the first one compiles
BUDGET = 10.0  # seconds after which a run is not repeated

Times = tuple[float, float]
"""Milliseconds of a prefill, and of a decode step after it."""


def best(make: Callable[[], Callable[[], object]], device: torch.device) -> float:
    """Milliseconds of the fastest of several runs; every run gets what ``make`` prepares."""
    times = list[float]()
    while len(times) < (RUNS if device.type == "cuda" else 1) and sum(times) < BUDGET:
        times.append(seconds(make(), device))
    return min(times) * 1e3


def ours(model: Model, device: torch.device, plan: Plan, tokens: int) -> tuple[Times, list[str]]:
    """Times, and the ops that the plan has no implementation for, so that the reference ran."""
    ids, runs = prompt(model.config, tokens), list[Session]()

    def fresh() -> Callable[[], object]:
        runs[:] = [session(model, device, plan, 1, tokens)]
        return lambda: runs[0].step(Step("prefill0", (Chunk(0, ids),)))

    prefill = best(fresh, device)
    step = best(lambda: lambda: runs[0].step(decode_step(runs[0], 0)), device)
    return (prefill, step), sorted(op for op, _ in runs[0].ops.fallbacks)


def transformers_model(config: ModelConfig, device: torch.device) -> Any:
    """transformers' model of the same sizes, bf16, eager, random weights made on the device."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    hashed = config.num_hash_layers
    sizes = DeepseekV4Config(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, num_hidden_layers=config.num_hidden_layers,
        moe_intermediate_size=config.moe_intermediate_size, num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim, q_lora_rank=config.q_lora_rank, num_experts_per_tok=config.num_experts_per_tok,
        n_routed_experts=config.n_routed_experts, routed_scaling_factor=config.routed_scaling_factor,
        max_position_embeddings=config.max_position_embeddings, rope_theta=config.rope_theta,
        compress_rope_theta=config.compress_rope_theta,
        partial_rotary_factor=config.qk_rope_head_dim / config.head_dim,
        layer_types=[KINDS[ratio] for ratio in config.compress_ratios],
        compress_rates={KINDS[4]: config.csa_ratio, KINDS[128]: config.hca_ratio},
        mlp_layer_types=["hash_moe"] * hashed + ["moe"] * (config.num_hidden_layers - hashed),
        hc_mult=config.hc_mult, hc_sinkhorn_iters=config.hc_sinkhorn_iters, swiglu_limit=config.swiglu_limit,
        sliding_window=config.sliding_window, o_groups=config.o_groups, o_lora_rank=config.o_lora_rank,
        index_n_heads=config.index_n_heads, index_head_dim=config.index_head_dim, index_topk=config.index_topk,
        rope_parameters={
            "rope_type": "yarn", "factor": config.rope_factor, "beta_fast": config.rope_beta_fast,
            "beta_slow": config.rope_beta_slow,
            "original_max_position_embeddings": config.rope_original_max_position,
        },
    )  # fmt: skip
    sizes._attn_implementation = sizes._experts_implementation = "eager"
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = DeepseekV4ForCausalLM(sizes).eval()
    finally:
        torch.set_default_dtype(before)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if any(part in model._keep_in_fp32_modules_strict for part in name.split(".")):
            tensor.data = tensor.data.float()
        if name.endswith("tid2eid"):  # the experts of a token are distinct
            order = torch.rand(tensor.shape[0], sizes.n_routed_experts, device=device).argsort(-1)
            tensor.data.copy_(order[:, : tensor.shape[1]])
    return model


def theirs(model: Any, device: torch.device, ids: tuple[int, ...]) -> Times:
    """Times with transformers' own cache."""
    from transformers import DynamicCache

    whole, caches = torch.tensor([ids], device=device), list[Any]()

    def forward(tokens: torch.Tensor) -> Any:
        return model(input_ids=tokens, cache=caches[0], use_cache=True, logits_to_keep=1)

    def fresh() -> Callable[[], object]:
        caches[:] = [DynamicCache(config=model.config)]
        return lambda: forward(whole)

    prefill = best(fresh, device)
    return prefill, best(lambda: lambda: forward(whole[:, :1]), device)


Found = tuple[str, str, int, Times]
"""What ran, on which weights, tokens, times."""


def quantised(device: torch.device, tiny: bool, lengths: tuple[int, ...]) -> Iterator[Found]:
    yield from on_plans(flash_model(device, tiny), device, "quantised", lengths)


def plain(device: torch.device, tiny: bool, lengths: tuple[int, ...]) -> Iterator[Found]:
    """transformers, and then ours on its weights."""
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed: nothing to compare with")
        return
    hf = transformers_model(flash_config(tiny), device)
    config = ModelConfig.from_json(hf.config.to_dict())
    for tokens in lengths:  # before ours, whose own copies of gate and up take memory too
        yield THEIRS, "bf16", tokens, theirs(hf, device, prompt(config, tokens))
    weights = ModelWeights(Checkpoint.from_state_dict(config, hf.state_dict()), device)
    yield from on_plans(Model(config, weights, OFFICIAL), device, "bf16", lengths)


def on_plans(model: Model, device: torch.device, weights: str, lengths: tuple[int, ...]) -> Iterator[Found]:
    for tokens in lengths:
        for name, plan in PLANS.items():
            times, fallbacks = ours(model, device, plan, tokens)
            if fallbacks:
                print(f"{name}, {weights}, {tokens} tokens: on the reference: {', '.join(fallbacks)}")
            yield name, weights, tokens, times


def show(found: list[Found]) -> None:
    """A table with every time beside the reference's on the same weights, and beside transformers'."""
    known = {(what, weights, tokens): times for what, weights, tokens, times in found}
    print(f"{'':<18} {'weights':<10} {'tokens':>6} {'prefill ms':>11} {'decode ms':>10}  times as fast as")
    for what, weights, tokens, times in sorted(found, key=lambda f: f[2]):
        beside = ""
        for other, kind in ((REFERENCE, weights), (THEIRS, "bf16")):
            base = known.get((other, kind, tokens))
            if base and what != other:
                beside += f"  {other} {base[0] / times[0]:.2f}/{base[1] / times[1]:.2f}"
        print(f"{what:<18} {weights:<10} {tokens:6} {times[0]:11.1f} {times[1]:10.2f}{beside}")


@torch.inference_mode()
def main() -> None:
    device, tiny, file = command_line(__doc__)
    lengths, found = (24,) if tiny else (4096, 8192), list[Found]()
    for part in (quantised, plain):
        try:
            for row in part(device, tiny, lengths):
                print(f"{row[0]}, {row[1]}, {row[2]} tokens: done", file=sys.stderr)
                found.append(row)
        except torch.OutOfMemoryError as error:
            print(f"the rest of {part.__name__} does not fit this device: {str(error).splitlines()[0]}")
    show(found)
    if file:
        rows = [{"what": w, "weights": k, "tokens": n, "prefill_ms": t[0], "decode_ms": t[1]} for w, k, n, t in found]
        file.write_text(json.dumps({"rows": rows, "environment": environment(device)}, default=str, indent=1))


if __name__ == "__main__":
    main()
