"""Reproducers: run as a stranger would, where only torch, numpy, safetensors and triton are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from short_scans import call_of

from dsv4dbg.bisect.protocol import Hello
from dsv4dbg.bisect.retry import Reproduced, reproduce
from dsv4dbg.errors import DbgError

pytest.importorskip("triton")
HERE = Path(__file__).parent
ABSENT = ("ml_dtypes", "h5py", "click", "rich", "textual", "xxhash", "tokenizers", "hdf5plugin")
BLOCKER = f"""
import sys
from importlib.machinery import PathFinder
class Absent:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {ABSENT!r} or top == "dsv4dbg" and path is None:
            ours = top == "dsv4dbg"
            places = [p for p in sys.path if (p.endswith("vendored") if ours else "site-packages" not in p)]
            found = PathFinder.find_spec(name, places)
            if found is None:
                raise ModuleNotFoundError(f"No module named {{name!r}}")
            return found
sys.meta_path.insert(0, Absent())
"""


def copied(folder: Path) -> Path:
    """The plug-in and what it imports, in a directory of their own."""
    folder.mkdir()
    for name in ("lone_kernels.py", "lone_helper.py"):
        shutil.copyfile(HERE / name, folder / name)
    return folder / "lone_kernels.py"


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    return copied(tmp_path / "kernels")


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Reproduced:
    """A reproducer of a kernel with one wrong element, whose own files are gone."""
    folder = tmp_path_factory.mktemp("wrong")
    plugin = copied(folder / "kernels")
    found = written("wrong", "rms_norm", plugin, folder)
    shutil.rmtree(plugin.parent)
    return found


def written(name: str, op: str, plugin: Path, tmp_path: Path, timeout: float = 60) -> Reproduced:
    found = reproduce(
        tmp_path / "found", call_of(op, 63), Hello(name, (plugin,), "cpu"), {"gpu": None}, timeout=timeout
    )
    assert found is not None
    return found


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script where the tool and most of its packages are absent."""
    clean = directory.parent / "clean"
    clean.mkdir(exist_ok=True)
    (clean / "sitecustomize.py").write_text(BLOCKER)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return subprocess.run(
        [sys.executable, str(directory / "reproduce.py"), "--device", "cpu", *arguments], cwd=clean, timeout=200,
        env={**environment, "PYTHONPATH": str(clean)}, capture_output=True, text=True,
    )  # fmt: skip


