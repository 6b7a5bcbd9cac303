"""One capture from request to trace: open the model, run the prompt, write everything down.

`record` is what ``dsv4dbg capture`` does, and what tests and checks use to make traces.
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dsv4dbg.errors import DbgError
from dsv4dbg.kernels.numerics import profile
from dsv4dbg.kernels.registry import ZOO, load_plugin, registry
from dsv4dbg.model.cache import CacheFormat
from dsv4dbg.model.capture import Capture, cache_specs
from dsv4dbg.model.checkpoint import Checkpoint, open_model
from dsv4dbg.model.environment import environment
from dsv4dbg.model.model import Model
from dsv4dbg.model.run import Session, generate, open_device, speculate
from dsv4dbg.model.weights import ModelWeights
from dsv4dbg.model.workload import Workload, coverage, load_workload, regimes
from dsv4dbg.plan import REFERENCE, Plan
from dsv4dbg.site import BLOCK, Pattern, op_name
from dsv4dbg.trace.writer import TraceWriter


@dataclass(frozen=True)
class Request:
    """What to run and what to keep; see ``dsv4dbg capture --help`` for each."""

    prompt: str | None = None
    tokens: tuple[int, ...] = ()
    chat: bool = False
    decode: int = 4
    verify: int | None = None
    drafts: tuple[int, ...] | None = None
    workload: str | None = None
    chunk: int | None = None
    model: str = "tiny"
    numerics: str = "official"
    plan: Plan = field(default_factory=Plan)
    plugins: tuple[Path, ...] = ()
    sites: tuple[Pattern, ...] = ()
    device: str = "cpu"
    kv_cache: str = "fp8"
    seed: int = 0


@dataclass(frozen=True)
class Recorded:
    """What a capture made.

    Attributes:
        completion: text after the prompt (None when the model has no tokenizer); ``tokens`` are its ids.
        seconds: wall time of the forward with capture; ``capture_seconds`` of it went into writing.
        regimes: for a workload, which regimes of the ops it reaches.
    """

    path: Path
    completion: str | None
    tokens: list[int]
    prompt_tokens: list[int]
    sites: int
    bytes: int
    plan: str
    fallbacks: dict[str, str]
    environment: dict[str, Any]
    seconds: float
    capture_seconds: float
    regimes: dict[str, bool]


def prompt_ids(request: Request, checkpoint: Checkpoint) -> list[int]:
    """Token ids of the request's prompt. A raw prompt gets no BOS."""
    if request.tokens:
        ids = list(request.tokens)
    elif request.prompt:
        tokenizer = checkpoint.tokenizer()
        ids = tokenizer.chat(request.prompt) if request.chat else tokenizer.encode(request.prompt)
    else:
        ids = []
    if not ids:
        raise DbgError("the prompt is empty", "give --prompt TEXT, --prompt-file FILE or --tokens IDS")
    vocab = checkpoint.config.vocab_size
    wrong = [i for i in ids if not 0 <= i < vocab]
    if wrong:
        raise DbgError(f"token {wrong[0]} is outside the model's vocabulary of {vocab:,}")
    return ids


def check_names(plan: Plan, patterns: Sequence[Pattern]) -> None:
    """Refuse op patterns that match no op, plans that name implementations which no op has, a zoo case everywhere."""
    found = registry()
    for pattern in (*patterns, *(p for p, _ in plan.rules)):
        ops = _ops(pattern)
        if ops is not None and not ops:
            raise DbgError(f"'{pattern}' names no op", f"ops: {', '.join([*sorted(found.ops), BLOCK])}")
    for pattern, name in plan.rules:
        if name == REFERENCE:
            continue
        if name.startswith(ZOO) and pattern.text == "*":
            raise DbgError(f"'{pattern}={name}': a zoo case is for sites that are named", f"such as 'op:OP={name}'")
        ops = _ops(pattern) or list(found.ops)
        if not any(found.find(op, name) for op in ops):
            known = sorted({n for o, n in found.implementations if o in ops})
            broken = [found.broken(op, name) for op in ops]
            reason = next(filter(None, broken), "no such implementation")
            raise DbgError(f"plan rule '{pattern}={name}': {reason}", f"there is: {', '.join(known)}")


def _ops(pattern: Pattern) -> list[str] | None:
    """Ops that an ``op:`` pattern names; None for a pattern by site name."""
    if not pattern.text.startswith("op:"):
        return None
    text = op_name(pattern.text.removeprefix("op:"))
    return [op for op in [*registry().ops, BLOCK] if fnmatch.fnmatchcase(op, text)]


def load_model(request: Request) -> tuple[Checkpoint, Model, torch.device]:
    """The model of a request on its device."""
    device = open_device(request.device)
    checkpoint = open_model(request.model)
    return checkpoint, Model(checkpoint.config, ModelWeights(checkpoint, device), profile(request.numerics)), device


