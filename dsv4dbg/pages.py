"""Byte layouts of paged caches: where entry ``slot`` of a buffer lies (numpy level, no torch).

A cache is ``uint8 [num_pages, page_stride]``. A *slot* is ``page * entries + offset``; -1 means
"do not write" or "nothing here". One record is split over *fields*: in a page, all rows of field 0
come first, then all rows of field 1, then padding. The record of a quantised KV entry follows
the ``fp8_ds_mla`` V4 form (spec: one byte per non-rope channel, two per rope channel, one E8M0 byte per
64 non-rope channels padded to 8), which for head_dim 512 gives the 576 + 8 bytes that vLLM and SGLang use.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

KV_GROUP = 64  # non-rope channels that share one scale in a KV record
FP4_GROUP = 32  # channels that share one scale in an FP4 indexer record


@dataclass(frozen=True)
class PageLayout:
    """How records of one kind lie in a page.

    Attributes:
        kind: ``kv`` (window and compressed entries), ``index`` (indexer keys) or ``state`` (compressor rows).
        format: number format of the record: ``fp8``, ``fp4``, ``bf16`` or ``f32``.
        dialect: ``ocp`` (e4m3fn) or ``fnuz`` (e4m3fnuz) for fp8 bytes, else empty. A property of the buffer.
        entries: records per page.
        channels: values per record.
        rope_channels: trailing channels of a ``kv`` record that are stored as bf16.
        fields: bytes per record of each field, in page order.
        align: page size is padded to a multiple of this many bytes.
    """

    kind: str
    format: str
    dialect: str
    entries: int
    channels: int
    rope_channels: int
    fields: tuple[int, ...]
    align: int

    @property
    def page_bytes(self) -> int:
        payload = self.entries * sum(self.fields)
        return -(-payload // self.align) * self.align

    @property
    def record_bytes(self) -> int:
        return sum(self.fields)

    def field_offsets(self, slots: np.ndarray, page_stride: int) -> list[np.ndarray]:
        """Byte offset of each field's row for every slot: one int64 array like ``slots`` per field."""
        slots = np.asarray(slots, dtype=np.int64)
        page, entry = slots // self.entries, slots % self.entries
        offsets, base = [], 0
        for size in self.fields:
            offsets.append(page * page_stride + base + entry * size)
            base += self.entries * size
        return offsets

    def read(self, data: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Records at ``slots`` (all >= 0) as ``uint8 [n, record_bytes]``, fields side by side."""
        flat, stride = data.reshape(-1), data.shape[1]
        parts = [
            flat[offset[:, None] + np.arange(size)]
            for offset, size in zip(self.field_offsets(slots, stride), self.fields, strict=True)
        ]
        return np.concatenate(parts, axis=1)

    def write(self, data: np.ndarray, slots: np.ndarray, records: np.ndarray) -> None:
        """Put ``records`` (``uint8 [n, record_bytes]``) at ``slots``; slots of -1 are skipped."""
        keep = np.asarray(slots) >= 0
        slots, records = np.asarray(slots, dtype=np.int64)[keep], records[keep]
        page, start = slots // self.entries, 0
        for column, size in zip(self.field_offsets(slots % self.entries, 0), self.fields, strict=True):
            data[page[:, None], column[:, None] + np.arange(size)] = records[:, start : start + size]
            start += size

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict) -> PageLayout:
        return cls(**{**data, "fields": tuple(data["fields"])})


def kv_data_bytes(head_dim: int, rope_dim: int) -> int:
    """Bytes of the data row of a quantised KV record; pages of every cache are padded to a multiple of it."""
    return (head_dim - rope_dim) + 2 * rope_dim


def kv_layout(fmt: str, dialect: str, head_dim: int, rope_dim: int, entries: int) -> PageLayout:
    """Layout of the window cache and of compressed entries: ``fmt`` is fp8, bf16 or f32."""
    nope = head_dim - rope_dim
    if fmt == "fp8":
        scales = -(-(nope // KV_GROUP) // 8) * 8
        fields: tuple[int, ...] = (kv_data_bytes(head_dim, rope_dim), scales)
    else:
        fields = (head_dim * {"bf16": 2, "f32": 4}[fmt],)
    return PageLayout(
        "kv", fmt, dialect if fmt == "fp8" else "", entries, head_dim, rope_dim, fields,
        kv_data_bytes(head_dim, rope_dim),
    )  # fmt: skip


def index_layout(fmt: str, dialect: str, channels: int, entries: int, align: int) -> PageLayout:
    """Layout of indexer keys: fp8 with one float32 scale, fp4 with one E8M0 byte per 32, or bf16/f32."""
    fields = {
        "fp8": (channels, 4),
        "fp4": (channels // 2, channels // FP4_GROUP),
        "bf16": (channels * 2,),
        "f32": (channels * 4,),
    }[fmt]
    return PageLayout("index", fmt, dialect if fmt == "fp8" else "", entries, channels, 0, fields, align)


def state_layout(width: int, entries: int, align: int) -> PageLayout:
    """Layout of compressor state rows: ``[kv (width) | gate + ape (width)]`` in float32."""
    return PageLayout("state", "f32", "", entries, 2 * width, 0, (2 * width * 4,), align)
