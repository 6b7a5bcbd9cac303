"""qnorm_rope_kv_insert: rounding points of the head norm, rotation laws, stored bytes, switches, transformers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4UnweightedRMSNorm, apply_rotary_pos_emb

from dsv4dbg.kernels import paged, samples
from dsv4dbg.kernels.attention.qnorm_rope_kv_insert import head_norm, qnorm_rope_kv_insert
from dsv4dbg.kernels.numerics import HF, OFFICIAL, Numerics
from dsv4dbg.kernels.oracle import to_numpy
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.pages import PageLayout, kv_layout

D, R, H, EPS = 512, 64, 3, 1e-6
TABLE = samples.cos_sin(301, R)
LAYOUTS = {
    "ocp": kv_layout("fp8", "ocp", D, R, 4),
    "fnuz": kv_layout("fp8", "fnuz", D, R, 4),
    "bf16": kv_layout("bf16", "", D, R, 4),
    "f32": kv_layout("f32", "", D, R, 4),
}


def inputs(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    positions = torch.from_numpy(rng.integers(0, 300, tokens))
    return samples.activations(rng, tokens, H, D), samples.activations(rng, tokens, D), positions


def run(
    q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, layout: PageLayout, numerics: Numerics = OFFICIAL,
    slots: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Cache]:  # fmt: skip
    """q_out and a window cache, 0xFF where nothing was stored."""
    pages = -(-len(q) // layout.entries) + 1
    cache = Cache("window", torch.full((pages, layout.page_bytes), 0xFF, dtype=torch.uint8), layout)
    slots = torch.arange(len(q)) if slots is None else slots
    return qnorm_rope_kv_insert(q, kv, positions, TABLE, cache, slots, eps=EPS, numerics=numerics), cache


def rows(cache: Cache, tokens: int) -> torch.Tensor:
    return paged.read(cache, torch.arange(tokens), torch.float32)


# head norm


def test_official_head_norm_rounds_every_step():
    """Each step exact (float64), then rounded; eps is not rounded itself (torch on a CPU would, on a GPU it is not)."""
    rng = np.random.default_rng(0)
    sizes = torch.from_numpy(10 ** rng.uniform(-4, 1, (1000, H, 1)))  # mean + eps rounds visibly for the small ones
    q = (samples.normal(rng, 1000, H, D) * sizes).to(torch.bfloat16)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.bfloat16).double()

    mean = rounded(rounded(q.double() ** 2).mean(-1, keepdim=True))
    stepwise = rounded(q.double() * rounded(1 / torch.sqrt(rounded(mean + EPS))))
    assert torch.equal(head_norm(q, EPS, "act").double(), stepwise)


def test_golden_distance_between_bf16_and_f32_head_norm():
    """Spec 4.2: 27-30 % of elements differ, at most 0.9 %, 0.15-0.17 % on average."""
    q = torch.from_numpy(np.random.default_rng(1).standard_normal((2000, 1, D))).to(torch.bfloat16)
    exact = head_norm(q.float(), EPS, "f32").to(torch.bfloat16).float()
    stepwise = head_norm(q, EPS, "act").float()
    assert 0.26 < (stepwise != exact).float().mean() < 0.31
    relative = ((stepwise - exact) / exact)[exact != 0].abs()
    assert 0.0014 < relative.mean() < 0.0018
    assert 0.007 < relative.max() < 0.0095


def test_epsilon_matters_only_for_tiny_heads():
    q = torch.full((1, 1, D), 1e-3)
    assert torch.allclose(head_norm(q, EPS, "f32"), torch.tensor(2**-0.5), rtol=1e-5)
    assert head_norm(torch.zeros(1, 1, D), EPS, "act").eq(0).all()


@pytest.mark.parametrize("form", ["act", "mixed", "f32"])
def test_head_norm_forms_agree_in_float32(form):
    q = samples.normal(np.random.default_rng(2), 9, H, D)
    expected = q.double() / torch.sqrt(q.double().square().mean(-1, keepdim=True) + EPS)
    assert torch.allclose(head_norm(q, EPS, form).double(), expected, rtol=1e-6, atol=1e-7)


# rope


def test_position_zero_is_not_rotated():
    q, kv, _ = inputs(5)
    out, cache = run(q, kv, torch.zeros(5, dtype=torch.int64), LAYOUTS["bf16"], replace(OFFICIAL, kv_quant=False))
    assert torch.equal(out, head_norm(q, EPS, "act"))
    assert torch.equal(rows(cache, 5), kv.float())


def test_only_the_last_channels_turn_in_adjacent_pairs():
    q, kv, positions = inputs(5)
    q, kv = torch.ones(5, H, D), torch.ones(5, D)
    out, cache = run(q, kv, positions, LAYOUTS["f32"], replace(OFFICIAL, kv_quant=False))
    theta = positions[:, None] * 10000.0 ** (-torch.arange(0, R, 2) / R)
    pair = torch.stack((theta.cos() - theta.sin(), theta.sin() + theta.cos()), -1).flatten(1)
    assert torch.equal(rows(cache, 5)[:, : D - R], kv[:, : D - R])
    assert torch.allclose(rows(cache, 5)[:, D - R :], pair, atol=2e-5)
    assert torch.allclose(out[:, 0, D - R :], pair, atol=2e-5)


def test_dot_products_depend_on_distance_only():
    q, kv, _ = inputs(4)
    q, kv = q.float(), kv.float()
    scores = []
    for shift in (0, 37, 250):
        positions = torch.tensor([0, 3, 11, 40]) + shift
        out, cache = run(q, kv, positions, LAYOUTS["f32"], replace(OFFICIAL, kv_quant=False))
        scores.append(torch.einsum("thd,sd->tsh", out, rows(cache, 4)))
    assert torch.allclose(scores[0], scores[1], atol=1e-3)
    assert torch.allclose(scores[0], scores[2], atol=1e-3)
    assert not torch.allclose(scores[0][0, 1], scores[0][1, 0], atol=1e-1)


# stored bytes


def test_golden_scale_exponents():
    """log2 of the scale for amax 0, 1e-4, 0.5, 1, 3.5, 7, 7.03125, 448, 450 (spec 7.1)."""
    amax, exponents = (0, 1e-4, 0.5, 1, 3.5, 7, 7.03125, 448, 450), (-22, -22, -9, -8, -7, -6, -5, 0, 1)
    kv = torch.zeros(9, D)
    kv[:, 0] = torch.tensor(amax)
    positions = torch.zeros(9, dtype=torch.int64)
    for layout, one_more in ((LAYOUTS["ocp"], 0), (LAYOUTS["fnuz"], 1)):
        _, cache = run(torch.zeros(9, H, D, dtype=torch.bfloat16), kv.bfloat16(), positions, layout)
        scales = paged.read_records(cache, torch.arange(9))[1]
        assert (scales[:, 0].int() - 127 - one_more).tolist() == list(exponents)
        assert (scales[:, 1:7].int() - 127 - one_more == -22).all()
        assert (scales[:, 7] == 0).all()


@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
def test_sim_quant_in_a_bf16_cache_equals_real_quantisation(dialect):
    q, kv, positions = inputs(40)
    _, plain = run(q, kv, positions, LAYOUTS["bf16"])
    _, packed = run(q, kv, positions, LAYOUTS[dialect])
    assert torch.equal(rows(plain, 40), rows(packed, 40))


def test_fnuz_never_stores_its_nan():
    q, kv, positions = inputs(40)
    kv[:, ::2] = -1e-9  # underflows to minus zero beside larger values
    _, cache = run(q, kv, positions, LAYOUTS["fnuz"])
    assert not (paged.read_records(cache, torch.arange(40))[0][:, : D - R] == 0x80).any()
    assert rows(cache, 40).isfinite().all()


def test_kv_without_a_slot_is_not_stored_and_q_does_not_care():
    q, kv, positions = inputs(9)
    slots = torch.tensor([0, -1, 2, 3, -1, -1, 6, 7, 8])
    out, cache = run(q, kv, positions, LAYOUTS["ocp"], slots=slots)
    everything, full = run(q, kv, positions, LAYOUTS["ocp"])
    assert torch.equal(out, everything)
    for token, slot in enumerate(slots):
        record = torch.cat(paged.read_records(cache, torch.tensor([token])), 1)
        same = torch.cat(paged.read_records(full, torch.tensor([token])), 1)
        assert torch.equal(record, same) if slot >= 0 else (record == 0xFF).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_row_alone_equals_the_row_in_the_batch(layout):
    q, kv, positions = inputs(7)
    out, cache = run(q, kv, positions, LAYOUTS[layout])
    for t in range(7):
        one, alone = run(q[t : t + 1], kv[t : t + 1], positions[t : t + 1], LAYOUTS[layout])
        assert torch.equal(one[0], out[t])
        assert torch.equal(rows(alone, 1)[0], rows(cache, 7)[t])


# switches


def changed(numerics: Numerics, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Channels of q_out and of the stored rows in which ``numerics`` differs from the official profile."""
    q, kv, positions = inputs(64)
    out, cache = run(q, kv, positions + 1, LAYOUTS[layout])
    other, other_cache = run(q, kv, positions + 1, LAYOUTS[layout], numerics)
    q_channels = (out != other).flatten(0, 1).any(0)
    return q_channels, (rows(cache, 64) != rows(other_cache, 64)).any(0)