def open_workload(name: str, checkpoint: Checkpoint) -> Workload:
    """``coverage``, or a workload file."""
    if name == "coverage":
        return coverage(checkpoint.config)
    return load_workload(Path(name), checkpoint.config.vocab_size)


def open_session(
    request: Request, model: Model, device: torch.device, ids: Sequence[int], workload: Workload | None = None
) -> Session:
    """A session with room for a workload, or for the prompt and what is decoded after it."""
    per_step = request.verify or 1
    room = len(ids) + (request.decode + 1) * per_step
    return Session(
        model, max_tokens=workload.max_tokens if workload else [room],
        step_tokens=workload.step_tokens if workload else max(request.chunk or len(ids), per_step), device=device,
        plan=request.plan, cache_format=CacheFormat.parse(request.kv_cache), seed=request.seed,
    )  # fmt: skip


def run_request(
    request: Request, session: Session, ids: Sequence[int], stop: int | None, workload: Workload | None = None
) -> list[int]:
    """Run what a request asks for; returns the completion's tokens (none for a workload)."""
    if workload is not None:
        session.run(workload)
        return []
    if request.verify is None:
        return generate(session, ids, request.decode, request.chunk, stop)
    return speculate(session, ids, request.decode, request.verify, request.drafts, request.chunk, stop)[0]


def record(request: Request, path: Path) -> Recorded:
    """Run a request and write its trace to ``path``.

    Raises:
        DbgError: one sentence on what is wrong with the request, the model or the path; nothing is left behind by a
            request that never ran.
    """
    for plugin in request.plugins:
        load_plugin(plugin)
    check_names(request.plan, request.sites)
    checkpoint, model, device = load_model(request)
    workload = open_workload(request.workload, checkpoint) if request.workload else None
    ids = [] if workload else prompt_ids(request, checkpoint)
    session = open_session(request, model, device, ids, workload)
    where = environment(device)
    manifest = {
        "model": request.model,
        "config": checkpoint.config.to_json(),
        "weights": checkpoint.fingerprint,
        "numerics": request.numerics,
        "plan": str(request.plan),
        "workload": workload.to_json() if workload else _steps(request),
        "prompt": request.prompt,
        "prompt_tokens": ids,
        "kv_cache": request.kv_cache,
        "seed": request.seed,
        "sites": [str(p) for p in request.sites],
        "environment": where,
    }
    stop = None if request.decode == 0 else checkpoint.config.eos_token_id
    with TraceWriter(path, manifest, cache_specs(session.manager)) as writer:
        capture = Capture(writer, session.manager, model.weights, request.sites)
        session.listen(capture)
        begin = time.perf_counter()
        tokens = run_request(request, session, ids, stop, workload)
        seconds = time.perf_counter() - begin
        completion = _text(checkpoint, ids, tokens) if tokens else None
        fallbacks = {f"{op}={name}": reason for (op, name), reason in session.ops.fallbacks.items()}
        writer.close({"completion": completion, "completion_tokens": tokens, "fallbacks": fallbacks})
    if not capture.kept:
        path.unlink()
        shown = ", ".join(str(p) for p in request.sites)
        raise DbgError(f"no site matches {shown}", f"sites look like {', '.join(capture.examples)}")
    return Recorded(
        path, completion, tokens, ids, capture.kept, path.stat().st_size, str(request.plan), fallbacks, where, seconds,
        capture.seconds, regimes(checkpoint.config, workload) if workload else {},
    )  # fmt: skip


def measure(request: Request) -> float:
    """Seconds that the request's forward takes without capture."""
    checkpoint, model, device = load_model(request)
    workload = open_workload(request.workload, checkpoint) if request.workload else None
    ids = [] if workload else prompt_ids(request, checkpoint)
    session = open_session(request, model, device, ids, workload)
    begin = time.perf_counter()
    run_request(request, session, ids, checkpoint.config.eos_token_id, workload)
    return time.perf_counter() - begin


def _steps(request: Request) -> dict[str, Any]:
    """What a prompt's run was fed beside the prompt."""
    return {
        "decode": request.decode, "verify": request.verify, "chunk": request.chunk,
        "drafts": list(request.drafts) if request.drafts is not None else None,
    }  # fmt: skip


def _text(checkpoint: Checkpoint, prompt: list[int], tokens: list[int]) -> str | None:
    """What the tokens add to the prompt's text."""
    if checkpoint.tokenizer_dir is None:
        return None
    tokenizer = checkpoint.tokenizer()
    before = tokenizer.decode(prompt)
    return tokenizer.decode([*prompt, *tokens])[len(before) :]
