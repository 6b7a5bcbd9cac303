"""sparse_mla_prefill: where it rounds, transformers' attention, the sink, order and reach of keys."""

from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import eager_attention_forward

from dsv4dbg.kernels.attention.sparse_mla_prefill import sparse_mla_prefill
from dsv4dbg.kernels.attention.sparse_samples import queries, sinks
from dsv4dbg.kernels.dims import TINY
from dsv4dbg.kernels.numerics import HF, OFFICIAL, Numerics
from dsv4dbg.kernels.samples import activations

SCALE = 128**-0.5
PROFILES = pytest.mark.parametrize("numerics", [OFFICIAL, HF], ids=["official", "hf"])


def inputs(seed: int, tokens: int = 5, rows: int = 200, keys: int = 150, dtype: torch.dtype = torch.bfloat16) -> dict:
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(rows)[:keys] for _ in range(tokens)])
    return {
        "q": queries(rng, tokens, 4, 128).to(dtype),
        "kv": activations(rng, rows, 128).to(dtype),
        "indices": torch.from_numpy(chosen.astype(np.int32)),
        "sink": sinks(rng, 4),
        "scale": SCALE,
    }


def close(o: torch.Tensor, other: torch.Tensor, kv: torch.Tensor) -> bool:
    """Equal within a few roundings of P and o; every o is a mean of rows of kv."""
    step = 2**-7 if o.dtype is torch.bfloat16 else 1e-5
    return bool((o.float() - other.float()).abs().max() <= step * kv.float().abs().max())


@pytest.mark.parametrize(
    ("numerics", "expected"), [(OFFICIAL, 0.482421875), (replace(OFFICIAL, attention="eager"), 0.484375)]
)
def test_p_is_rounded_for_pv_and_not_for_the_sum(numerics: Numerics, expected: float) -> None:
    """Two keys with logits 0 and -1/16, values 0 and 1: p = 0.93941 and bf16(p) = 0.9375; bf16(p) / (1 + p) rounds
    to 0.48242, while p / (1 + p) and bf16(p) / (1 + bf16(p)) both round to 0.48438."""
    q = torch.tensor([[[1.0, 0.0]]], dtype=torch.bfloat16)
    kv = torch.tensor([[0.0, 0.0], [-0.0625, 1.0]], dtype=torch.bfloat16)
    o, _ = sparse_mla_prefill(q, kv, torch.tensor([[0, 1]], dtype=torch.int32), scale=1.0, numerics=numerics)
    assert o[0, 0, 1].item() == expected


