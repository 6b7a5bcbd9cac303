"""What a run that ended without results ended in: told apart by exit code, exception and last words.

The texts are those of ROCm, CUDA, PyTorch and Triton. One table holds them; an address becomes a place in a buffer
through the ranges that the worker sent before it ran.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

LINES = 3  # of the last words that a sentence may hold
FAR = 1 << 30  # bytes from every buffer, beyond which an address has nothing to do with any


@dataclass(frozen=True)
class Range:
    """Device addresses ``begin <= a < end`` of a buffer."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True)
class Fault:
    """How a run ended.

    Attributes:
        kind: one of `KINDS`.
        text: one sentence.
        address: device address of the access, where the driver names one.
    """

    kind: str
    text: str
    address: int | None = None


# kind -> what it is called in a sentence; the first that matches in `TEXTS` counts
KINDS = {
    "memory access fault": "the GPU reports a memory access fault",
    "illegal memory access": "the GPU reports an illegal memory access",
    "misaligned address": "the GPU reports a misaligned address",
    "device assert": "an assertion in device code failed",
    "device out of memory": "the device is out of memory",
    "out of memory": "out of memory",
    "out of resources": "the kernel asks for more than the device has",
    "compilation": "the kernel does not compile",
    "launch failure": "the kernel launch failed",
    "device lost": "the device is lost",
    "device error": "the device reports an error",
    "signal": "the process was killed",
    "exit": "the candidate ended the process",
    "exception": "it raised",
    "hang": "no result in time",
}

# what is said where, first match first
TEXTS = (
    ("memory access fault", r"Memory access fault by GPU node-\d+.*"),
    ("memory access fault", r"HSA_STATUS_ERROR_MEMORY_FAULT.*|HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION.*"),
    ("illegal memory access", r"(?:HIP|CUDA) error: an illegal memory access.*"),
    ("illegal memory access", r"hipErrorIllegalAddress.*|CUDA_ERROR_ILLEGAL_ADDRESS.*|cudaErrorIllegalAddress.*"),
    ("misaligned address", r"(?:HIP|CUDA) error: misaligned address.*|CUDA_ERROR_MISALIGNED_ADDRESS.*"),
    ("device assert", r"(?:HIP|CUDA) error: device-side assert triggered.*|Device-side assertion .*|hipErrorAssert.*"),
    ("device assert", r".*: block: \[.*Assertion .* failed.*"),
    ("device out of memory", r"(?:HIP|CUDA) out of memory.*|hipErrorOutOfMemory.*|CUDA_ERROR_OUT_OF_MEMORY.*"),
    ("device out of memory", r"HSA_STATUS_ERROR_OUT_OF_RESOURCES.*|torch\.OutOfMemoryError.*"),
    ("out of resources", r"out of resource: .*|OutOfResources.*|too many resources requested for launch.*"),
    ("out of memory", r".*DefaultCPUAllocator: can't allocate memory.*|.*Cannot allocate memory.*|std::bad_alloc.*"),
    ("compilation", r"CompilationError.*|.*PassManager::run failed.*|LLVM ERROR: .*|ptxas (?:error|fatal).*"),
    ("compilation", r"error: hip.*compil.*|.*hiprtc.*[Cc]ompil.*|Error building extension .*"),
    ("launch failure", r"(?:HIP|CUDA) error: (?:invalid configuration argument|unspecified launch failure|.*launch).*"),
    ("launch failure", r"hipErrorLaunchFailure.*|hipErrorInvalidConfiguration.*|CUDA_ERROR_LAUNCH_FAILED.*"),
    (
        "device lost",
        r"hipErrorNoDevice.*|(?:HIP|CUDA) error: no (?:ROCm|CUDA)-capable device.*|.*[Uu]ncorrectable ECC.*",
    ),
    (
        "device lost",
        r".*GPU (?:reset|has fallen off the bus).*|HSA_STATUS_ERROR_FATAL.*|HW Exception by GPU node-\d+.*",
    ),
    ("device error", r"(?:HIP|CUDA) error: .*|HSA_STATUS_ERROR\w*.*|hipError[A-Z]\w+.*|CUDA_ERROR_[A-Z_]+.*"),
)
RAISED = {  # names of exceptions that are a kind of their own
    "OutOfMemoryError": "device out of memory",
    "MemoryError": "out of memory",
    "OutOfResources": "out of resources",
    "CompilationError": "compilation",
    "CompileTimeAssertionFailure": "compilation",
    "UnsupportedLanguageConstruct": "compilation",
    "PTXASError": "compilation",
    "SystemExit": "exit",
}
MAYBE = {"SIGKILL": " (as the system does when memory runs out)"}
ADDRESS = re.compile(r"address:? (0x[0-9a-fA-F]+)")
FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


