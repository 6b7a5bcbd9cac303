"""Halving and delta debugging on failures whose causes are known."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4dbg.bisect.search import smallest


class Failing:
    """Fails where all of ``causes`` are swapped together; counts trials."""

    def __init__(self, *causes: int) -> None:
        self.causes, self.trials = set(causes), 0

    def __call__(self, swapped: Sequence[int]) -> bool:
        self.trials += 1
        return self.causes <= set(swapped)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 43, 61])
def test_one_cause_costs_a_logarithm(count: int) -> None:
    for cause in range(count):
        fails = Failing(cause)
        assert smallest(range(count), fails) == [cause]
        assert fails.trials <= math.ceil(math.log2(count)) + 1


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_causes_that_only_act_together(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 40))
    causes = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=4))
    assert set(smallest(range(count), Failing(*causes))) == causes


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_one_of_several_causes(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 40))
    causes = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=5))
    found = smallest(range(count), lambda swapped: bool(causes & set(swapped)))
    assert len(found) == 1
    assert causes.issuperset(found)
