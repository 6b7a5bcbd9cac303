"""hash_router: experts fixed per token id, weights from the learned scores (the first layers)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from dsv4dbg.compare import Exact, RoutingWeights
from dsv4dbg.kernels.contract import Example, attr, op, tensor, weight
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.moe.router_samples import alone, logit_samples
from dsv4dbg.kernels.moe.scores import ROUTING_INVARIANTS, chosen_weights, router_scores
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
    invariants=ROUTING_INVARIANTS,
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


@hash_router.oracle
def _(
    logits: np.ndarray, tid2eid: np.ndarray, token_ids: np.ndarray, *, scale: float, numerics: Numerics
) -> tuple[np.ndarray, np.ndarray]:
    ids = tid2eid[token_ids]
    chosen = np.sqrt(np.logaddexp(0.0, np.take_along_axis(logits, ids, axis=-1)))
    return chosen / (chosen.sum(axis=-1, keepdims=True) + numerics.router_eps) * scale, ids


@hash_router.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    order = rng.random((dims.vocab, dims.experts)).argsort(axis=-1)
    table = torch.from_numpy(order[:, : dims.topk_experts].copy())
    for name, logits in logit_samples(rng, dims.experts):
        token_ids = torch.from_numpy(rng.integers(0, dims.vocab, len(logits)))
        token_ids[:1] = dims.vocab - 1
        token_ids[1:3] = 0
        yield Example(name, {"logits": logits, "tid2eid": table, "token_ids": token_ids, "scale": 1.5})
    token_ids = torch.arange(7)
    loud = alone(dims.experts, table[token_ids, 0])
    yield Example("all but one underflow", {"logits": loud, "tid2eid": table, "token_ids": token_ids, "scale": 2.5})
