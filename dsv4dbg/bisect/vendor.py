"""Copying an implementation with the modules that it imports, found by reading their source.

Of this package only the modules that are reached by imports at their top are copied; of a user's file also those that
stand beside it. What else is imported is a requirement, or gets a placeholder where only code that is never called in a
reproducer (oracles) uses it.
"""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import dsv4dbg

ROOT = Path(dsv4dbg.__file__).parent
PACKAGE = ROOT.name
PROVIDED = {"torch", "numpy", "safetensors", "triton"}
PLACEHOLDER = '''"""Stands in for {name}, which no code that runs here uses."""

import numpy


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return numpy.void
'''


@dataclass
class Closure:
    """What an implementation needs.

    Attributes:
        modules: files of this package, by path from its root.
        files: the user's, by path from the directory of the plug-in.
        needs: other packages that the user's files import.
        placeholders: other packages that ours import.
    """

    modules: set[Path] = field(default_factory=set)
    files: dict[Path, Path] = field(default_factory=dict)
    needs: set[str] = field(default_factory=set)
    placeholders: set[str] = field(default_factory=set)

    def copy(self, directory: Path) -> None:
        """Put everything into ``vendored/``, ``implementation/`` and ``placeholders/`` of a directory."""
        for path in self.modules:
            _copy(ROOT / path, directory / "vendored" / PACKAGE / path)
        for path, source in self.files.items():
            _copy(source, directory / "implementation" / path)
        for name in self.placeholders:
            path = directory / "placeholders" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(PLACEHOLDER.format(name=name), encoding="utf-8")


def closure(modules: Iterable[str], plugin: Path | None = None) -> Closure:
    """Everything reached from modules of this package, by name, and from a user's file."""
    found = Closure()
    for name in modules:
        _add(found, name)
    if plugin is not None:
        _add_file(found, plugin, plugin.parent)
    return found


def _add(found: Closure, name: str) -> bool:
    """A module of this package with its parents and what it imports; False if there is no such module."""
    path = _source(ROOT.parent, name)
    if path is None:
        return False
    relative = path.relative_to(ROOT)
    if relative in found.modules:
        return True
    found.modules.add(relative)
    found.modules.update(parent / "__init__.py" for parent in relative.parents)
    for imported in _imports(path, nested=False):
        top = imported.partition(".")[0]
        if top == PACKAGE:
            _add(found, imported)
        elif top not in PROVIDED | sys.stdlib_module_names:
            found.placeholders.add(top)
    return True


def _add_file(found: Closure, path: Path, home: Path) -> None:
    """A user's file, the files beside it that it imports, and modules of this package."""
    if path.relative_to(home) in found.files:
        return
    found.files[path.relative_to(home)] = path
    for imported in _imports(path, nested=True):
        top = imported.partition(".")[0]
        source, compiled = _source(home, imported), list(home.glob(f"{top}.*so"))
        found.files |= {file.relative_to(home): file for file in compiled}
        if top == PACKAGE:
            _add(found, imported)
        elif source is not None:
            _add_file(found, source, home)
        elif not compiled and not _source(home, top) and top not in PROVIDED | sys.stdlib_module_names:
            found.needs.add(top)


def _source(root: Path, name: str) -> Path | None:
    """The file of a module below ``root``."""
    path = root.joinpath(*name.split("."))
    for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
        if file.is_file():
            return file
    return None


def _imports(path: Path, nested: bool) -> Iterator[str]:
    """Names of modules that a file imports; ``from a import b`` gives ``a`` and ``a.b``.

    Args:
        nested: those inside functions too.
    """
    for node in _statements(ast.parse(path.read_text(encoding="utf-8")), nested):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _statements(tree: ast.AST, nested: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not nested:
            continue
        yield node
        yield from _statements(node, nested)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
