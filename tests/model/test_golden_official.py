"""Our forward against recordings of the official inference code on the same weights (data/README.md).

Every sublayer is fed the recorded inputs (`golden_forward`), so each is judged alone. Three layers of evidence:

* Run with the two traits of the recording program (`Along.as_recorded`), our sublayers give the recorded bits, but for
  the few values that lie within float32 accumulation error of a rounding tie.
* The shipped reference then differs from the recordings as it differs from that variant of itself, and by no more
  than the roundings involved allow. A bf16 value that falls to the other side is off by at most 2^-8 of its size.
  An FP8 quantiser behind it has steps of at most 2^-3 of a value, so it passes on a difference d of a value x as a
  whole step with probability |d| / step: in the mean square |d| 2^-3 |x| <= 2^-11 x^2. Quantisers with independent
  flips add in squares; gains of the layers in between are about 1.
* What can be equal is equal: routing, selections up to exact ties, the answers.

All of it holds for any order of float32 sums: with float64 sums, and with sums cut into 16 or 32 terms, too.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from golden_forward import DATA, Along, Recording, official_caches, open_tiny

from dsv4dbg.kernels.numerics import HF, OFFICIAL
from dsv4dbg.model.run import Session, generate

CPU = torch.device("cpu")
STEP = 2**-5.5  # root mean square, relative: one FP8 quantiser whose inputs are all off by one bf16 step
QUANTIZERS = {"attn": 3, "ffn": 1}  # on unequal inputs: wq_b, cache records, wo_b; w2
FORCED = ("paris", "random-131")
# Share of tokens with the recorded bits in all channels. Here 0.97 to 1. In another order of sums 0.85: an entry that
# one tie has moved reaches all later tokens of its layer. With a rounding moved below 0.6.
SAME = 0.75


@pytest.fixture(scope="module")
def model():
    return open_tiny()


@pytest.fixture(scope="module")
def recordings() -> dict[str, Recording]:
    return {name: Recording(DATA / f"{name}.safetensors") for name in (*FORCED, "needle-520")}


@pytest.fixture(scope="module")
def runs(model, recordings) -> dict[tuple[str, bool], Along]:
    """Forced runs by (recording, as recorded)."""
    return {
        (name, as_recorded): Along(model, recordings[name], as_recorded=as_recorded).run()
        for name in FORCED
        for as_recorded in (True, False)
    }


def joined(run: Along, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Our and the recorded outputs of all layers and steps, float64 ``[token, channel]``."""
    pairs = [(ours.flatten(1), theirs.flatten(1)) for *_, ours, theirs in run.judged(part)]
    return tuple(torch.cat(side).double() for side in zip(*pairs, strict=True))


