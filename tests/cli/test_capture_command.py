"""``dsv4dbg capture``: answers, JSON, and one sentence for whatever is wrong with its input."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest

from dsv4dbg.trace.reader import Trace

PROMPT = "The capital of France is"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A copy of the shipped model that a test may damage."""
    target = tmp_path / "model"
    shutil.copytree(str(files("dsv4dbg.model") / "tiny"), target)
    return target


def test_it_answers_and_names_the_trace_and_the_next_command(dsv4dbg, tmp_path: Path) -> None:
    ran = dsv4dbg("capture", "--prompt", PROMPT, "--decode", "1", "-o", tmp_path / "t.h5")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0] == f"{PROMPT} Paris."
    assert str(tmp_path / "t.h5") in ran.out
    assert lines[-1].startswith("next")
    assert Trace.open(tmp_path / "t.h5").complete


def test_json_document(dsv4dbg, tmp_path: Path) -> None:
    ran = dsv4dbg("capture", "--prompt", PROMPT, "--decode", "0", "--json", "--measure", "-o", tmp_path / "t.h5")
    document = json.loads(ran.out)
    assert document["schema"] == "dsv4dbg.capture/1"
    assert document["completion"] == " Paris"
    assert document["prompt_tokens"] == 5
    assert document["bytes"] == (tmp_path / "t.h5").stat().st_size
    assert document["plan"] == "*=torch"
    assert document["overhead"]["ratio"] > 0
    assert {"python", "torch", "arch", "switches", "fp8_dialect"} <= set(document["environment"])
    with Trace.open(tmp_path / "t.h5") as trace:
        assert document["sites"] == len(trace.sites())


def test_default_path_is_a_free_name_in_traces(dsv4dbg, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        ran = dsv4dbg("capture", "--tokens", "5", "--decode", "0", "--sites", "embed")
        assert ran.code == 0
        assert (tmp_path / "traces" / f"tiny-{number:04d}.h5").is_file()


def test_prompt_file_tokens_chat_and_filters(dsv4dbg, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text(PROMPT, encoding="utf-8")
    ran = dsv4dbg("capture", "--prompt-file", tmp_path / "p.txt", "--decode", "0", "--json", "-o", tmp_path / "a.h5")
    assert json.loads(ran.out)["completion"] == " Paris"
    (tmp_path / "ids.txt").write_text("1 2\n3, 4", encoding="utf-8")
    ran = dsv4dbg("capture", "--tokens", tmp_path / "ids.txt", "--layers", "1-2", "--json", "-o", tmp_path / "b.h5")
    assert json.loads(ran.out)["prompt_tokens"] == 4
    with Trace.open(tmp_path / "b.h5") as trace:
        assert {r.site.layer for r in trace.sites() if r.outputs} == {1, 2}
    chat = ("capture", "--chat", "--prompt", "What is the capital of Japan?", "--decode", "2", "--json")
    assert "Tokyo" in json.loads(dsv4dbg(*chat, "-o", tmp_path / "c.h5").out)["completion"]


def _remove(name: str):
    return lambda d: (d / name).unlink()


def _config(**changes):
    def change(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | changes))

    return change


def _truncate(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1_000_000])


