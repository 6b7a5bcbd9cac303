"""compress_insert: any split into calls gives the same bytes, what an entry is made of, switches, transformers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACompressor, DeepseekV4HCACompressor

from dsv4dbg.kernels import formats, paged, samples
from dsv4dbg.kernels.attention.compress_insert import compress_insert, compressor_example, pool, tree_sum
from dsv4dbg.kernels.dims import TINY
from dsv4dbg.kernels.numerics import HF, OFFICIAL, Numerics
from dsv4dbg.kernels.oracle import to_numpy
from dsv4dbg.kernels.paged import Cache
from dsv4dbg.pages import PageLayout, index_layout, kv_layout, state_layout

C, R, EPS = 128, 64, 1e-6
TABLE = samples.cos_sin(1200, R, 160000.0)
KINDS = {  # name -> ratio, overlap, layout of entries
    "csa": (4, True, kv_layout("fp8", "ocp", C, R, 4)),
    "hca": (128, False, kv_layout("fp8", "fnuz", C, R, 2)),
    "index": (4, True, index_layout("fp4", "", C, 4, 576)),
    "index fp8": (4, True, index_layout("fp8", "ocp", C, 4, 576)),
    "csa bf16": (4, True, kv_layout("bf16", "", C, R, 4)),
}
kinds = pytest.mark.parametrize("kind", KINDS)
EXACT = replace(OFFICIAL, kv_quant=False, index_quant=False, index_hadamard=False)


@dataclass
class Compressor:
    """Weights, caches and tables of one compressor for sequences of at most ``length`` tokens."""

    ratio: int
    overlap: bool
    layout: PageLayout
    length: int = 300
    sequences: int = 1
    seed: int = 0
    fill: int = 0xFF
    act: str = "bf16"
    numerics: Numerics = OFFICIAL
    cos_sin: torch.Tensor = field(default_factory=lambda: TABLE)
    state: Cache = field(init=False)
    entries: Cache = field(init=False)

    def __post_init__(self) -> None:
        width = C * (2 if self.overlap else 1)
        weights, places = np.random.default_rng(7), np.random.default_rng(self.seed)
        self.ape, self.weight = samples.normal(weights, self.ratio, width), samples.norm_weight(weights, C)
        state = state_layout(width, 8, 576)
        self.state_table, pages = samples.block_table(places, [self.length] * self.sequences, 8)
        self.state = Cache("state", torch.full((pages, state.page_bytes), self.fill, dtype=torch.uint8), state)
        lengths = [self.length // self.ratio] * self.sequences
        self.table, pages = samples.block_table(places, lengths, self.layout.entries)
        self.entries = Cache(
            "e", torch.full((pages, self.layout.page_bytes), self.fill, dtype=torch.uint8), self.layout
        )

    def feed(
        self, kv: torch.Tensor, gate: torch.Tensor, positions: torch.Tensor, sequence: int | torch.Tensor = 0
    ) -> None:
        sequence = torch.as_tensor(sequence, dtype=torch.int32).expand(len(positions))
        slots = torch.full_like(positions, -1)
        full = (positions + 1) % self.ratio == 0
        slots[full] = self.entry_slots(positions[full] // self.ratio, sequence[full])
        compress_insert(
            kv, gate, self.ape, self.weight, positions, sequence, self.cos_sin, self.state,
            samples.table_slots(self.state_table, sequence, positions, 8), self.state_table, self.entries, slots,
            ratio=self.ratio, eps=EPS, act=self.act, numerics=self.numerics,
        )  # fmt: skip

    def entry_slots(self, entries: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
        return samples.table_slots(self.table, sequence, entries, self.layout.entries)

    def rows(self, count: int, sequence: int = 0) -> torch.Tensor:
        """The first ``count`` entries of a sequence, decoded."""
        slots = self.entry_slots(torch.arange(count), torch.full((count,), sequence))
        return paged.read(self.entries, slots, torch.float32)


def make(kind: str, **options) -> Compressor:
    return Compressor(*KINDS[kind], **options)


def plain(kind: str, **options) -> Compressor:
    """The same compressor with a float32 cache and float32 activations, nothing quantised or rotated by Hadamard."""
    ratio, overlap, layout = KINDS[kind]
    layout = replace(layout, format="f32", dialect="", fields=(C * 4,))
    return Compressor(ratio, overlap, layout, act="f32", numerics=EXACT, **options)


def inputs(compressor: Compressor, tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    rng, width = np.random.default_rng(seed), compressor.ape.shape[1]
    return samples.normal(rng, tokens, width), samples.normal(rng, tokens, width, scale=2.0)


def chunks(tokens: int, sizes: list[int]) -> list[torch.Tensor]:
    """Positions 0 .. tokens - 1 in chunks of ``sizes``, repeated."""
    cuts, i = [0], 0
    while cuts[-1] < tokens:
        cuts.append(min(tokens, cuts[-1] + sizes[i % len(sizes)]))
        i += 1
    return [torch.arange(a, b) for a, b in pairwise(cuts)]


# any split into calls gives the same bytes


@pytest.mark.parametrize("kind", ["csa", "hca", "index"])
@pytest.mark.parametrize("sizes", [[1], [5, 2], [129, 1, 1], [127, 2, 4]], ids=lambda s: "+".join(map(str, s)))
def test_every_split_into_calls_gives_the_same_bytes(kind, sizes):
    tokens = 261
    whole, split = make(kind), make(kind)
    kv, gate = inputs(whole, tokens)
    whole.feed(kv, gate, torch.arange(tokens))
    for part in chunks(tokens, sizes):
        split.feed(kv[part], gate[part], part)
    assert torch.equal(whole.state.data, split.state.data)
    assert torch.equal(whole.entries.data, split.entries.data)
    assert whole.rows(tokens // whole.ratio).isfinite().all()


@pytest.mark.parametrize("kind", ["csa", "hca", "index"])
def test_every_start_mod_4_and_around_128(kind):
    """One call for the first n tokens, one for the rest, for n at all positions mod 4 and around multiples of 128."""
    whole = make(kind)
    kv, gate = inputs(whole, 262)
    whole.feed(kv, gate, torch.arange(262))
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 126, 127, 128, 129, 130, 255, 256, 257):
        split = make(kind)
        split.feed(kv[:n], gate[:n], torch.arange(n))
        split.feed(kv[n:], gate[n:], torch.arange(n, 262))
        assert torch.equal(whole.state.data, split.state.data)
        assert torch.equal(whole.entries.data, split.entries.data)


@kinds
def test_sequences_and_row_order_do_not_matter(kind):
    """Several sequences in one call, rows shuffled, equal each sequence alone."""
    lengths = [261, 3, 128, 0, 130]
    batch, alone = make(kind, sequences=5), make(kind, sequences=5)
    data = [inputs(batch, n, seed=n) for n in lengths]
    for s, (n, (kv, gate)) in enumerate(zip(lengths, data, strict=True)):
        alone.feed(kv, gate, torch.arange(n), s)
    order = torch.from_numpy(np.random.default_rng(3).permutation(sum(lengths)))
    kv, gate = (torch.cat(parts)[order] for parts in zip(*data, strict=True))
    positions = torch.cat([torch.arange(n) for n in lengths])[order]
    sequence = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))[order]
    batch.feed(kv, gate, positions, sequence)
    assert torch.equal(batch.state.data, alone.state.data)
    assert torch.equal(batch.entries.data, alone.entries.data)


@pytest.mark.parametrize("kind", ["csa", "hca", "index"])
@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_rejected_drafts_leave_no_trace(kind, accepted):
    """Steps of 4 tokens of which the last are rejected and fed again as others: bytes as if they had never been."""
    clean, drafted = make(kind), make(kind)
    kv, gate = inputs(clean, 140)
    wrong = inputs(clean, 140, seed=9)
    clean.feed(kv[:136], gate[:136], torch.arange(136))
    start = 0
    if kind == "hca":
        start = 117
        drafted.feed(kv[:start], gate[:start], torch.arange(start))
    while start < 136:
        part, true = torch.arange(start, start + 4), (torch.arange(4) < accepted)[:, None]
        drafted.feed(torch.where(true, kv[part], wrong[0][part]), torch.where(true, gate[part], wrong[1][part]), part)
        start += accepted
    last = torch.arange(136, start + 4 - accepted)
    for compressor in (clean, drafted):  # what lies beyond the accepted tokens is the last step's own business
        compressor.feed(kv[last], gate[last], last)
    assert torch.equal(clean.state.data, drafted.state.data)
    assert torch.equal(clean.entries.data, drafted.entries.data)


@kinds
def test_repeating_the_last_token_changes_nothing(kind):
    """ape enters the state once, and reading the state leaves it as it is."""
    compressor = make(kind)
    kv, gate = inputs(compressor, 256)
    compressor.feed(kv, gate, torch.arange(256))
    before = compressor.state.data.clone(), compressor.entries.data.clone()
    compressor.feed(kv[255:], gate[255:], torch.tensor([255]))
    assert torch.equal(compressor.state.data, before[0])
    assert torch.equal(compressor.entries.data, before[1])


@kinds
def test_physical_pages_do_not_matter(kind):
    a, b = make(kind, seed=0), make(kind, seed=1)
    kv, gate = inputs(a, 256)
    for compressor in (a, b):
        compressor.feed(kv, gate, torch.arange(256))
    assert not torch.equal(a.table, b.table) or a.ratio == 128
    assert not torch.equal(a.state_table, b.state_table)
    assert torch.equal(a.rows(256 // a.ratio), b.rows(256 // b.ratio))


# what is written


@kinds
def test_one_entry_when_a_window_completes_and_none_before(kind):
    compressor = make(kind)
    kv, gate = inputs(compressor, 260)
    start = compressor.ratio - 4
    compressor.feed(kv[:start], gate[:start], torch.arange(start))
    assert (compressor.entries.data == 0xFF).all()
    for p in range(start, start + 14):
        before = compressor.entries.data.clone()
        compressor.feed(kv[p : p + 1], gate[p : p + 1], torch.tensor([p]))
        changed = (compressor.entries.data != before).any()
        assert changed == ((p + 1) % compressor.ratio == 0), p


@kinds
def test_state_row_is_kv_and_gate_with_ape(kind):
    compressor = make(kind)
    kv, gate = inputs(compressor, 131)
    compressor.feed(kv, gate, torch.arange(131))
    slots = samples.table_slots(compressor.state_table, torch.zeros(131), torch.arange(131), 8)
    row = paged.read(compressor.state, slots, torch.float32)
    assert torch.equal(row, torch.cat((kv, gate + compressor.ape[torch.arange(131) % compressor.ratio]), 1))


def test_bf16_inputs_are_stored_exactly():
    compressor = make("csa")
    kv, gate = (x.to(torch.bfloat16) for x in inputs(compressor, 8))
    compressor.feed(kv, gate, torch.arange(8))
    slots = samples.table_slots(compressor.state_table, torch.zeros(8), torch.arange(8), 8)
    row = paged.read(compressor.state, slots, torch.float32)
    assert torch.equal(row[:, : 2 * C], kv.float())
    assert torch.equal(row[:, 2 * C :], gate.float() + compressor.ape.repeat(2, 1))


# what an entry is made of


def affected(kind: str, token: int, columns: slice) -> list[int]:
    """Entries of 16 windows that change when ``columns`` of one token's kv change."""
    a, b = plain(kind), plain(kind)
    kv, gate = inputs(a, 64)
    a.feed(kv, gate, torch.arange(64))
    kv[token, columns] += 1.0
    b.feed(kv, gate, torch.arange(64))
    return (a.rows(16) != b.rows(16)).any(1).nonzero().flatten().tolist()