def same_tokens(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours == theirs).flatten(1).all(1).double().mean())


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Per token ``|ours - theirs| / |theirs|``."""
    ours, theirs = ours.double().flatten(1), theirs.double().flatten(1)
    return (ours - theirs).norm(dim=1) / theirs.norm(dim=1)


def spread(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("name", FORCED)
@pytest.mark.parametrize("part", ["attn", "ffn"])
def test_recorded_bits(runs, name, part):
    ours, theirs = joined(runs[name, True], part)
    assert same_tokens(ours, theirs) > SAME
    # what is left are single values at a tie: a small part of what all values off by one step would make
    assert spread(ours, theirs) < 0.2 * STEP * QUANTIZERS[part] ** 0.5


@pytest.mark.parametrize("name", FORCED)
def test_recorded_streams(runs, name):
    ours, theirs = joined(runs[name, True], "streams")
    assert (ours == theirs).double().mean() > 0.999
    assert relative(ours, theirs).max() < 2**-8


@pytest.mark.parametrize("as_recorded", [True, False])
def test_recorded_logits(runs, as_recorded):
    """256 float32 products each; ours and theirs differ by the order of their sums, and by that of the head mix."""
    run = runs["paris", as_recorded]
    for name, step, _ in run.recording.steps():
        assert spread(run.results[name].logits[0], run.recording.get(f"{step}.logits")) < 256**0.5 * 2**-20


@pytest.mark.parametrize("name", FORCED)
@pytest.mark.parametrize("as_recorded", [True, False])
def test_choices(runs, name, as_recorded):
    run = runs[name, as_recorded]
    assert not run.wrong
    for step, layer, *_ in run.judged("ffn"):
        sites = run.sites.outputs["prefill0" if step == "prefill" else step]
        router = sites.get(f"L{layer}.ffn.moe_router") or sites[f"L{layer}.ffn.hash_router"]
        experts, order = router["ids"].sort(1)
        theirs, their_order = run.recording.get(f"{step}.layers.{layer}.ffn.gate.indices").int().sort(1)
        assert torch.equal(experts, theirs), (step, layer)
        weights = run.recording.get(f"{step}.layers.{layer}.ffn.gate.weights").gather(1, their_order)
        # single channels of the router's input may be off by a bf16 step
        torch.testing.assert_close(router["weights"].gather(1, order), weights, rtol=2**-8, atol=0)


@pytest.mark.parametrize("name", FORCED)
@pytest.mark.parametrize("part", ["attn", "ffn"])
def test_shipped_reference_is_as_near_as_its_own_variant(runs, name, part):
    shipped, theirs = joined(runs[name, False], part)
    variant, _ = joined(runs[name, True], part)
    assert relative(shipped, theirs).max() < QUANTIZERS[part] ** 0.5 * STEP
    assert spread(shipped, theirs) <= 1.2 * spread(shipped, variant) + 0.2 * STEP


@pytest.mark.parametrize("name", FORCED)
def test_differences_have_no_direction(runs, name):
    """No bias of sign, no scale, no channel group that is off more than others."""
    shipped, theirs = joined(runs[name, False], "attn")
    difference = shipped - theirs
    unequal = difference != 0
    larger = int(((difference * theirs.sign()) > 0).sum())
    count = int(unequal.sum())
    assert abs(larger - count / 2) < 5 * (count / 4) ** 0.5, f"{larger} of {count} differences are outward"
    tokens = int(unequal.any(1).sum())
    scale = float((shipped * theirs).sum() / theirs.square().sum()) - 1
    # a token's difference stems from a few flipped codes, so tokens count, not elements
    assert abs(scale) < 5 * spread(shipped, theirs) / tokens**0.5
    groups = difference.square().unflatten(1, (8, 32)).mean((0, 2)) / theirs.square().unflatten(1, (8, 32)).mean((0, 2))
    assert groups.max() < 4 * groups.median()


@pytest.mark.parametrize("name", FORCED)
@pytest.mark.parametrize("as_recorded", [True, False])
def test_caches(runs, name, as_recorded):
    """Window ring, compressed entries, indexer keys: recorded bits but for single codes; states as float32 allows."""
    run = runs[name, as_recorded]
    for layer in sorted({layer for _, layer, *_ in run.judged("attn")}):
        theirs = {
            key.split(".", 3)[3]: value
            for key, value in run.recording.tensors.items()
            if key.startswith(f"final.layers.{layer}.")
        }
        ours = official_caches(run.session, layer)
        ours["kv_cache"] = torch.cat((ours["window"], ours.get("entries", ours["window"][:0])))
        ours["indexer.kv_cache"] = ours.pop("index", None)
        for key, recorded in theirs.items():
            if key in ("kv_state", "score_state"):
                recorded = recorded[: len(ours[key])]  # rows beyond hold tokens of an earlier window
                # sums of 256 products, of which a channel (of up to twice the usual size) may be off by a bf16 step
                bound = 2 * 256**-0.5 * 2**-8 * recorded.abs().max()
                assert (ours[key] - recorded).abs().max() <= bound, (layer, key)
            else:
                assert ours[key].shape == recorded.shape
                # a pair of rope channels turns together; another order of sums moves a few more
                assert (ours[key] != recorded).sum() <= 2 + 2**-11 * recorded.numel(), (layer, key)
                assert relative(ours[key], recorded).max() < 2**-4, (layer, key)


def plain_share(run: Along) -> float:
    """Where no trait of the recording program shows: share of the recorded bits in layer 0, first 64 tokens."""
    ours, theirs = next((o, t) for step, layer, o, t in run.judged("attn") if (step, layer) == ("prefill", 0))
    return same_tokens(ours[:64], theirs[:64])


def test_shipped_bits_where_no_trait_shows(runs):
    """One block of keys, no tail of a vector register."""
    assert plain_share(runs["random-131", False]) > SAME


SEEN_IN = {
    "mhc_mix": "streams", "head_norm": "plain", "attention": "plain", "rope_table": "attn", "compressor_pool": "attn",
    "compressor_gemm": "attn", "router": "ffn", "experts": "ffn", "routing_weight": "ffn", "combine": "ffn",
    "logits": "logits",
}  # fmt: skip


@pytest.mark.parametrize("switch", SEEN_IN)
def test_a_moved_rounding_is_seen(recordings, switch):
    """The bits are sharp enough: with one switch at transformers' value they are not the recorded ones any more."""
    assert getattr(HF, switch) != getattr(OFFICIAL, switch)
    numerics = replace(OFFICIAL, name=switch, **{switch: getattr(HF, switch)})
    part = SEEN_IN[switch]
    if part == "plain":
        assert plain_share(Along(open_tiny(numerics), recordings["random-131"], as_recorded=False).run(steps=1)) < 0.65
        return
    run = Along(open_tiny(numerics), recordings["paris"]).run(steps=2)
    if part == "logits":
        assert not torch.equal(run.results["prefill0"].logits[0], recordings["paris"].get("prefill.logits"))
    else:
        assert min(same_tokens(ours, theirs) for *_, ours, theirs in run.judged(part)) < 0.5


