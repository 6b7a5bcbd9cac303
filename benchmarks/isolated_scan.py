"""What a differential scan of all ops and layers costs, beside one full forward per swapped op and layer.

    python benchmarks/isolated_scan.py                 # the tiny model, candidates as fast as the reference
    python benchmarks/isolated_scan.py --model wide

The candidate of every op is the reference under another name, so that nothing differs and the oracle never runs. In
one run: the plain forward of the coverage workload (best of three), and the scan of `dsv4dbg bisect --check
differential` with one worker. ``wall`` counts from the start of the walker's forward to the last trial, with calls
shipped, run and compared; ``all trials`` adds up the seconds of the trials and of the reference.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from dsv4dbg.bisect.journal import Trial
from dsv4dbg.bisect.run import bisect
from dsv4dbg.bisect.settings import Settings
from dsv4dbg.model.recording import Request, load_model, open_session, open_workload

SAME = """
from dsv4dbg.kernels.registry import implements, registry

def same(op):
    reference = registry().ops[op].reference
    return lambda **kwargs: reference(**kwargs)

for op in list(registry().ops):
    implements(op, "same")(same(op))
"""


class Stopwatch:
    """A watcher that notes when the walker began its forward and when the last trial ended."""

    begin = end = 0.0

    def opened(self, model: str, steps: tuple[str, ...], ops: tuple[str, ...]) -> None:
        self.begin = time.perf_counter()

    def trial(self, trial: Trial) -> None:
        self.end = time.perf_counter()


def forward(model: str) -> float:
    """Seconds of the plain forward, without listener."""
    request = Request(workload="coverage", model=model)
    checkpoint, loaded, device = load_model(request)
    workload = open_workload("coverage", checkpoint)
    best = float("inf")
    for _ in range(3):
        session = open_session(request, loaded, device, [], workload)
        begin = time.perf_counter()
        session.run(workload)
        best = min(best, time.perf_counter() - begin)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    model = parser.parse_args().model
    plain = forward(model)
    with tempfile.TemporaryDirectory() as folder:
        plugin = Path(folder) / "same.py"
        plugin.write_text(SAME)
        watch = Stopwatch()
        request = Request(workload="coverage", model=model, plugins=(plugin,))
        settings = Settings(request, "same", checks=("differential",), workers=1)
        result = bisect(settings, Path(folder) / "journal.jsonl", False, watch)
    assert result.exit_code == 0
    places = {(t.op, t.site.rpartition("/")[2]) for t in result.trials}
    wall, cost = watch.end - watch.begin, result.cost
    print(f"{model}: {len(result.trials)} calls of {len({t.op for t in result.trials})} ops at {len(places)} sites")
    print(f"plain forward                    {plain:8.2f} s")
    print(f"differential scan, wall          {wall:8.2f} s  {wall / plain:6.2f} forwards")
    print(f"  reference in the walker        {cost['reference_s']:8.2f} s  {cost['reference_s'] / plain:6.2f} forwards")
    print(f"  candidate in its process       {cost['candidate_s']:8.2f} s  {cost['candidate_s'] / plain:6.2f} forwards")
    trials = cost["forward_equivalents"] * cost["reference_s"]
    print(f"  all trials                     {trials:8.2f} s  {trials / plain:6.2f} forwards")
    print(f"one forward per op and layer     {plain * len(places):8.0f} s  {len(places):6d} forwards")


if __name__ == "__main__":
    main()
