"""`judge`: one call of an op, output by output, by the comparators of its contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dsv4dbg.compare import (
    Codes,
    Comparator,
    Dense,
    Exact,
    IndexSet,
    Logits,
    Records,
    Routing,
    RoutingWeights,
    Scales,
    Verdict,
)  # fmt: skip
from dsv4dbg.verdict import quantised, sets
from dsv4dbg.verdict.judgement import Judgement, OutputJudgement, broken_decision
from dsv4dbg.verdict.metrics import Noise, same_bits
from dsv4dbg.verdict.noise import act_unit, noise_of, row_size
from dsv4dbg.verdict.steps import UNIT, as_float, float_grid, unit
from dsv4dbg.verdict.values import Axes, Values, judge_values

Arrays = Mapping[str, Any]


def judge(
    op: Any, args: Arrays, reference: Arrays, candidate: Arrays, oracle: Arrays | Callable[[], Arrays], numerics: Any
) -> Judgement:
    """Judge every output of ``candidate`` by the rule of docs/verdicts.md.

    Args:
        op: the op's contract.
        args: all arguments by name as numpy arrays in their own dtype (bf16 as ml_dtypes.bfloat16, caches with
            ``data`` and ``layout``, as they were before the call).
        reference, candidate: outputs by name, and mutated caches after the call under their arguments' names.
        oracle: the oracle's float64 results; or a function that computes them, called only if bits differ.
    """
    known = oracle if isinstance(oracle, Mapping) else None
    result = {}
    for name, compare in op.compare.items():
        if _same(op, name, reference, candidate):
            result[name] = OutputJudgement(
                name, type(compare).__name__, Verdict.PASS, f"{name} equals the reference bit for bit"
            )
            continue
        if known is None:
            assert callable(oracle)
            known = oracle()
        result[name] = _output(op, name, compare, args, reference, candidate, known, numerics)
    return Judgement(op.name, result)


def judge_reference(op: Any, args: Arrays, reference: Arrays, oracle: Arrays, numerics: Any) -> Judgement:
    """The reference alone against the oracle, by derived bounds only; bits equal to the oracle's are not needed."""
    return Judgement(
        op.name,
        {
            name: _output(op, name, compare, args, None, reference, oracle, numerics)
            for name, compare in op.compare.items()
        },
    )


def _same(op: Any, name: str, reference: Arrays, candidate: Arrays) -> bool:
    """Equal bits of an output, and of the ids or scales that give it its meaning."""
    compare = op.compare[name]
    names = {name}
    if isinstance(compare, RoutingWeights):
        names.add(compare.ids)
    elif isinstance(compare, Codes):
        names.add(compare.scale)
    pairs = ((x[n].data if n in op.mutates else x[n] for x in (reference, candidate)) for n in names)
    return all(same_bits(np.asarray(a), np.asarray(b)) for a, b in pairs)


def _output(
    op: Any, name: str, compare: Comparator, args: Arrays, reference: Arrays | None, candidate: Arrays, oracle: Arrays,
    numerics: Any,
) -> OutputJudgement:  # fmt: skip
    if isinstance(compare, Records):
        return quantised.judge_records(op, name, compare, args, reference, candidate, oracle, numerics)
    c, r = np.asarray(candidate[name]), None if reference is None else np.asarray(reference[name])
    if r is not None and (c.shape != r.shape or c.dtype != r.dtype):
        text = f"{name} is {c.dtype} {c.shape}, the reference's is {r.dtype} {r.shape}"
        return broken_decision(name, type(compare).__name__, text)
    match compare:
        case Exact():
            expected = oracle[name] if r is None else r
            return sets.judge_exact(name, np.asarray(expected).astype(c.dtype).reshape(c.shape), c)
        case Codes():
            return quantised.judge_codes(op, name, compare, args, reference, candidate, oracle)
        case Scales():
            return quantised.judge_scales(op, name, compare, args, reference, candidate, oracle)
        case IndexSet():
            return sets.judge_index_set(name, compare, r, c, args)
        case Routing():
            in_act = getattr(numerics, "router", "f32") == "act"
            return sets.judge_routing(name, r, c, oracle, args, act_unit(op, args) if in_act else UNIT["f32"])
        case RoutingWeights():
            return _routing_weights(op, name, compare, args, reference, candidate, oracle, numerics)
        case Dense():
            found = _dense(op, name, compare, args, r, c, oracle, numerics)
            return _with_logits(found, r, c) if isinstance(compare, Logits) and r is not None else found
    raise TypeError(f"no judge for {type(compare).__name__}")


