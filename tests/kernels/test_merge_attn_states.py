"""merge_attn_states: parts merged agree with the joint attention, the sink once; empty sides; algebra."""

import math

import numpy as np
import pytest
import torch

from dsv4dbg.kernels.attention.merge_attn_states import merge_attn_states
from dsv4dbg.kernels.attention.sparse_mla_decode import sparse_mla_decode
from dsv4dbg.kernels.attention.sparse_mla_prefill import sparse_mla_prefill
from dsv4dbg.kernels.dims import TINY, WIDE, Dims
from dsv4dbg.kernels.numerics import OFFICIAL
from dsv4dbg.kernels.oracle import to_numpy
from dsv4dbg.kernels.samples import activations, normal


def part(seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return activations(rng, 5, 4, 64).to(dtype), normal(rng, 5, 4, scale=3)


def empty() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(5, 4, 64), torch.full((5, 4), -torch.inf)


def test_golden() -> None:
    """Sums 1 and 3, and a sink of 4: o = (1 * 8 + 3 * 16) / 8, lse = ln 4."""
    o_a, o_b, sink = torch.full((1, 1, 1), 8.0), torch.full((1, 1, 1), 16.0), torch.tensor([math.log(4)])
    o, lse = merge_attn_states(o_a, torch.zeros(1, 1), o_b, torch.full((1, 1), math.log(3)), sink)
    torch.testing.assert_close(o, torch.full((1, 1, 1), 7.0))
    torch.testing.assert_close(lse, torch.full((1, 1), math.log(4)))


def decode_example(dims: Dims, float32: bool) -> dict:
    assert sparse_mla_decode.examples_function is not None
    name = "float32 over fp8" if float32 else "one token each at 124 to 131"
    return next(
        dict(e.args) for e in sparse_mla_decode.examples_function(dims, np.random.default_rng(0)) if e.name == name
    )


@pytest.mark.parametrize("dims", [TINY, WIDE], ids=["tiny", "wide"])
@pytest.mark.parametrize("float32", [True, False], ids=["f32", "bf16"])
@pytest.mark.parametrize("shift", [None, 0.0, 10.0, -10.0])
def test_window_and_entries_apart_agree_with_the_joint_call(dims: Dims, float32: bool, shift: float | None) -> None:
    """Tokens with few or no entries are among them. A sink in both parts, or in a part and the merge, is far off."""
    args = decode_example(dims, float32)
    sink, window = None if shift is None else args["sink"] + shift, args["window"]
    alone = torch.arange(args["indices"].shape[1]) < window

    def call(columns: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        lists = args["indices"].masked_fill(~columns, -1)
        return sparse_mla_decode(**{**args, "indices": lists, "sink": sink}, numerics=OFFICIAL)

    joint, joint_lse = call(torch.ones_like(alone), sink)
    o, lse = merge_attn_states(*call(alone, None), *call(~alone, None), sink)
    step = 1e-5 if float32 else 2**-6
    room = step * joint.float().abs().amax(-1, keepdim=True)
    assert ((o - joint).float().abs() <= room).all()
    torch.testing.assert_close(lse, joint_lse, rtol=1e-5, atol=1e-5)
    if shift == 0:
        for wrong in (
            merge_attn_states(*call(alone, sink), *call(~alone, None), sink),
            merge_attn_states(*call(alone, sink), *call(~alone, sink)),
            merge_attn_states(*call(alone, None), *call(~alone, None)),
        ):
            assert ((wrong[0] - joint).float().abs() > 2 * room).any()


def test_parts_of_a_prefill_in_any_grouping() -> None:
    """Three parts, merged in either order, with the sink in the last merge only."""
    rng = np.random.default_rng(1)
    q, kv, sink = activations(rng, 5, 4, 128).float(), activations(rng, 96, 128).float(), normal(rng, 4)
    lists = torch.from_numpy(np.stack([rng.permutation(96) for _ in range(5)]).astype(np.int32))
    joint, joint_lse = sparse_mla_prefill(q, kv, lists, sink, scale=0.1, numerics=OFFICIAL)
    a, b, c = (sparse_mla_prefill(q, kv, p, scale=0.1, numerics=OFFICIAL) for p in lists.split([64, 31, 1], dim=1))
    for o, lse in (
        merge_attn_states(*merge_attn_states(*a, *b), *c, sink),
        merge_attn_states(*a, *merge_attn_states(*b, *c), sink),
    ):
        torch.testing.assert_close(o, joint, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, joint_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sides_may_be_exchanged(dtype: torch.dtype) -> None:
    a, b, sink = part(0, dtype), part(1, dtype), torch.tensor([0.0, 5.0, -5.0, 60.0])
    for one, other in zip(merge_attn_states(*a, *b, sink), merge_attn_states(*b, *a, sink), strict=True):
        assert torch.equal(one, other)


def test_empty_side_is_neutral_bit_for_bit() -> None:
    """Whatever its o holds."""
    a, (zeros, lse_empty) = part(2), empty()
    for filling in (0.0, torch.nan, torch.inf):
        side = (zeros + filling, lse_empty)
        for o, lse in (merge_attn_states(*a, *side), merge_attn_states(*side, *a)):
            assert torch.equal(o, a[0])
            assert torch.equal(lse, a[1])


@pytest.mark.parametrize("sink", [None, torch.tensor([-torch.inf, 0.0, 500.0, -500.0])])
def test_both_sides_empty_give_zero(sink: torch.Tensor | None) -> None:
    """Whatever the sides' o holds: a kernel that leaves a row without keys unwritten leaves NaN."""
    for filling in (0.0, torch.nan, torch.inf):
        o_side, lse_side = empty()
        o, lse = merge_attn_states(o_side + filling, lse_side, o_side - filling, lse_side, sink)
        assert (o == 0).all()
        assert (lse == -torch.inf).all()


def test_sink_beyond_the_range_of_exp() -> None:
    a, b = part(3), part(4)
    o, lse = merge_attn_states(*a, *b, torch.full((4,), 1000.0))
    assert (o == 0).all()
    assert torch.equal(lse, merge_attn_states(*a, *b)[1])


def test_common_shift_of_all_logits_changes_nothing() -> None:
    """By a power of two that both lse keep exactly."""
    (o_a, lse_a), (o_b, lse_b), sink = part(5), part(6), torch.tensor([0.0, 1.0, -2.0, 3.0])
    lse_a, lse_b = (lse_a * 64).round() / 64, (lse_b * 64).round() / 64
    o, lse = merge_attn_states(o_a, lse_a, o_b, lse_b, sink)
    shifted, shifted_lse = merge_attn_states(o_a, lse_a + 1024, o_b, lse_b + 1024, sink + 1024)
    assert torch.equal(shifted, o)
    torch.testing.assert_close(shifted_lse - 1024, lse, rtol=0, atol=1e-4)


def test_one_rounding_to_the_dtype_of_the_first_side() -> None:
    (o_a, lse_a), (o_b, lse_b) = part(7, torch.bfloat16), part(8, torch.bfloat16)
    exact, _ = merge_attn_states(o_a.float(), lse_a, o_b.float(), lse_b)
    o, _ = merge_attn_states(o_a, lse_a, o_b, lse_b)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, exact.bfloat16())


def test_invariants_speak() -> None:
    names = ("o_a", "lse_a", "o_b", "lse_b")
    inputs = dict(zip(names, (*part(9), *empty()), strict=True))
    inputs["lse_a"][2] = -torch.inf  # token 2 is empty on both sides
    o, lse = merge_attn_states(**inputs)
    call = {k: to_numpy(v) for k, v in {**inputs, "o": o, "lse": lse}.items()} | {"sink": None}
    checks = merge_attn_states.invariants
    assert [i.check(call) for i in checks] == [None] * len(checks)
    for invariant, change in zip(
        checks, ({"lse": call["lse"] + 1}, {"o": call["o"] + 1}, {"o": call["o"] * np.nan}), strict=True
    ):
        assert invariant.check({**call, **change}), invariant.name
