"""The import directions, held as data, and what heavy packages may be loaded where."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "dsv4dbg"

# what a part of the package may import besides itself
ALLOWED = {
    "cli": {
        "tui", "bisect", "diff", "model", "kernels", "verdict", "compare", "trace", "plan", "pages", "site", "errors",
    },
    "tui": {"diff", "verdict", "compare", "trace", "plan", "pages", "site", "errors"},
    "bisect": {"diff", "model", "kernels", "verdict", "compare", "trace", "plan", "pages", "site", "errors"},
    "model": {"kernels", "compare", "trace", "plan", "pages", "site", "errors"},
    "kernels": {"compare", "plan", "pages", "site", "errors"},
    "verdict": {"compare", "pages", "site", "errors"},
    "trace": {"pages", "site", "errors"},
    "diff": {"compare", "trace", "site", "errors"},
    "plan": {"site", "errors"},
    "compare": set(),
    "pages": set(),
    "site": {"errors"},
    "errors": set(),
}  # fmt: skip
NUMPY_LEVEL = ("errors", "site", "plan", "pages", "compare", "trace", "verdict", "diff", "tui")  # never import torch
MODULES = sorted(ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Full names of all modules that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(path)
    if part in ("__init__", "__main__"):
        return
    targets = {name.split(".")[1] for name in imported(path) if name.startswith("dsv4dbg.") and name.count(".") >= 1}
    targets -= {"__version__", part}
    assert targets <= ALLOWED[part], f"{part} may not import {targets - ALLOWED[part]}"


@pytest.mark.parametrize(
    "path", [p for p in MODULES if part_of(p) in NUMPY_LEVEL], ids=lambda p: str(p.relative_to(ROOT))
)
def test_numpy_level_modules_do_not_name_torch(path: Path) -> None:
    assert not {n for n in imported(path) if n.split(".")[0] in ("torch", "triton")}


@pytest.mark.parametrize(
    "path", [p for p in MODULES if p.name == "__init__.py"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_package_files_import_nothing(path: Path) -> None:
    assert not imported(path)


@pytest.mark.parametrize("module", ["dsv4dbg.trace.reader", "dsv4dbg.trace.writer", "dsv4dbg.cli.main", "dsv4dbg.plan"])
def test_light_modules_load_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'triton', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_registry_loads_without_triton_and_says_why() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from dsv4dbg.kernels.registry import registry\n"
        "found = registry()\n"
        "assert len(found.ops) >= 27, found.ops\n"
        "assert all('triton' in u.reason for u in found.unavailable), found.unavailable\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_file_is_too_long() -> None:
    long = {str(p.relative_to(ROOT)): n for p in MODULES if (n := len(p.read_text().splitlines())) > 450}
    assert not long