def test_every_switch_is_listed():
    """Those left out change no bit here: float32 order, 1e-20, quantised caches, scores that pick the same entries."""
    differing = {f.name for f in fields(HF) if getattr(HF, f.name) != getattr(OFFICIAL, f.name)} - {"name"}
    silent = {"mhc_norm", "router_eps", "kv_quant", "index_quant", "index_hadamard", "index_score"}
    assert differing == set(SEEN_IN) | silent


@pytest.mark.parametrize("name", ["paris", "needle-520"])
def test_answers(model, recordings, name):
    """Greedy decoding from the prompt alone."""
    recording = recordings[name]
    count = len(recording.decoded)
    session = Session(model, max_tokens=[len(recording.prompt) + count], step_tokens=512, device=CPU, draft=False)
    assert generate(session, recording.prompt, count - 1) == recording.decoded


@pytest.mark.parametrize("name", FORCED)
def test_logits_of_a_free_run(model, recordings, name):
    """Only the tokens are the recorded ones; what all quantisers of six layers may do adds in squares."""
    run = Along(model, recordings[name], forced=False, as_recorded=False).run()
    bound = (model.config.num_hidden_layers * sum(QUANTIZERS.values())) ** 0.5 * STEP
    for name, step, _ in run.recording.steps():
        theirs = run.recording.get(f"{step}.logits")
        if theirs is not None:
            assert spread(run.results[name].logits[0], theirs) < bound, step


def test_free_run_of_the_long_prompt(model, recordings):
    """506 tokens: a window that slides, twice as many entries as the indexer may select.

    The first CSA layer sees what two layers' quantisers have made of rounding; where it selects other entries, their
    scores lie within that, and for most tokens it does not.
    """
    recording = recordings["needle-520"]
    free = Along(model, recording, forced=False).run(steps=1)
    sites = free.sites.outputs["prefill0"]
    rows = recording.get("rows").long()
    for part in ("attn", "ffn"):
        assert same_tokens(sites[f"L0.{part}"]["y"][rows], recording.get(f"prefill.layers.0.{part}")) > SAME
    member = recording.selected("prefill", 2)
    logits = sites["L2.attn.indexer.indexer_logits"]["logits"]
    error = (2 * sum(QUANTIZERS.values())) ** 0.5 * STEP
    unlike = 0
    for t, chosen in enumerate(sites["L2.attn.indexer.indexer_topk"]["indices"]):
        ours, theirs = set(chosen[chosen >= 0].tolist()), set(member[t].nonzero().flatten().tolist())
        assert len(ours) == len(theirs) == min(64, (t + 1) // 4)
        if ours != theirs:
            unlike += 1
            gap = logits[t, sorted(ours - theirs)].max() - logits[t, sorted(theirs - ours)].min()
            assert gap <= 2 * error * logits[t][: (t + 1) // 4].abs().max(), t
    assert unlike < len(member) / 3