def classify(
    *,
    exitcode: int | None = None,
    words: str = "",
    ranges: Sequence[Range] = (),
    raised: str = "",
    text: str = "",
    hang: float | None = None,
) -> Fault:
    """What a run ended in.

    Args:
        exitcode: of the process, if it ended; negative: the signal.
        words: the end of what the process printed.
        ranges: device addresses of the call's buffers.
        raised, text: name and message of the exception, if it raised one.
        hang: seconds after which the process was killed for giving no answer.
    """
    told = _told(f"{text}\n{words}")
    if hang is not None:
        return Fault("hang", f"no result within {hang:g} s{_in_line(words)}")
    kind = RAISED.get(raised, "exception") if raised else _ended(exitcode)
    if told and kind in ("exception", "signal", "exit"):
        kind, sentence = told
    else:
        sentence = _first_line(text) or (_last_lines(words) if kind == "exit" else "")
    address = _address(f"{text}\n{words}") if told else None
    if raised:
        sentence = f"{raised}: {sentence}" if raised not in sentence else sentence
    elif kind == "signal":
        name = signal.Signals(-(exitcode or 0)).name
        sentence = f"killed by {name}{_in_line(words)}{MAYBE.get(name, '')}"
    elif kind == "exit":
        sentence = f"ended the process with exit code {exitcode}" + (f": {sentence}" if sentence else "")
    where = f" ({place(address, ranges)})" if address is not None and ranges else ""
    lead = "" if kind in ("signal", "exit") else f"{KINDS[kind]}: "
    return Fault(kind, f"{lead}{sentence}{where}", address)


def _ended(exitcode: int | None) -> str:
    return "signal" if (exitcode or 0) < 0 else "exit"


def _told(text: str) -> tuple[str, str] | None:
    """Kind and line of the first known text."""
    for kind, pattern in TEXTS:
        if found := re.search(pattern, text):
            return kind, found[0].strip()
    return None


def _address(text: str) -> int | None:
    found = ADDRESS.search(text)
    return int(found[1], 16) if found else None


def _in_line(words: str) -> str:
    """The innermost Python line of a faulthandler report."""
    found = FRAME.search(words)
    return f" in {found[3]}, {found[1]} line {found[2]}" if found else ""


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _last_lines(words: str) -> str:
    return " ".join(words.strip().splitlines()[-LINES:])


def place(address: int, ranges: Sequence[Range]) -> str:
    """Where an address lies: ``inside page_table``, ``4,096 bytes past the end of kv_cache``."""
    for known in ranges:
        if known.begin <= address < known.end:
            return f"{address - known.begin:,} bytes into {known.name}"
    before = [r for r in ranges if r.end <= address]
    after = [r for r in ranges if r.begin > address]
    left = max(before, key=lambda r: r.end, default=None)
    right = min(after, key=lambda r: r.begin, default=None)
    past = address - left.end if left else FAR
    short = right.begin - address if right else FAR
    if min(past, short) >= FAR:
        return "near none of the call's buffers"
    if past <= short:
        assert left is not None
        return f"{past:,} bytes past the end of {left.name}"
    assert right is not None
    return f"{short:,} bytes before the start of {right.name}"
