"""hash_router: experts fixed per token id, weights from the learned scores (the first layers)."""

from __future__ import annotations

import torch

from dsv4dbg.compare import Exact, RoutingWeights
from dsv4dbg.kernels.contract import attr, op, tensor, weight
from dsv4dbg.kernels.moe.scores import chosen_weights, router_scores
from dsv4dbg.kernels.numerics import Numerics


@op(
    family="moe",
    args={
        "logits": tensor("token expert", "act"),
        "tid2eid": weight("vocab choice", "i64", "experts of every token id"),
        "token_ids": tensor("token", "i64"),
        "scale": attr("sum of a token's weights"),
    },
    outputs={"weights": tensor("token choice", "f32"), "ids": tensor("token choice", "i32")},
    compare={"weights": RoutingWeights(ids="ids"), "ids": Exact()},
    switches=("router", "router_eps"),
)
def hash_router(
    logits: torch.Tensor, tid2eid: torch.Tensor, token_ids: torch.Tensor, *, scale: float, numerics: Numerics
) -> tuple[torch.Tensor, torch.Tensor]:
    """``ids = tid2eid[token_ids]``; ``weights = a[ids] / sum(a[ids]) * scale`` with ``a = sqrt(softplus(logits))``.

    Float32 (``router="act"``: every step rounded to the logits' dtype); no epsilon in the sum, see `moe_router`.

    Args:
        logits: ``[token, expert]`` float32 (bf16 where the stack rounds them).
        tid2eid: ``[vocab, choice]`` int64.
        token_ids: ``[token]`` int64, ids of the rows themselves; rows of padding need any valid id.
    Returns:
        weights ``float32 [token, choice]`` and ids ``int32 [token, choice]`` in the table's order.
    """
    ids = tid2eid[token_ids].long()
    return chosen_weights(router_scores(logits, numerics), ids, scale, numerics), ids.int()
