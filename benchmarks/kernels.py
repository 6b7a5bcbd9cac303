"""Time of every op's kernels at Flash shapes, beside what the machine can do and beside the PyTorch reference.

    python benchmarks/kernels.py --device cuda                  # minutes on a data-centre GPU
    python benchmarks/kernels.py --device cpu --sizes tiny      # a try: its numbers mean nothing

A forward of four layers (two window-only, one CSA, one HCA) is run on the kernels, and the largest call that every op
gets is timed: prefill of 4,096 and 8,192 tokens, decode of 1, 16 and 64 sequences with 8,192 tokens of context. In the
same run: a large copy, and the best rates of bf16 and FP8 library matmuls. ``bytes`` are those that must move once (of
caches and tables the rows that are pointed to, of experts those that are chosen); ``share`` is the larger of bytes over
the copy's rate and operations over the bf16 matmul's rate, as part of the time taken. Every time is a median of device
events, with the caches flushed before each run: of 20 runs, or of fewer (three at least) where they take over a second.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
from flash import command_line, decode_step, flash_model, prefill, prompt, seconds, session

from dsv4dbg.bisect.derive import owned_entries
from dsv4dbg.kernels.contract import Op
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.kernels.registry import Implementation, registry
from dsv4dbg.kernels.table import Call, device_arch
from dsv4dbg.model.batch import Chunk, Step
from dsv4dbg.model.environment import environment
from dsv4dbg.model.model import Model
from dsv4dbg.plan import REFERENCE, Plan
from dsv4dbg.site import Site

RUNS = 20  # timed runs
SECONDS = 1.0  # for them all; three are made in any case
FLUSH = 2 << 30  # bytes written between runs: no cache holds them, and a launch takes the host less time than they take
COPY = 2 << 30  # bytes of the copy
LOOK_UPS = {"embed": "ids", "hash_router": "token_ids"}  # ops that read the rows of a vocabulary that these name
SLOW = 2.0  # seconds after which a call is not made again


@dataclass(frozen=True)
class Row:
    """One op at one size. Times in microseconds."""

    op: str
    size: str
    us: float
    reference_us: float
    bytes: int
    operations: int
    bound: str
    share: float


class Largest:
    """Listener that keeps, for every op, the call with the most bytes."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[Call, Mapping[str, torch.Tensor]]] = {}

    def before(self, call: Call) -> None: ...

    def after(self, call: Call, outputs: Mapping[str, torch.Tensor]) -> None:
        known = self.calls.get(call.op.name)
        if known is None or moved(call, outputs) > moved(*known):
            self.calls[call.op.name] = call, outputs

    def boundary(self, site: Site, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None: ...


def moved(call: Call, outputs: Mapping[str, torch.Tensor]) -> int:
    """Bytes that the call must read or write once."""
    args, total = call.args, sum(v.numel() * v.itemsize for v in outputs.values())
    for name, arg in call.op.args.items():
        value = args[name]
        if isinstance(value, Cache):
            total += int(owned_entries(call, name).sum()) * value.layout.record_bytes
        elif isinstance(value, torch.Tensor):
            total += int(value.numel() * value.itemsize * _part(call, name, arg.dims.split()))
    return total


def _part(call: Call, name: str, dims: list[str]) -> float:
    """Which part of an argument a call reads."""
    args, size = call.args, call.args[name].shape
    if dims[:1] == ["expert"]:
        ids = args.get("ids")
        return 1.0 if ids is None else len(ids.unique()) / size[0]
    if dims[:1] == ["position"]:
        return min(1.0, len(args["positions"]) / size[0])
    if dims[:1] == ["vocab"] and call.op.name in LOOK_UPS:
        return min(1.0, len(args[LOOK_UPS[call.op.name]].unique()) / size[0])
    return 1.0


def _rows(call: Call, name: str = "x") -> int:
    return call.args[name].shape[0]


def _experts(call: Call) -> int:
    each = sum(call.args[f"{w}"].numel() * (2 if call.args[w].dtype == torch.uint8 else 1) for w in ("w1", "w2", "w3"))
    return 2 * int((call.args["ids"] >= 0).sum()) * each // call.args["w1"].shape[0]


def _logits(call: Call) -> int:
    q = call.args["q"]
    channels = q.shape[2] * (2 if call.args["q_scale"] is not None and call.args["q_scale"].dtype == torch.uint8 else 1)
    return 2 * q.shape[1] * channels * int(call.args["lens"].sum())


def _attention(call: Call) -> int:
    q = call.args["q"]
    return 4 * q.shape[1] * q.shape[2] * int((call.args["indices"] >= 0).sum())


OPERATIONS: dict[str, Callable[[Call], int]] = {
    "fp8_linear": lambda c: 2 * _rows(c) * c.args["weight"].numel(),
    "linear": lambda c: 2 * _rows(c) * c.args["weight"].numel(),
    "lm_head": lambda c: 2 * _rows(c, "y") * c.args["weight"].numel(),
    "o_proj_grouped": lambda c: 2 * _rows(c, "o") * c.args["weight"].numel(),
    "moe_experts": _experts,
    "indexer_logits": _logits,
    "sparse_mla_prefill": _attention,
    "sparse_mla_decode": _attention,
}


class Timer:
    """Times calls on a device with cold caches."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flush = torch.empty(FLUSH if device.type == "cuda" else 1 << 20, dtype=torch.uint8, device=device)

    def __call__(self, function: Callable[[], object]) -> float:
        """Median microseconds, after a first run that does not count unless it is slow, or on a CPU."""
        first = seconds(function, self.device)
        if first > SLOW or self.device.type != "cuda":
            return first * 1e6
        runs = max(3, min(RUNS, int(SECONDS / seconds(function, self.device))))
        return median(self._once(function) for _ in range(runs))

    def _once(self, function: Callable[[], object]) -> float:
        self._flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end) * 1e3


@dataclass(frozen=True)
class Machine:
    """What the device does in this run: bytes (read and written) and operations per second; None: no such matmul."""

    copy: float
    matmul: float
    fp8_matmul: float | None


def machine(timer: Timer, tiny: bool) -> Machine:
    """Rates of a copy, and of the best library matmul of several sizes."""
    source = torch.zeros((COPY if not tiny else 1 << 24) // 2, dtype=torch.bfloat16, device=timer.device)
    target = torch.empty_like(source)
    copy = 2 * source.numel() * 2 / (timer(lambda: target.copy_(source)) * 1e-6)
    rates, fp8_rates = [], []
    for size in (256,) if tiny else (4096, 8192, 16384):
        a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=timer.device) for _ in range(2))
        rates.append(2 * size**3 / (timer(lambda a=a, b=b: a @ b) * 1e-6))
        if us := fp8_matmul(timer, a, b):
            fp8_rates.append(2 * size**3 / (us * 1e-6))
    return Machine(copy, max(rates), max(fp8_rates, default=None))


def fp8_matmul(timer: Timer, a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Microseconds of a product in FP8 with one scale for each side; None if the library has none for this device."""
    one = torch.ones((), device=a.device)
    for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):  # gfx942 has the second only
        left, right = a.to(dtype), b.to(dtype).t()
        try:
            return timer(lambda x=left, y=right: torch.ops.aten._scaled_mm(x, y, one, one, out_dtype=torch.bfloat16))
        except (RuntimeError, ValueError):
            continue
    return None


