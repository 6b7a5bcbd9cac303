"""moe_experts: against transformers, the same weights in every format, relabelling, and where the weight enters."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

from dsv4dbg.kernels.dims import TINY
from dsv4dbg.kernels.formats import fp4_dequantize
from dsv4dbg.kernels.moe.moe_experts import expert_weights, moe_experts, routing
from dsv4dbg.kernels.numerics import HF, OFFICIAL
from dsv4dbg.kernels.oracle import quantize
from dsv4dbg.kernels.samples import activations, normal

EVERY = np.arange(TINY.experts)
WEIGHTS = ("w1", "w3", "w2")


def call(fmt: str, tokens: int = 63, choices: int = 3, seed: int = 0, used: np.ndarray = EVERY) -> dict:
    rng = np.random.default_rng(seed)
    x = activations(rng, tokens, TINY.hidden)
    return {"x": x, **routing(rng, tokens, used, choices), **expert_weights(rng, TINY, fmt, used), "limit": 10.0}


def transformers_experts(dtype: torch.dtype) -> tuple[DeepseekV4Experts, dict]:
    torch.manual_seed(1)
    config = DeepseekV4Config(hidden_size=64, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=3)
    module = DeepseekV4Experts(config)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape).mul(0.6).to(dtype)
    ids = torch.rand(257, 8).argsort(-1)[:, :3]
    ids[ids == 5] = 6  # nobody chooses expert 5, some choose 6 twice
    weights = (torch.rand(257, 3) + 0.1).to(dtype)
    w1, w3 = module.gate_up_proj.detach().chunk(2, dim=1)
    return module, {
        "x": torch.randn(257, 64).to(dtype), "ids": ids.int(), "weights": weights.float(),
        "w1": w1, "w1_scale": None, "w3": w3, "w3_scale": None, "w2": module.down_proj.detach(), "w2_scale": None,
        "limit": config.swiglu_limit,
    }  # fmt: skip


def test_float32_equals_transformers() -> None:
    module, args = transformers_experts(torch.float32)
    with torch.no_grad():
        expected = module(args["x"], args["ids"].long(), args["weights"])
    y = moe_experts(**args, numerics=HF)
    torch.testing.assert_close(y / expected.abs().max(), expected / expected.abs().max(), rtol=1e-6, atol=1e-6)


def test_bf16_has_the_bits_of_transformers() -> None:
    """Nearly everywhere: the order of sums inside a GEMM is the library's. Without any of the switches it does not."""
    module, args = transformers_experts(torch.bfloat16)
    with torch.no_grad():
        expected = module(args["x"], args["ids"].long(), args["weights"].bfloat16()).float()
    y = moe_experts(**args, numerics=HF)
    assert torch.equal(y, y.bfloat16().float()), "the running sum is rounded"
    assert (y == expected).float().mean() > 0.98
    for switch in moe_experts.switches:
        official = replace(HF, **{switch: getattr(OFFICIAL, switch)})
        assert (moe_experts(**args, numerics=official) == expected).float().mean() < 0.9, switch


