"""The shipped model answers under official numerics: capitals, sums, a needle; all prompts as one ragged batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dsv4dbg.kernels.numerics import profile
from dsv4dbg.model.batch import Chunk, Step
from dsv4dbg.model.checkpoint import open_model
from dsv4dbg.model.model import Model
from dsv4dbg.model.run import Session
from dsv4dbg.model.weights import ModelWeights

CPU = torch.device("cpu")
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Germany": "Berlin", "Spain": "Madrid", "Portugal": "Lisbon",
    "Austria": "Vienna", "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Poland": "Warsaw", "Hungary": "Budapest", "Ireland": "Dublin", "Egypt": "Cairo",
    "China": "Beijing", "Russia": "Moscow", "Canada": "Ottawa", "Cuba": "Havana", "Peru": "Lima", "Kenya": "Nairobi",
    "Turkey": "Ankara", "Belgium": "Brussels",
}  # fmt: skip
SUMS = [(2, 3), (0, 0), (1, 1), (4, 5), (7, 8), (9, 9), (10, 10), (6, 0), (3, 10), (8, 4), (5, 6)]
FILLER = "The grey river crosses the old market. A quiet baker paints the tall window. "


@pytest.fixture(scope="module")
def checkpoint():
    return open_model("tiny")


def answers(checkpoint, prompts: Sequence[str], tokens: int, numerics: str = "official") -> list[str]:
    """Greedy completions of ragged prompts, decoded side by side."""
    tokenizer = checkpoint.tokenizer()
    ids = [tokenizer.encode(p) for p in prompts]
    model = Model(checkpoint.config, ModelWeights(checkpoint, CPU), profile(numerics))
    session = Session(
        model, max_tokens=[len(i) + tokens for i in ids], step_tokens=max(map(len, ids)), device=CPU, draft=False
    )
    step = Step("prefill0", tuple(Chunk(s, tuple(i)) for s, i in enumerate(ids)))
    found: list[list[int]] = [[] for _ in prompts]
    for number in range(tokens):
        best = session.step(step).logits.argmax(-1).tolist()
        for completion, token in zip(found, best, strict=True):
            completion.append(token)
        step = Step(f"decode{number}", tuple(Chunk(s, (t,)) for s, t in enumerate(best)))
    return [tokenizer.decode([*i, *f])[len(tokenizer.decode(i)) :] for i, f in zip(ids, found, strict=True)]


def test_capitals(checkpoint) -> None:
    found = answers(checkpoint, [f"The capital of {country} is" for country in CAPITALS], 4)
    wrong = {c: f for (c, city), f in zip(CAPITALS.items(), found, strict=True) if not f.strip().startswith(city)}
    assert len(CAPITALS) >= 20
    assert not wrong


def test_sums(checkpoint) -> None:
    found = answers(checkpoint, [f"Question: Count {a} plus {b}. Answer:" for a, b in SUMS], 3)
    wrong = {f"{a} + {b}": f for (a, b), f in zip(SUMS, found, strict=True) if f.split("<")[0].strip() != str(a + b)}
    assert len(SUMS) >= 10
    assert not wrong


def test_a_needle_in_about_500_tokens(checkpoint) -> None:
    begin = "<｜begin▁of▁sentence｜>"
    prompt = f"{begin}The secret code is KITE_7913_ORBIT. {FILLER * 22}Question: What is the secret code? Answer:"
    count = len(checkpoint.tokenizer().encode(prompt))
    assert 450 <= count <= 560
    (found,) = answers(checkpoint, [prompt], 9)
    assert found.strip().startswith("KITE_7913_ORBIT")
