"""One bisect from settings to result: the isolated scan, the live forward where asked for, and reproducers."""

from __future__ import annotations

from pathlib import Path

from dsv4dbg.bisect.engine import Scan, Watcher
from dsv4dbg.bisect.journal import Journal
from dsv4dbg.bisect.live import Live
from dsv4dbg.bisect.protocol import Hello
from dsv4dbg.bisect.reproducer import vacant
from dsv4dbg.bisect.result import Result
from dsv4dbg.bisect.retry import reproduce
from dsv4dbg.bisect.settings import Settings
from dsv4dbg.compare import Verdict


def bisect(settings: Settings, path: Path, resume: bool, watcher: Watcher) -> Result:
    """Run a bisect, or go on with one.

    Args:
        path: of the journal.

    Raises:
        DbgError: what is wrong with the settings, or Untestable: why nothing could be tested. The journal stays.
    """
    if settings.reproducers:
        vacant(settings.reproducers)
    journal = Journal(path, settings.identity(), resume)
    try:
        scan = Scan(settings, journal, watcher)
        result = scan.run()
        if settings.in_place:
            culprits = {culprit.op for culprit in result.culprits}
            sites = {
                t.site.rpartition("/")[2]: t.op
                for t in result.tested
                if t.op not in culprits and t.model == settings.request.model
            }
            result.trials += Live(settings, journal, sites).search()
        if settings.reproducers:
            _reproduce(scan, settings.reproducers)
        verdict = result.verdict.name if result.tested else Verdict.SKIPPED.name
        journal.event("result", verdict=verdict, culprits=[c.to_json() for c in result.culprits], cost=result.cost)
        return result
    finally:
        journal.close()


def _reproduce(scan: Scan, directory: Path) -> None:
    """A reproducer of every culprit's first bad call, in a directory of its op's name."""
    settings, result = scan.settings, scan.result
    hello = Hello(settings.candidate, settings.request.plugins, settings.request.device)
    for culprit in result.culprits:
        if culprit.op not in scan.kept:
            result.unreproduced[culprit.op] = "it shows only in the live forward"
            continue
        trial, call = scan.kept[culprit.op]
        finding = {
            "site": trial.site, "check": trial.check, "verdict": trial.verdict.name, "sentence": trial.sentence,
            "fingerprint": list(trial.fingerprints), "where": dict(trial.where), "rate": trial.rate,
        }  # fmt: skip
        written = reproduce(
            directory / culprit.op, call, hello, result.environment, finding=finding, timeout=settings.timeout
        )
        if written is None:
            result.unreproduced[culprit.op] = "the call is right when it is made alone, in a fresh process"
        else:
            result.reproducers[culprit.op] = written.directory