@pytest.mark.parametrize("token", [0, 3, 4, 6, 13, 59])
def test_first_columns_go_to_the_next_entry_last_columns_to_the_own(token):
    assert affected("csa", token, slice(0, C)) == [token // 4 + 1]
    assert affected("csa", token, slice(C, 2 * C)) == [token // 4]


def test_first_columns_of_an_unfinished_next_window_go_nowhere():
    assert affected("csa", 63, slice(0, C)) == []


def expected_entry(compressor: Compressor, values: torch.Tensor, gates: torch.Tensor, position: int) -> torch.Tensor:
    """Pooled, normed and rotated in float64; ``values`` and ``gates [row, c]``."""
    pooled = (torch.softmax(gates.double(), 0) * values.double()).sum(0)
    normed = compressor.weight.double() * pooled / torch.sqrt(pooled.square().mean() + EPS)
    cos, sin = TABLE[position].double().split(R // 2)
    pairs = torch.view_as_complex(normed[-R:].reshape(-1, 2)) * torch.complex(cos, sin)
    return torch.cat((normed[:-R], torch.view_as_real(pairs).flatten()))


def test_first_csa_window_pools_its_own_four_rows():
    """Nothing precedes it: a zero kv with gate 0 (instead of -inf) would show, and so would the NaN in the pages."""
    compressor = plain("csa")
    kv, gate = inputs(compressor, 8)
    compressor.feed(kv, gate, torch.arange(8))
    biased = gate + compressor.ape.repeat(2, 1)
    first = expected_entry(compressor, kv[:4, C:], biased[:4, C:], 0)
    second = expected_entry(
        compressor, torch.cat((kv[:4, :C], kv[4:, C:])), torch.cat((biased[:4, :C], biased[4:, C:])), 4
    )
    assert torch.allclose(compressor.rows(2).double(), torch.stack((first, second)), atol=2e-6)


def test_hca_entry_pools_128_rows_and_turns_at_the_first():
    compressor = plain("hca")
    kv, gate = inputs(compressor, 256)
    compressor.feed(kv, gate, torch.arange(256))
    biased = gate + compressor.ape.repeat(2, 1)
    expected = [expected_entry(compressor, kv[i : i + 128], biased[i : i + 128], i) for i in (0, 128)]
    assert torch.allclose(compressor.rows(2).double(), torch.stack(expected), atol=2e-6)


def test_equal_gates_give_the_mean_and_a_high_gate_its_row():
    compressor = plain("csa")
    kv, _ = inputs(compressor, 8)
    gate = -compressor.ape.repeat(2, 1)
    compressor.feed(kv, gate, torch.arange(8))
    mean = torch.cat((kv[:4, :C], kv[4:, C:])).mean(0, keepdim=True)
    assert torch.allclose(compressor.rows(2)[1].double(), expected_entry(compressor, mean, 0 * mean, 4), atol=2e-6)
    gate[1, :C] += 200
    compressor.feed(kv, gate, torch.arange(8))
    only = kv[1:2, :C]
    assert torch.allclose(compressor.rows(2)[1].double(), expected_entry(compressor, only, 0 * only, 4), atol=2e-6)


def test_shifting_all_gates_of_a_channel_changes_nothing():
    a, b = plain("csa"), plain("csa")
    kv, gate = inputs(a, 32)
    a.feed(kv, gate, torch.arange(32))
    b.feed(kv, gate + torch.arange(2 * C) % C / 4.0, torch.arange(32))
    assert torch.allclose(a.rows(8), b.rows(8), atol=1e-5)


def test_a_zero_window_gives_a_zero_entry():
    compressor = make("csa")
    kv, gate = inputs(compressor, 8)
    compressor.feed(0 * kv, gate, torch.arange(8))
    assert (compressor.rows(2) == 0).all()


@pytest.mark.parametrize("kind", ["csa", "hca", "index"])
@pytest.mark.parametrize("fill", [0x00, 0x7F, 0xFF])
def test_unused_bytes_never_reach_an_entry(kind, fill):
    """State rows that no window needs, and pages nobody owns, may hold anything; -1 in the table is never followed."""
    ratio, overlap, layout = KINDS[kind]
    results = []
    for byte in (0x3C, fill):
        example = compressor_example(
            np.random.default_rng(4), "", ((ratio - 2, 3), (0, 1), (3 * ratio - 1, 2)), layout, R, ratio, overlap
        )
        args = example.args
        state, reach = args["state_cache"], (2 if overlap else 1) * ratio
        owned = torch.zeros_like(state.data)
        mark = Cache("owned", owned, state.layout)
        ends = [int(args["positions"][args["sequence"] == s].max()) for s in range(3)]
        for s, end in enumerate(ends):
            needed = torch.arange(max(0, (end + 1) // ratio * ratio - reach), end + 1)
            slots = samples.table_slots(args["state_table"], torch.full_like(needed, s), needed, state.layout.entries)
            ones = torch.ones(len(needed), state.layout.record_bytes, dtype=torch.uint8)
            paged.write_records(mark, slots, (ones,))
        state.data[owned == 0] = byte
        compress_insert.reference(**args, numerics=OFFICIAL)
        slots = args["slots"][args["slots"] >= 0].numpy()
        results.append(to_numpy(args["cache"]).rows(slots))
    assert len(results[0]) == 2
    assert np.array_equal(results[0], results[1])
    assert np.isfinite(results[0]).all()


# reductions


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 128, 129])
def test_tree_sum_sums(rows):
    x = torch.from_numpy(np.random.default_rng(rows).integers(-99, 99, (5, rows, 16)).astype(np.float32))
    assert torch.equal(tree_sum(x), x.sum(1))


def test_pool_agrees_with_torch_softmax():
    rng = np.random.default_rng(0)
    kv, gate = samples.normal(rng, 5, 8, C), samples.normal(rng, 5, 8, C, scale=3.0)
    gate[0, :4] = -torch.inf
    expected = (kv * gate.softmax(1)).sum(1)
    assert torch.allclose(pool(kv, gate, torch.float32, OFFICIAL), expected, atol=1e-6)
    assert torch.equal(pool(kv, gate, torch.float32, HF), pool(kv, gate, torch.float32, OFFICIAL))


# switches


def differing(kind: str, numerics: Numerics, act: str = "bf16") -> tuple[bool, torch.Tensor]:
    """Whether state bytes change under ``numerics``, and which channels of the entries do."""
    a, b = make(kind, act=act), make(kind, act=act, numerics=numerics)
    kv, gate = inputs(a, 256)
    for compressor in (a, b):
        compressor.feed(kv, gate, torch.arange(256))
    count = 256 // a.ratio
    return not torch.equal(a.state.data, b.state.data), (a.rows(count) != b.rows(count)).any(0)


def test_pool_switch_changes_rounding_of_the_pooled_value():
    state, channels = differing("csa bf16", replace(OFFICIAL, compressor_pool="act", kv_quant=False))
    assert not state
    assert channels.all()
    state, channels = differing("csa bf16", replace(OFFICIAL, compressor_pool="act"), act="f32")
    assert not state
    assert not channels.any()


def test_rope_table_switch_changes_rope_channels_only():
    state, channels = differing("csa", replace(OFFICIAL, rope_table="act"))
    assert not state
    assert not channels[:-R].any()
    assert channels[-R:].any()


@pytest.mark.parametrize(("kind", "share"), [("csa", 0), ("hca", 0), ("index", 0), ("csa bf16", C - R)])
def test_kv_quant_switch_changes_plain_kv_caches_only(kind, share):
    state, channels = differing(kind, replace(OFFICIAL, kv_quant=False))
    assert not state
    assert channels.sum() == share
    assert not channels[-R:].any()


@pytest.mark.parametrize(("kind", "changes"), [("csa", False), ("index", True), ("index fp8", True)])
def test_hadamard_switch_changes_indexer_keys_only(kind, changes):
    state, channels = differing(kind, replace(OFFICIAL, index_hadamard=False))
    assert not state
    assert channels.any() == changes


def test_hadamard_and_fp4_are_the_last_steps():
    """With both switches on, a plain cache holds exactly what an FP4 cache decodes to."""
    layout = index_layout("bf16", "", C, 4, 576)
    runs = [
        Compressor(4, True, KINDS["index"][2]),
        Compressor(4, True, layout),
        Compressor(4, True, layout, numerics=EXACT),
    ]
    kv, gate = inputs(runs[0], 64)
    for compressor in runs:
        compressor.feed(kv, gate, torch.arange(64))
    packed, simulated, exact = (compressor.rows(16) for compressor in runs)
    assert torch.equal(packed, simulated)
    rotated = formats.hadamard(exact.to(torch.bfloat16))
    assert torch.equal(simulated, formats.fp4_dequantize(*formats.fp4_quantize(rotated)))


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_index_quant_switch_leaves_kv_alone(kind):
    state, channels = differing(kind, replace(OFFICIAL, index_quant=False))
    assert not state
    assert not channels.any()


# transformers


def hf_config() -> DeepseekV4Config:
    return DeepseekV4Config(
        hidden_size=64, head_dim=C, partial_rotary_factor=R / C, num_hidden_layers=2, q_lora_rank=32, index_n_heads=4,
        index_head_dim=C, index_topk=8, rms_norm_eps=EPS, num_attention_heads=4, o_groups=2,
        layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["moe", "moe"],
    )  # fmt: skip


@pytest.mark.parametrize(("dtype", "layer"), [(t, n) for t in (torch.float32, torch.bfloat16) for n in (0, 1)])
def test_hf_profile_is_transformers(dtype, layer):
    """Main compressors and the indexer's, prefill of 129 then 131 tokens; float32 to 1e-6, bf16 to two roundings."""
    config, rng = hf_config(), np.random.default_rng(layer)
    module = (DeepseekV4CSACompressor, DeepseekV4HCACompressor)[layer](config)
    branches = {"compressor": module} | ({"indexer": module.indexer} if layer == 0 else {})
    for parameter in module.parameters():
        parameter.data = samples.normal(rng, *parameter.shape, scale=0.3).to(parameter.dtype)
    for branch in branches.values():
        branch.kv_norm.weight.data += 1.0
    for linear in [m for m in module.modules() if isinstance(m, torch.nn.Linear)]:
        linear.to(dtype)
    hidden = samples.normal(rng, 1, 260, 64).to(dtype)
    residual = samples.normal(rng, 1, 260, 32).to(dtype)
    cache, fmt = DynamicCache(config=config), {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
    ours = {}
    for name, branch in branches.items():
        kv = kv_layout(fmt, "", C, R, 4) if name == "compressor" else index_layout(fmt, "", C, 4, 576)
        ours[name] = Compressor((4, 128)[layer], layer == 0, kv, act=fmt, numerics=HF)
        ours[name].ape, ours[name].weight = branch.position_bias.data, branch.kv_norm.weight.data
        ours[name].cos_sin = torch.cat(branch.rotary_emb(torch.zeros(1), torch.arange(300)[None], "compress"), -1)[0]
    with torch.no_grad():
        for part in (torch.arange(129), torch.arange(129, 260)):
            module(hidden[:, part], residual[:, part], part[None], cache, layer)
            for name, branch in branches.items():
                x = hidden[0, part]
                ours[name].feed(branch.kv_proj(x), branch.gate_proj(x), part)
    for name, compressor in ours.items():
        theirs = cache.layers[layer].compressed_kv[name][0].float()
        mine = compressor.rows(len(theirs))
        assert len(theirs) == 260 // compressor.ratio
        if dtype == torch.float32:
            assert torch.allclose(mine, theirs, atol=2e-6)
        else:
            assert (mine == theirs).float().mean() > 0.98
            assert torch.allclose(mine, theirs, atol=0.02, rtol=0.02)


def test_dims_name_the_ratios_of_the_examples():
    assert (TINY.csa_ratio, TINY.hca_ratio) == (KINDS["csa"][0], KINDS["hca"][0])