@pytest.mark.parametrize("form", ["mixed", "f32"])
def test_head_norm_switch_changes_q_only(form):
    q, kv = changed(replace(OFFICIAL, head_norm=form), "ocp")
    assert q.all()
    assert not kv.any()


def test_f32_head_norm_rounds_once():
    q, kv, positions = inputs(64)
    out, _ = run(q, kv, positions, LAYOUTS["ocp"], replace(OFFICIAL, head_norm="f32"))
    exact, _ = run(q.float(), kv.float(), positions, LAYOUTS["f32"], replace(OFFICIAL, head_norm="f32"))
    assert torch.equal(out, exact.bfloat16())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kv_quant_switch_changes_plain_caches_only(layout):
    q, kv = changed(replace(OFFICIAL, kv_quant=False), layout)
    assert not q.any()
    if layout in ("ocp", "fnuz"):
        assert not kv.any()
    else:
        assert kv[: D - R].float().mean() > 0.9
        assert not kv[D - R :].any()


def test_rope_table_switch_changes_rope_channels_only():
    q, kv = changed(replace(OFFICIAL, rope_table="act"), "ocp")
    for channels in (q, kv):
        assert not channels[: D - R].any()
        assert channels[D - R :].all()


def test_rope_table_switch_does_nothing_in_float32():
    q, kv, positions = inputs(20)
    out, cache = run(q.float(), kv.float(), positions, LAYOUTS["f32"])
    other, other_cache = run(q.float(), kv.float(), positions, LAYOUTS["f32"], replace(OFFICIAL, rope_table="act"))
    assert torch.equal(out, other)
    assert torch.equal(cache.data, other_cache.data)


