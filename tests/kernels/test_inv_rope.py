"""inv_rope: golden rotations, the inverse of rope, and transformers' conjugate rotation."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from dsv4dbg.kernels import formats
from dsv4dbg.kernels.attention.inv_rope import inv_rope
from dsv4dbg.kernels.numerics import HF, OFFICIAL, Numerics
from dsv4dbg.kernels.oracle import to_numpy
from dsv4dbg.kernels.samples import activations, cos_sin

POSITIONS = torch.tensor([0, 1, 2, 3, 127, 128, 129, 900])


def heads(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return activations(np.random.default_rng(seed), len(POSITIONS), 4, 128).to(dtype)


def test_quarter_turn_back() -> None:
    """cos 0, sin 1 for the first pair of the last four channels, cos 1, sin 0 for the second."""
    o = torch.tensor([[[9.0, 8.0, 1.0, 2.0, 3.0, 4.0]]])
    table = torch.tensor([[7.0, 7.0, 7.0, 7.0], [0.0, 1.0, 1.0, 0.0]])
    y = inv_rope(o, torch.tensor([1]), table, numerics=OFFICIAL)
    assert y.tolist() == [[[9.0, 8.0, 2.0, -1.0, 3.0, 4.0]]]


@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 2**-21), (torch.bfloat16, 2**-7)])
def test_undoes_rope(dtype: torch.dtype, step: float) -> None:
    o, table = heads(dtype), cos_sin(1024, 64)
    there = formats.rotate(o, table[POSITIONS])
    back = inv_rope(there, POSITIONS, table, numerics=OFFICIAL)
    assert not torch.equal(there, o)
    assert (back.float() - o.float()).abs().max() <= step * o.float().abs().max()
    assert torch.equal(back[..., :64], o[..., :64])
    assert torch.equal(back[0], o[0]), "position 0"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers(dtype: torch.dtype) -> None:
    """cos and sin in the dtype of activations, sine negated; bit for bit in bf16, 1e-6 in float32."""
    o, table = heads(dtype, 1), cos_sin(1024, 64)
    cos, sin = table[POSITIONS].to(dtype).split(32, dim=1)
    expected = apply_rotary_pos_emb(o[None], cos[None], -sin[None], unsqueeze_dim=2)[0]
    y = inv_rope(o, POSITIONS, table, numerics=HF)
    tolerance = 1e-6 if dtype is torch.float32 else 0.0
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)


def test_only_the_table_switch_is_read() -> None:
    o, table = heads(torch.bfloat16, 2), cos_sin(1024, 64)
    y = inv_rope(o, POSITIONS, table, numerics=OFFICIAL)
    for switch in (f.name for f in fields(Numerics)):
        other = inv_rope(o, POSITIONS, table, numerics=replace(OFFICIAL, **{switch: getattr(HF, switch)}))
        assert torch.equal(other, y) != (switch == "rope_table"), switch
    rounded = inv_rope(o, POSITIONS, table.bfloat16().float(), numerics=OFFICIAL)
    assert torch.equal(inv_rope(o, POSITIONS, table, numerics=HF), rounded)


def test_invariants_speak() -> None:
    o, table = heads(torch.bfloat16, 3), cos_sin(1024, 64)
    call = {"o": to_numpy(o), "positions": to_numpy(POSITIONS), "cos_sin": to_numpy(table)}
    call["y"] = to_numpy(inv_rope(o, POSITIONS, table, numerics=OFFICIAL))
    copied, finite = (i.check for i in inv_rope.invariants)
    assert (copied(call), finite(call)) == (None, None)
    assert copied({**call, "y": call["y"] + (np.arange(128) == 63)})
    assert copied({**call, "y": call["y"] + (np.arange(128) == 64)}) is None
    assert finite({**call, "y": call["y"] * np.nan})
