"""mtp_input: which norm, projection and stream meet, and where it rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsv4dbg.kernels.ends.mtp_input import mtp_input
from dsv4dbg.kernels.linear.fp8_linear import fp8_linear
from dsv4dbg.kernels.linear.linear import linear
from dsv4dbg.kernels.norm.rms_norm import rms_norm
from dsv4dbg.kernels.samples import activations, fp8_weight, norm_weight, normal

D, HC, V, T = 128, 4, 20, 5


def inputs(seed: int = 0, quantized: bool = True, dtype: torch.dtype = torch.bfloat16) -> dict:
    rng = np.random.default_rng(seed)

    def projection() -> tuple[torch.Tensor, torch.Tensor | None]:
        return fp8_weight(rng, D, D) if quantized else (normal(rng, D, D, scale=0.1).to(dtype), None)

    (e_proj, e_scale), (h_proj, h_scale) = projection(), projection()
    return {
        "ids": torch.from_numpy(rng.integers(0, V, T)),
        "streams": activations(rng, T, HC, D).to(dtype),
        "embed_weight": activations(rng, V, D).to(dtype),
        "enorm": norm_weight(rng, D),
        "hnorm": norm_weight(rng, D),
        "e_proj": e_proj,
        "e_scale": e_scale,
        "h_proj": h_proj,
        "h_scale": h_scale,
        "eps": 1e-6,
    }


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_composition_stream_by_stream(quantized, dtype):
    a = inputs(quantized=quantized, dtype=dtype)

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        weight, scale = a[f"{name}_proj"], a[f"{name}_scale"]
        return fp8_linear(x, weight, scale) if quantized else linear(x, weight, out="act")

    e = project(rms_norm(a["embed_weight"][a["ids"]], a["enorm"], eps=1e-6), "e")
    mixed = mtp_input(**a)
    assert (mixed.shape, mixed.dtype) == ((T, HC, D), dtype)
    for j in range(HC):
        h = project(rms_norm(a["streams"][:, j], a["hnorm"], eps=1e-6), "h")
        expected = e + h
        assert expected.dtype == dtype
        assert torch.allclose(mixed[:, j], expected, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-5)


@pytest.mark.parametrize(("kept", "zeroed"), [("e", "h"), ("h", "e")])
def test_each_half_reads_its_own_input_norm_and_projection(kept, zeroed):
    a = inputs(quantized=False, dtype=torch.float32)
    a |= {f"{kept}_proj": torch.eye(D), f"{zeroed}_proj": torch.zeros(D, D)}
    source = a["embed_weight"][a["ids"]][:, None].expand(T, HC, D) if kept == "e" else a["streams"]
    expected = rms_norm(source.flatten(0, 1), a[f"{kept}norm"], eps=1e-6).unflatten(0, (T, HC))
    assert torch.equal(mtp_input(**a), expected)


def test_scales_belong_to_their_projection():
    a = inputs()
    doubled = {name: mtp_input(**{**a, name: a[name] + 10}).float() for name in ("e_scale", "h_scale")}
    plain = mtp_input(**a).float()
    # at 2^10 times the size only the doubled half is left: equal over streams for e, not for h
    assert torch.allclose(doubled["e_scale"], doubled["e_scale"][:, :1], atol=0.02 * doubled["e_scale"].abs().max())
    assert not torch.allclose(doubled["h_scale"], doubled["h_scale"][:, :1], atol=0.02 * doubled["h_scale"].abs().max())
    assert not torch.allclose(plain, plain[:, :1], atol=0.02 * plain.abs().max())


def test_one_projection_may_be_quantised():
    a = inputs(dtype=torch.float32)
    plain = {**a, "e_proj": normal(np.random.default_rng(1), D, D), "e_scale": None}
    assert not torch.equal(mtp_input(**plain), mtp_input(**a))
    zero = mtp_input(**{**plain, "e_proj": torch.zeros(D, D)})
    h = fp8_linear(rms_norm(a["streams"].flatten(0, 1), a["hnorm"], eps=1e-6), a["h_proj"], a["h_scale"])
    assert torch.equal(zero.flatten(0, 1), h)


def test_the_sum_is_rounded_in_the_dtype_of_the_streams():
    """256 + 1 = 257 needs nine bits: bf16 keeps 256, and each half was rounded before."""
    a = inputs(quantized=False)
    a |= {"e_proj": torch.zeros(D, D), "h_proj": torch.zeros(D, D)}
    a["embed_weight"] = a["streams"].new_zeros(V, D)
    a["embed_weight"][:, 0], a["streams"] = 1, a["streams"] * 0
    a["streams"][..., 0] = 1
    a["enorm"], a["hnorm"] = torch.ones(D), torch.ones(D)
    a["e_proj"], a["h_proj"] = a["e_proj"].float(), a["h_proj"].float()
    a["e_proj"][0, 0], a["h_proj"][0, 0] = 256 / D**0.5, 1 / D**0.5
    assert mtp_input(**a)[..., 0].unique().tolist() == [256]
    floats = {**a, "streams": a["streams"].float(), "embed_weight": a["embed_weight"].float()}
    assert mtp_input(**floats)[..., 0].unique().tolist() == pytest.approx([257], rel=1e-4)


def test_row_zero_is_not_special():
    a = inputs()
    a["ids"] = a["ids"][:1].expand(T).clone()
    a["streams"] = a["streams"][:1].expand(T, HC, D).clone()
    mixed = mtp_input(**a)
    assert torch.equal(mixed, mixed[:1].expand_as(mixed))
    assert not torch.equal(mixed[0], mtp_input(**{**a, "embed_weight": torch.zeros_like(a["embed_weight"])})[0])


def test_size_of_a_stream_does_not_matter():
    a = {**inputs(), "eps": 0.0}
    size = torch.tensor([1, 2.0**9, 2.0**-9, 4], dtype=torch.bfloat16)[:, None]
    assert torch.equal(mtp_input(**{**a, "streams": a["streams"] * size}), mtp_input(**a))


def test_no_tokens():
    a = inputs()
    assert mtp_input(**{**a, "ids": a["ids"][:0], "streams": a["streams"][:0]}).shape == (0, HC, D)