@PROFILES
def test_sink_is_a_key_without_value(numerics: Numerics) -> None:
    """Two keys and a sink with logit 0 each: o is a third of the sum, lse = ln 2 knows nothing of the sink."""
    kv = torch.tensor([[0.0, 3.0], [0.0, 6.0]])
    q, indices = torch.ones(1, 1, 2) * torch.tensor([1.0, 0.0]), torch.tensor([[1, 0]], dtype=torch.int32)
    o, lse = sparse_mla_prefill(q, kv, indices, torch.zeros(1), scale=1.0, numerics=numerics)
    torch.testing.assert_close(o, torch.tensor([[[0.0, 3.0]]]))
    torch.testing.assert_close(lse, torch.tensor([[np.log(2.0)]], dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [3, 200])
def test_eager_equals_transformers_on_dense_masks(dtype: torch.dtype, window: int) -> None:
    """Causal and banded masks; float32 within 1e-6, bf16 equal but for rare flips by the order of sums."""
    args = inputs(0, tokens=129, rows=129, dtype=dtype)
    query, key = torch.arange(129)[:, None], torch.arange(129)[None]
    seen = (key <= query) & (key > query - window)
    mask = torch.zeros(129, 129).masked_fill(~seen, torch.finfo(dtype).min).to(dtype)
    module = SimpleNamespace(num_key_value_groups=4, sinks=args["sink"], training=False)
    rows = args["kv"][None, None]
    expected, _ = eager_attention_forward(module, args["q"].transpose(0, 1)[None], rows, rows, mask[None, None], SCALE)
    args["indices"] = torch.where(seen, key, -1).to(torch.int32)
    o, _ = sparse_mla_prefill(**args, numerics=HF)
    if dtype is torch.float32:
        torch.testing.assert_close(o, expected[0], rtol=1e-6, atol=1e-6)
    else:
        assert (o == expected[0]).float().mean() > 0.99
        assert close(o, expected[0], args["kv"])


@PROFILES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_order_of_keys_changes_only_rounding(numerics: Numerics, dtype: torch.dtype) -> None:
    """Any order, the running maximum's best and worst included: logits ascending and descending over 64-key blocks."""
    args = inputs(1, tokens=1, dtype=dtype)
    args["q"] = args["q"] * 4
    o, lse = sparse_mla_prefill(**args, numerics=numerics)
    indices = args["indices"][0]
    for head in range(4):
        ascending = (args["kv"].float() @ args["q"][0, head].float())[indices.long()].argsort()
        for order in (ascending, ascending.flip(0), torch.randperm(150, generator=torch.manual_seed(head))):
            permuted, permuted_lse = sparse_mla_prefill(**{**args, "indices": indices[order][None]}, numerics=numerics)
            assert close(permuted, o, args["kv"])
            torch.testing.assert_close(permuted_lse, lse, rtol=1e-6, atol=1e-6)


@PROFILES
@pytest.mark.parametrize("keys", [1, 3, 65, 150])
def test_empty_columns_behind_the_list_change_no_bit(numerics: Numerics, keys: int) -> None:
    """A list's width is the batch's business: chunks of another width give the same bits."""
    args = inputs(2, keys=keys)
    o, lse = sparse_mla_prefill(**args, numerics=numerics)
    for more in (1, 42, 64, 500):
        wider = torch.nn.functional.pad(args["indices"], (0, more), value=-1)
        wide, wide_lse = sparse_mla_prefill(**{**args, "indices": wider}, numerics=numerics)
        if numerics.attention == "flash":
            assert torch.equal(wide, o)
            assert torch.equal(wide_lse, lse)
        else:
            assert close(wide, o, args["kv"])


@PROFILES
def test_empty_columns_anywhere_change_only_rounding(numerics: Numerics) -> None:
    args = inputs(3, keys=70)
    o, lse = sparse_mla_prefill(**args, numerics=numerics)
    spread = torch.full((5, 210), -1, dtype=torch.int32)
    spread[:, 66 + 2 * torch.arange(70)] = args["indices"]  # the first block of 64 is empty
    o_spread, lse_spread = sparse_mla_prefill(**{**args, "indices": spread}, numerics=numerics)
    assert close(o_spread, o, args["kv"])
    torch.testing.assert_close(lse_spread, lse, rtol=1e-6, atol=1e-6)


@PROFILES
def test_sink_beyond_the_range_of_exp(numerics: Numerics) -> None:
    """exp(sink - max) overflows: nothing is left for the keys, and nothing is NaN. lse does not change."""
    args = inputs(4)
    _, lse = sparse_mla_prefill(**args, numerics=numerics)
    o, lse_sink = sparse_mla_prefill(**{**args, "sink": torch.full((4,), 1000.0)}, numerics=numerics)
    assert (o == 0).all()
    assert torch.equal(lse_sink, lse)


@PROFILES
def test_sink_of_minus_infinity_is_no_sink(numerics: Numerics) -> None:
    args = inputs(5)
    o, _ = sparse_mla_prefill(**{**args, "sink": torch.full((4,), -torch.inf)}, numerics=numerics)
    without, _ = sparse_mla_prefill(**{**args, "sink": None}, numerics=numerics)
    assert torch.equal(o, without)
    assert not torch.equal(o, sparse_mla_prefill(**args, numerics=numerics)[0])


@PROFILES
@pytest.mark.parametrize("sink", [None, torch.tensor([-torch.inf, 0.0, 90.0, -5.0])])
def test_a_token_without_keys_is_zero_and_disturbs_no_other(numerics: Numerics, sink: torch.Tensor | None) -> None:
    args = {**inputs(6), "sink": sink}
    o, lse = sparse_mla_prefill(**args, numerics=numerics)
    empty = args["indices"].index_fill(0, torch.tensor([1, 4]), -1)
    o_empty, lse_empty = sparse_mla_prefill(**{**args, "indices": empty}, numerics=numerics)
    assert (o_empty[[1, 4]] == 0).all()
    assert (lse_empty[[1, 4]] == -torch.inf).all()
    assert torch.equal(o_empty[[0, 2, 3]], o[[0, 2, 3]])
    assert torch.equal(lse_empty[[0, 2, 3]], lse[[0, 2, 3]])


@PROFILES
def test_nan_reaches_the_tokens_that_list_it_and_no_other(numerics: Numerics) -> None:
    args = inputs(7, keys=80)
    o, _ = sparse_mla_prefill(**args, numerics=numerics)
    indices = torch.cat((args["indices"], torch.full((5, 3), -1, dtype=torch.int32)), 1)
    for row in (0, 57, 199):  # of which row 0 is what a careless gather of -1 would touch
        kv = args["kv"].clone()
        kv[row, 5] = torch.nan
        hit = (indices == row).any(1)
        assert 0 < hit.sum() < 5, "the sample has tokens of both kinds"
        poisoned, lse = sparse_mla_prefill(**{**args, "kv": kv, "indices": indices}, numerics=numerics)
        assert poisoned[hit].isnan().all()
        assert lse[hit].isnan().all()
        assert torch.equal(poisoned[~hit], o[~hit]) or numerics.attention == "eager"
        assert poisoned[~hit].isfinite().all()


def test_row_named_twice_counts_twice() -> None:
    """As if the row's logit were higher by ln 2."""
    kv = torch.tensor([[0.0, 3.0], [0.0, 6.0]])
    indices = torch.tensor([[0, 1, 1]], dtype=torch.int32)
    o, lse = sparse_mla_prefill(torch.zeros(1, 1, 2), kv, indices, scale=1.0, numerics=OFFICIAL)
    torch.testing.assert_close(o[0, 0, 1], torch.tensor(5.0))
    torch.testing.assert_close(lse[0, 0], torch.tensor(np.log(3.0), dtype=torch.float32))


def test_only_the_attention_switch_is_read() -> None:
    args = inputs(8)
    o, lse = sparse_mla_prefill(**args, numerics=OFFICIAL)
    for switch in (f.name for f in fields(Numerics)):
        other, other_lse = sparse_mla_prefill(**args, numerics=replace(OFFICIAL, **{switch: getattr(HF, switch)}))
        changed = switch == "attention"
        assert torch.equal(other, o) != changed, switch
        assert torch.equal(other_lse, lse) != changed, switch
        assert close(other, o, args["kv"]) or changed


def test_invariants_speak() -> None:
    args = inputs(9)
    o, lse = sparse_mla_prefill(**args, numerics=OFFICIAL)
    call = {
        **{k: v.double().numpy() for k, v in args.items() if k not in ("indices", "scale")},
        "o": o.double().numpy(),
    }
    call |= {"indices": args["indices"].long().numpy(), "lse": lse.double().numpy()}
    checks = sparse_mla_prefill.invariants
    assert [i.check(call) for i in checks] == [None] * len(checks)
    beyond = call["indices"].copy()
    beyond[2, 3] = 200
    wrong = [
        {"indices": beyond},
        {"lse": call["lse"] - np.inf},
        {"o": call["o"] * TINY.head_dim},
        {"o": call["o"] * np.nan},
    ]
    for invariant, change in zip(checks, wrong, strict=True):
        assert invariant.check({**call, **change}), invariant.name