def runner(call: Call, implementation: Implementation) -> Callable[[], object]:
    """The call, ready to be made again and again."""
    kwargs = dict(call.args) | ({"numerics": call.numerics} if call.op.reads_numerics else {})
    if implementation.prepare is not None:
        weights = {n: kwargs[n] for n, arg in call.op.args.items() if arg.kind == "weight"}
        kwargs["prepared"] = implementation.prepare(**weights)
    return lambda: implementation.function(**kwargs)


def measure(
    op: Op, size: str, call: Call, outputs: Mapping[str, torch.Tensor], timer: Timer, rates: Machine
) -> Row | str:
    """Time an op's Triton kernels and its reference on one call; or the reason why there are no kernels for it."""
    fast = registry().find(op.name, "triton")
    if fast is None:
        return "has no kernels"
    seen = {**call.args, "numerics": call.numerics}
    if reason := fast.why_not(timer.device, device_arch(timer.device), seen):
        return reason
    us = timer(runner(call, fast))
    reference = timer(runner(call, registry().implementation(op.name, REFERENCE)))
    amount = moved(call, outputs)
    operations = OPERATIONS[op.name](call) if op.name in OPERATIONS else 0
    parts = {"copy": amount / rates.copy, "matmul": operations / rates.matmul}
    bound = max(parts, key=lambda name: parts[name])
    return Row(op.name, size, us, reference, amount, operations, bound, parts[bound] / (us * 1e-6))


