"""lm_head: logits over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from dsv4dbg.compare import Logits
from dsv4dbg.kernels.contract import Example, op, tensor, weight
from dsv4dbg.kernels.dims import Dims
from dsv4dbg.kernels.invariants import finite, zero_rows
from dsv4dbg.kernels.numerics import Numerics
from dsv4dbg.kernels.samples import TOKENS, activations, normal

ROWS = 16384  # of the weight that are widened to float32 at a time


@op(
    family="ends",
    args={"y": tensor("token channel", "act"), "weight": weight("vocab channel", "bf16 f32")},
    outputs={"logits": tensor("token vocab", "f32")},
    compare={"logits": Logits(terms="channel", roundings=0, more={"logits=act": 1})},
    invariants=(finite("logits"), zero_rows("y", "logits")),
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


@lm_head.oracle
def _(y: np.ndarray, weight: np.ndarray, *, numerics: Numerics) -> np.ndarray:
    return y @ weight.T


@lm_head.examples
def _(dims: Dims, rng: np.random.Generator) -> Iterator[Example]:
    weight = normal(rng, dims.vocab, dims.hidden, scale=dims.hidden**-0.5).to(torch.bfloat16)
    for tokens in TOKENS:
        yield Example(f"{tokens} tokens", {"y": activations(rng, tokens, dims.hidden), "weight": weight})
    zero = activations(rng, 3, dims.hidden)
    zero[1] = 0
    yield Example("zero row", {"y": zero, "weight": weight})
    tied = weight.clone()
    tied[1::2] = tied[0::2]
    yield Example("every logit twice", {"y": activations(rng, 5, dims.hidden), "weight": tied})
    yield Example("odd vocabulary", {"y": activations(rng, 5, dims.hidden), "weight": weight[: dims.vocab - 13]})
    yield Example("float32", {"y": normal(rng, 5, dims.hidden), "weight": weight.float()})
