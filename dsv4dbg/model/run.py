"""Running a model: a `Session` feeds steps to it and keeps caches; `generate` is greedy decoding on top.

A session is what capture, bisect and the gates drive. It owns the caches of a set of ragged sequences and the order
of steps; which kernels run is the plan's business, what is recorded the listener's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dsv4dbg.errors import DbgError, Untestable
from dsv4dbg.kernels.registry import registry
from dsv4dbg.kernels.table import Listener, OpTable, device_arch
from dsv4dbg.model.batch import Chunk, Step, StepInputs, prepare_step
from dsv4dbg.model.cache import CacheFormat, CacheManager
from dsv4dbg.model.model import Model, Rope
from dsv4dbg.model.workload import Workload
from dsv4dbg.plan import Plan


def open_device(name: str) -> torch.device:
    """``cpu``, ``cuda`` or ``cuda:1`` (HIP devices are named cuda by torch)."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DbgError(f"'{name}' is not a device", "use cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise DbgError(f"device '{name}' is not supported", "use cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise Untestable(f"no GPU '{name}' here: torch {torch.__version__} sees {count}", "use --device cpu")
    return device


@dataclass(frozen=True)
class StepResult:
    """What a step computed.

    Attributes:
        logits: ``f32 [row, vocab]`` of the step's logit rows.
        streams: ``act [token, hc_mult, hidden]`` after the last main layer.
        draft: logits of the MTP block for the same rows, or None when it did not run; ``draft_streams`` its streams.
    """

    inputs: StepInputs
    logits: torch.Tensor
    streams: torch.Tensor
    draft: torch.Tensor | None = None
    draft_streams: torch.Tensor | None = None


class Session:
    """A model with caches for a set of sequences.

    Args:
        max_tokens: for each sequence the largest length that it will reach.
        step_tokens: the largest number of new tokens of one sequence in one step.
        draft: run the MTP block after every step.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_tokens: Sequence[int],
        step_tokens: int,
        device: torch.device,
        plan: Plan | None = None,
        cache_format: CacheFormat | None = None,
        seed: int = 0,
        draft: bool = True,
        placement: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        limit = model.config.max_position_embeddings
        if max(max_tokens, default=0) > limit:
            raise DbgError(
                f"the prompt and what follows make {max(max_tokens)} tokens; the model's maximum is {limit}",
                "shorten the prompt or --decode",
            )
        self.model = model
        self.device = device
        self.manager = CacheManager(
            model.config, max_tokens=max_tokens, step_tokens=step_tokens, device=device, fmt=cache_format, seed=seed,
            placement=placement,
        )  # fmt: skip
        self.rope = Rope.build(model.config, max(max_tokens, default=0) or 1, device)
        self.last: StepResult | None = None
        self._drafted = 0
        self.draft = draft and model.config.num_nextn_predict_layers > 0
        self.ops = OpTable(registry(), plan or Plan(), device, model.numerics, arch=device_arch(device))

    def listen(self, listener: Listener) -> None:
        """Hand every site of the following steps to ``listener``."""
        self.ops = replace(self.ops, listener=listener)

    @torch.inference_mode()
    def step(self, step: Step, following: Callable[[torch.Tensor], Sequence[int]] | None = None) -> StepResult:
        """Feed one step.

        Args:
            following: gets the step's logits and returns for every row the token after it, which the MTP block is
                fed (default: the next token of the chunk, and after its last one the most likely one).
        """
        inputs = prepare_step(step, self.manager, self.model.config.sliding_window, self.device)
        ops, caches = self.ops.in_step(step.name), self.manager.caches
        logits, streams = self.model.forward(ops, inputs, self.rope, caches)
        if not self.draft:
            self.last = StepResult(inputs, logits, streams)
            return self.last
        next_ids = following(logits) if following else shifted(step, most_likely(step, logits))
        after = torch.tensor(list(next_ids), dtype=torch.int64, device=self.device)
        draft, draft_streams = self.model.draft(ops, inputs, self.rope, caches, streams, after)
        self.last = StepResult(inputs, logits, streams, draft, draft_streams)
        return self.last

    @torch.inference_mode()
    def draft_step(self, token: int, next_id: int, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The MTP block alone on one more position of sequence 0, as step ``draft0``, ``draft1``...

        Args:
            token, next_id: the position's token and the one after it.
            streams: ``act [1, hc_mult, hidden]`` of the position before, from this block.
        Returns:
            logits ``f32 [1, vocab]`` and the block's streams.
        """
        step = Step(f"draft{self._drafted}", (Chunk(0, (token,)),))
        self._drafted += 1
        inputs = prepare_step(step, self.manager, self.model.config.sliding_window, self.device)
        after = torch.tensor([next_id], dtype=torch.int64, device=self.device)
        return self.model.draft(self.ops.in_step(step.name), inputs, self.rope, self.manager.caches, streams, after)

    def run(self, workload: Workload, seen: Callable[[StepResult], None] | None = None) -> None:
        """Feed a workload, taking sequences back to what each verify step accepts.

        The MTP block is fed the tokens that truly follow.
        """
        ahead = _tokens_ahead(workload)
        for step, feeds in workload:
            result = self.step(step, following=lambda _, n=step.name: ahead[n])
            for feed in feeds:
                self.manager.rollback(
                    feed.sequence, self.manager.lengths[feed.sequence] - len(feed.tokens) + feed.accepted
                )
            if seen is not None:
                seen(result)


def most_likely(step: Step, logits: torch.Tensor) -> list[int]:
    """For each chunk that has tokens, the most likely token after its last one."""
    if step.all_rows:
        counts = torch.tensor([len(c.tokens) for c in step.chunks], device=logits.device)
        logits = logits[(counts.cumsum(0) - 1)[counts > 0]]
    return logits.argmax(-1).tolist()


def shifted(step: Step, after: Sequence[int]) -> list[int]:
    """For every row the token after it: within a chunk its next token, at its end the given one."""
    chunks = [c for c in step.chunks if c.tokens]
    return [token for chunk, last in zip(chunks, after, strict=True) for token in (*chunk.tokens[1:], last)]


def _tokens_ahead(workload: Workload) -> dict[str, list[int]]:
    """For every row of every step the token that truly follows it (for the last ones of the workload: token 0)."""
    true: list[list[int]] = [[] for _ in range(workload.num_sequences)]
    for step in workload.steps:
        for feed in step.feeds:
            true[feed.sequence] += feed.tokens[: feed.accepted]
    ahead, fed = {}, [0] * workload.num_sequences
    for step, feeds in workload:
        rows: list[int] = []
        for feed in feeds:
            start = fed[feed.sequence]
            following = true[feed.sequence][start + 1 : start + 1 + len(feed.tokens)]
            rows += following + [0] * (len(feed.tokens) - len(following))
            fed[feed.sequence] = start + feed.accepted
        ahead[step.name] = rows
    return ahead


def prefill_steps(prompt: Sequence[int], chunk: int | None, sequence: int = 0) -> list[Step]:
    """A prompt in one piece, or in pieces of ``chunk`` tokens."""
    size = chunk or max(1, len(prompt))
    pieces = [tuple(prompt[i : i + size]) for i in range(0, len(prompt), size)]
    return [Step(f"prefill{n}", (Chunk(sequence, piece),)) for n, piece in enumerate(pieces)]


def generate(
    session: Session, prompt: Sequence[int], decode: int, chunk: int | None = None, stop: int | None = None
) -> list[int]:
    """Greedy completion: the token after the prompt, then one for each of at most ``decode`` decode steps."""
    if not prompt:
        raise DbgError("the prompt is empty", "give --prompt TEXT or --tokens IDS")
    steps = prefill_steps(prompt, chunk)
    result = None
    for number, step in enumerate(steps):
        upcoming = steps[number + 1].chunks[0].tokens[:1] if number + 1 < len(steps) else None
        result = session.step(step, following=(lambda _, s=step, t=upcoming: shifted(s, t)) if upcoming else None)
    assert result is not None
    completion = [int(result.logits[-1].argmax())]
    for number in range(decode):
        if completion[-1] == stop:
            break
        result = session.step(Step(f"decode{number}", (Chunk(0, (completion[-1],)),)))
        completion.append(int(result.logits[-1].argmax()))
    return completion


def speculate(
    session: Session, prompt: Sequence[int], steps: int, count: int, drafts: Sequence[int] | None = None,
    chunk: int | None = None, stop: int | None = None,
) -> tuple[list[int], list[int]]:  # fmt: skip
    """Greedy completion by verify steps of ``count`` tokens: the last token and ``count - 1`` drafts.

    Args:
        drafts: token ids to propose, ``count - 1`` for each step; without them the MTP block drafts.

    Returns:
        the completion, and how many of each step's tokens were accepted. The completion is that of `generate`.
    """
    if drafts is None and not session.draft:
        raise DbgError("the model has no MTP block to draft with", "give token ids with --drafts FILE")
    given = iter(drafts or ())
    completion = generate(session, prompt, 0, chunk)
    assert session.last is not None
    proposed = _propose(session, session.last, -1, completion[-1], count - 1) if drafts is None else []
    accepted: list[int] = []
    for number in range(steps):
        if completion[-1] == stop:
            break
        if drafts is not None:
            proposed = list(itertools.islice(given, count - 1))
        fed = (completion[-1], *proposed)
        start, best = session.manager.lengths[0], list[int]()

        def following(logits: torch.Tensor, fed: tuple[int, ...] = fed, best: list[int] = best) -> list[int]:
            best += logits.argmax(-1).tolist()
            return _corrected(fed, best)

        result = session.step(Step(f"verify{number}", (Chunk(0, fed),), all_rows=True), following)
        if not best:  # no MTP block ran
            best += result.logits.argmax(-1).tolist()
        kept = _agreed(fed, best)
        session.manager.rollback(0, start + kept)
        completion += best[:kept]
        accepted.append(kept)
        if drafts is None:
            proposed = _propose(session, result, kept - 1, completion[-1], count - 1)
    return completion, accepted


def _agreed(fed: Sequence[int], best: Sequence[int]) -> int:
    """How many fed tokens stay: the first, and drafts as long as each is what the model would have said."""
    kept = 1
    while kept < len(fed) and fed[kept] == best[kept - 1]:
        kept += 1
    return kept


def _corrected(fed: Sequence[int], best: Sequence[int]) -> list[int]:
    """The token after each row: the next one fed, but after the last accepted row what the model says."""
    following, kept = [*fed[1:], best[-1]], _agreed(fed, best)
    following[kept - 1] = best[kept - 1]
    return following


def _propose(session: Session, result: StepResult, row: int, token: int, count: int) -> list[int]:
    """``count`` drafts after ``token`` from the MTP block, which goes on from its own streams after the first.

    Args:
        row: row of ``result`` that predicted ``token``.
    """
    assert result.draft is not None
    assert result.draft_streams is not None
    drafts, streams = [int(result.draft[row].argmax())], result.draft_streams[[row]]
    start = session.manager.lengths[0]
    for _ in range(count - 1):
        logits, streams = session.draft_step(token, drafts[-1], streams)
        token = drafts[-1]
        drafts.append(int(logits[-1].argmax()))
    session.manager.rollback(0, start)
    return drafts[:count]
