"""``dsv4dbg diff`` on captures of the shipped model: what is named, what is not, exit codes, and what it says."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from dsv4dbg.kernels.registry import load_plugin, registry
from dsv4dbg.site import BLOCK
from dsv4dbg.trace.reader import Trace

PLANTED = Path(__file__).parents[1] / "planted.py"
TOKENS = "11,45,7,300,21,8,9,100,32,77"

Capture = Callable[..., Path]


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """A capture of ten tokens and one decode step with further options; the same options give the same file."""
    from dsv4dbg.cli.main import main

    if ("rms_norm", "shifted") not in registry().implementations:
        load_plugin(PLANTED)
    folder, made = tmp_path_factory.mktemp("captures"), {}

    def run(*options: str) -> Path:
        if options not in made:
            path = folder / f"{len(made)}.h5"
            decode = () if "--decode" in options else ("--decode", "1")
            with pytest.raises(SystemExit) as end:
                main(["capture", "--tokens", TOKENS, *decode, *options, "-o", str(path)])
            assert not end.value.code
            made[options] = path
        return made[options]

    return run


@pytest.fixture(scope="module")
def plain(capture: Capture) -> Path:
    return capture()


@pytest.fixture
def diff(dsv4dbg) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Exit code and JSON document of a comparison."""

    def run(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
        ran = dsv4dbg("diff", *arguments, "--json")
        assert ran.out, ran
        document = json.loads(ran.out)
        assert document["schema"] == "dsv4dbg.diff/1"
        assert document["exit_code"] == ran.code
        return ran.code, document

    return run


def flip(path: Path, dataset: str, bit: int = 1) -> None:
    """One bit of one element in the middle of a dataset."""
    with h5py.File(path, "r+") as file:
        data = file[f"steps/{dataset}"]
        values = data[()]
        bits = values.reshape(-1).view(f"u{data.dtype.itemsize}")
        bits[bits.size // 2] ^= bits.dtype.type(bit)
        data[()] = values


def edit_manifest(path: Path, **changes: Any) -> None:
    with h5py.File(path, "r+") as file:
        manifest = json.loads(file["manifest"][()])
        del file["manifest"]
        file["manifest"] = np.bytes_(json.dumps(manifest | changes).encode())


@pytest.fixture
def copy(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(plain, tmp_path / "copy.h5"))


# identical


def test_two_captures_are_bit_identical(dsv4dbg, diff, capture: Capture, plain: Path) -> None:
    again = capture("--plan", "*=torch")
    assert again != plain
    ran = dsv4dbg("diff", plain, again)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    with Trace.open(plain) as trace:
        count = sum(r.site.op != BLOCK for r in trace.sites())
    assert lines[0] == f"bit-identical: all {count} site calls"
    assert lines[-1].startswith("next")
    assert len(lines) == 3
    code, document = diff(plain, again)
    assert (code, document["identical"], document["verdict"]) == (0, True, "PASS")
    assert document["sites"]["compared"] == document["sites"]["judged"] == document["sites"]["same"] == count
    assert document["first"] is None
    assert document["differing"] == []


def test_identical_traces_need_no_torch(plain: Path) -> None:
    code = (
        "import sys\nfrom dsv4dbg.cli.main import main\n"
        f"try: main(['diff', {str(plain)!r}, {str(plain)!r}])\n"
        "except SystemExit as end: assert not end.code\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


# one bit


# one site of each op and more, and few enough to compare them a hundred times
FEW = ("embed", "L0.ffn.*", "L2", "L2.*", "head.*", "mtp0.mtp_input")


@pytest.mark.parametrize("op", sorted(registry().ops))
def test_one_bit_of_any_output_or_cache_write_names_its_site(diff, capture, tmp_path: Path, op: str) -> None:
    plain, copy = capture(*(part for name in FEW for part in ("--sites", name))), tmp_path / "copy.h5"
    with Trace.open(plain) as trace:
        records = trace.sites(f"op:{op}")
        if not records:
            pytest.skip("not in this forward")
        record = next((r for r in records[len(records) // 2 :] if r.inputs), records[-1])
        outputs = [f"out/{name}" for name, spec in record.outputs.items() if spec.nbytes]
        outputs += [
            f"mut/{arg}/{part}" for arg, w in record.mutated.items() for part, s in w.tensors.items() if s.nbytes
        ]
    assert outputs
    for output in outputs:
        shutil.copy(plain, copy)
        flip(copy, f"{record.site}/{output}")
        code, document = diff(plain, copy, "--no-judge")
        first = document["first"]
        assert (code, first["site"], first["verdict"]) == (1, str(record.site), "DIVERGED")
        assert first["worst_output"] == output.split("/")[1]
        assert first["inputs_equal"]
        assert document["first_difference"] == first
        assert document["sites"]["diverged"] == 1


@pytest.mark.slow
def test_one_bit_of_every_output_of_every_site(diff, plain: Path, copy: Path) -> None:
    with Trace.open(plain) as trace:
        places = [(str(r.site), f"out/{name}") for r in trace.sites() if r.site.op != BLOCK for name in r.outputs]
        places += [(str(r.site), f"mut/{arg}/records") for r in trace.sites() for arg in r.mutated]
        sizes = {(str(r.site), name): spec.nbytes for r in trace.sites() for name, spec in r.tensors().items()}
    for site, output in places:
        if not sizes[site, output]:
            continue
        shutil.copy(plain, copy)
        flip(copy, f"{site}/{output}")
        code, document = diff(plain, copy, "--no-judge")
        assert (code, document["first"]["site"], document["first"]["verdict"]) == (1, site, "DIVERGED")


@pytest.mark.parametrize(("block", "op"), [("L2/out/streams", "L2.ffn.mhc_post"), ("L3.attn/out/y", "L3.attn.wo_b")])
def test_one_bit_of_a_block_boundary_is_one_of_the_op_that_made_it(diff, plain, copy, block: str, op: str) -> None:
    flip(copy, f"prefill0/{block}")
    code, document = diff(plain, copy, "--no-judge")
    assert (code, document["first"]["site"]) == (1, f"prefill0/{op}")


def test_the_judge_says_which_of_the_two_has_the_odd_bit(dsv4dbg, diff, plain: Path, copy: Path) -> None:
    flip(copy, "prefill0/L2.attn.wq_b/out/y")
    code, document = diff(plain, copy)
    assert (code, document["first"]["site"]) == (1, "prefill0/L2.attn.wq_b")
    assert document["first"]["sentence"].endswith("(within rounding: is it repeatable?)")
    assert document["first"]["judgement"]["y"]["verdict"] == "ROUNDING"
    code, document = diff(copy, plain)
    assert (code, document["first"]["site"]) == (1, "prefill0/L2.attn.wq_b")
    assert "the candidate's is what torch yields here, the reference's is not" in document["first"]["sentence"]


def test_a_cache_record_makes_later_readers_inputs_differ(diff, plain: Path, copy: Path) -> None:
    flip(copy, "prefill0/L1.attn.qnorm_rope_kv_insert/mut/window_cache/records", 0x40)
    code, document = diff(plain, copy, "--no-judge")
    assert code == 1
    found = {s["site"]: s for s in document["differing"]}
    for reader in ("prefill0/L1.attn.gather_kv", "decode0/L1.attn.sparse_mla_decode"):
        assert found[reader]["inputs_differ"] == ["cache L1.window differs in 1 record"]
        assert found[reader]["unjudged_because"]
    assert document["sites"]["diverged"] == 1


def test_other_bits_in_another_environment_are_judged(diff, plain: Path, copy: Path) -> None:
    """Not the same place: a last bit may differ by rounding; a high one may not."""
    flip(copy, "decode0/L2.attn.wq_b/out/y")
    edit_manifest(copy, environment={"gpu": "MI300X"})
    code, document = diff(plain, copy)
    found = {s["site"]: s for s in document["differing"]}["decode0/L2.attn.wq_b"]
    assert (found["verdict"], found["inputs_equal"]) == ("ROUNDING", True)
    assert document["same_environment"] is False
    code, document = diff(plain, copy, "--no-judge")
    assert (code, document["sites"]["diverged"]) == (125, 0)
    flip(copy, "decode0/L2.attn.wq_b/out/y", 0x4000)
    code, document = diff(plain, copy)
    assert (code, document["first"]["site"]) == (1, "decode0/L2.attn.wq_b")


# other numerics, caches, places


@pytest.mark.parametrize("cache", ["bf16", pytest.param("fp8", marks=pytest.mark.slow)])
def test_official_against_hf_names_the_first_op_that_differs_on_purpose(diff, capture, plain, cache: str) -> None:
    code, document = diff(plain, capture("--numerics", "hf", "--kv-cache", cache))
    first = document["first"]
    assert (code, document["sites"]["diverged"], document["sites"]["unjudged"]) == (0, 0, 0)
    assert (first["site"], first["verdict"], first["intended"]) == ("prefill0/L0.attn.mhc_pre", "DRIFT", ["mhc_norm"])
    assert "no op is at fault" in document["answer"]


@pytest.mark.parametrize("cache", ["bf16", *(pytest.param(c, marks=pytest.mark.slow) for c in ("f32", "fp8-fnuz"))])
def test_other_caches_differ_on_purpose(diff, capture: Capture, plain: Path, cache: str) -> None:
    code, document = diff(plain, capture("--kv-cache", cache))
    first = document["first"]
    assert (code, document["sites"]["diverged"], document["sites"]["unjudged"]) == (0, 0, 0)
    assert first["site"] == "prefill0/L0.attn.qnorm_rope_kv_insert"
    assert first["intended"] == ["cache L0.window has another format"]


def test_other_pages_are_other_inputs(diff, capture: Capture, plain: Path) -> None:
    code, document = diff(plain, capture("--seed", "1"))
    assert (code, document["sites"]["diverged"], document["sites"]["unjudged"]) == (0, 0, 0)
    first = document["first"]
    assert first["outputs"]["window_cache"]["reason"] == "written at other slots"
    assert "window_slots" in first["inputs_differ"]


# plans


@pytest.mark.parametrize(
    "plan", ["op:rms_norm=right", "op:indexer_topk=right, op:moe_router=right"], ids=["float64 inside", "other order"]
)
def test_what_is_right_but_rounds_or_orders_otherwise_is_nobodys_fault(diff, capture, plain, plan: str) -> None:
    code, document = diff(plain, capture("--plan", plan))
    assert code == 0
    assert document["first"]["verdict"] == "ROUNDING"
    assert document["first"]["implementation"] == "right"
    assert document["sites"]["rounding"] > 0
    assert document["sites"]["drift"] > 0
    assert document["sites"]["diverged"] == document["sites"]["unjudged"] == 0


WRONG = {
    "off by one row": ("L3.ffn.ffn_norm=shifted", "prefill0/L3.ffn.ffn_norm", "1 row earlier"),
    "twice the scale": ("L3.attn.wq_b=doubled", "prefill0/L3.attn.wq_b", "ratio 2"),
    "one head x 1.06": ("L3.attn.sparse_mla_prefill=one_head", "prefill0/L3.attn.sparse_mla_prefill", "only head 1"),
    "stale slot": ("L3.attn.qnorm*=stale", "prefill0/L3.attn.qnorm_rope_kv_insert", "records were not written"),
    "stray byte": ("L3.attn.qnorm*=stray", "prefill0/L3.attn.qnorm_rope_kv_insert", "outside the slots"),
    "nan": ("L4.ffn.shared_experts.silu_mul=nan", "prefill0/L4.ffn.shared_experts.silu_mul", "not finite"),
    "wrong index": ("L4.*.indexer_topk=wrong_index", "prefill0/L4.attn.indexer.indexer_topk", "outside [-1, 2)"),
    "last row": ("decode0/head.lm_head=last_row", "decode0/head.lm_head", "permuted"),
}


LATE = tuple(part for name in ("L3", "L3.*", "L4", "L4.*", "head.*") for part in ("--sites", name))


@pytest.mark.parametrize("kept", [LATE, pytest.param((), marks=pytest.mark.slow)], ids=["two layers", "all"])
@pytest.mark.parametrize(("plan", "site", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named_first_and_nothing_else_is(
    diff, capture, plan: str, site: str, words: str, kept
) -> None:
    code, document = diff(capture(*kept), capture("--plan", plan, *kept))
    first = document["first"]
    assert code == 1
    assert (first["site"], first["verdict"], first["judged"]) == (site, "DIVERGED", True)
    assert words in first["sentence"]
    planted = plan.rpartition("=")[2]
    for found in document["differing"]:
        at_fault = found["verdict"] == "DIVERGED"
        assert at_fault == (found["implementation"] == planted), found
        assert found["verdict"] in ("DIVERGED", "DRIFT", "PASS")
    assert document["sites"]["unjudged"] == 0


@pytest.mark.slow
def test_faults_in_the_coverage_workload(diff, dsv4dbg, plain: Path, tmp_path: Path) -> None:
    """Ragged batches, chunks, verify with rollback: a right plan is clean, wrong ones are named, all is judged."""
    paths = {}
    for plan in ("*=torch", "op:rms_norm=right", "L2.*.sparse_mla_prefill=one_head", "L1.attn.qnorm*=stale"):
        paths[plan] = tmp_path / f"{len(paths)}.h5"
        ran = dsv4dbg("capture", "--workload", "coverage", "--plan", plan, "-o", paths[plan])
        assert ran.code == 0, ran
    reference, right, *wrong = paths
    code, document = diff(paths[reference], paths[right])
    assert (code, document["sites"]["diverged"], document["sites"]["unjudged"]) == (0, 0, 0)
    for plan in wrong:
        code, document = diff(paths[reference], paths[plan])
        assert (code, document["sites"]["unjudged"]) == (1, 0)
        assert {s["implementation"] for s in document["differing"] if s["verdict"] == "DIVERGED"} == {
            plan.split("=")[1]
        }


def test_an_exception_in_a_kernel_is_a_fault(dsv4dbg, diff, plain: Path, tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text(
        "from dsv4dbg.kernels.registry import implements\n"
        "@implements('moe_combine', 'raises')\n"
        "def raises(*args, **kwargs):\n    raise RuntimeError('HIP error: an illegal memory access')\n"
    )
    path = tmp_path / "a.h5"
    from dsv4dbg.model.recording import Plan, Request, record

    tokens = tuple(int(t) for t in TOKENS.split(","))
    request = Request(
        tokens=tokens, decode=1, plugins=(tmp_path / "raises.py",), plan=Plan.parse("L2.ffn.moe_combine=raises")
    )
    with pytest.raises(RuntimeError):
        record(request, path)
    code, document = diff(plain, path)
    assert (code, document["verdict"]) == (1, "FAULT")
    assert document["first"]["site"] == "prefill0/L2.ffn.moe_combine"
    assert "HIP error: an illegal memory access" in document["answer"]


# what cannot be judged


def test_without_the_model(diff, dsv4dbg, capture: Capture, plain: Path, tmp_path: Path) -> None:
    """Sites with weights are listed as not judged and why; others are judged; nothing that differs passes as clean."""
    wrong = Path(shutil.copy(capture("--plan", "L3.attn.wq_b=doubled"), tmp_path / "wrong.h5"))
    edit_manifest(wrong, model="/no/such/model")
    code, document = diff(plain, wrong)
    assert code == 125
    unjudged = [s for s in document["differing"] if not s["judged"]]
    assert unjudged[0]["site"] == "prefill0/L3.attn.wq_b"
    assert "weights are not at hand" in unjudged[0]["unjudged_because"]
    assert document["sites"]["unjudged"] == len(unjudged) > 0
    assert document["sites"]["judged"] + len(unjudged) == document["sites"]["compared"]
    ran = dsv4dbg("diff", plain, wrong)
    assert ran.out.startswith("not judged: ")
    assert "unjudged: the model's weights are not at hand" in ran.out
    assert "--model DIR" in ran.out.splitlines()[-1]
    code, document = diff(plain, wrong, "--model", "tiny")
    assert (code, document["first"]["site"], document["sites"]["unjudged"]) == (1, "prefill0/L3.attn.wq_b", 0)
    edit_manifest(wrong, model="nul\0byte")
    assert diff(plain, wrong)[0] == 125


def test_no_judge(diff, dsv4dbg, capture: Capture, plain: Path) -> None:
    wrong = capture("--plan", "L3.attn.wq_b=doubled")
    code, document = diff(plain, wrong, "--no-judge")
    assert (code, document["sites"]["diverged"]) == (125, 0)
    assert document["not_judged_because"] == {"no judge": document["sites"]["unjudged"]}
    assert document["first"]["site"] == "prefill0/L3.attn.wq_b"
    assert document["first"]["outputs"]["y"]["scale"] == pytest.approx(2, rel=1e-3)
    last = dsv4dbg("diff", plain, wrong, "--no-judge").out.splitlines()[-1]
    assert last.startswith(f"next   dsv4dbg diff {plain} {wrong}")
    assert "--no-judge" not in last


def test_a_model_that_is_named_must_be_there(dsv4dbg, plain: Path) -> None:
    ran = dsv4dbg("diff", plain, plain, "--model", "nowhere")
    assert (ran.code, ran.out) == (2, "")
    assert "nowhere" in ran.err


# not all in both


def test_filters_and_other_lengths(diff, dsv4dbg, capture: Capture, plain: Path) -> None:
    attention = capture("--sites", "op:sparse_mla_decode")
    code, document = diff(plain, attention)
    assert (code, document["first"], document["identical"]) == (0, None, False)
    assert document["sites"]["compared"] == document["sites"]["same"] == 7
    assert document["sites"]["only_reference"] == len(document["only_reference"]) > 300
    longer = capture("--decode", "2")
    code, document = diff(plain, longer)
    assert (code, document["first"], document["sites"]["only_reference"]) == (0, None, 0)
    assert all(path.startswith("decode1/") for path in document["only_candidate"])
    code, document = diff(attention, capture("--sites", "op:sparse_mla_decode", "--plan", "L2.ffn.ffn_norm=shifted"))
    assert code == 0
    assert document["first"]["site"] == "decode0/L3.attn.sparse_mla_decode"
    assert document["first"]["verdict"] == "DRIFT"


def test_nothing_in_common_could_not_be_tested(dsv4dbg, capture: Capture) -> None:
    one, other = capture("--sites", "op:sparse_mla_decode"), capture("--sites", "op:embed")
    ran = dsv4dbg("diff", one, other)
    assert (ran.code, ran.out) == (125, "")
    assert "no finished site call in common" in ran.err


def test_other_prompts_are_refused(dsv4dbg, plain: Path, tiny_trace: Path) -> None:
    ran = dsv4dbg("diff", plain, tiny_trace)
    assert (ran.code, ran.out) == (2, "")
    assert "the traces cannot be compared: prompt tokens is" in ran.err


# what it looks like


def test_the_text(dsv4dbg, capture: Capture, plain: Path) -> None:
    wrong = capture("--plan", "L3.attn.sparse_mla_prefill=one_head")
    ran = dsv4dbg("diff", plain, wrong)
    assert (ran.code, ran.err) == (1, "")
    lines = ran.out.splitlines()
    assert lines[0] == "DIVERGED at prefill0/L3.attn.sparse_mla_prefill (by one_head)"
    assert lines[1].startswith("  o: ")
    assert lines[3:7] == [
        "           embed  L0      head  mtp0",
        "  prefill  ·      ···█▄▄  ▄     ▄",
        "  decode   ·      ····▄▄  ▄     ▄",
        "  · same  ▄ drift  █ diverged",
    ]
    assert "judged, 0 unjudged" in lines[8]
    assert lines[10].split() == ["site", "verdict", "rel.", "error", "worst", "row", "why"]
    assert lines[11].startswith("  prefill0/L3.attn.sparse_mla_prefill (by one_head)  diverged  ")
    assert lines[-1] == "next   dsv4dbg ops sparse_mla_prefill   (its contract)"
    assert len(lines) < 30


def test_a_terminal_that_is_narrow_or_has_no_unicode(capture: Capture, plain: Path) -> None:
    """Lines of the table end at the width of the terminal; glyphs become ASCII."""
    wrong = capture("--plan", "L3.attn.sparse_mla_prefill=one_head")
    code = (
        "import os, sys\nfrom dsv4dbg.cli.main import main\n"
        "sys.stdout.isatty = lambda: True\n"
        f"main(['diff', {str(plain)!r}, {str(wrong)!r}, '--no-judge'])\n"
    )
    env = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "90", "PYTHONUTF8": "0"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, text=True)
    assert ran.returncode == 125, ran.stderr
    assert ran.stdout.isascii()
    assert "...???" in ran.stdout
    assert max(map(len, ran.stdout.splitlines())) <= 90 or "diff" in max(ran.stdout.splitlines(), key=len)


# files made to harm


def one_sentence(ran, code: int = 2) -> None:
    assert ran.code == code, ran
    assert ran.out == ""
    assert "Traceback" not in ran.err
    lines = ran.err.strip().splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines) <= 2
    assert len(lines[0]) < 900


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["few sites", "all sites"])
def test_truncated_at_every_4_kib(dsv4dbg, capture: Capture, tmp_path: Path, few: bool) -> None:
    """A closed trace that lost its end is refused, on either side of the command."""
    plain = capture("--decode", "0", "--sites", "op:sparse_mla_prefill") if few else capture()
    copy = Path(shutil.copy(plain, tmp_path / "copy.h5"))
    for size in range(copy.stat().st_size // 4096 * 4096, -1, -4096):
        os.truncate(copy, size)
        one_sentence(dsv4dbg("diff", plain, copy))
        one_sentence(dsv4dbg("diff", copy, plain))


def unclosed(tmp_path: Path) -> Iterator[Path]:
    """A capture as a kill at its end would leave it."""
    from dsv4dbg.model.recording import Request, record
    from dsv4dbg.trace.writer import TraceWriter

    close, path = TraceWriter.close, tmp_path / "killed.h5"

    def killed(self: TraceWriter, *args: Any, **kwargs: Any) -> None:
        if not self._closed:
            for suffix in ("", ".journal"):
                shutil.copy(f"{self.path}{suffix}", f"{path}{suffix}")
        close(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TraceWriter, "close", killed)
        record(Request(tokens=tuple(int(t) for t in TOKENS.split(",")), decode=1), tmp_path / "whole.h5")
    yield path


@pytest.mark.parametrize("step", [150, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_capture_cut_at_every_4_kib(dsv4dbg, diff, plain: Path, tmp_path: Path, step: int) -> None:
    """With its journal a capture that lost its end is compared as far as it goes, and nothing it had differs."""
    (path,) = unclosed(tmp_path)
    compared = []
    for size in range(path.stat().st_size // 4096 * 4096, -1, -4096 * step):
        os.truncate(path, size)
        for pair in ((plain, path), (path, plain)):
            ran = dsv4dbg("diff", *pair, "--json")
            if ran.code == 125:
                assert "no finished site call in common" in ran.err
                assert size < 100_000
                continue
            assert ran.code == 0, ran
            assert "the rest is lost" in ran.err
            compared.append(json.loads(ran.out)["sites"]["compared"])
    assert compared == sorted(compared, reverse=True)
    assert compared[0] > 300


def test_files_that_are_no_traces(dsv4dbg, plain: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    contents = {
        "empty": b"",
        "zip": b"PK\3\4",
        "zeros": bytes(9000),
        "text": b"prompt\n",
        "magic only": b"\x89HDF\r\n\x1a\n",
    }
    for content in contents.values():
        path.write_bytes(content)
        one_sentence(dsv4dbg("diff", plain, path))
        one_sentence(dsv4dbg("diff", path, plain))
    with h5py.File(path, "w") as file:
        file["weights"] = np.zeros(3)
        file["manifest"] = h5py.SoftLink("/weights")
    one_sentence(dsv4dbg("diff", plain, path))
    one_sentence(dsv4dbg("diff", plain, tmp_path))
    one_sentence(dsv4dbg("diff", tmp_path / "gone.h5", plain))
    assert dsv4dbg("diff", plain).code == 2


def replaced(path: Path, dataset: str, make: Callable[[h5py.Group, str, h5py.Dataset], None]) -> None:
    with h5py.File(path, "r+") as file:
        old = file[f"steps/{dataset}"]
        attrs, group = dict(old.attrs), old.parent
        name = dataset.rpartition("/")[2]
        values = old[()]
        del group[name]
        make(group, name, values)
        if isinstance(group.get(name, getlink=True), h5py.HardLink):
            group[name].attrs.update(attrs)


HARM: dict[str, Callable[[h5py.Group, str, np.ndarray], object]] = {
    "external link": lambda g, n, v: g.__setitem__(n, h5py.ExternalLink("/etc/hostname", "/x")),
    "soft link": lambda g, n, v: g.__setitem__(n, h5py.SoftLink("/manifest")),
    "external storage": lambda g, n, v: g.create_dataset(
        n, v.shape, v.dtype, external=[("/etc/hostname", 0, h5py.h5f.UNLIMITED)]
    ),
    "other dtype": lambda g, n, v: g.create_dataset(n, data=v.astype(np.float64)),
    "other shape": lambda g, n, v: g.create_dataset(n, data=v.reshape(-1)),
    "absurd shape": lambda g, n, v: g.create_dataset(n, (1 << 40, 1 << 10), v.dtype),
    "absurd and compressed": lambda g, n, v: g.create_dataset(n, (1 << 40,), v.dtype, chunks=(1 << 20,), compression=1),
    "compressed": lambda g, n, v: g.create_dataset(n, data=v, compression="gzip"),
    "a group": lambda g, n, v: g.create_group(n),
    "nothing": lambda g, n, v: None,
}


@pytest.mark.parametrize("make", HARM.values(), ids=HARM)
def test_a_harmful_output_is_one_sentence(dsv4dbg, plain: Path, copy: Path, make) -> None:
    replaced(copy, "prefill0/L2.attn.wq_b/out/y", make)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for arguments in ((plain, copy), (copy, plain), (copy, copy)):
        one_sentence(dsv4dbg("diff", *arguments))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100_000  # KiB


def test_absurd_shapes_in_the_index(dsv4dbg, plain: Path, copy: Path) -> None:
    """Sizes are held against the file also where the two traces do not agree about them."""
    for shape in ([1 << 42, 512], [1 << 62, 1 << 62], [], [10, 512, 1]):
        with h5py.File(copy, "r+") as file:
            index = json.loads(file["index"][()])
            entry = next(e for e in index["sites"] if e["site"] == "L2.attn.wq_b")
            entry["outputs"]["y"]["shape"] = shape
            del file["index"]
            file["index"] = np.bytes_(json.dumps(index).encode())
        for arguments in ((plain, copy), (copy, plain)):
            one_sentence(dsv4dbg("diff", *arguments))


def test_text_from_a_file_does_not_reach_the_terminal_raw(dsv4dbg, plain: Path, copy: Path) -> None:
    with h5py.File(copy, "r+") as file:
        index = json.loads(file["index"][()])
        entry = next(e for e in index["sites"] if e["site"] == "L2.attn.wq_b")
        entry |= {"op": "\x1b[2J\nevil", "implementation": "\x1b]0;title\x07" * 50}
        entry["attrs"] = {"\x1b[31m": "\x1b[0m\n"}
        del file["index"]
        file["index"] = np.bytes_(json.dumps(index).encode())
    flip(copy, "prefill0/L2.attn.wq_b/out/y")
    ran = dsv4dbg("diff", plain, copy)
    assert ran.code in (1, 125)
    assert "\x1b" not in ran.out
    assert "\x07" not in ran.out
    edit_manifest(copy, prompt_tokens="\x1b[2J" * 1000)
    ran = dsv4dbg("diff", plain, copy)
    one_sentence(ran)
    assert "\x1b" not in ran.err
