"""The MTP block, which transformers leaves out, put together from transformers' modules."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperHead, DeepseekV4RMSNorm
from transformers_forward import CPU, Sizes, decode_names, random_model

from dsv4dbg.kernels.numerics import HF
from dsv4dbg.model.batch import Chunk, Step
from dsv4dbg.model.cache import CacheFormat
from dsv4dbg.model.checkpoint import Checkpoint
from dsv4dbg.model.config import ModelConfig
from dsv4dbg.model.model import Model
from dsv4dbg.model.run import Session
from dsv4dbg.model.weights import ModelWeights

LENGTH = 60
SIZES = Sizes("whcw")  # the last layer becomes the MTP block's


class Ends(torch.nn.Module):
    """What the MTP block has besides a layer."""

    def __init__(self, config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.e_proj, self.h_proj = (torch.nn.Linear(size, size, bias=False) for _ in range(2))
        self.enorm, self.hnorm, self.norm = (DeepseekV4RMSNorm(size, eps) for _ in range(3))
        self.hc_head = DeepseekV4HyperHead(config)
        for parameter in self.parameters():
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
        for norm in (self.enorm, self.hnorm, self.norm):
            norm.weight.data += 1


@torch.no_grad()
def draft_of(model, ends: Ends, ids: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Logits ``[token, vocab]`` of the block after the main layers, ``following`` the token after each."""
    kept: list[torch.Tensor] = []
    hook = model.model.layers[-2].register_forward_hook(lambda _, args, out: kept.append(out))
    model(input_ids=ids[None])
    hook.remove()
    embedded = ends.e_proj(ends.enorm(model.model.embed_tokens(following[None])))
    x = embedded[:, :, None] + ends.h_proj(ends.hnorm(kept[0]))
    position = torch.arange(len(ids))
    distance = position[:, None] - position
    mask = torch.zeros(len(ids), len(ids)).masked_fill((distance < 0) | (distance >= SIZES.window), -torch.inf)
    rotary = {"main": model.model.rotary_emb(embedded, position_ids=position[None], layer_type="main")}
    streams = model.model.layers[-1](
        x, input_ids=following[None], position_embeddings=rotary, position_ids=position[None],
        attention_mask=mask[None, None], cache=None,
    )  # fmt: skip
    return model.lm_head(ends.norm(ends.hc_head(streams)))[0]


def test_mtp_block_in_float32():
    """Prefill in chunks, then decode; fed with tokens that are not the model's own."""
    torch.manual_seed(5)
    model = random_model(SIZES, seed=1)
    ends = Ends(model.config).requires_grad_(False)
    layers = len(SIZES.layers) - 1
    config = replace(
        ModelConfig.from_json(model.config.to_dict()), num_hidden_layers=layers, num_nextn_predict_layers=1
    )
    tensors = {name.replace(f"model.layers.{layers}.", "mtp.0."): tensor for name, tensor in model.state_dict().items()}
    for name, tensor in ends.state_dict().items():
        tensors[f"mtp.0.{name.replace('hc_head.hc_', 'hc_head_')}"] = tensor
    weights = ModelWeights(Checkpoint.from_state_dict(config, tensors), CPU)
    ids, following = SIZES.tokens(2, LENGTH)
    expected = draft_of(model, ends, ids, following)
    session = Session(
        Model(config, weights, HF), max_tokens=[LENGTH], step_tokens=40, device=CPU,
        cache_format=CacheFormat.parse("f32"),
    )  # fmt: skip
    pieces = [17, 40, 1, 1, 1]
    for name, piece, after, wanted in zip(
        decode_names(pieces), ids.split(pieces), following.split(pieces), expected.split(pieces), strict=True
    ):
        step = Step(name, (Chunk(0, tuple(piece.tolist())),), all_rows=True)
        draft = session.step(step, lambda _, row=after: row.tolist()).draft
        assert draft is not None
        assert ((draft - wanted).norm(dim=1) / wanted.norm(dim=1)).max() < 1e-5, name
