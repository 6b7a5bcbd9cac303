"""Texts of real failures, each told apart, and addresses that become places in buffers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dsv4dbg.bisect.faults import Range, classify, place

ROCM = """Memory access fault by GPU node-2 (Agent handle: 0x55d3c0a8f2d0) on address 0x7f1e00003000. \
Reason: Page not present or supervisor privilege."""
RAISED = [
    ("RuntimeError", "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be",
     "illegal memory access"),
    ("AcceleratorError", "CUDA error: device-side assert triggered", "device assert"),
    ("RuntimeError", "HIP error: misaligned address", "misaligned address"),
    ("RuntimeError", "HIP error: unspecified launch failure", "launch failure"),
    ("RuntimeError", "HIP error: invalid configuration argument", "launch failure"),
    ("RuntimeError", "Triton Error [HIP]:  Code: 209, Messsage: hipErrorNoBinaryForGpu", "device error"),
    ("OutOfMemoryError", "HIP out of memory. Tried to allocate 2.00 GiB.", "device out of memory"),
    ("RuntimeError", "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you"
     " tried to allocate 1125899906842624 bytes.", "out of memory"),
    ("OutOfResources", "out of resource: shared memory, Required: 131072, Hardware limit: 65536.", "out of resources"),
    ("CompilationError", "at 12:8:\n    x = tl.load(p)\n        ^\nNameError: p is not defined", "compilation"),
    ("RuntimeError", "PassManager::run failed", "compilation"),
    ("ZeroDivisionError", "division by zero", "exception"),
]  # fmt: skip
ENDED = [
    (-6, ROCM, "memory access fault"),
    (-6, "rocdevice.cpp :2984: Queue 0x7f aborting with error : HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION",
     "memory access fault"),
    (-6, "HW Exception by GPU node-1 (Agent handle: 0x1c8) reason :GPU Hang", "device lost"),
    (-6, "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc", "out of memory"),
    (-11, "Fatal Python error: Segmentation fault", "signal"),
    (-9, "", "signal"),
    (0, "", "exit"),
    (3, "bye", "exit"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "kind"), RAISED)
def test_exceptions(name: str, text: str, kind: str) -> None:
    fault = classify(raised=name, text=text)
    assert fault.kind == kind
    assert name in fault.text
    assert "\n" not in fault.text


@pytest.mark.parametrize(("code", "words", "kind"), ENDED)
def test_ends(code: int, words: str, kind: str) -> None:
    fault = classify(exitcode=code, words=words)
    assert fault.kind == kind
    assert "\n" not in fault.text


def test_an_earlier_exception_in_the_output_is_not_the_cause_of_another() -> None:
    assert classify(raised="OutOfResources", text="out of resource: threads", words=ROCM).kind == "out of resources"


def test_the_address_becomes_a_place() -> None:
    ranges = [Range("kv_cache", 0x7F1E00000000, 0x7F1E00002000), Range("indices", 0x7F1E00010000, 0x7F1E00020000)]
    fault = classify(exitcode=-6, words=ROCM, ranges=ranges)
    assert fault.address == 0x7F1E00003000
    assert "4,096 bytes past the end of kv_cache" in fault.text


def test_places() -> None:
    ranges = [Range("a", 1000, 2000), Range("b", 3000, 4000)]
    assert place(1010, ranges) == "10 bytes into a"
    assert place(2000, ranges) == "0 bytes past the end of a"
    assert place(2990, ranges) == "10 bytes before the start of b"
    assert place(900, ranges) == "100 bytes before the start of a"
    assert "none" in place(1 << 40, ranges)


def test_a_real_segmentation_fault_names_its_line() -> None:
    code = "import faulthandler, ctypes\nfaulthandler.enable()\ndef bad():\n    ctypes.string_at(0)\nbad()\n"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    fault = classify(exitcode=ran.returncode, words=ran.stderr)
    assert fault.kind == "signal"
    assert "SIGSEGV" in fault.text
    assert "line" in fault.text


def test_a_hang_names_its_time() -> None:
    assert classify(hang=4, words="").text == "no result within 4 s"
