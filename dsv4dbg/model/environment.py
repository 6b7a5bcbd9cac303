"""What a finding depends on besides the code: versions, GPU, dialect, and the switches that are set.

Stored with every trace and verdict, printed by ``dsv4dbg doctor``.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

from dsv4dbg import __version__
from dsv4dbg.kernels.formats import FP8_DTYPE, fp8_decode
from dsv4dbg.kernels.table import device_arch

SWITCH_PREFIXES = (
    "VLLM_", "SGLANG_", "AITER_", "ATOM_", "HIP_", "ROCR_", "HSA_", "AMD_", "GPU_", "CUDA_", "NCCL_", "RCCL_",
    "TRITON_", "PYTORCH_", "TORCH_", "MIOPEN_", "HIPBLASLT_", "ROCBLAS_",
)  # fmt: skip
FNUZ_ARCHES = ("gfx940", "gfx941", "gfx942")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    """Model name of the processor: another one sums in another order."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def fp8_dialect(arch: str) -> str:
    """The FP8 dialect of a device's matrix instructions: ``fnuz`` on gfx942, else ``ocp``."""
    return "fnuz" if arch in FNUZ_ARCHES else "ocp"


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device and switches, as JSON."""
    arch = device_arch(device)
    return {
        "dsv4dbg": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "triton": _version("triton") or _version("triton-rocm") or _version("pytorch-triton-rocm"),
        "numpy": _version("numpy"),
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "arch": arch,
        "fp8_dialect": fp8_dialect(arch),
        "threads": torch.get_num_threads(),
        "switches": switches(),
    }


def switches() -> dict[str, str]:
    """Environment variables that are known to change kernels, by the prefixes of the stacks that read them."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(SWITCH_PREFIXES)}


def check_fp8(device: torch.device) -> dict[str, str | None]:
    """Whether the device converts FP8 as the formats say, over all 256 bytes; dialect -> None or what is wrong.

    Decodes every byte, and encodes every finite value back, against tables computed from the bit fields.
    """
    return {dialect: _check_dialect(device, dialect) for dialect in FP8_DTYPE}


def _check_dialect(device: torch.device, dialect: str) -> str | None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = torch.tensor([_fp8_value(code, dialect) for code in range(256)])
    try:
        decoded = fp8_decode(codes.to(device), dialect).cpu()
        finite = ~expected.isnan()
        back = expected[finite].to(device).to(FP8_DTYPE[dialect]).view(torch.uint8).cpu()
    except RuntimeError as error:
        return f"conversion is not supported: {str(error).splitlines()[0]}"
    wrong = ~((decoded == expected) & (decoded.signbit() == expected.signbit()) | decoded.isnan() & expected.isnan())
    if wrong.any():
        code = int(wrong.nonzero()[0])
        return f"byte 0x{code:02x} decodes to {decoded[code].item()}, not {expected[code].item()}"
    if not torch.equal(back, codes[finite]):
        first = int((back != codes[finite]).nonzero()[0])
        value, got, wanted = expected[finite][first].item(), int(back[first]), int(codes[finite][first])
        return f"{value} encodes to 0x{got:02x}, not 0x{wanted:02x}"
    return None


def _fp8_value(code: int, dialect: str) -> float:
    """Value of an e4m3 byte from its sign, exponent and mantissa bits."""
    bias, nan = (7, (0x7F, 0xFF)) if dialect == "ocp" else (8, (0x80,))
    if code in nan:
        return float("nan")
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 0:
        return sign * mantissa * 2.0 ** (-2 - bias)
    return sign * (8 + mantissa) * 2.0 ** (exponent - 3 - bias)
