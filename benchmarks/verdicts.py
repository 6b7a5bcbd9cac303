"""How far verdicts can be trusted: clean variants and generated mutants, judged. Prints the tables of docs/verdicts.md.

python benchmarks/verdicts.py prototypes --rows 100000 --seeds 1 2
python benchmarks/verdicts.py registry --sizes tiny wide --seeds 101 102
python benchmarks/verdicts.py blindspots
python benchmarks/verdicts.py speed
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from verdict_blindspots import FAULTS, HARMLESS, blind_spot_case, index_case
from verdict_cases import PROTOTYPES, examples
from verdict_variants import CLEAN, Case, effective, mutants

from dsv4dbg.compare import Verdict
from dsv4dbg.verdict.metrics import rows_apart


class Tally:
    """Verdicts by variant, and the sentences of those that are wrong."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {"clean": Counter(), "mutant": Counter()}
        self.rows: dict[str, Counter[str]] = {}
        self.wrong: list[str] = []

    def add(self, kind: str, where: str, variant: str, verdict: Verdict, sentence: str) -> None:
        self.counts[kind][verdict.name] += 1
        self.rows.setdefault(f"{kind} | {variant}", Counter())[verdict.name] += 1
        if (verdict is Verdict.DIVERGED) == (kind == "clean"):
            self.wrong.append(f"{'FALSE ALARM' if kind == 'clean' else 'MISS'} | {where} | {variant} | {sentence}")


def sweep(cases: Iterable[tuple[str, Case]], seed: int, tally: Tally) -> None:
    for where, c in cases:
        for variant, make in CLEAN.items():
            found = c.judge(make(c))
            tally.add("clean", where, variant, found.verdict, found.sentence)
        for fault, candidate in mutants(c, np.random.default_rng(seed)):
            if effective(c, candidate):
                found = c.judge(candidate)
                tally.add("mutant", where, fault, found.verdict, found.sentence)


def report(tally: Tally, by_variant: bool) -> None:
    for kind, counts in tally.counts.items():
        print(f"{kind}: {counts.total()} comparisons, {dict(counts)}")
    if by_variant:
        for variant, counts in tally.rows.items():
            print(f"| {variant} | {', '.join(f'{k} {n}' for k, n in sorted(counts.items()))} |")
    print(*tally.wrong, sep="\n")


def prototypes(names: list[str], rows: int, seeds: list[int]) -> None:
    for name in names:
        tally = Tally()
        for seed in seeds:
            sweep([(f"seed {seed}", PROTOTYPES[name](np.random.default_rng(seed), rows))], seed, tally)
        print(f"\n{name}, {rows} rows, seeds {seeds}")
        report(tally, by_variant=True)


def registry_sweep(sizes: list[str], seeds: list[int]) -> None:
    tally, start = Tally(), time.perf_counter()
    for size in sizes:
        for seed in seeds:
            sweep(examples(size, seed), seed, tally)
    print(f"registry, {sizes}, seeds {seeds}, {time.perf_counter() - start:.0f} s")
    report(tally, by_variant=False)


def blindspots() -> None:
    dense, chosen = blind_spot_case(), index_case()
    for faults in (FAULTS, HARMLESS):
        for name, make in faults.items():
            c = chosen if "index" in name or "sets" in name else dense
            found = c.judge(make(c))
            print(f"| {name} | {found.verdict.name} | {found.sentence} |")


def speed() -> None:
    """Two captures of 634 MB in RAM without an oracle; and the judge with its oracle, per element."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((634_000_000 // 4 // 4096, 4096), dtype=np.float32)
    b = a * np.float32(1 + 2.0**-10)
    start = time.perf_counter()
    rows_apart(a, b)
    print(f"rows_apart, 2 x 634 MB float32: {time.perf_counter() - start:.2f} s")
    c = PROTOTYPES["fp8_linear"](rng, 20_000)
    candidate = CLEAN["float64 inside"](c)
    start = time.perf_counter()
    c.judge(candidate)
    seconds = time.perf_counter() - start
    print(f"judge, 20,000 x 128 bf16: {seconds:.2f} s, {seconds / (20_000 * 128) * 1e9:.0f} ns per element")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("prototypes", "registry", "blindspots", "speed"))
    parser.add_argument("--ops", nargs="+", default=list(PROTOTYPES))
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[101])
    parser.add_argument("--sizes", nargs="+", default=["tiny"])
    options = parser.parse_args()
    if options.table == "prototypes":
        prototypes(options.ops, options.rows, options.seeds)
    elif options.table == "registry":
        registry_sweep(options.sizes, options.seeds)
    else:
        {"blindspots": blindspots, "speed": speed}[options.table]()


if __name__ == "__main__":
    main()
