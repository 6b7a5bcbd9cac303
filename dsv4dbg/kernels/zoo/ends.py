"""Zoo cases of the embedding, the MTP block's input and the head."""

from __future__ import annotations

from typing import Any

import torch

from dsv4dbg.kernels.ends.embed import embed
from dsv4dbg.kernels.ends.lm_head import lm_head
from dsv4dbg.kernels.ends.mtp_input import mtp_input
from dsv4dbg.kernels.zoo.case import case


@case(
    "one-stream", op="embed", bug="D13", kind="values", shows="streams 1 to 3 of every token", fingerprint="exact zeros"
)
def one_stream(**call: Any) -> torch.Tensor:
    """maxtext#4337: only the first residual stream gets the embedding; all have to be equal."""
    streams = embed(**call)
    streams[:, 1:] = 0
    return streams


@case("shard-boundary", op="embed", bug="G16", kind="values", shows="token ids in the upper half of the vocabulary")
def shard_boundary(*, ids: torch.Tensor, weight: torch.Tensor, **call: Any) -> torch.Tensor:
    """tokenspeed#1490: rows of the next rank's shard are looked up one row too high."""
    half = len(weight) // 2
    return embed(ids=torch.where(ids >= half, ids - 1, ids), weight=weight, **call)


@case("draft-of-same-token", op="mtp_input", bug="H07", kind="values", shows="draft logits only; the text stays right")
def draft_of_same_token(*, ids: torch.Tensor, **call: Any) -> torch.Tensor:
    """ds4#750: the draft block embeds the token of the row where it has to embed the one after it."""
    return mtp_input(ids=ids.roll(1), **call)


@case("draft-norms-swapped", op="mtp_input", bug="H08", kind="values", shows="draft logits only; acceptance falls")
def draft_norms_swapped(*, enorm: torch.Tensor, hnorm: torch.Tensor, **call: Any) -> torch.Tensor:
    """ds4#411: the draft block reads parameters of another place; here those of its two norms."""
    return mtp_input(enorm=hnorm, hnorm=enorm, **call)


@case("rounded-logits", op="lm_head", bug="D04", kind="values", shows="every logit, by half a bf16 step")
def rounded_logits(**call: Any) -> torch.Tensor:
    """sglang#25646: a result that has to stay float32 goes through bf16; near ties of tokens become exact."""
    return lm_head(**call).bfloat16().float()


@case(
    "vocab-tail",
    op="lm_head",
    bug="G10",
    kind="values",
    shows="the last 16 tokens of the vocabulary",
    fingerprint="only the last",
)
def vocab_tail(**call: Any) -> torch.Tensor:
    """ATOM#2022: the kernel's tiles do not cover the shape; logits of the last tokens stay zero."""
    logits = lm_head(**call)
    logits[:, -16:] = 0
    return logits
