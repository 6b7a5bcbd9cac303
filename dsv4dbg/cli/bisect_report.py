"""What ``dsv4dbg bisect`` shows: progress while it runs, then the answer, the evidence, and the next command."""

from __future__ import annotations

import shlex
import sys
import threading
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from dsv4dbg.bisect.journal import Trial
from dsv4dbg.bisect.result import Culprit, Result
from dsv4dbg.bisect.settings import Settings
from dsv4dbg.cli.output import columns, note
from dsv4dbg.compare import Verdict

MISSED = 4  # regimes not reached that are named
COVERAGE = "coverage"  # the default workload
COORDINATES = 6  # of a place that a line shows


class Progress:
    """A bar on stderr when that is a terminal: which step is tested, how many calls are good and bad so far."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._model, self._steps = "", tuple[str, ...]()
        self._good = self._bad = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            text = TextColumn("{task.fields[now]}  {task.fields[good]} good, [red]{task.fields[bad]} bad[/red]")
            look = (TextColumn("bisect"), BarColumn(30), text, TimeElapsedColumn())
            self._bar = Bar(*look, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=None, now="starting", good=0, bad=0)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def opened(self, model: str, steps: tuple[str, ...], ops: tuple[str, ...]) -> None:
        self._steps, self._model = steps, model
        if self._bar is not None:
            self._bar.update(self._task, total=len(steps) or None, completed=0, now=f"{model}: {len(ops)} ops")

    def trial(self, trial: Trial) -> None:
        with self._lock:
            self._good += not trial.bad
            self._bad += trial.bad
        if self._bar is not None:
            step = trial.site.partition("/")[0]
            done = self._steps.index(step) if step in self._steps else None
            self._bar.update(
                self._task, completed=done, now=f"{self._model}: {trial.site}", good=self._good, bad=self._bad
            )


def show(result: Result, settings: Settings, journal: Path) -> None:
    """The report: the answer first, the next command last."""
    culprits = result.culprits
    if not result.tested:
        print("could not be tested")
    elif not culprits:
        print(f"clean: '{settings.candidate}' agrees with the reference at every call that was tested")
    for culprit in culprits:
        _culprit(culprit)
    print(columns([*_facts(result), ("journal", str(journal))]))
    print(f"next     {_next(result, settings)}")


def _culprit(culprit: Culprit) -> None:
    trial = culprit.trial
    print(f"{trial.verdict.name}  {culprit.op}  first at {trial.site} of {trial.model}  (check: {trial.check})")
    print(f"  {trial.sentence}")
    if trial.where:
        print(f"  worst at {', '.join(f'{k} {v}' for k, v in list(trial.where.items())[:COORDINATES])}")
    if trial.fingerprints:
        print(f"  looks like: {'; '.join(trial.fingerprints[:3])}")
    if trial.threshold:
        limit = trial.threshold
        print(f"  {limit['name']} is {limit['value']:.3g}, the limit {limit['limit']:.3g} ({limit['source']})")
    layers = ", ".join(culprit.layers) if len(culprit.layers) <= 8 else f"{len(culprit.layers)} layers"
    print(f"  bad at {culprit.bad} of {culprit.tested} sites: {layers}; {', '.join(culprit.phases)}")
    others = [f"{check} ({count})" for check, count in culprit.checks.items() if check != trial.check]
    if others:
        print(f"  also found by: {', '.join(others)}")
    if culprit.reproducer:
        print(f"  reproducer: python {culprit.reproducer / 'reproduce.py'}")
    print()


def _facts(result: Result) -> list[tuple[str, str]]:
    counts, cost = result.counts(), result.cost
    verdicts = Counter(t.verdict for t in result.trials)
    spread = ", ".join(f"{verdicts[v]} {v.name}" for v in Verdict if verdicts[v])
    ops = list(dict.fromkeys(t.op for t in result.tested))
    tested = f"{counts['tested']} calls of {ops[0] if len(ops) == 1 else f'{len(ops)} ops'}"
    rows = [("tested", f"{tested}; {len(result.trials)} trials: {spread}")]
    rows += [("", f"not tested: {op}: {reason}") for op, reason in result.untested.items()]
    rows += [("", f"no reproducer of {op}: {reason}") for op, reason in result.unreproduced.items()]
    if result.regimes:
        missed = [name for name, reached in result.regimes.items() if not reached]
        rows.append(("regimes", f"{len(result.regimes) - len(missed)} of {len(result.regimes)} reached"))
        rows += [("", f"not: {name}") for name in missed[:MISSED]]
        if len(missed) > MISSED:
            rows.append(("", f"not: {len(missed) - MISSED} more, in --json"))
    rows.append((
        "cost", f"reference {cost['reference_s']:.1f} s, candidate {cost['candidate_s']:.1f} s, oracle "
        f"{cost['oracle_s']:.1f} s, other checks {cost['checks_s']:.1f} s; {cost['wall_s']:.0f} s in all",
    ))  # fmt: skip
    return rows


def _next(result: Result, settings: Settings) -> str:
    plugins = "".join(f" --plugin {shlex.quote(str(p))}" for p in settings.request.plugins)
    base = f"dsv4dbg bisect --candidate {shlex.quote(settings.candidate)}{plugins}{_source(settings)}"
    culprits = result.culprits
    if culprits and not settings.reproducers:
        return f"{base} --model {shlex.quote(culprits[0].trial.model)} --op {culprits[0].op} --reproducer found"
    if culprits:
        written = next(iter(result.reproducers.values()), None)
        return f"python {written / 'reproduce.py'}" if written else f"{base} --op {culprits[0].op} --workers 1"
    if not result.tested:
        return f"dsv4dbg ops {next(iter(result.untested), '')}".rstrip()
    if not settings.in_place and not settings.trace:
        return f"{base}{''.join(f' --op {op}' for op in settings.ops)} --in-place   (interactions between ops)"
    return f"dsv4dbg ops {_ops(result)[0]}"


def _source(settings: Settings) -> str:
    """The options that say where calls come from, unless it is the default."""
    request = settings.request
    given = {"--workload": request.workload, "--prompt": request.prompt, "--trace": settings.trace}
    return "".join(f" {o} {shlex.quote(str(v))}" for o, v in given.items() if v is not None and v != COVERAGE)


def document(result: Result, settings: Settings, journal: Path) -> dict[str, Any]:
    """The report as JSON."""
    for op, reason in result.untested.items():
        note(f"note: {op} was not tested: {reason}")
    return {
        "verdict": result.verdict.name, "culprits": [c.to_json() for c in result.culprits], "sites": result.counts(),
        "coverage": dict(result.regimes), "untested": result.untested, "trials": len(result.trials),
        "cost": result.cost, "plan": f"*=torch, {', '.join(f'op:{o}={settings.candidate}' for o in _ops(result))}",
        "environment": dict(result.environment), "journal": str(journal),
    }  # fmt: skip


def _ops(result: Result) -> list[str]:
    return list(dict.fromkeys(t.op for t in result.tested))
