"""A forward of four layers at Flash shapes: PyTorch reference, Triton kernels, Hugging Face transformers, in one run.

    python benchmarks/forward.py --device cuda
    python benchmarks/forward.py --device cpu --tiny            # a try: its numbers mean nothing

Two window-only layers, one CSA, one HCA, seeded weights. ``quantised``: FP8 linears and MXFP4 experts, as the
checkpoint has them. ``bf16``: the weights of the transformers model, which has no others; reference and kernels run on
the very same tensors. Prefill of one prompt in one piece and a decode step after it, the best of several runs; logits
of the last row only.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flash import decode_step, flash_config, flash_model, prompt, seconds, session

from dsv4dbg.kernels.numerics import HF
from dsv4dbg.model.batch import Chunk, Step
from dsv4dbg.model.checkpoint import Checkpoint
from dsv4dbg.model.config import ModelConfig
from dsv4dbg.model.environment import environment
from dsv4dbg.model.model import Model
from dsv4dbg.model.run import open_device
from dsv4dbg.model.weights import ModelWeights
from dsv4dbg.plan import Plan

PLANS = {"torch reference": Plan(), "triton": Plan.parse("*=triton")}
KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
SLOW = 20.0  # seconds after which a run is not repeated


def best(make: Callable[[], Callable[[], object]], device: torch.device, runs: int) -> float:
    """Milliseconds of the fastest of several runs after one that compiles; every run gets what ``make`` prepares."""
    times = []
    for _ in range(1 + runs):
        times.append(seconds(make(), device))
        if times[-1] > SLOW:
            break
    return min(times) * 1e3


def ours(model: Model, device: torch.device, plan: Plan, tokens: int, runs: int) -> tuple[float, float]:
    """Milliseconds of a prefill, and of a decode step after it."""
    ids = prompt(model, tokens)

    def fresh() -> Callable[[], object]:
        run = session(model, device, plan, 1, tokens)
        return lambda: run.step(Step("prefill0", (Chunk(0, ids),)))

    run = session(model, device, plan, 1, tokens)
    run.step(Step("prefill0", (Chunk(0, ids),)))
    return best(fresh, device, runs), best(lambda: lambda: run.step(decode_step(run, 0)), device, runs)


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


def theirs(model: Any, device: torch.device, ids: tuple[int, ...], runs: int) -> tuple[float, float]:
    """Milliseconds of a prefill, and of a decode step after it, with transformers' own cache."""
    from transformers import DynamicCache

    whole = torch.tensor([ids], device=device)

    def forward(tokens: torch.Tensor, cache: Any) -> Any:
        return model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1)

    cache = DynamicCache(config=model.config)
    forward(whole, cache)
    step = best(lambda: lambda: forward(whole[:, :1], cache), device, runs)
    return best(lambda: lambda: forward(whole, DynamicCache(config=model.config)), device, runs), step


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a small model and few tokens, to try the script")
    parser.add_argument("--json", type=Path, help="write the times to this file too")
    options = parser.parse_args()
    device = open_device(options.device)
    tiny = options.tiny or device.type == "cpu"
    if device.type == "cpu":
        print("a CPU runs a small model in Triton's interpreter: these numbers mean nothing", file=sys.stderr)
    lengths, runs = ((48,), 1) if tiny else ((4096, 8192), 5)
    found: dict[tuple[str, int], tuple[float, float]] = {}

    def note(what: str, tokens: int, times: tuple[float, float]) -> None:
        found[what, tokens] = times
        print(f"{what:<28} {tokens:6} tokens: prefill {times[0]:9.1f} ms, decode step {times[1]:8.2f} ms", flush=True)

    quantised = flash_model(device, tiny)
    for tokens in lengths:
        for name, plan in PLANS.items():
            note(f"{name}, quantised", tokens, ours(quantised, device, plan, tokens, runs))
    del quantised
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed: nothing to compare with")
        return
    hf = transformers_model(flash_config(tiny), device)
    config = ModelConfig.from_json(hf.config.to_dict())
    shared = Checkpoint.from_state_dict(config, hf.state_dict())
    model = Model(config, ModelWeights(shared, device), HF)
    for tokens in lengths:
        note("transformers eager, bf16", tokens, theirs(hf, device, prompt(model, tokens), runs))
        for name, plan in PLANS.items():
            note(f"{name}, bf16", tokens, ours(model, device, plan, tokens, runs))
        eager = found["transformers eager, bf16", tokens]
        for what in ("triton, quantised", "triton, bf16", "torch reference, bf16"):
            mine = found[what, tokens]
            ratios = f"prefill {eager[0] / mine[0]:.2f}, decode {eager[1] / mine[1]:.2f}"
            print(f"  {what} is faster than transformers by a factor of: {ratios}")
    if options.json:
        rows = [{"what": w, "tokens": t, "prefill_ms": p, "decode_ms": d} for (w, t), (p, d) in found.items()]
        options.json.write_text(json.dumps({"rows": rows, "environment": environment(device)}, default=str, indent=1))


if __name__ == "__main__":
    main()
