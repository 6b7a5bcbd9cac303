"""moe_router: choice of experts by biased scores, weights from the scores alone (layers with a learned router)."""

from __future__ import annotations

import torch

from dsv4dbg.compare import Routing, RoutingWeights
from dsv4dbg.kernels.contract import attr, op, tensor, weight
from dsv4dbg.kernels.moe.scores import chosen_weights, router_scores
from dsv4dbg.kernels.numerics import Numerics


@op(
    family="moe",
    args={
        "logits": tensor("token expert", "act"),
        "bias": weight("expert", "f32"),
        "topk": attr("experts per token"),
        "scale": attr("sum of a token's weights"),
    },
    outputs={"weights": tensor("token choice", "f32"), "ids": tensor("token choice", "i32")},
    compare={"weights": RoutingWeights(ids="ids"), "ids": Routing(weights="weights")},
    switches=("router", "router_eps"),
)
def moe_router(
    logits: torch.Tensor, bias: torch.Tensor, *, topk: int, scale: float, numerics: Numerics
) -> tuple[torch.Tensor, torch.Tensor]:
    """``a = sqrt(softplus(logits))``; ids = top-k of ``a + bias``; ``weights = a[ids] / sum(a[ids]) * scale``.

    All in float32 (``router="act"``: scores and weights rounded to the logits' dtype at every step, ranked in
    float32 as the bias is). The sum has no epsilon, so a token whose chosen scores all underflow gets NaN.

    Args:
        logits: ``[token, expert]`` float32 (bf16 where the stack rounds them).
        bias: ``[expert]`` float32; chooses, does not weigh.
    Returns:
        weights ``float32 [token, topk]`` and ids ``int32 [token, topk]`` in descending order of ``a + bias``, ties
        to the lowest id (NaN ranks highest).
    """
    scores = router_scores(logits, numerics)
    ids = (scores + bias.float()).sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    return chosen_weights(scores, ids, scale, numerics), ids.int()
