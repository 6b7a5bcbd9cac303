"""How outputs are compared: the kinds of output, as data, and the scale of verdicts (no torch).

An op names a `Comparator` for everything it yields; `dsv4dbg.verdict` judges by it. Dims of a comparator are the
contract's dim names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum


class Verdict(IntEnum):
    """Ordered by gravity. DRIFT: the inputs already differed; DIVERGED: the op itself is at fault."""

    PASS = 0
    ROUNDING = 1
    DRIFT = 2
    DIVERGED = 3
    UNSTABLE = 4
    FAULT = 5
    TIMEOUT = 6
    SKIPPED = 7


@dataclass(frozen=True)
class Comparator:
    """Base of all kinds."""


@dataclass(frozen=True)
class Exact(Comparator):
    """Bit for bit: copies, gathers, index arithmetic."""


@dataclass(frozen=True)
class Dense(Comparator):
    """Floating-point values.

    Attributes:
        terms: dims of the op's *inputs* whose sizes multiply to the number of terms summed per element
            (space separated; empty for elementwise work).
        magnitude: output or argument names whose largest size in a row bounds the terms summed (empty: the
            output itself), for outputs that are small differences of large terms. A name ``<output>.terms`` is a
            further result of the oracle: the size of the terms per element (the root of the sum of their squares
            where their errors are independent, else the sum of their sizes).
        roundings: number of roundings to the activation dtype on the way, the stored one included.
        row: dims of the output that identify a row; what remains is one row's content.
        inner: an argument; where it is given, an FP8 quantiser sits inside the op behind a rounding, so that
            some inner values move by a whole FP8 step.
        more: further roundings where ``switch=value`` holds in the numerics, or ``argument:f32``: it is float32.
    """

    terms: str = ""
    magnitude: tuple[str, ...] = ()
    roundings: int = 1
    row: str = "token"
    inner: str = ""
    more: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Codes(Comparator):
    """Quantised values with their scales in another output: the oracle gives the values before quantisation.

    Attributes:
        scale: name of the output that holds the scales.
        format: ``fp8`` or ``fp4``; or the name of an attr argument that holds it.
        group: channels that share one scale (0: the whole row); or the name of an attr argument that holds it.
        roundings: roundings to the activation dtype before the quantiser.
        dialect: of fp8: ``ocp`` or ``fnuz``; or the name of an attr argument that holds it.
    """

    scale: str
    format: str
    group: int | str
    roundings: int = 0
    terms: str = ""
    dialect: str = "ocp"


@dataclass(frozen=True)
class Scales(Comparator):
    """Scales of a `Codes` output; judged together with it."""

    codes: str


@dataclass(frozen=True)
class Records(Comparator):
    """Bytes written to a paged cache: decoded by an independent codec in the buffer's dialect, and every byte
    outside the contract's slots unchanged. The oracle gives the values before quantisation, one row per slot >= 0.
    Where a bf16 or float32 buffer gets sim-quantised values it gives those, and ``<name>.unquantized`` beside them.

    Attributes:
        roundings: roundings to the activation dtype before the store.
        terms: as in `Dense`.
    """

    roundings: int = 1
    terms: str = ""


@dataclass(frozen=True)
class IndexSet(Comparator):
    """Chosen indices, order-free, -1 as padding: ties are excused by the gap of ``scores`` at the cut.

    Attributes:
        scores: argument that holds the scores chosen from.
        lengths: argument that holds the number of valid entries per row.
    """

    scores: str
    lengths: str


@dataclass(frozen=True)
class Routing(Comparator):
    """Expert ids, order-free, with the router's gap at the cut as margin; ``weights`` names the output beside them.

    The oracle gives ids and, as ``<ids>.scores``, the scores that were ranked (float64 ``[token, expert]``).
    """

    weights: str


@dataclass(frozen=True)
class RoutingWeights(Comparator):
    """Weights of chosen experts: compared per expert after aligning by id."""

    ids: str
    roundings: int = 0


@dataclass(frozen=True)
class Logits(Dense):
    """Scores over the vocabulary: KL, top-1 and top-k order are shown beside the dense judgement."""
