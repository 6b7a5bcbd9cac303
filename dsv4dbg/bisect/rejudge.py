"""Judging a site of a candidate's trace on the candidate's own inputs: what `diff` asks when bits cannot tell.

The reference implementation and the oracle run on the inputs that the candidate's site had, so that an error made
earlier does not count against this op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from dsv4dbg.diff import Decision
from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.arrays import CacheArray, to_array, to_arrays
from dsv4dbg.kernels.oracle import run_oracle
from dsv4dbg.kernels.registry import registry
from dsv4dbg.kernels.table import Call
from dsv4dbg.model.replay import load_call, run, to_tensor
from dsv4dbg.model.weights import ModelWeights
from dsv4dbg.plan import REFERENCE
from dsv4dbg.trace.caches import CacheReplay
from dsv4dbg.trace.reader import Trace
from dsv4dbg.trace.records import SiteRecord
from dsv4dbg.trace.text import one_line
from dsv4dbg.verdict.judge import judge
from dsv4dbg.verdict.judgement import Judgement, OutputJudgement
from dsv4dbg.verdict.metrics import same_bits


class Rejudge:
    """A judge for `dsv4dbg.diff.compare_traces`.

    It never raises: a site that cannot be judged, for whatever reason, is a sentence.

    Args:
        weights: gives the model that the candidate's trace was made with, when the first site that has weights comes;
            if it raises, such sites are not judged, others still are.
    """

    def __init__(self, candidate: Trace, weights: Callable[[], ModelWeights]) -> None:
        self._trace = candidate
        self._open = weights
        self._weights: ModelWeights | None = None
        self._no_weights = ""
        self._caches = CacheReplay(candidate)
        self._device = torch.device("cpu")

    def __call__(self, reference: SiteRecord, candidate: SiteRecord) -> Decision | str:
        try:
            return self._judge(candidate)
        except DbgError as error:
            return one_line(error.message)
        except Exception as error:  # a trace holds anything, and no shape of it may end the whole comparison
            return _words("judging it failed", error)

    def _judge(self, record: SiteRecord) -> Decision:
        if record.weights and self._weights is None:
            self._weights = self._opened()
        call = load_call(self._trace, record, self._weights, self._device, self._caches)
        outputs = self._outputs(call, record)
        expected = to_arrays(run(call, registry().implementation(call.op.name, REFERENCE)))
        found = judge(
            call.op, to_arrays(call.args), expected, outputs, lambda: run_oracle(call.op, call.args, call.numerics),
            call.numerics,
        )  # fmt: skip
        exact = all(same_bits(_bits(outputs[name]), _bits(expected[name])) for name in found.outputs)
        return _decision(found, exact)

    def _opened(self) -> ModelWeights:
        """The weights; DbgError, the same one every time, if they are not at hand."""
        if not self._no_weights:
            try:
                return self._open()
            except Exception as error:  # the name of the model comes from the trace
                words = error.message if isinstance(error, DbgError) else _words("opening it failed", error)
                self._no_weights = f"the model's weights are not at hand ({words})"
        raise DbgError(self._no_weights)

    def _outputs(self, call: Call, record: SiteRecord) -> Mapping[str, Any]:
        """What the candidate's site yielded, as the judge takes it; caches with its writes applied."""
        missing = [n for n in call.op.outputs if n not in record.outputs]
        missing += [n for n in call.op.mutates if n in record.caches and n not in record.mutated]
        if missing:
            raise DbgError(f"the trace has no {' and no '.join(missing)} of {record.site}")
        outputs = {
            name: to_array(to_tensor(self._trace.read(record, f"out/{name}"), spec.dtype, self._device))
            for name, spec in record.outputs.items()
        }
        for arg in call.op.mutates:
            data = np.array(to_array(call.args[arg].data))
            self._trace.apply_write(data, record, arg)
            outputs[arg] = CacheArray(data, call.args[arg].layout)
        return outputs


def _bits(value: Any) -> np.ndarray:
    return np.asarray(value.data if isinstance(value, CacheArray) else value)


def _words(what: str, error: Exception) -> str:
    return one_line(f"{what} with {type(error).__name__}: {error}"[:300])[:160]


def _decision(found: Judgement, exact: bool) -> Decision:
    worst = found.worst
    if worst is None:
        return Decision(found.verdict, found.sentence, exact)
    outputs = {name: _numbers(output) for name, output in found.outputs.items()}
    return Decision(found.verdict, worst.sentence, exact, worst.at, worst.fingerprints, outputs)


def _numbers(output: OutputJudgement) -> dict[str, Any]:
    """One output's judgement as JSON."""
    clause = output.worst
    fields = ("name", "value", "limit", "source")
    return {
        "comparator": output.kind, "verdict": output.verdict.name, "sentence": output.sentence,
        "errors": dict(output.errors), "where": dict(output.at), "flips": dict(output.flips),
        "notes": dict(output.notes), "fingerprints": list(output.fingerprints),
        "clause": clause and {name: getattr(clause, name) for name in fields},
    }  # fmt: skip
