"""lm_head: logits over the vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsv4dbg.compare import Logits
from dsv4dbg.kernels.contract import op, tensor, weight
from dsv4dbg.kernels.numerics import Numerics

ROWS = 16384  # of the weight that are widened to float32 at a time


@op(
    family="ends",
    args={"y": tensor("token channel", "act"), "weight": weight("vocab channel", "bf16 f32")},
    outputs={"logits": tensor("token vocab", "f32")},
    compare={"logits": Logits(terms="channel", roundings=0)},
    switches=("logits",),
)
def lm_head(y: torch.Tensor, weight: torch.Tensor, *, numerics: Numerics) -> torch.Tensor:
    """``logits = y @ weight^T``: float32 inputs, accumulation and result.

    With ``logits`` "act" the result is rounded to y's dtype and returned as float32.

    Args:
        y: ``[token, channel]`` bf16 (or float32). weight: ``[vocab, channel]`` bf16 or float32.
    Returns:
        float32 ``[token, vocab]``.
    """
    logits = torch.cat([F.linear(y.float(), rows.float()) for rows in weight.split(ROWS)], dim=1)
    return logits.to(y.dtype).float() if numerics.logits == "act" else logits
