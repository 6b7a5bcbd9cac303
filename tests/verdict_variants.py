"""What the judge is proved on: calls of ops with clean variants of their outputs and with generated mutants.

Clean variants compute the same in another way: other orders and splits of sums, another last bit of every
elementary function, float32 activations inside, everything in float64 with the contract's last rounding. Mutants are
the reference's outputs with one fault each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from dsv4dbg.compare import Codes, Dense, IndexSet, Records, Routing, Scales
from dsv4dbg.kernels import formats, paged
from dsv4dbg.kernels.arrays import CacheArray, copied, to_array, to_arrays
from dsv4dbg.kernels.contract import Op
from dsv4dbg.kernels.numerics import OFFICIAL, Numerics
from dsv4dbg.kernels.oracle import run_oracle
from dsv4dbg.verdict.judge import judge
from dsv4dbg.verdict.judgement import Judgement
from dsv4dbg.verdict.noise import roundings_of

Outputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One call with what the judge compares against."""

    op: Op
    args: Mapping[str, Any]
    numerics: Numerics
    arrays: Mapping[str, Any]
    reference: Outputs
    oracle: Mapping[str, np.ndarray]

    def judge(self, candidate: Outputs) -> Judgement:
        return judge(self.op, self.arrays, self.reference, candidate, self.oracle, self.numerics)


def run(op: Op, args: Mapping[str, Any], numerics: Numerics, mode: AbstractContextManager | None = None) -> Outputs:
    call = copied(op.bind((), args))
    with mode or nullcontext():
        result = op.reference(**call, **({"numerics": numerics} if op.reads_numerics else {}))
    return to_arrays({**op.name_outputs(result), **{name: call[name] for name in op.mutates}})


def case(op: Op, args: Mapping[str, Any], numerics: Numerics = OFFICIAL) -> Case:
    bound = op.bind((), args)
    return Case(op, bound, numerics, to_arrays(bound), run(op, bound, numerics), run_oracle(op, bound, numerics))


# clean variants


class OtherOrder(TorchFunctionMode):
    """Matrix products and sums in chunks of ``chunk`` terms, last chunk first; float32 like the reference."""

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear and args[0].dtype == torch.float32:
            return self._product(args[0], args[1].transpose(-1, -2))
        if func in (torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm):
            return self._product(args[0], args[1])
        if func in (torch.Tensor.mean, torch.Tensor.sum) and len(args) == 2 and isinstance(args[1], int):
            x, dim = args
            parts = [p.sum(dim, **kwargs) for p in reversed(x.split(self.chunk, dim))] if x.shape[dim] else []
            if not parts:
                return func(*args, **kwargs)
            total = self._chain(parts)
            return total / x.shape[dim] if func is torch.Tensor.mean else total
        return func(*args, **kwargs)

    def _product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.shape[-1] == 0:
            return a @ b
        pairs = zip(a.split(self.chunk, -1), b.split(self.chunk, -2), strict=True)
        return self._chain([x @ y for x, y in pairs][::-1])

    @staticmethod
    def _chain(parts: list[torch.Tensor]) -> torch.Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


class Nudged(TorchFunctionMode):
    """Elementary functions and divisions with up to two wrong last bits of float32, as fast GPU versions have."""

    NAMES = frozenset({"exp", "rsqrt", "sqrt", "log", "div", "__truediv__", "sigmoid", "softplus", "softmax", "silu"})

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in self.NAMES or not isinstance(result, torch.Tensor):
            return result
        if result.dtype != torch.float32:
            return result
        nudge = torch.randint(-2, 3, result.shape, generator=self.generator).float() * 2.0**-24
        return torch.where(result.isfinite() & (result != 1), result * (1 + nudge), result)


def in_float32(c: Case) -> Outputs:
    """Float32 activations inside, rounded at the end; caches keep their formats."""
    args = {}
    for name, arg in c.op.args.items():
        value = c.args[name]
        wide = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 and "act" in arg.dtype.split()
        args[name] = value.float() if wide else "f32" if name == "act" and value == "bf16" else value
    result = run(c.op, args, c.numerics)
    return {
        n: v.astype(c.reference[n].dtype) if isinstance(v, np.ndarray) and v.dtype != c.reference[n].dtype else v
        for n, v in result.items()
    }