def test_packages_are_really_absent(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    for name in ("click", "dsv4dbg"):
        ran = subprocess.run(
            [sys.executable, "-c", f"import {name}"], env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path,
            capture_output=True, text=True,
        )  # fmt: skip
        assert "No module named" in ran.stderr, name


@pytest.mark.parametrize(
    ("name", "op", "mode", "words"),
    [
        pytest.param("wrong_triton", "rms_norm", "values", "of y is", marks=pytest.mark.slow),
        pytest.param("one_slot_on", "qnorm_rope_kv_insert", "values", "window_cache", marks=pytest.mark.slow),
        pytest.param("flaky", "rms_norm", "runs", "wrong: ", marks=pytest.mark.slow),
        pytest.param("unwritten", "rms_norm", "fills", "wrong: ", marks=pytest.mark.slow),
        pytest.param("segfault", "rms_norm", "fault", "SIGSEGV", marks=pytest.mark.slow),
        pytest.param("leaves", "rms_norm", "fault", "exit code 0", marks=pytest.mark.slow),
        pytest.param("hang", "rms_norm", "fault", "no result within", marks=pytest.mark.slow),
    ],
)
def test_it_shows_the_fault_on_its_own(name: str, op: str, mode: str, words: str, plugin: Path, tmp_path: Path) -> None:
    found = written(name, op, plugin, tmp_path, timeout=5 if name == "hang" else 60)
    shutil.rmtree(plugin.parent)
    assert (found.failure.mode, found.confirmed) == (mode, True)
    ran = run(found.directory)
    assert ran.returncode == 1, ran.stderr
    assert words in ran.stdout
    readme = (found.directory / "README.md").read_text()
    assert op in readme
    assert found.finding["verdict"] in readme


def test_wrong_results(wrong: Reproduced) -> None:
    """Cut down to one token, it shows the fault where the tool is not installed."""
    assert (wrong.failure.mode, wrong.confirmed, len(wrong.call.args["x"])) == ("values", True, 1)
    ran = run(wrong.directory)
    assert ran.returncode == 1, ran.stderr
    assert "of y is" in ran.stdout


def test_a_kernel_put_right_passes(wrong: Reproduced, plugin: Path) -> None:
    ran = run(wrong.directory, "--implementation", f"{plugin}:fixed")
    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (0, "right"), ran.stdout + ran.stderr


@pytest.mark.slow
def test_a_triton_kernel_put_right_passes(plugin: Path, tmp_path: Path) -> None:
    found = written("wrong_triton", "rms_norm", plugin, tmp_path)
    ran = run(found.directory, "--implementation", f"{plugin}:fixed_triton")
    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (0, "right"), ran.stdout + ran.stderr


def test_what_cannot_run_says_so(wrong: Reproduced, plugin: Path, tmp_path: Path) -> None:
    for other, words in (
        (f"{tmp_path}/none.py:f", "is not a file"),
        (f"{plugin}:nothing", "has no function 'nothing'"),
    ):
        ran = run(wrong.directory, "--implementation", other)
        assert ran.returncode == 2
        assert words in ran.stderr
        assert "Traceback" not in ran.stderr


@pytest.mark.slow
def test_a_zoo_case(tmp_path: Path) -> None:
    call = call_of("moe_combine", 63)
    found = reproduce(tmp_path / "found", call, Hello("zoo:unwritten-row", (), "cpu"), {})
    assert found is not None
    assert run(found.directory).returncode == 1


def test_a_right_call_writes_nothing(plugin: Path, tmp_path: Path) -> None:
    call = call_of("rms_norm", 63)
    assert reproduce(tmp_path / "found", replace(call), Hello("torch", (), "cpu"), {}) is None
    assert not (tmp_path / "found").exists()


def test_a_directory_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(DbgError, match="holds something already"):
        reproduce(tmp_path, call_of("rms_norm", 63), Hello("torch", (), "cpu"), {})
    assert (tmp_path / "mine").read_text() == "precious"


def test_what_stands_beside_a_plugin_goes_with_it(tmp_path: Path) -> None:
    """A module and a package, found though the directory is on no path."""
    kernels = tmp_path / "kernels"
    (kernels / "beside_package").mkdir(parents=True)
    (kernels / "beside_package" / "__init__.py").write_text("from beside_package.inner import FACTOR\n")
    (kernels / "beside_package" / "inner.py").write_text("FACTOR = 2\n")
    (kernels / "beside_module.py").write_text("import beside_package\nFACTOR = beside_package.FACTOR\n")
    plugin = kernels / "doubling.py"
    plugin.write_text(
        "import beside_module\n"
        "from dsv4dbg.kernels.norm.rms_norm import rms_norm\n"
        "from dsv4dbg.kernels.registry import implements\n"
        "@implements('rms_norm', 'doubled')\n"
        "def doubled(x, weight, *, eps):\n"
        "    return beside_module.FACTOR * rms_norm(x, weight, eps=eps)\n"
    )
    found = written("doubled", "rms_norm", plugin, tmp_path)
    shutil.rmtree(kernels)
    assert run(found.directory).returncode == 1
    copies = {str(p.relative_to(found.directory)) for p in found.directory.glob("implementation/**/*.py")}
    names = ("beside_module.py", "beside_package/__init__.py", "beside_package/inner.py", "doubling.py")
    assert copies == {f"implementation/{name}" for name in names}
