"""Comparing two captures of 634 MB with metrics per row, beside plain h5py reading of the same bytes.

    python benchmarks/diff.py                # both traces are made in a temporary folder and removed again
    python benchmarks/diff.py --rounds 9

The traces hold 343 tensors in the shapes of a forward of 678 tokens, written by `TraceWriter`; the second holds the
first's values after noise and a rounding to bf16, so that nearly every element differs. Rounds alternate between the
two ways; files are in the system's page cache after the first. Memory is measured in processes of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import h5py
import ml_dtypes
import numpy as np

from dsv4dbg.cli.main import main as dsv4dbg
from dsv4dbg.site import Site
from dsv4dbg.trace.reader import Trace
from dsv4dbg.trace.records import Tensor
from dsv4dbg.trace.writer import TraceWriter

TENSORS = 343
TOKENS = 678
SHAPES = (
    ("mhc_pre", "bfloat16", "token channel", (TOKENS, 1024)),
    ("rms_norm", "bfloat16", "token channel", (TOKENS, 1024)),
    ("fp8_linear", "bfloat16", "token channel", (TOKENS, 512)),
    ("fp8_linear", "bfloat16", "token head channel", (TOKENS, 16, 128)),
    ("indexer_logits", "float32", "token entry", (TOKENS, 256)),
    ("sparse_mla_prefill", "bfloat16", "token head channel", (TOKENS, 16, 128)),
    ("linear", "float32", "token expert", (TOKENS, 64)),
    ("moe_experts", "float32", "token channel", (TOKENS, 1024)),
    ("mhc_post", "bfloat16", "token stream channel", (TOKENS, 4, 736)),
)  # op, dtype, dims, shape of its output


def bits(values: np.ndarray, dtype: str) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).view(np.uint16) if dtype == "bfloat16" else values


def make(path: Path, noisy: bool) -> int:
    """Write one trace; returns the bytes of its tensors."""
    total = 0
    with TraceWriter(path, {"model": "made-up", "plan": "noisy" if noisy else "plain"}) as writer:
        before: dict[str, Tensor] = {}
        for number in range(TENSORS):
            op, dtype, dims, shape = SHAPES[number % len(SHAPES)]
            values = np.random.default_rng(number).standard_normal(shape, np.float32)
            if noisy:
                noise = np.random.default_rng(number + TENSORS).standard_normal(shape, np.float32)
                values = (values * (1 + noise / 256)).astype(ml_dtypes.bfloat16).astype(np.float32)
            output = Tensor(bits(values, dtype), dtype, dims)
            site = Site(f"L{number // len(SHAPES)}.attn.op{number % len(SHAPES)}", op, "prefill0")
            writer.site(site, "mine" if noisy else "torch", inputs=before).finish({"y": output})
            before, total = {"x": output}, total + output.array.nbytes
    return total


def plain_reading(paths: list[Path]) -> None:
    """All outputs of both traces with h5py, one array each."""
    for path in paths:
        with h5py.File(path) as file:
            for site in file["steps/prefill0"].values():
                site["out/y"][()]


def diff(paths: list[Path]) -> str:
    """``dsv4dbg diff --no-judge``; returns what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        dsv4dbg(["diff", *map(str, paths), "--no-judge"])
    return out.getvalue()


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds (of all threads)."""
    begin, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begin, time.process_time() - used


def peak(way: str, paths: list[Path]) -> tuple[float, float]:
    """Largest resident memory of a process that does it once, in MB, before and after."""
    command = [sys.executable, __file__, "--peak-of", way, *map(str, paths)]
    before, after = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(before), float(after)


def resident() -> float:
    """Largest resident memory of this process so far, in MB (``ru_maxrss`` would begin with the parent's)."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 1000


def many_sites(path: Path, sites: int) -> None:
    rng = np.random.default_rng(0)
    with TraceWriter(path, {"model": "made-up"}) as writer:
        x = Tensor(rng.integers(0, 1 << 16, (4, 64), np.uint16), "bfloat16", "token channel")
        for number in range(sites):
            site = Site(f"L{number % 250 // 6}.attn.op{number % 6}", "fp8_linear", f"decode{number // 250}")
            weight = {"w": {"tensor": f"layers.{number % 250}.w", "hash": "0" * 32, "dtype": "F8", "shape": [2]}}
            call = writer.site(site, "torch", attrs={"eps": 1e-6}, inputs={"x": x, "bias": None}, weights=weight)
            x = Tensor(rng.integers(0, 1 << 16, (4, 64), np.uint16), "bfloat16", "token channel")
            call.finish({"y": x})


def alternate(paths: list[Path], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of both ways, in turns; the first round fills the page cache and does not count."""
    ways: dict[str, Callable[[list[Path]], object]] = {"plain h5py reading": plain_reading, "dsv4dbg diff": diff}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            times[name].append(seconds(lambda way=way: way(paths)))
    return {name: found[1:] for name, found in times.items()}


def compare_large(folder: Path, rounds: int) -> None:
    paths = [folder / "reference.h5", folder / "candidate.h5"]
    size = make(paths[0], noisy=False) / 1e6
    make(paths[1], noisy=True)
    print(f"2 x {size:.0f} MB in 2 x {TENSORS} tensors; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    found = alternate(paths, rounds)
    for name, times in found.items():
        wall, cpu = zip(*times, strict=True)
        print(f"{name:<20} {min(wall):.2f} s best, {median(wall):.2f} s median; {min(cpu):.2f} s of processors")
    plain, ours = found.values()
    for kind, what in enumerate(("wall", "processors")):
        ratios = [b[kind] / a[kind] for a, b in zip(plain, ours, strict=True)]
        best = min(t[kind] for t in ours) / min(t[kind] for t in plain)
        print(f"ratio, {what:<13} {best:.2f} of the best, {median(ratios):.2f} median of rounds")
    for way in ("plain", "diff"):
        before, after = peak(way, paths)
        print(f"peak memory, {way:<7} {after:.0f} MB, {after - before:.0f} MB more than before it began")
    for path in paths:
        path.unlink()


def compare_many(folder: Path, rounds: int, sites: int) -> None:
    paths = [folder / "many.h5", folder / "again.h5"]
    for path in paths:
        many_sites(path, sites)
    for what, work in (("opening one", lambda: Trace.open(paths[0]).close()), ("comparing two", lambda: diff(paths))):
        wall, cpu = zip(*(seconds(work) for _ in range(rounds)), strict=True)
        print(f"{what:<13} of {sites:,} sites: {min(wall):.2f} s best, {min(cpu):.2f} s of processors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sites", type=int, default=10_000, help="of the traces with many sites")
    parser.add_argument("--peak-of", nargs=3, metavar=("WAY", "REFERENCE", "CANDIDATE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        way, *files = options.peak_of
        before = resident()
        {"plain": plain_reading, "diff": diff}[way]([Path(file) for file in files])
        print(before, resident())
        return
    with tempfile.TemporaryDirectory() as folder:
        compare_large(Path(folder), options.rounds)
        compare_many(Path(folder), options.rounds, options.sites)


if __name__ == "__main__":
    main()