def in_float64(c: Case) -> Outputs:
    """The oracle's values with the contract's last rounding or quantiser."""
    result = dict(c.reference)
    for name, compare in c.op.compare.items():
        exact = c.oracle[name]
        if isinstance(compare, Records):
            result[name] = _stored(c, name, exact)
        elif isinstance(compare, Codes):
            result |= _coded(c, name, compare, exact)
        elif not isinstance(compare, Scales):
            with np.errstate(all="ignore"):
                result[name] = exact.astype(c.reference[name].dtype).reshape(c.reference[name].shape)
    return result


def _stored(c: Case, name: str, exact: np.ndarray) -> CacheArray:
    before = c.args[name]
    cache = paged.Cache(before.name, before.data.clone(), before.layout)
    slots = c.args[c.op.mutates[name]].long().flatten()
    paged.write(cache, slots[slots >= 0], torch.from_numpy(exact).float())
    return to_array(cache)


def _coded(c: Case, name: str, compare: Codes, exact: np.ndarray) -> Outputs:
    fmt = str(c.args.get(compare.format, compare.format))
    values = torch.from_numpy(exact).float()
    if fmt == "plain":
        return {name: exact.astype(c.reference[name].dtype)}
    if fmt == "fp4":
        pair = formats.fp4_quantize(values, compare.group)
    elif "_" in fmt:
        pair = paged.index_fp8(values, fmt.partition("_")[2])
    else:
        pair = formats.fp8_quantize(values, c.args[compare.group], c.args[compare.dialect])
    return dict(zip((name, compare.scale), map(to_array, pair), strict=True))


def other_set_order(c: Case) -> Outputs:
    """Choices in another order, weights along with them."""
    result = dict(c.reference)
    for name, compare in c.op.compare.items():
        if isinstance(compare, IndexSet | Routing):
            result[name] = np.ascontiguousarray(c.reference[name][:, ::-1])
            if isinstance(compare, Routing):
                result[compare.weights] = np.ascontiguousarray(c.reference[compare.weights][:, ::-1])
    return result


CLEAN: dict[str, Callable[[Case], Outputs]] = {
    "sums in chunks of 32, last first": lambda c: run(c.op, c.args, c.numerics, OtherOrder(32)),
    "sums in chunks of 7": lambda c: run(c.op, c.args, c.numerics, OtherOrder(7)),
    "sums in chunks of 128": lambda c: run(c.op, c.args, c.numerics, OtherOrder(128)),
    "last bits of functions": lambda c: run(c.op, c.args, c.numerics, Nudged(1)),
    "other last bits": lambda c: run(c.op, c.args, c.numerics, Nudged(2)),
    "float32 inside": in_float32,
    "float64 inside": in_float64,
    "choices in another order": other_set_order,
}


# mutants

Mutant = tuple[str, Outputs]


def mutants(c: Case, rng: np.random.Generator) -> Iterator[Mutant]:
    """One fault each; those that change nothing are left out."""
    for name, compare in c.op.compare.items():
        if isinstance(compare, Records):
            found = _record_faults(c, name, rng)
        elif isinstance(compare, Codes):
            found = _code_faults(c, name, compare, rng)
        elif isinstance(compare, IndexSet | Routing):
            found = _choice_faults(c, name, compare, rng)
        elif isinstance(compare, Scales):
            continue
        else:
            found = _dense_faults(c, name, compare, rng)
        for fault, changed in found:
            yield f"{name}: {fault}", {**c.reference, **changed}


