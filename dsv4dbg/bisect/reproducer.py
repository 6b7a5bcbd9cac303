"""Writing a reproducer: a directory that shows a fault without the checkpoint, the trace and this tool.

It holds the call's inputs and right results, the implementation with what it imports, a script and a README, and needs
Python with torch, numpy, safetensors (and triton, if the implementation does). Nothing here opens a device.
"""

from __future__ import annotations

import ast
import inspect
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dsv4dbg.bisect import reproduce_script
from dsv4dbg.bisect.case import MODES, Case, save
from dsv4dbg.bisect.criteria import criteria
from dsv4dbg.bisect.vendor import PACKAGE, Closure, closure
from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.oracle import run_oracle
from dsv4dbg.kernels.registry import ZOO, registry
from dsv4dbg.kernels.table import Call
from dsv4dbg.model.replay import run
from dsv4dbg.plan import REFERENCE

ALWAYS = ("bisect.case", "bisect.faults", "kernels.child", "kernels.triton_run", "kernels.rows", "kernels.formats")
README = """\
# {op} at {site}: {verdict}

{sentence}

- implementation: `{implementation}`
- fingerprint: {fingerprints}
- what fails: {mode}
{criteria}
## Run it

    python reproduce.py

It makes the call in a child process, which may crash or hang, and ends with exit code 1 while the fault exists, 0 when
it is gone, and 2 if it could not run. It needs Python 3.11 or newer with {packages}. On a machine without a GPU, Triton
kernels run in Triton's interpreter (or choose with `--device`). The same call with a kernel that was put right, a
function with the same arguments:

    python reproduce.py --implementation fixed.py:function

## What is here

- `case.json`: the call (op, attributes, dtypes, strides, cache layouts), when a run counts as wrong, the finding
- `inputs.safetensors`, `expected.safetensors`: the call's tensors; the reference's results, and in float64 the oracle's
- `implementation/`, `vendored/`: the implementation, and the modules of dsv4dbg that it and the script import

## Where it was found

{environment}
"""


def write(
    directory: Path, call: Call, implementation: str, plugins: Iterable[Path] = (), *, mode: str,
    finding: Mapping[str, Any], environment: Mapping[str, Any], results: Mapping[str, Any] | None = None, runs: int = 1,
    timeout: float = 60.0,
) -> Path:  # fmt: skip
    """Write a reproducer; reference and oracle run here, the candidate does not.

    Args:
        directory: is made; it must not hold anything yet.
        call: its tensors are on the CPU.
        implementation: name of the candidate, which is in the registry or in one of ``plugins``.
        mode: how it fails, one of `case.MODES`.
        finding: ``verdict``, ``sentence``, ``fingerprint`` (a list) and whatever else is known, as JSON.
        results: what the candidate gave, where it gave anything.
        runs: how often the candidate must run for the fault to show.
        timeout: seconds that one run may take.

    Raises:
        DbgError: the directory is not empty or cannot be written, or the implementation's source is not at hand.
    """
    vacant(directory)
    op = call.op
    needed, file = _sources(op.name, implementation, [Path(plugin) for plugin in plugins])
    reference = run(call, registry().implementation(op.name, REFERENCE))
    oracle = oracle_of(call)
    found = criteria(op, call, reference, oracle, results if mode in ("values", "runs") else None)
    case = Case(call, implementation, file, mode, runs, timeout, found, reference, oracle, finding, environment)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save(case, directory)
        needed.copy(directory)
        shutil.copyfile(inspect.getfile(reproduce_script), directory / "reproduce.py")
        (directory / "README.md").write_text(_readme(case, needed), encoding="utf-8")
    except OSError as error:
        raise DbgError(f"the reproducer in {directory} cannot be written: {error.strerror}") from error
    return directory


def vacant(directory: Path) -> None:
    """Raise DbgError unless a reproducer can go there."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise DbgError(f"{directory} holds something already", "name a new directory for the reproducer")


def _sources(op: str, name: str, plugins: list[Path]) -> tuple[Closure, str]:
    """What is copied, and the plug-in's path in the reproducer ('' for an implementation of this package)."""
    modules = [*(f"{PACKAGE}.{module}" for module in ALWAYS), registry().op(op).reference.__module__]
    texts = {path: path.read_text(encoding="utf-8") for path in plugins}
    declaring = [path for path, text in texts.items() if name in _strings(text)]
    known = registry().find(op, name)
    module = inspect.unwrap(known.function).__module__ if known else ""
    if module.startswith(f"{PACKAGE}."):
        modules.append(module)
    elif not declaring and not plugins:
        raise DbgError(f"the source of '{name}' of {op} is not at hand", "name its file with --plugin")
    if name.startswith(ZOO):
        modules.append(f"{PACKAGE}.kernels.zoo.case")
    plugin = declaring[-1] if declaring else plugins[-1] if plugins and not known else None
    if plugin is not None and "registry(" in texts[plugin]:  # it asks for ops by name
        modules += [registry().ops[text].reference.__module__ for text in _strings(texts[plugin]) & {*registry().ops}]
    return closure(modules, plugin), f"implementation/{plugin.name}" if plugin else ""


def _strings(source: str) -> set[str]:
    return {n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def oracle_of(call: Call) -> dict[str, np.ndarray]:
    """The oracle's results for outputs that hold floating-point numbers."""
    found = run_oracle(call.op, call.args, call.numerics)
    names = (*call.op.outputs, *call.op.mutates)
    return {n: np.asarray(found[n]) for n in names if n in found and np.asarray(found[n]).dtype.kind == "f"}


def _readme(case: Case, needed: Closure) -> str:
    finding, call = case.finding, case.call
    limits = [
        f"  - {c.output}: {c.measure} {c.candidate:.3g}; the reference has {c.reference:.3g}, wrong is more than "
        f"{c.limit:.3g}\n"
        for c in case.criteria
        if c.apart
    ]
    packages = ["torch", "numpy", "safetensors", *sorted(needed.needs)]
    packages += ["triton"] if _uses_triton(case, needed) else []
    environment = [f"- {name}: {value}" for name, value in case.environment.items() if value not in (None, "", {}, [])]
    return README.format(
        op=call.op.name, site=call.site.path, verdict=finding.get("verdict", "at fault"),
        sentence=textwrap.fill(str(finding.get("sentence", "")), 120), implementation=case.implementation,
        fingerprints="; ".join(finding.get("fingerprint", ())) or "none", mode=MODES[case.mode],
        criteria="".join(limits), packages=", ".join(packages), environment="\n".join(environment),
    )  # fmt: skip


def _uses_triton(case: Case, needed: Closure) -> bool:
    if case.file:
        return any("import triton" in f.read_text(encoding="utf-8") for f in needed.files.values() if f.suffix == ".py")
    return any(path.name.endswith("_triton.py") for path in needed.modules)