def _dense(
    op: Any, name: str, compare: Dense, args: Arrays, reference: np.ndarray | None, candidate: np.ndarray,
    oracle: Arrays, numerics: Any,
) -> OutputJudgement:  # fmt: skip
    dims = op.outputs[name].dims.split()
    split = len(compare.row.split())
    sizes = dict(zip(dims, candidate.shape, strict=True))
    axes = Axes({d: sizes[d] for d in dims[:split]}, {d: sizes[d] for d in dims[split:]})
    shape = (int(np.prod(candidate.shape[:split])), int(np.prod(candidate.shape[split:])))
    flat = np.asarray(oracle[name], np.float64).reshape(shape)
    stored = unit(candidate)
    noise = noise_of(op, name, compare, args, oracle, flat, stored, numerics)
    r = None if reference is None else reference.reshape(shape)
    kind = type(compare).__name__
    values = Values(name, kind, r, candidate.reshape(shape), flat, float_grid(stored), noise, axes)
    return judge_values(values, args)


def _routing_weights(
    op: Any, name: str, compare: RoutingWeights, args: Arrays, reference: Arrays | None, candidate: Arrays,
    oracle: Arrays, numerics: Any,
) -> OutputJudgement:  # fmt: skip
    """Weights of the same expert side by side; rows whose experts differ keep only their sum."""
    ids, expected = (np.asarray(x[compare.ids]).astype(np.int64) for x in (candidate, oracle))
    rows = np.flatnonzero((np.sort(ids, axis=1) == np.sort(expected, axis=1)).all(axis=1))
    c, o = np.asarray(candidate[name]), np.asarray(oracle[name], np.float64)
    other = np.setdiff1d(np.arange(len(ids)), rows)
    sums = np.abs(c[other].sum(axis=1, dtype=np.float64) - o[other].sum(axis=1))
    loose = 2.0**-6 * np.abs(o[other]).sum(axis=1)
    if (~(sums <= loose) & np.isfinite(o[other]).all(axis=1)).any():
        row = int(other[np.argmax(sums - loose)])
        return broken_decision(name, "RoutingWeights", f"{name} of row {row} has another sum", at={"row": row})
    r = None
    if reference is not None:
        r = np.asarray(reference[name])
        same = (np.sort(np.asarray(reference[compare.ids]), axis=1) == np.sort(expected, axis=1)).all(axis=1)
        rows = rows[same[rows]]
        r = sets.align(np.asarray(reference[compare.ids])[rows], r[rows])
    flat = sets.align(expected[rows], o[rows])
    roundings = compare.roundings + (3 if getattr(numerics, "router", "f32") == "act" else 0)
    size = row_size(flat)
    noise = Noise(np.sqrt(roundings / 3) * act_unit(op, args), (np.sqrt(c.shape[1]) + 8) * UNIT["f32"], size, size, 2.0)
    axes = Axes({}, {"choice": c.shape[1]}, {"token": rows})
    values = Values(
        name, "RoutingWeights", r, sets.align(ids[rows], c[rows]), flat, float_grid(unit(c)), noise, axes
    )  # fmt: skip
    return judge_values(values, args)


def _with_logits(found: OutputJudgement, reference: np.ndarray, candidate: np.ndarray) -> OutputJudgement:
    """Beside the dense judgement: mean and largest KL(reference || candidate), top-1 and top-8 order."""
    r, c = as_float(reference).astype(np.float64), as_float(candidate).astype(np.float64)
    if not r.size:
        return found
    with np.errstate(all="ignore"):
        p, q = (x - x.max(axis=1, keepdims=True) for x in (r, c))
        p, q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (p, q))
        kl = (np.exp(p) * (p - q)).sum(axis=1)
    best = min(8, r.shape[1])
    top_r, top_c = (np.argsort(-x, axis=1, kind="stable")[:, :best] for x in (r, c))
    notes = {
        "KL mean": float(kl.mean()), "KL max": float(kl.max()),
        "top-1 agreement": float((top_r[:, 0] == top_c[:, 0]).mean()),
        "top-8 in order": float((top_r == top_c).all(axis=1).mean()),
    }  # fmt: skip
    return replace(found, notes={**found.notes, **notes})
