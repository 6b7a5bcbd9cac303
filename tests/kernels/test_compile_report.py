"""Offline compilation: every kernel for gfx942 and gfx950, and what the report says of kernels that are no good."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")

from dsv4dbg.kernels.compile_report import (
    ARCHES,
    LDS_LIMIT,
    Compiler,
    KernelReport,
    Task,
    cause,
    occupancy,
    software_path,
)
from dsv4dbg.kernels.registry import registry
from dsv4dbg.plan import REFERENCE

PLUGIN = Path(__file__).parent / "plugin_kernels.py"
FIELDS = {
    "name", "op", "arch", "lds_bytes", "lds_limit", "vgpr", "agpr", "sgpr", "spills", "scratch_bytes", "occupancy",
    "matrix_instructions", "software_path", "seconds", "error",
}  # fmt: skip
QUICK = ("act_quant", "qnorm_rope_kv_insert", "rms_norm", "sparse_mla_decode")  # the others compile for minutes
OURS = sorted({op for op, name in registry().implementations if name == "triton"})


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    compiler = Compiler(str(tmp_path_factory.mktemp("cache")), 120)
    yield compiler
    compiler.close()


@pytest.mark.parametrize("arch", ["gfx942", pytest.param("gfx950", marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", [o if o in QUICK else pytest.param(o, marks=pytest.mark.slow) for o in OURS])
def test_our_kernels_fit(op: str, arch: str, compiler: Compiler) -> None:
    found = compiler.run(Task(op, "triton", arch))
    assert found
    assert not [(k.name, k.problem) for k in found if k.problem]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("op", OURS)
def test_all_forms_of_our_kernels_fit(op: str, arch: str, compiler: Compiler) -> None:
    """Also as the op's examples launch them."""
    assert not [(k.name, k.problem) for k in compiler.run(Task(op, "triton", arch, examples=True)) if k.problem]


def only(compiler: Compiler, name: str, arch: str = "gfx942") -> KernelReport:
    found = compiler.run(Task("rms_norm", name, arch, (PLUGIN,)))
    assert len(found) == 1
    return found[0]


def test_too_much_lds(compiler: Compiler) -> None:
    report = only(compiler, "much_lds")
    assert report.lds_bytes > report.lds_limit == 65536
    assert "exceeds 65536" in report.problem
    assert report.occupancy == 0
    assert not only(compiler, "much_lds", "gfx950").problem.startswith("LDS")


def test_spills(compiler: Compiler) -> None:
    report = only(compiler, "spilling")
    assert report.spills > 0
    assert report.scratch_bytes > 0
    assert "spilled" in report.problem
    assert report.agpr > 0


def test_slow_path(compiler: Compiler) -> None:
    slow, fast = only(compiler, "fp8_dot"), only(compiler, "fp8_dot", "gfx950")
    assert "f8E4M3FN x f8E4M3FN dot as f16" in slow.software_path
    assert not slow.problem
    assert any("f8f6f4" in name for name in fast.matrix_instructions)
    assert not fast.software_path


def test_an_error_is_reduced_to_its_cause(compiler: Compiler) -> None:
    report = only(compiler, "misspelt")
    assert report.error == "NameError('no_such_name is not defined'), at line 2 of the kernel"
    assert report.name == "misspelt"


def test_every_configuration_of_an_autotuned_kernel(compiler: Compiler) -> None:
    found = compiler.run(Task("rms_norm", "tuned", "gfx942", (PLUGIN,)))
    assert [k.name for k in found] == ["tuned[BLOCK=128]", "tuned[BLOCK=256]"]
    assert not [k.problem for k in found if k.problem]


def test_an_implementation_that_fails_before_its_kernel(compiler: Compiler) -> None:
    assert "could not be recorded: RuntimeError: needs a GPU" in only(compiler, "raising").error
    assert "was killed by SIGABRT" in only(compiler, "dying").error
    assert compiler.run(Task("rms_norm", "plain", "gfx942", (PLUGIN,))) == []