# transformers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hf_profile_is_transformers_bit_for_bit(dtype):
    q, kv, positions = inputs(50)
    q, kv = q.to(dtype), kv.to(dtype)
    layout = LAYOUTS["bf16" if dtype == torch.bfloat16 else "f32"]
    out, cache = run(q, kv, positions, layout, HF)
    cos, sin = TABLE[positions].to(dtype)[None].split(R // 2, -1)
    normed = DeepseekV4UnweightedRMSNorm(EPS)(q[None].transpose(1, 2))
    assert torch.equal(out, apply_rotary_pos_emb(normed, cos, sin)[0].transpose(0, 1))
    assert torch.equal(rows(cache, 50), apply_rotary_pos_emb(kv[None, None], cos, sin)[0, 0].float())


# invariants


def test_invariants_notice_large_heads_and_stored_nan():
    q, kv, positions = inputs(5)
    out, cache = run(q, kv, positions, LAYOUTS["fnuz"])
    slots = torch.arange(5)
    call = {"q": q, "kv": kv, "window_slots": slots, "q_out": out, "window_cache": cache}

    def complaints(**changes) -> list[str]:
        named = {n: v if isinstance(v, Cache) else to_numpy(v) for n, v in {**call, **changes}.items()}
        return [message for message in (i.check(named) for i in qnorm_rope_kv_insert.invariants) if message]

    assert complaints() == []
    assert "root mean square" in complaints(q_out=1.1 * out)[0]
    assert "slot 5" in complaints(window_slots=slots + 1)[0]  # nothing was stored there
