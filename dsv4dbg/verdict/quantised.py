"""The judge of quantised values: codes with scales, and records of paged caches.

Both are decoded and judged as numbers on the grid of the oracle's scales. A value other than the nearest is a flip;
it is excused only where the oracle's value lies within the derived noise of the tie (`Noise`). A power-of-two scale
off by one changes nothing but subnormal codes and saturation, so bytes are counted and values decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dsv4dbg.compare import Codes, Records, Scales, Verdict
from dsv4dbg.verdict.judgement import OutputJudgement, broken_decision
from dsv4dbg.verdict.metrics import CONFIDENCE, Noise
from dsv4dbg.verdict.noise import FUNCTIONS, act_unit, row_size, terms_of
from dsv4dbg.verdict.steps import (
    E4M3,
    E8M0,
    FP4_FLOOR,
    FP4_MAX,
    FP8_FLOOR,
    FP8_MAX,
    UNIT,
    float_grid,
    group_amax,
    power_of_two_scale,
    record_grid,
    record_padding,
    record_values,
    scaled_grid,
    unit,
    unpack_fp4,
)  # fmt: skip
from dsv4dbg.verdict.values import Axes, Values, judge_values

Arrays = Mapping[str, Any]
CHUNK = 4096  # records that are read at a time


def _noise(op: Any, roundings: int, terms: str, args: Arrays, oracle: np.ndarray, work: bool) -> Noise:
    """Before a quantiser: roundings of activations, and float32 ``work`` if there is anything to compute."""
    size, act = row_size(oracle), act_unit(op, args)
    summed = (np.sqrt(terms_of(op, terms, args)) + FUNCTIONS) * UNIT["f32"] if work else 0.0
    return Noise(float(act * np.sqrt(roundings / 3)), float(summed), size, size)


def _of_codes(op: Any, compare: Codes, args: Arrays, shape: tuple[int, ...]) -> tuple[str, int, str, bool]:
    """Format (fp8, fp4 or plain), group, dialect, and whether the scale is a float32 factor."""
    fmt = str(args.get(compare.format, compare.format))
    group = args.get(compare.group, compare.group) if isinstance(compare.group, str) else compare.group
    dialect = str(args.get(compare.dialect, compare.dialect))
    smooth = "_" in fmt
    if smooth:  # the indexer's fp8_ocp and fp8_fnuz: one float32 scale per row
        fmt, _, dialect = fmt.partition("_")
        group = shape[-1]
    return fmt, int(group) or shape[-1], dialect, smooth


def _decoded(codes: np.ndarray, scale: np.ndarray, fmt: str, dialect: str) -> np.ndarray:
    values = unpack_fp4(codes) if fmt == "fp4" else E4M3[dialect][codes.view(np.uint8)]
    factor = E8M0[scale] if scale.dtype == np.uint8 else scale.astype(np.float32)
    if factor.size and factor.max() > 1e34:
        factor = factor.astype(np.float64)
    with np.errstate(all="ignore"):
        return values * np.repeat(factor, values.shape[-1] // factor.shape[-1], axis=-1)


def judge_codes(
    op: Any, name: str, compare: Codes, args: Arrays, reference: Arrays | None, candidate: Arrays, oracle: Arrays
) -> OutputJudgement:
    simulated = f"{name}.unquantized" in oracle
    full = np.asarray(oracle[f"{name}.unquantized" if simulated else name], np.float64)
    if not full.size:
        return OutputJudgement(name, "Codes", Verdict.PASS, f"{name} is empty")
    flat = full.reshape(-1, full.shape[-1])
    fmt, group, dialect, smooth = _of_codes(op, compare, args, full.shape)
    dims = op.outputs[name].dims.split()
    axes = Axes(dict(zip(dims[:-1], full.shape[:-1], strict=True)), {dims[-1]: full.shape[-1]})
    noise = _noise(op, compare.roundings, compare.terms, args, flat, bool(compare.roundings or compare.terms or smooth))
    margin = CONFIDENCE * noise.relative
    if fmt == "plain":
        stored = unit(np.asarray(candidate[name]))
        grid = scaled_grid(flat, group, "fp4", "ocp", margin) if simulated else float_grid(stored)
        c, r = (None if x is None else np.asarray(x[name]).reshape(flat.shape) for x in (candidate, reference))
    else:
        grid = scaled_grid(flat, group, fmt, dialect, margin, smooth)
        c, r = (
            None if x is None
            else _decoded(np.asarray(x[name]), np.asarray(x[compare.scale]), fmt, dialect).reshape(flat.shape)
            for x in (candidate, reference)
        )  # fmt: skip
    assert c is not None
    exact = noise.relative == 0 and not smooth
    return judge_values(Values(name, "Codes", r, c, flat, grid, noise, axes, exact), args)


def judge_scales(
    op: Any, name: str, compare: Scales, args: Arrays, reference: Arrays | None, candidate: Arrays, oracle: Arrays
) -> OutputJudgement:
    """Scales by themselves: the oracle's, or the neighbour's where amax lies within the noise of an exponent's edge.

    Whatever scale: if the decoded values are right, the codes' judgement says so and another scale is a note.
    """
    codes = op.compare[compare.codes]
    c = np.asarray(candidate[name])
    full = np.asarray(oracle.get(f"{compare.codes}.unquantized", oracle[compare.codes]), np.float64)
    fmt, group, dialect, smooth = _of_codes(op, codes, args, full.shape)
    if fmt == "plain" or not c.size:
        return OutputJudgement(name, "Scales", Verdict.PASS, f"{name}: no scales in this format")
    flat = full.reshape(-1, full.shape[-1])
    noise = _noise(op, codes.roundings, codes.terms, args, flat, bool(codes.roundings or codes.terms or smooth))
    maximum, floor = (FP4_MAX, FP4_FLOOR) if fmt == "fp4" else (FP8_MAX[dialect], FP8_FLOOR)
    amax = group_amax(flat, group)
    # channels are mixed before the quantiser: amax may move by the noise of the row's size
    share = np.maximum(1, row_size(flat) / np.maximum(amax, 1e-300))
    margin = CONFIDENCE * noise.relative * share
    value = (E8M0[c] if c.dtype == np.uint8 else c).astype(np.float64).reshape(amax.shape)
    low, high = (np.maximum(amax * (1 + s * margin), floor) for s in (-1, 1))
    if smooth:
        low, high = low / maximum * (1 - 2.0**-22), high / maximum * (1 + 2.0**-22)
        exact = np.maximum(amax, floor) / maximum
    else:
        low, high = power_of_two_scale(low, maximum), power_of_two_scale(high, maximum)
        exact = power_of_two_scale(np.maximum(amax, floor), maximum)
    with np.errstate(invalid="ignore"):
        wrong = ~((value >= low) & (value <= high)) & np.isfinite(exact)
        other = (value != exact) & ~wrong & np.isfinite(exact)
    flips = {"excused": 0 if smooth else int(other.sum()), "not excused": int(wrong.sum())}
    if wrong.any():
        decided = judge_codes(op, compare.codes, codes, args, reference, candidate, oracle)
        row, column = (int(i) for i in np.argwhere(wrong)[0])
        text = f"{name}: {int(wrong.sum())} scales differ, first {value[row, column]:g} for {exact[row, column]:g}"
        at = {"row": row, "group": column}
        if decided.verdict <= Verdict.ROUNDING:
            return OutputJudgement(
                name, "Scales", Verdict.ROUNDING, f"{text}; the decoded values are right", at=at, flips=flips
            )
        marks = ()
        ratio = value[wrong] / exact[wrong]
        if np.all(ratio == ratio[0]):
            marks = (f"scales are {ratio[0]:g} times the oracle's",)
        return broken_decision(name, "Scales", text, at=at, flips=flips, fingerprints=marks)
    if flips["excused"]:
        text = f"{name}: {flips['excused']} of {value.size} exponents differ, all within the noise of an edge"
        return OutputJudgement(name, "Scales", Verdict.ROUNDING, text, flips=flips)
    return OutputJudgement(name, "Scales", Verdict.PASS, f"{name}: the oracle's scales", flips=flips)


def _read(layout: Any, data: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Records at ``slots``, a chunk at a time: reading takes an index of eight bytes for every byte."""
    records = np.empty((len(slots), layout.record_bytes), np.uint8)
    for start in range(0, len(slots), CHUNK):
        part = slice(start, start + CHUNK)
        records[part] = layout.read(data, slots[part])
    return records


