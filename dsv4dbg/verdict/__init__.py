"""Verdicts: a candidate's outputs judged against the reference's and a float64 oracle's (numpy, no torch).

`dsv4dbg.verdict.judge.judge` is all that others need; docs/verdicts.md says how to read what it returns.
"""
