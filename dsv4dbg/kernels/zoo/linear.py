"""Zoo cases of the dense layers: block scales, weight layouts, rounding."""

from __future__ import annotations

from typing import Any

import torch

from dsv4dbg.kernels.linear.fp8_linear import BLOCK, fp8_linear
from dsv4dbg.kernels.linear.linear import linear
from dsv4dbg.kernels.zoo.case import case


@case(
    "scale-as-integer", op="fp8_linear", bug="A02", kind="values", shows="every linear",
    fingerprint="UE8M0 read as an integer",
)  # fmt: skip
def scale_as_integer(*, scale: torch.Tensor, **call: Any) -> torch.Tensor:
    """vllm#41601: a scale byte b is used as the factor b; it stands for 2^(b - 127)."""
    return fp8_linear(scale=scale.float(), **call)


@case("scale-one-up", op="fp8_linear", bug="A03", kind="values", shows="every linear", fingerprint="ratio 2")
def scale_one_up(*, scale: torch.Tensor, **call: Any) -> torch.Tensor:
    """vllm#42893: FNUZ scales (one exponent up) are used with weights that are still in the OCP dialect."""
    return fp8_linear(scale=scale + 1 if scale.dtype == torch.uint8 else scale * 2, **call)


@case(
    "scale-transposed", op="fp8_linear", bug="A08", kind="values", model="wide",
    shows="weights with several scales in both directions; equal scales hide it",
)  # fmt: skip
def scale_transposed(*, scale: torch.Tensor, **call: Any) -> torch.Tensor:
    """vllm#48052: block scales lie column by column where the kernel reads them row by row."""
    return fp8_linear(scale=scale.T.reshape(scale.shape), **call)


@case("shuffled-weight", op="fp8_linear", bug="A12", kind="values", shows="every linear, from layer 0 on")
def shuffled_weight(*, weight: torch.Tensor, **call: Any) -> torch.Tensor:
    """vllm#51821: the weight was shuffled in tiles of 16 x 16 for another kernel, and is multiplied as it lies."""
    return fp8_linear(weight=_shuffled(weight), **call)


def _shuffled(weight: torch.Tensor) -> torch.Tensor:
    """Tiles of 16 x 16, each row-major, one behind the other; what does not fill a tile stays."""
    rows, columns = (n // 16 * 16 for n in weight.shape)
    bytes_ = weight.view(torch.uint8).clone()
    tiles = bytes_[:rows, :columns].unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).transpose(1, 2)
    bytes_[:rows, :columns] = tiles.reshape(rows, columns)
    return bytes_.view(weight.dtype)


@case(
    "truncated-store", op="fp8_linear", kind="values", shows="half of all elements, by one step toward zero",
    fingerprint="truncation instead of rounding",
)  # fmt: skip
def truncated_store(*, x: torch.Tensor, **call: Any) -> torch.Tensor:
    """The float32 sum is cut to bf16 by dropping bits, where it has to be rounded to nearest."""
    bits = fp8_linear(x=x.float(), **call).view(torch.int32)
    return (bits & -65536).view(torch.float32).to(x.dtype)


@case("stale-k-tile", op="fp8_linear", bug="E13", kind="values", shows="inputs of more than 128 channels")
def stale_k_tile(*, x: torch.Tensor, **call: Any) -> torch.Tensor:
    """aiter#4163: a pipelined loop multiplies the second K tile of the weight with the first one of x."""
    x = x.clone()
    x[:, BLOCK : 2 * BLOCK] = x[:, : x[:, BLOCK : 2 * BLOCK].shape[1]]
    return fp8_linear(x=x, **call)


@case("last-columns-zero", op="fp8_linear", bug="G10", kind="values", shows="the last 16 outputs of every linear")
def last_columns_zero(**call: Any) -> torch.Tensor:
    """ATOM#2022: the kernel's tiles do not cover the shape of a shard; its last columns stay zero."""
    y = fp8_linear(**call)
    y[:, -16:] = 0
    return y


@case("gate-in-bf16", op="linear", bug="D04", kind="values", shows="router gate and compressor, by one bf16 step")
def gate_in_bf16(*, out: str, **call: Any) -> torch.Tensor:
    """sglang#25646: a result that has to stay float32 goes through bf16; answers lose points, none is garbage."""
    y = linear(out="act", **call)
    return y.float() if out == "f32" else y


@case(
    "stray-block-row",
    op="linear",
    bug="G09",
    kind="values",
    shows="rows from 256 on",
    fingerprint="only tokens from 256 on",
)
def stray_block_row(*, x: torch.Tensor, **call: Any) -> torch.Tensor:
    """vllm#56389: a buffer has 256 rows; row 256 and those after it get what is in row 0 and after."""
    return linear(x=x[torch.arange(len(x), device=x.device) % 256], **call)
