"""One bisect from settings to result: the isolated scan, the live forward where asked for, and reproducers."""

from __future__ import annotations

from pathlib import Path

from dsv4dbg.bisect.engine import Scan, Watcher
from dsv4dbg.bisect.journal import Journal
from dsv4dbg.bisect.live import Live
from dsv4dbg.bisect.result import Result
from dsv4dbg.bisect.settings import Settings
from dsv4dbg.compare import Verdict


def bisect(settings: Settings, path: Path, resume: bool, watcher: Watcher) -> Result:
    """Run a bisect, or go on with one.

    Args:
        path: of the journal.

    Raises:
        DbgError: what is wrong with the settings, or Untestable: why nothing could be tested. The journal stays.
    """
    journal = Journal(path, settings.identity(), resume)
    try:
        scan = Scan(settings, journal, watcher)
        result = scan.run()
        if settings.in_place:
            culprits = {culprit.op for culprit in result.culprits}
            sites = {t.site.rpartition("/")[2]: t.op for t in result.tested if t.op not in culprits}
            result.trials += Live(settings, journal, sites).search()
        verdict = result.verdict.name if result.tested else Verdict.SKIPPED.name
        journal.event("result", verdict=verdict, culprits=[c.to_json() for c in result.culprits], cost=result.cost)
        return result
    finally:
        journal.close()
