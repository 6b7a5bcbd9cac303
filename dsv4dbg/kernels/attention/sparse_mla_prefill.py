"""sparse_mla_prefill: attention over listed rows of a workspace, with a sink (spec 4.8)."""

from __future__ import annotations

import torch

from dsv4dbg.compare import Dense
from dsv4dbg.kernels.attention.sparse_core import attend
from dsv4dbg.kernels.contract import attr, op, tensor, weight
from dsv4dbg.kernels.numerics import Numerics


@op(
    family="attention",
    args={
        "q": tensor("token head channel", "act"),
        "kv": tensor("entry channel", "act", "rows that are keys and values at once"),
        "indices": tensor("token key", "i32", "rows of kv, -1 for no key"),
        "sink": weight("head", "f32", "logit in the denominator only", optional=True),
        "scale": attr("factor of the dot product"),
    },
    outputs={"o": tensor("token head channel", "act"), "lse": tensor("token head", "f32")},
    compare={
        "o": Dense(terms="key", roundings=2, row="token head"),
        "lse": Dense(terms="channel", roundings=0, row="token head"),
    },
    switches=("attention",),
)
def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sink: torch.Tensor | None = None,
    *,
    scale: float,
    numerics: Numerics,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``o = sum_j e^(l_j) kv_j / (sum_j e^(l_j) + e^sink)`` with ``l_j = scale * (q . kv_j)`` over a token's list.

    Args:
        q: ``[token, head, channel]`` bf16 (or float32).
        kv: ``[entry, channel]``, q's dtype.
        indices: int32 ``[token, key]``; -1 is no key, wherever it stands. A row named twice counts twice.
        sink: float32 ``[head]`` or None.
    Returns:
        ``o``, q's dtype; ``lse`` float32 ``[token, head] = ln sum_j e^(l_j)``, without the sink. A token without
        any key has o = 0 and lse = -inf. A NaN in a listed row reaches all of that token, and no other token.

    Official ("flash"): dots, scaling, maximum, exponentials and sums in float32, in list order, 64 keys at a time with
    a running maximum (which the sink does not join); P is rounded to q's dtype for PV and not for the sum; PV
    accumulates in float32; one division; one rounding. "eager" rounds dots, scaled dots and normalised P to q's
    dtype, as transformers.
    """
    padded = torch.cat((kv, kv.new_zeros(1, kv.shape[1])))  # index -1 is the row of zeros
    return attend(q, indices, sink, lambda block, _: padded[block.long()], scale, numerics)
