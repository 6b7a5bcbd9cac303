"""Over the whole registry: clean variants never DIVERGE, generated mutants do. Seeds are fresh ones: limits were set
on seeds 1 to 9."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from verdict_cases import PROTOTYPES, examples
from verdict_variants import CLEAN, effective, mutants

from dsv4dbg.compare import Verdict


def sweep(cases, seed):
    clean = mutated = 0
    alarms, misses = [], []
    for where, c in cases:
        for variant, make in CLEAN.items():
            clean += 1
            found = c.judge(make(c))
            if found.verdict is Verdict.DIVERGED:
                alarms.append(f"{where} | {variant} | {found.sentence}")
        for fault, candidate in mutants(c, np.random.default_rng(seed)):
            if effective(c, candidate):
                mutated += 1
                found = c.judge(candidate)
                if found.verdict is not Verdict.DIVERGED:
                    misses.append(f"{where} | {fault} | {found.sentence}")
    return clean, mutated, alarms, misses


def test_a_sixteenth_of_the_registry():
    clean, mutated, alarms, misses = sweep(islice(examples("tiny", 101), 4, None, 16), 101)
    assert clean > 300
    assert not alarms, "\n".join(alarms)
    assert len(misses) <= 0.01 * mutated, "\n".join(misses)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_registry():
    clean, mutated, alarms, misses = 0, 0, [], []
    for size in ("tiny", "wide"):
        counts = sweep(examples(size, 102), 102)
        clean, mutated = clean + counts[0], mutated + counts[1]
        alarms, misses = alarms + counts[2], misses + counts[3]
    assert clean >= 10_000
    assert not alarms, "\n".join(alarms)
    assert len(misses) <= 0.01 * mutated, "\n".join(misses)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [103, 104])
@pytest.mark.parametrize("name", PROTOTYPES)
def test_prototypes_over_100_000_rows(name, seed):
    case = PROTOTYPES[name](np.random.default_rng(seed), 100_000)
    _, mutated, alarms, misses = sweep([(name, case)], seed)
    assert mutated >= 7
    assert not alarms, "\n".join(alarms)
    assert not misses, "\n".join(misses)