def _missing_shard(directory: Path) -> None:
    index = {"metadata": {}, "weight_map": {"embed.weight": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_config(model_type="llama", architectures=["LlamaForCausalLM"]), "llama"),
        (_missing_shard, "model-00001-of-00002.safetensors"),
        (_truncate, "model.safetensors"),
        (_remove("tokenizer.json"), "tokenizer"),
        (_remove("config.json"), "config.json"),
        (_config(max_position_embeddings=4), "maximum is 4"),
    ],
    ids=["not V4", "missing shard", "truncated", "no tokenizer", "no config", "prompt too long"],
)
def test_a_damaged_model_is_one_sentence(dsv4dbg, model_dir: Path, damage, words: str) -> None:
    damage(model_dir)
    assert_one_sentence(dsv4dbg("capture", "--model", model_dir, "--prompt", PROMPT, "-o", model_dir / "t.h5"), words)
    assert not (model_dir / "t.h5").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nowhere", "--prompt", PROMPT], "nowhere"),
        (["--prompt", ""], "empty"),
        (["--tokens", "1,999999"], "999999"),
        (["--tokens", "no-such-file"], "no-such-file"),
        ([], "no prompt"),
        (["--prompt", "a", "--tokens", "1"], "both"),
        (["--prompt", "a", "--sites", "L99.attn.*"], "no site matches L99.attn.*"),
        (["--prompt", "a", "--sites", "op:no_such_op"], "op:no_such_op"),
        (["--prompt", "a", "--sites", "a b"], "not a site pattern"),
        (["--prompt", "a", "--layers", "x"], "not a range"),
        (["--prompt", "a", "--plan", "op:no_such_op=torch"], "no_such_op"),
        (["--prompt", "a", "--plan", "op:rms_norm=warp9"], "warp9"),
        (["--prompt", "a", "--plan", "rms_norm"], "not a plan rule"),
        (["--prompt", "a", "--numerics", "fast"], "official, hf"),
        (["--prompt", "a", "--kv-cache", "int3"], "int3"),
        (["--prompt", "a", "--device", "tpu"], "tpu"),
        (["--prompt", "a", "--plugin", "no.py"], "no.py"),
        (["--prompt-file", "no.txt"], "no.txt"),
    ],
    ids=lambda v: " ".join(v)[:40] if isinstance(v, list) else "",
)
def test_bad_input_is_one_sentence(dsv4dbg, tmp_path: Path, arguments: list[str], words: str) -> None:
    assert_one_sentence(dsv4dbg("capture", *arguments, "--decode", "0", "-o", tmp_path / "t.h5"), words)
    assert list(tmp_path.iterdir()) == []


def test_paths_that_cannot_be_written(dsv4dbg, tmp_path: Path) -> None:
    existing = tmp_path / "old.h5"
    existing.write_text("mine")
    for path, words in (
        (tmp_path, "directory"),
        (tmp_path / "no" / "t.h5", "No such file"),
        (existing, "exists already"),
    ):
        assert_one_sentence(dsv4dbg("capture", "--prompt", "a", "--decode", "0", "-o", path), words)
    assert existing.read_text() == "mine"


def test_no_gpu_is_untestable(dsv4dbg, tmp_path: Path) -> None:
    ran = dsv4dbg("capture", "--prompt", "a", "--device", "cuda:63", "-o", tmp_path / "t.h5")
    assert_one_sentence(ran, "no GPU 'cuda:63'", code=125)


def test_a_plugin_that_fails_says_why(dsv4dbg, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module_at_all")
    (tmp_path / "empty.py").write_text("x = 1")
    (tmp_path / "usurper.py").write_text(
        "from dsv4dbg.kernels.registry import implements\nimplements('rms-norm', 'torch')(print)"
    )
    for name, words in (
        ("broken.py", "no_such_module_at_all"), ("empty.py", "declares no implementation"),
        ("usurper.py", "the reference's name"),
    ):  # fmt: skip
        ran = dsv4dbg("capture", "--prompt", "a", "--plugin", tmp_path / name, "-o", tmp_path / "t.h5")
        assert_one_sentence(ran, words)


def test_a_plugin_runs_where_the_plan_says(dsv4dbg, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dsv4dbg.kernels.registry import implements, registry\n"
        "@implements('rms-norm', 'mine')\n"
        "def mine(x, weight, *, eps):\n"
        "    return registry().op('rms_norm').reference(x, weight, eps=eps)\n"
    )
    ran = dsv4dbg(
        "capture", "--prompt", PROMPT, "--decode", "0", "--plugin", tmp_path / "mine.py", "--plan", "op:rms_norm=mine",
        "--json", "-o", tmp_path / "t.h5",
    )  # fmt: skip
    assert json.loads(ran.out)["plan"] == "*=torch, op:rms_norm=mine"
    with Trace.open(tmp_path / "t.h5") as trace:
        used = {(r.site.op == "rms_norm", r.implementation) for r in trace.sites() if r.site.op != "block"}
    assert used == {(True, "mine"), (False, "torch")}


def assert_one_sentence(ran, words: str, code: int = 2) -> None:
    """An error message of one sentence (and perhaps a hint) that names the trouble, and nothing on stdout."""
    assert ran.code == code, ran
    assert words in ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""
    assert len(ran.err.strip().splitlines()) <= 2