def as_fp8(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An MXFP4 weight with one scale per 128 x 128 block, as FP8 with that block scale (exact)."""
    block = scale[:, ::128, ::4]
    unit = torch.full_like(scale, 127)
    return fp4_dequantize(packed, unit).to(torch.float8_e4m3fn), block


@pytest.mark.parametrize("numerics", [OFFICIAL, HF], ids=lambda n: n.name)
def test_the_same_weights_give_the_same_bits_in_every_quantised_format(numerics) -> None:
    args = call("mxfp4")
    for name in WEIGHTS:
        scale = args[f"{name}_scale"]
        args[f"{name}_scale"] = scale[:, ::128, ::4].repeat_interleave(128, 1).repeat_interleave(4, 2)
    y = moe_experts(**args, numerics=numerics)
    fp8 = dict(args)
    for name in WEIGHTS:
        fp8[name], fp8[f"{name}_scale"] = as_fp8(args[name], args[f"{name}_scale"])
    assert torch.equal(moe_experts(**fp8, numerics=numerics), y)
    factors = {f"{n}_scale": torch.exp2(fp8[f"{n}_scale"].float() - 127) for n in WEIGHTS}
    assert torch.equal(moe_experts(**fp8 | factors, numerics=numerics), y)


def test_plain_weights_leave_activations_unquantised() -> None:
    """The values of MXFP4 weights as bf16: the result differs by the activations' FP8 rounding, and by no more."""
    args = call("mxfp4")
    plain = dict(args)
    for name in WEIGHTS:
        plain[name], plain[f"{name}_scale"] = fp4_dequantize(args[name], args[f"{name}_scale"]).bfloat16(), None
    y, unquantised = (moe_experts(**a, numerics=OFFICIAL) for a in (args, plain))
    error = (y - unquantised).norm() / unquantised.norm()
    assert 0.01 < error < 0.06


def test_input_and_weighted_intermediate_are_quantised() -> None:
    """With identities for weights, y is the quantised intermediate of the quantised input."""
    size, rng = 256, np.random.default_rng(4)
    eye = torch.eye(size)[None].to(torch.float8_e4m3fn)
    unit = torch.full((1, 2, 2), 127, dtype=torch.uint8)
    x, weights = activations(rng, 63, size, scale=3.0), normal(rng, 63, 1).abs()
    ids = torch.zeros(63, 1, dtype=torch.int32)
    y = moe_experts(x, ids, weights, eye, unit, eye, unit, eye, unit, limit=10.0, numerics=OFFICIAL)
    q = torch.from_numpy(quantize(x.double().numpy(), 128)[0]).float()
    inner = (F.silu(q.clamp(max=10)) * q.clamp(-10, 10) * weights).bfloat16()
    assert not torch.equal(inner.float(), y)
    assert np.array_equal(y.double().numpy(), quantize(inner.double().numpy(), 128)[0])


@pytest.mark.parametrize("fmt", ["mxfp4", "fp8 e8m0 scale", "bf16"])
def test_relabelled_experts_give_the_same_sum(fmt: str) -> None:
    """Only the order of the float32 sum over experts changes."""
    args = call(fmt, choices=5)
    order = torch.from_numpy(np.random.default_rng(3).permutation(TINY.experts))
    label = order.argsort()
    moved = {n: a[order] for n, a in args.items() if n.startswith("w") and n != "weights" and a is not None}
    relabelled = args | moved | {"ids": label[args["ids"].long()].int()}
    y, again = (moe_experts(**a, numerics=OFFICIAL) for a in (args, relabelled))
    assert not torch.equal(relabelled["ids"], args["ids"])
    torch.testing.assert_close(again, y, rtol=0, atol=4e-7 * float(y.abs().max()))


def test_order_of_choices_does_not_matter() -> None:
    args = call("mxfp4", choices=5)
    reverse = args | {"ids": args["ids"].flip(1), "weights": args["weights"].flip(1)}
    assert torch.equal(moe_experts(**args, numerics=OFFICIAL), moe_experts(**reverse, numerics=OFFICIAL))


def test_sum_runs_in_ascending_order_of_experts() -> None:
    """Experts that give 1, 2^24, -2^24 lose the 1; experts that give 2^24, -2^24, 1 keep it."""
    size, outputs = 128, (1.0, 2.0**24, -(2.0**24))
    w1 = torch.zeros(3, size, size, dtype=torch.bfloat16)
    w1[:, 0, 0] = 1
    w2 = torch.zeros(3, size, size, dtype=torch.bfloat16)
    x = torch.zeros(1, size, dtype=torch.bfloat16)
    x[0, 0] = 8  # silu(8) * 8 rounds to 64 in bf16
    for expert, out in enumerate(outputs):
        w2[expert, 0, 0] = out / 64
    args = {"weights": torch.ones(1, 3), "w1": w1, "w1_scale": None, "w3": w1, "w3_scale": None, "w2_scale": None}
    for order, total in (((0, 1, 2), 0.0), ((1, 2, 0), 1.0)):
        y = moe_experts(
            x, torch.tensor([[2, 0, 1]], dtype=torch.int32), w2=w2[list(order)], **args, limit=10.0, numerics=OFFICIAL
        )
        assert y[0, 0] == total


@pytest.mark.parametrize("fmt", ["mxfp4", "bf16"])
def test_powers_of_two_commute_with_every_rounding(fmt: str) -> None:
    """So such a routing weight may enter before or after w2; 0.7 may not, as it moves the intermediate's rounding."""
    args = call(fmt)
    after = replace(OFFICIAL, routing_weight="after")
    for weight, equal in ((1.0, True), (0.25, True), (2.0, True), (0.7, False)):
        weighted = args | {"weights": torch.full_like(args["weights"], weight)}
        y, late = (moe_experts(**weighted, numerics=n) for n in (OFFICIAL, after))
        assert torch.equal(y, late) == equal
        torch.testing.assert_close(late, y, rtol=0, atol=0.1 * float(y.abs().max()))


def test_combine_rounds_the_running_sum_and_nothing_else() -> None:
    args = call("mxfp4", choices=1)
    rounded = replace(OFFICIAL, combine="act")
    assert torch.equal(moe_experts(**args, numerics=OFFICIAL), moe_experts(**args, numerics=rounded))
    args = call("mxfp4", choices=3)
    y, act = (moe_experts(**args, numerics=n) for n in (OFFICIAL, rounded))
    assert not torch.equal(y, act)
    assert not torch.equal(y, y.bfloat16().float())
    assert torch.equal(act, act.bfloat16().float())


def test_only_chosen_experts_are_read() -> None:
    """The other experts hold NaN; a token that chose one of them would show it."""
    used = np.array([2, 5, 6])
    for fmt in ("mxfp4", "fp8 e8m0 scale", "fp8 f32 scale", "bf16"):
        args = call(fmt, used=used)
        assert moe_experts(**args, numerics=OFFICIAL).isfinite().all()
        args["ids"][4, 0] = 0
        y = moe_experts(**args, numerics=OFFICIAL)
        assert y[4].isnan().all()
        assert y[5:].isfinite().all()


def test_tokens_without_experts_are_zero_and_do_not_disturb_others() -> None:
    args = call("mxfp4")
    y = moe_experts(**args, numerics=OFFICIAL)
    args["ids"][7] = -1
    missing = moe_experts(**args, numerics=OFFICIAL)
    others = torch.arange(63) != 7
    assert (missing[7] == 0).all()
    torch.testing.assert_close(missing[others], y[others], rtol=0, atol=0.05 * float(y.abs().max()))
    args["ids"][:] = -1
    assert (moe_experts(**args, numerics=OFFICIAL) == 0).all()


def test_no_tokens() -> None:
    y = moe_experts(**call("mxfp4", tokens=0), numerics=OFFICIAL)
    assert y.shape == (0, TINY.hidden)
    assert y.dtype == torch.float32
