"""o_proj_grouped: the first output projection wo_a, one block per group of heads (spec 4.9)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from dsv4dbg.compare import Dense
from dsv4dbg.kernels import formats, oracle
from dsv4dbg.kernels.contract import Example, attr, op, tensor, weight
from dsv4dbg.kernels.dims import TINY, Dims
from dsv4dbg.kernels.invariants import finite
from dsv4dbg.kernels.samples import TOKENS, activations, fp8_weight, normal


@op(
    family="attention",
    args={
        "o": tensor("token head channel", "act"),
        "weight": weight("out inp", "fp8 bf16 f32"),
        "scale": weight("out_block inp_block", "u8 f32", "of an fp8 weight, per 128 x 128", optional=True),
        "groups": attr("groups of consecutive heads"),
    },
    outputs={"z": tensor("token out", "act")},
    compare={"z": Dense(terms="inp", more={"scale:f32": 1, "weight:f32": 1})},
    invariants=(finite("z"),),
)
def o_proj_grouped(
    o: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None, *, groups: int
) -> torch.Tensor:
    """``z[t, g] = W[g] @ o[t, g]`` with o viewed as ``[token, group, inp]`` and W as ``[group, out / group, inp]``.

    Args:
        o: ``[token, head, channel]`` bf16 (or float32), not quantised; ``inp = head * channel / groups``.
        weight: ``[out, inp]`` e4m3fn with ``scale``, or bf16 / float32 without.
        scale: ``[ceil(out / 128), ceil(inp / 128)]`` E8M0 bytes or float32. Blocks may span groups.
    Returns:
        ``[token, out]``, groups side by side. The weight is brought to o's dtype first (E8M0: exact; float32 scales:
        one rounding); products accumulate in float32; one rounding.
    """
    dense = weight if scale is None else formats.block_dequantize(weight, scale)
    dense = dense.to(o.dtype).float().unflatten(0, (groups, -1))
    z = torch.bmm(o.float().reshape(len(o), groups, dense.shape[2]).transpose(0, 1), dense.transpose(1, 2))
    return z.transpose(0, 1).flatten(1).to(o.dtype)


@o_proj_grouped.oracle
def _(o: np.ndarray, weight: np.ndarray, scale: np.ndarray | None, *, groups: int) -> np.ndarray:
    dense = weight if scale is None else oracle.fp8_blocks(weight, scale)
    heads, out = o.shape[1] // groups, len(dense) // groups
    z = np.zeros((len(o), len(dense)))
    for g in range(groups):
        x = o[:, g * heads : (g + 1) * heads].reshape(len(o), dense.shape[1])
        z[:, g * out : (g + 1) * out] = x @ dense[g * out : (g + 1) * out].T
    return z


@o_proj_grouped.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    out, inp = dims.groups * dims.o_lora, dims.heads * dims.head_dim // dims.groups
    codes, scale = fp8_weight(rng, out, inp)
    plain = normal(rng, out, inp, scale=inp**-0.5)

    def case(
        name: str, tokens: int, weight: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype = torch.bfloat16
    ) -> Example:
        o = activations(rng, tokens, dims.heads, dims.head_dim).to(dtype)
        return Example(name, {"o": o, "weight": weight, "scale": scale, "groups": dims.groups})

    for tokens in TOKENS if dims == TINY else (0, 1, 3, 129):
        yield case(f"{tokens} tokens, fp8", tokens, codes, scale)
    yield case("fp8 with float32 scales", 3, codes, formats.e8m0_decode(scale) * 1.3)
    yield case("bf16 weight", 3, plain.to(torch.bfloat16), None)
    yield case("float32 weight", 3, plain, None)
    yield case("float32 activations, fp8", 3, codes, scale, torch.float32)
    yield case("float32 activations, float32 weight", 3, plain, None, torch.float32)
    one = case("one head is not zero", 3, codes, scale)
    yield Example(one.name, {**one.args, "o": one.args["o"] * (torch.arange(dims.heads) == dims.heads - 2)[:, None]})
    zero = case("a zero row", 3, codes, scale)
    yield Example(zero.name, {**zero.args, "o": zero.args["o"].index_fill(0, torch.tensor([1]), 0)})
    single = case("one group", 3, codes, scale)
    yield Example(single.name, {**single.args, "o": activations(rng, 3, inp // 64, 64), "groups": 1})
