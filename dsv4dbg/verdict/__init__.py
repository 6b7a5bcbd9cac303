"""Verdicts: a candidate's outputs judged against the reference's and a float64 oracle's (numpy, no torch).

`judge` is all that others need; docs/verdicts.md says how to read what it returns.
"""

from dsv4dbg.verdict.bounds import Clause
from dsv4dbg.verdict.judge import judge, judge_reference
from dsv4dbg.verdict.judgement import Judgement, OutputJudgement
from dsv4dbg.verdict.metrics import rows_apart, same_bits

__all__ = ["Clause", "Judgement", "OutputJudgement", "judge", "judge_reference", "rows_apart", "same_bits"]