def judge_records(
    op: Any, name: str, compare: Records, args: Arrays, reference: Arrays | None, candidate: Arrays, oracle: Arrays,
    numerics: Any,
) -> OutputJudgement:  # fmt: skip
    before, layout = args[name], args[name].layout
    slots = np.asarray(args[op.mutates[name]]).astype(np.int64).reshape(-1)
    data, old = (np.ascontiguousarray(x.data) for x in (candidate[name], before))
    if data.shape != old.shape:
        return broken_decision(name, "Records", f"{name} is {data.shape}, was {old.shape}")
    rows = np.flatnonzero(slots >= 0)
    used = slots[rows]
    last = len(used) - 1 - np.unique(used[::-1], return_index=True)[1]  # of several rows for a slot the last one counts
    keep = np.sort(last)
    simulated = f"{name}.unquantized" in oracle
    flat = np.asarray(oracle[f"{name}.unquantized" if simulated else name], np.float64)[keep]
    written = _read(layout, data, used[keep])
    fault = _outside(name, layout, old, data, used[keep], written)
    if fault:
        return fault
    noise = _noise(op, compare.roundings, compare.terms, args, flat, True)
    pooled = "compressor_pool" in op.switches and getattr(numerics, "compressor_pool", "f32") == "act"
    if layout.kind == "kv" and not pooled:  # channels by themselves, rope channels in pairs: bounds that are sure
        pairs = np.repeat(np.hypot(flat[:, 0::2], flat[:, 1::2]), 2, axis=1)
        pairs[:, : layout.channels - layout.rope_channels] = 0
        noise = replace(noise, mixed=pairs, worst=float(np.sqrt(3 * max(compare.roundings, 1))))
    grid = record_grid(flat, layout, CONFIDENCE * noise.relative, simulated)
    with np.errstate(all="ignore"):
        c = record_values(written, layout)
        r = None
        if reference is not None:
            r = record_values(_read(layout, np.ascontiguousarray(reference[name].data), used[keep]), layout)
    labels = {"token": rows[keep], "slot": used[keep]}
    values = Values(name, "Records", r, c, flat, grid, noise, Axes({}, {"channel": layout.channels}, labels))
    found = judge_values(values, args)
    if found.verdict is Verdict.DIVERGED and len(keep):
        stale = (written == _read(layout, old, used[keep])).all(axis=1)
        if stale.any():
            mark = f"{int(stale.sum())} of {len(stale)} records were not written (first: slot {used[keep][stale][0]})"
            found = replace(found, fingerprints=(mark, *found.fingerprints), sentence=f"{found.sentence}; {mark}")
    return found


def _outside(
    name: str, layout: Any, old: np.ndarray, data: np.ndarray, slots: np.ndarray, written: np.ndarray
) -> OutputJudgement | None:
    """Bytes that the call must leave alone: everything outside its slots; padding of a record is left alone or zero."""
    expected = old.copy()
    for start in range(0, len(slots), CHUNK):
        part = slice(start, start + CHUNK)
        layout.write(expected, slots[part], written[part])
    if not np.array_equal(expected, data):
        page, byte = (int(i) for i in np.argwhere(expected != data)[0])
        count = int((expected != data).sum())
        text = f"{name}: {count} bytes outside the slots of this call changed, first byte {byte} of page {page}"
        return broken_decision(name, "Records", text, at={"page": page, "byte": byte})
    padding = record_padding(layout)
    dirty = written[:, padding] != 0
    if dirty.any():
        dirty &= written[:, padding] != _read(layout, old, slots)[:, padding]
    if dirty.any():
        slot = int(slots[dirty.any(axis=1)][0])
        text = f"{name}: padding of the record at slot {slot} holds {written[:, padding][dirty][0]:#04x}"
        return broken_decision(name, "Records", text, at={"slot": slot})
    return None
