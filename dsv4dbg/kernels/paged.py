"""Paged caches in torch: a buffer of raw bytes with its layout, and the codecs of its records.

The forward reads and writes caches only through these functions or through kernels that follow the same
`PageLayout`; nothing dense lies underneath.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4dbg.kernels import formats
from dsv4dbg.pages import FP4_GROUP, KV_GROUP, PageLayout

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True)
class Cache:
    """One paged buffer.

    Attributes:
        name: what it belongs to, such as ``L2.window``.
        data: ``uint8 [num_pages, page_stride]``; the stride may exceed the layout's page size.
        layout: where records lie in a page and how they are encoded.
    """

    name: str
    data: torch.Tensor
    layout: PageLayout

    @property
    def num_slots(self) -> int:
        return self.data.shape[0] * self.layout.entries


def _rows(cache: Cache, field: int) -> torch.Tensor:
    """One field of all records, ``uint8 [page, entry, field bytes]``, a view of the buffer."""
    layout = cache.layout
    size, base = layout.fields[field], layout.entries * sum(layout.fields[:field])
    return cache.data[:, base : base + layout.entries * size].unflatten(1, (layout.entries, size))


def field_rows(cache: Cache) -> list[torch.Tensor]:
    """All records, field by field: one ``uint8 [page, entry, field bytes]`` each, views of the buffer."""
    return [_rows(cache, field) for field in range(len(cache.layout.fields))]


def read_records(cache: Cache, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Fields of the records at ``slots`` (``int [n]``, all >= 0): one ``uint8 [n, field bytes]`` per field."""
    page, entry = slots.long() // cache.layout.entries, slots.long() % cache.layout.entries
    return tuple(_rows(cache, i)[page, entry] for i in range(len(cache.layout.fields)))


def write_records(cache: Cache, slots: torch.Tensor, fields: tuple[torch.Tensor, ...]) -> None:
    """Store records at ``slots``; rows whose slot is -1 are not written."""
    keep = slots >= 0
    slots = slots[keep].long()
    page, entry = slots // cache.layout.entries, slots % cache.layout.entries
    for i, field in enumerate(fields):
        _rows(cache, i)[page, entry] = field[keep]


def _bytes(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous() if x.numel() else x.new_empty(x.shape)  # an empty tensor may be contiguous with any strides
    return x.view(torch.uint8)


def encode(values: torch.Tensor, layout: PageLayout) -> tuple[torch.Tensor, ...]:
    """Rows ``[n, channels]`` to the fields of ``layout``'s records."""
    if layout.format in DTYPES:
        return (_bytes(values.to(DTYPES[layout.format])),)
    if layout.format == "fp4":
        return formats.fp4_quantize(values, FP4_GROUP)
    if layout.kind == "index":
        return _encode_index_fp8(values, layout.dialect)
    nope = layout.channels - layout.rope_channels
    codes, scale = formats.fp8_quantize(values[:, :nope], KV_GROUP, layout.dialect)
    padding = scale.new_zeros(len(scale), layout.fields[1] - scale.shape[1])
    rope = _bytes(values[:, nope:].to(torch.bfloat16))
    return torch.cat((codes, rope), 1), torch.cat((scale, padding), 1)


def decode(fields: tuple[torch.Tensor, ...], layout: PageLayout, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of `encode`: rows ``[n, channels]`` in ``dtype`` (exact for bf16 where scales are powers of two)."""
    if layout.format in DTYPES:
        return fields[0].contiguous().view(DTYPES[layout.format]).to(dtype)
    if layout.format == "fp4":
        return formats.fp4_dequantize(*fields).to(dtype)
    if layout.kind == "index":
        scale = fields[1].contiguous().view(torch.float32)
        return (formats.fp8_decode(fields[0], layout.dialect) * scale).to(dtype)
    nope = layout.channels - layout.rope_channels
    data, scale = fields
    values = formats.fp8_dequantize(data[:, :nope], scale[:, : nope // KV_GROUP], layout.dialect)
    rope = data[:, nope:].contiguous().view(torch.bfloat16)
    return torch.cat((values.to(dtype), rope.to(dtype)), 1)


def index_fp8(values: torch.Tensor, dialect: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Indexer FP8: codes ``uint8 [..., n]`` and one float32 scale ``[..., 1]`` = amax / max, amax at least 1e-4."""
    amax = values.float().abs().amax(-1, keepdim=True).clamp_min(formats.FP8_AMAX_FLOOR)
    scale = amax / formats.FP8_MAX[dialect]
    return formats.fp8_encode(values.float() / scale, dialect), scale


def _encode_index_fp8(values: torch.Tensor, dialect: str) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = index_fp8(values, dialect)
    return codes, _bytes(scale)


def read(cache: Cache, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decoded rows ``[n, channels]`` at ``slots`` (all >= 0)."""
    return decode(read_records(cache, slots), cache.layout, dtype)


def write(cache: Cache, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Encode rows ``[n, channels]`` and store them at ``slots``; -1 is skipped."""
    write_records(cache, slots, encode(values, cache.layout))
