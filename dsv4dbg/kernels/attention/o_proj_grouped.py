"""o_proj_grouped: the first output projection wo_a, one block per group of heads (spec 4.9)."""

from __future__ import annotations

import torch

from dsv4dbg.compare import Dense
from dsv4dbg.kernels import formats
from dsv4dbg.kernels.contract import attr, op, tensor, weight


@op(
    family="attention",
    args={
        "o": tensor("token head channel", "act"),
        "weight": weight("out inp", "fp8 bf16 f32"),
        "scale": weight("out_block inp_block", "u8 f32", "of an fp8 weight, per 128 x 128", optional=True),
        "groups": attr("groups of consecutive heads"),
    },
    outputs={"z": tensor("token out", "act")},
    compare={"z": Dense(terms="inp")},
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
