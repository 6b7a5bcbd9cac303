"""moe_router: choice of experts by biased scores, weights from the scores alone (layers with a learned router)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from dsv4dbg.compare import Routing, RoutingWeights
from dsv4dbg.kernels.contract import Example, attr, op, tensor, weight
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.moe.router_samples import alone, logit_samples
from dsv4dbg.kernels.moe.scores import ROUTING_INVARIANTS, chosen_weights, router_scores
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.samples import normal


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
    invariants=ROUTING_INVARIANTS,
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


@moe_router.oracle
def _(logits: np.ndarray, bias: np.ndarray, *, topk: int, scale: float, numerics: Numerics) -> dict[str, np.ndarray]:
    scores = np.sqrt(np.logaddexp(0.0, logits))
    ranked = scores + bias
    ids = np.argsort(-ranked, axis=-1, kind="stable")[:, :topk]
    chosen = np.take_along_axis(scores, ids, axis=-1)
    weights = chosen / (chosen.sum(axis=-1, keepdims=True) + numerics.router_eps) * scale
    return {"weights": weights, "ids": ids, "ids.scores": ranked}


@moe_router.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    sizes = {"topk": dims.topk_experts, "scale": 1.5}
    none = torch.zeros(dims.experts)
    for name, logits in logit_samples(rng, dims.experts):
        yield Example(name, {"logits": logits, "bias": normal(rng, dims.experts, scale=0.1), **sizes})
        yield Example(f"{name}, no bias", {"logits": logits, "bias": none, **sizes})
    logits = normal(rng, 63, dims.experts, scale=2.0)
    flip = torch.from_numpy(np.where(np.arange(dims.experts) < dims.topk_experts, 20.0, -1.0).astype(np.float32))
    yield Example("bias decides alone", {"logits": logits, "bias": flip, **sizes})
    ascending = torch.linspace(-104, 60, dims.experts).repeat(2, 1)
    yield Example("bias for the lowest logits", {"logits": ascending, "bias": flip.roll(1), **sizes})
    loud = alone(dims.experts, torch.arange(dims.experts))
    yield Example("all but one underflow", {"logits": loud, "bias": none, **sizes})
    yield Example("one expert per token", {"logits": logits, "bias": none, "topk": 1, "scale": 2.5})
    yield Example("every expert", {"logits": logits, "bias": none, "topk": dims.experts, "scale": 2.5})