def test_a_time_limit(tmp_path: Path) -> None:
    compiler = Compiler(str(tmp_path), 3)
    try:
        assert "no answer within 3 s" in only(compiler, "hanging").error
        assert "needs a GPU" in only(compiler, "raising").error  # the next one has a compiler again
    finally:
        compiler.close()


MINE = """
import torch, triton, triton.language as tl
from dsv4dbg.kernels.registry import implements

@triton.jit
def _copy(x, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < count), at < count)

@implements("rms_norm", "mine")
def mine(x, weight, *, eps):
    out = torch.empty_like(x)
    _copy[(1,)](x, out, x.numel(), BLOCK=128)
    return out
"""


def test_command_on_a_plug_in(dsv4dbg, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    arguments = ("--arch", "gfx950,gfx1201", "--op", "rms-norm", "--plugin", tmp_path / "mine.py")
    ran = dsv4dbg("compile", *arguments, "--json")
    kernels = {(k["implementation"], k["arch"]): k for k in json.loads(ran.out)["kernels"]}
    assert ran.code == 0
    assert set(kernels["mine", "gfx950"]) >= FIELDS
    for arch in ("gfx950", "gfx1201"):
        assert kernels["mine", arch]["error"] == ""
        assert kernels["mine", arch]["vgpr"] > 0


def test_command_on_what_is_not_there(dsv4dbg) -> None:
    assert dsv4dbg("compile", "--op", "no_such_op").code == 2
    assert dsv4dbg("compile", "--arch", "gfx000").code == 2
    untested = next(op for op in sorted(registry().ops) if registry().names(op) == [REFERENCE])
    assert dsv4dbg("compile", "--op", untested).code == 125


def test_occupancy() -> None:
    assert occupancy("gfx942", 8, 0, 4) == 8
    assert occupancy("gfx942", 8, 32768, 4) == 2
    assert occupancy("gfx942", 1, 32768, 4) == 1
    assert occupancy("gfx950", 8, 65536, 8) == 4
    assert occupancy("gfx942", 8, 65536, 2) == 1
    assert occupancy("gfx942", 8, 65537, 4) == 0
    assert set(LDS_LIMIT) == set(ARCHES)


def test_software_path() -> None:
    dot = "%d = tt.dot %a, %b, %c, inputPrecision = ieee : tensor<64x32x{0}> * tensor<32x64x{0}> -> tensor<64x64xf32>"
    assert software_path(dot.format("bf16"), "", ["v_mfma_f32_32x32x8_bf16"]) == ""
    assert software_path(dot.format("f16"), "", ["v_mfma_f32_32x32x8_f16"]) == ""
    assert "bf16 x bf16 dot without matrix" in software_path(dot.format("bf16"), "", [])
    assert "as bf16 matrix product" in software_path(dot.format("f16"), "", ["v_mfma_f32_32x32x8_bf16"])
    assert "as xf32" in software_path(dot.format("f32"), "", ["v_mfma_f32_16x16x8_xf32"])
    assert software_path(dot.format("f32"), "", ["v_mfma_f32_16x16x4_f32"]) == ""
    assert software_path(dot.format("f8E4M3FN"), "", ["v_mfma_f32_16x16x128_f8f6f4"]) == ""
    cast = "%1 = tt.fp_to_fp %0 : tensor<64xf8E4M3FN> -> tensor<64xf32>"
    assert "FP8 conversion in software" in software_path(cast, "v_lshlrev_b32", [])
    assert software_path(cast, "v_cvt_pk_f32_fp8_e32", []) == ""


def test_cause() -> None:
    assert (
        cause("was killed by SIGABRT; its last words:\nx\nLLVM ERROR: no reg\n#0")
        == "was killed by SIGABRT: LLVM ERROR: no reg"
    )
    assert cause("no answer within 3 s") == "no answer within 3 s"
