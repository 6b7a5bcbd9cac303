"""merge_attn_states: attention over two disjoint sets of keys, merged by their lse, the sink added once (spec 9)."""

from __future__ import annotations

import torch

from dsv4dbg.compare import Dense
from dsv4dbg.kernels.contract import op, tensor, weight


@op(
    family="attention",
    args={
        "o_a": tensor("token head channel", "act f32", "computed without a sink"),
        "lse_a": tensor("token head", "f32"),
        "o_b": tensor("token head channel", "act f32", "computed without a sink"),
        "lse_b": tensor("token head", "f32"),
        "sink": weight("head", "f32", "logit in the denominator only", optional=True),
    },
    outputs={"o": tensor("token head channel", "act f32"), "lse": tensor("token head", "f32")},
    compare={"o": Dense(magnitude=("o_a", "o_b"), row="token head"), "lse": Dense(roundings=0, row="token head")},
)
def merge_attn_states(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``o = (e^lse_a o_a + e^lse_b o_b) / (e^lse_a + e^lse_b + e^sink)``, ``lse = ln(e^lse_a + e^lse_b)``.

    Args:
        o_a, o_b: ``[token, head, channel]`` bf16 or float32, each divided by its own sum without the sink.
        lse_a, lse_b: float32 ``[token, head]``, natural logarithm; -inf for a side without keys, whose o counts
            for nothing whatever it holds.
        sink: float32 ``[head]`` or None.
    Returns:
        ``o`` in o_a's dtype, float32 inside and one rounding; ``lse`` float32, without the sink. Where both sides
        are empty, o = 0 and lse = -inf.
    """
    maximum = torch.maximum(lse_a, lse_b)
    top = torch.where(maximum == -torch.inf, 0, maximum)
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = weight_a + weight_b
    denominator = total if sink is None else total + torch.exp(sink.float() - top)
    o = _weighted(o_a, weight_a, lse_a) + _weighted(o_b, weight_b, lse_b)
    o = torch.where((maximum == -torch.inf)[..., None], 0, o / denominator[..., None])
    return o.to(o_a.dtype), maximum + torch.log(total)


def _weighted(o: torch.Tensor, factor: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return torch.where((lse == -torch.inf)[..., None], 0, o.float() * factor[..., None])