def apart(model: Model, device: torch.device, tokens: int) -> Iterator[Call]:
    """Calls of the ops that the forward does not make: other stacks do."""
    config, ops = model.config, registry().ops
    heads = (tokens, config.num_attention_heads)
    o_a, o_b = (torch.randn(*heads, config.head_dim, device=device).to(torch.bfloat16) for _ in range(2))
    lse_a, lse_b = (torch.randn(heads, device=device) for _ in range(2))
    x = torch.randn(tokens, config.hidden_size, device=device).to(torch.bfloat16)
    for name, args in (
        ("act_quant", {"x": x, "group": 128, "dialect": "ocp"}),
        ("merge_attn_states", {"o_a": o_a, "lse_a": lse_a, "o_b": o_b, "lse_b": lse_b, "sink": lse_a[0]}),
    ):
        yield Call(Site(name, name), ops[name], REFERENCE, ops[name].bind((), args), model.numerics)


def sizes(model: Model, device: torch.device, tiny: bool) -> list[tuple[str, int, Callable[[Largest], None]]]:
    """Names of sizes, the tokens of a step, and what runs a forward of each with a listener."""
    plan = Plan() if device.type == "cpu" else Plan.parse("*=triton")  # the same calls, whichever runs them
    context = 144 if tiny else 8192

    def prefilled(tokens: int) -> Callable[[Largest], None]:
        def run(listener: Largest) -> None:
            one = session(model, device, plan, 1, tokens)
            one.listen(listener)
            one.step(Step("prefill0", (Chunk(0, prompt(model.config, tokens)),)))

        return run

    def decoded(batch: int) -> Callable[[Largest], None]:
        def run(listener: Largest) -> None:
            many = session(model, device, plan, batch, context)
            prefill(many, context)
            many.listen(listener)
            many.step(decode_step(many, 0))

        return run

    prefills, batches = ((32, 144), (1, 2)) if tiny else ((4096, 8192), (1, 16, 64))
    return [
        *((f"decode {b} at {context}", b, decoded(b)) for b in batches),
        *((f"prefill {tokens}", tokens, prefilled(tokens)) for tokens in prefills),
    ]


def show(rows: list[Row], rates: Machine) -> None:
    fp8 = "none" if rates.fp8_matmul is None else f"{rates.fp8_matmul / 1e12:.0f} TFLOP/s"
    print(f"in this run: copy {rates.copy / 1e12:.2f} TB/s (read + written), ", end="")
    print(f"bf16 matmul {rates.matmul / 1e12:.0f} TFLOP/s, FP8 matmul {fp8}")
    print(f"{'op':<22} {'size':<20} {'us':>10} {'MB':>9} {'GFLOP':>9}  {'share of':<14} {'torch / ours':>12}")
    for row in sorted(rows, key=lambda r: (r.op, r.size)):
        share = f"{row.share:6.0%} {row.bound}"
        print(
            f"{row.op:<22} {row.size:<20} {row.us:10.1f} {row.bytes / 1e6:9.2f} {row.operations / 1e9:9.2f}  "
            f"{share:<14} {row.reference_us / row.us:12.1f}"
        )


@torch.inference_mode()
def main() -> None:
    device, tiny, file = command_line(__doc__)
    timer, rows, reasons = Timer(device), list[Row](), dict[str, str]()
    print("weights, copy and matmul ...", file=sys.stderr)
    model = flash_model(device, tiny)
    rates = machine(timer, tiny)
    for size, tokens, run in sizes(model, device, tiny):
        print(f"{size} ...", file=sys.stderr)
        largest = Largest()
        run(largest)
        for call in apart(model, device, tokens):
            largest.after(call, call.op.name_outputs(call.op.reference(**call.args)))
        for name, (call, outputs) in largest.calls.items():
            row = measure(call.op, size, replace(call, site=Site(name, name)), outputs, timer, rates)
            if isinstance(row, Row):
                rows.append(row)
            else:
                reasons[name] = row
    show(rows, rates)
    for name in sorted({*registry().ops} - {row.op for row in rows}):
        print(f"not timed: {name}, {reasons.get(name, 'which this forward does not call')}")
    if file:
        found = {**asdict(rates), "environment": environment(device), "rows": [asdict(row) for row in rows]}
        file.write_text(json.dumps(found, default=str, indent=1))


if __name__ == "__main__":
    main()