def _dense_faults(c: Case, name: str, compare: Any, rng: np.random.Generator) -> Iterator[Mutant]:
    stored = c.reference[name]
    x = stored.astype(np.float64)
    rows = len(x)
    if not x.size or rows < 2:
        return
    flat = x.reshape(rows, -1)
    loud = np.flatnonzero((np.abs(np.nan_to_num(flat)) > 1e-3).any(axis=1))
    row = int(rng.choice(loud)) if len(loud) else 0
    size = float(np.sqrt(np.mean(np.where(np.isfinite(x), x, 0) ** 2))) or 1.0

    def changed(index: Any, value: Any) -> dict[str, np.ndarray]:
        y = flat.copy()
        y[index] = value
        with np.errstate(all="ignore"):
            return {name: y.reshape(x.shape).astype(stored.dtype)}

    def garbage(*shape: int) -> np.ndarray:
        noise = rng.standard_normal(shape) * size
        return noise if stored.dtype.kind != "i" else rng.integers(0, max(int(x.max()), 2), shape)

    yield "a row is zero", changed(row, 0)
    yield "rows off by one", changed(slice(1, None), flat[:-1])
    yield "the last row is garbage", changed(-1, garbage(flat.shape[1]))
    yield "a stale row", changed(row, flat[(row + 1) % rows])
    if stored.dtype.kind == "i":
        yield "off by one", changed(slice(None), flat + 1)
        return
    yield "a NaN", changed((row, int(rng.integers(flat.shape[1]))), np.nan)
    yield "all x 2", changed(slice(None), flat * 2)
    faint = max(0.04, 6 * _own_error(x, c.oracle[name]))
    yield f"all x {1 + faint:.2f}", changed(slice(None), flat * (1 + faint))
    if flat.shape[1] >= 16:
        yield f"{faint:.0%} noise", changed(slice(None), flat * (1 + faint * rng.standard_normal(flat.shape)))
    width = x.shape[-1] if x.ndim > 2 else flat.shape[1] // 4
    if width >= 16 and flat.shape[1] >= 2 * width:
        head = int(rng.integers(flat.shape[1] // width)) * width
        columns = slice(head, head + width)
        yield f"one head x {1 + 1.5 * faint:.2f}", changed((slice(None), columns), flat[:, columns] * (1 + 1.5 * faint))
        yield "one head zero on 8 rows", changed((slice(0, 8), columns), 0)
        order = np.arange(flat.shape[1])
        order[:width], order[width : 2 * width] = order[width : 2 * width].copy(), order[:width].copy()
        yield "two groups swapped", changed(slice(None), flat[:, order])
    if isinstance(compare, Dense) and stored.dtype == ml_dtypes.bfloat16 and _shows_truncation(c, name, compare):
        bits = c.oracle[name].reshape(x.shape).astype(np.float32).view(np.uint32) >> 16
        yield "truncated", {name: bits.astype(np.uint16).view(ml_dtypes.bfloat16)}


def _own_error(x: np.ndarray, oracle: np.ndarray) -> float:
    """Relative L2 error of the reference: an op with a quantiser inside is wrong by some percent by right."""
    finite = np.isfinite(oracle)
    return float(np.linalg.norm(x[finite] - oracle[finite]) / max(np.linalg.norm(oracle[finite]), 1e-30))


def _shows_truncation(c: Case, name: str, compare: Dense) -> bool:
    """A bias of half a step can be seen in one row where nothing but the store rounds, else over many rows."""
    rows = np.prod(c.reference[name].shape[: len(compare.row.split())])
    alone = roundings_of(compare, c.arrays, c.numerics) == 1
    return c.reference[name].size >= 256 and bool(alone or rows >= 128)


def _choice_faults(c: Case, name: str, compare: IndexSet | Routing, rng: np.random.Generator) -> Iterator[Mutant]:
    ids = c.reference[name]
    if not ids.size:
        return
    scores = c.oracle[f"{name}.scores"] if isinstance(compare, Routing) else c.arrays[compare.scores]
    lens = c.arrays[compare.lengths] if isinstance(compare, IndexSet) else np.full(len(ids), scores.shape[1])
    full = np.flatnonzero((ids >= 0).all(axis=1) & (lens > ids.shape[1]))
    some = np.flatnonzero((ids >= 0).any(axis=1))
    if len(some):
        off = ids.copy()
        off[some] += off[some] >= 0
        yield "indices off by one", {name: off}
        out = ids.copy()
        out[some[-1], 0] = lens[some[-1]]
        yield "one index beyond the length", {name: out}
        short = ids.copy()
        short[some[0]] = np.where(np.arange(ids.shape[1]) == (ids[some[0]] >= 0).sum() - 1, -1, ids[some[0]])
        yield "one index missing", {name: short}
    if len(full):
        for label, chosen in (("one wrong index in a row", full[:1]), ("one wrong index in every row", full)):
            wrong = ids.copy()
            visible = np.arange(scores.shape[1]) < lens[chosen, None]
            wrong[chosen, 0] = np.argmin(np.where(visible, scores[chosen], np.inf), axis=1)
            yield label, {name: wrong}
        if ids.shape[1] > 1:
            twice = ids.copy()
            twice[full[0], 0] = twice[full[0], 1]
            yield "an index twice", {name: twice}
        row = full[int(rng.integers(len(full)))]
        stale = ids.copy()
        stale[row] = ids[(row + 1) % len(ids)]
        yield "a stale row", {name: stale}


def _code_faults(c: Case, name: str, compare: Codes, rng: np.random.Generator) -> Iterator[Mutant]:
    codes, scale = c.reference[name], c.reference[compare.scale]
    if not codes.size or codes.dtype != np.uint8:
        return
    flat, groups = codes.reshape(-1, codes.shape[-1]), scale.reshape(-1, scale.shape[-1])
    rows = np.flatnonzero(np.abs(c.oracle[name].reshape(len(flat), -1)).max(axis=1) > 1e-3)
    if not len(rows):
        return
    row = int(rows[rng.integers(len(rows))])

    def codes_with(index: Any, value: Any) -> dict[str, np.ndarray]:
        y = flat.copy()
        y[index] = value
        return {name: y.reshape(codes.shape)}

    yield "a row is zero", codes_with(row, 0)
    yield "low bit cleared", codes_with(slice(None), flat & 0xFE)
    yield "signs flipped in a row", codes_with(row, flat[row] ^ (0x88 if str(c.args.get("format")) == "fp4" else 0x80))
    half = flat.shape[1] // 2
    yield "two groups swapped in a row", codes_with(row, np.roll(flat[row], half))
    up = groups.copy()
    up[row, 0] = up[row, 0] + 1 if up.dtype == np.uint8 else up[row, 0] * 2
    yield "a scale off by a factor of 2", {compare.scale: up.reshape(scale.shape)}
    if len(flat) > 1:
        yield "rows off by one", codes_with(slice(1, None), flat[:-1])


def _record_faults(c: Case, name: str, rng: np.random.Generator) -> Iterator[Mutant]:
    layout, after, before = c.reference[name].layout, c.reference[name].data, c.arrays[name].data
    slots = np.asarray(c.arrays[c.op.mutates[name]]).reshape(-1)
    slots = slots[slots >= 0]
    if not len(slots):
        return
    records = layout.read(after, slots)
    real = np.flatnonzero(np.isfinite(c.oracle[name]).all(axis=1) & (np.abs(c.oracle[name]) > 1e-3).any(axis=1))
    if not len(real):
        return

    def changed(at: np.ndarray, rows: np.ndarray) -> dict[str, CacheArray]:
        data = after.copy()
        layout.write(data, at, rows)
        return {name: CacheArray(data, layout)}

    i = int(rng.choice(real))
    one = slots[i : i + 1]
    yield "a stale slot", changed(one, layout.read(before, one))
    yield "a record is zero", changed(one, np.zeros_like(records[i : i + 1]))
    shifted = records[i : i + 1].copy()
    data = layout.fields[0] // 2
    shifted[0, :data], shifted[0, data : 2 * data] = records[i, data : 2 * data], records[i, :data]
    yield "halves of a record swapped", changed(one, shifted)
    if len(slots) > 1:
        yield "records off by one", changed(slots, np.roll(records, 1, axis=0))
    free = np.setdiff1d(np.arange(len(after) * layout.entries), slots)
    if len(free):
        stray = changed(free[:1], records[i : i + 1])
        yield "a stray write", stray
    if layout.format in ("fp8", "fp4") and layout.kind != "index":
        up = records.copy()
        up[i, layout.fields[0]] += 1
        yield "a scale byte off by one", changed(slots, up)
    if layout.format == "fp8":
        low = records.copy()
        low[:, : layout.channels - layout.rope_channels] &= 0xFE
        yield "low bit of codes cleared", changed(slots, low)


def effective(c: Case, candidate: Outputs) -> bool:
    """Whether a mutant has a value that the reference does not have (NaN on both sides is the same)."""
    for name, value in candidate.items():
        a, b = (x.data if name in c.op.mutates else x for x in (value, c.reference[name]))
        if a.dtype.kind in "iu":
            if not np.array_equal(a, b):
                return True
        elif not np.array_equal(a.astype(np.float64), b.astype(np.float64), equal_nan=True):
            return True
    return False


__all__ = ["CLEAN", "Case", "case", "effective", "mutants", "run"]
