"""indexer_topk: the entries with the highest scores."""

from __future__ import annotations

import torch

from dsv4dbg.compare import IndexSet
from dsv4dbg.kernels.contract import attr, op, tensor


@op(
    family="attention",
    args={
        "logits": tensor("token entry", "f32"),
        "lens": tensor("token", "i32", "columns that count"),
        "k": attr("entries chosen"),
    },
    outputs={"indices": tensor("token choice", "i32")},
    compare={"indices": IndexSet(scores="logits", lengths="lens")},
)
def indexer_topk(logits: torch.Tensor, lens: torch.Tensor, *, k: int) -> torch.Tensor:
    """Local numbers of the ``k`` best entries: descending score, ties to the lowest number, -1 after the last one."""
    tokens, width = logits.shape
    valid = torch.arange(width, device=logits.device) < lens[:, None]
    order = torch.where(valid, logits, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = torch.full((tokens, k), -1, dtype=torch.int32, device=logits.device)
    rank = torch.arange(order.shape[1], device=logits.device)
    chosen[:, : order.shape[1]] = torch.where(rank < lens[:, None], order, -1)
    return chosen
