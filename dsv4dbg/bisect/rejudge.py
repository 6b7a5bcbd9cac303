"""Judging a site of a candidate's trace on the candidate's own inputs: what `diff` asks when bits cannot tell.

The reference implementation and the oracle run on the inputs that the candidate's site had, so that an error made
earlier does not count against this op.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dsv4dbg.diff import Decision
from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.arrays import CacheArray, to_array, to_arrays
from dsv4dbg.kernels.oracle import run_oracle
from dsv4dbg.kernels.registry import registry
from dsv4dbg.model.replay import SiteCall, load_call, run, to_tensor
from dsv4dbg.model.weights import ModelWeights
from dsv4dbg.plan import REFERENCE
from dsv4dbg.trace.reader import Trace
from dsv4dbg.trace.records import SiteRecord
from dsv4dbg.verdict.judge import judge


class Rejudge:
    """A judge for `dsv4dbg.diff.compare_traces`.

    Args:
        weights: the model that the candidate's trace was made with, or None: sites without weights are judged still.
    Attributes:
        problem: why sites could not be judged, if any.
    """

    def __init__(self, candidate: Trace, weights: ModelWeights | None) -> None:
        self._trace = candidate
        self._weights = weights
        self._device = torch.device("cpu")
        self.problem = ""

    def __call__(self, reference: SiteRecord, candidate: SiteRecord) -> Decision | None:
        if not candidate.complete:
            return None
        try:
            call = load_call(self._trace, candidate, self._weights, self._device)
        except DbgError as error:
            self.problem = self.problem or error.message
            return None
        outputs = self._outputs(call, candidate)
        expected = to_arrays(run(call, registry().implementation(call.op.name, REFERENCE)))
        found = judge(
            call.op, to_arrays(call.args), expected, outputs, lambda: run_oracle(call.op, call.args, call.numerics),
            call.numerics,
        )  # fmt: skip
        worst = found.worst
        return Decision(found.verdict, found.sentence, worst.at if worst else {}, worst.fingerprints if worst else ())

    def _outputs(self, call: SiteCall, record: SiteRecord) -> Mapping[str, Any]:
        """What the candidate's site yielded, as the judge takes it; caches with its writes applied."""
        outputs = {
            name: to_array(to_tensor(self._trace.read(record, f"out/{name}"), spec.dtype, self._device))
            for name, spec in record.outputs.items()
        }
        for arg in call.op.mutates:
            data = np.array(to_array(call.args[arg].data))
            self._trace.apply_write(data, record, arg)
            outputs[arg] = CacheArray(data, call.args[arg].layout)
        return outputs
