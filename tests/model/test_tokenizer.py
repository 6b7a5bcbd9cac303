"""Tokenizer: no begin token on raw prompts, the chat form, and what happens without a tokenizer.json."""

from __future__ import annotations

import shutil

import pytest

from dsv4dbg.errors import DbgError
from dsv4dbg.model.checkpoint import TINY, Checkpoint, open_model
from dsv4dbg.model.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return open_model("tiny").tokenizer()


def test_raw_prompt(tiny):
    ids = tiny.encode("The capital of France is")
    assert ids == [278, 355, 326, 2025, 276]
    assert tiny.decode(ids) == "The capital of France is"
    assert tiny.encode("") == []
    assert tiny.decode([]) == ""


def test_chat(tiny):
    ids = tiny.chat("Hi")
    assert ids[:2] == [0, 3]
    assert ids[-2:] == [4, 6]
    assert ids[2:-2] == tiny.encode("Hi")
    assert tiny.decode(ids, skip_special=True) == "Hi"


def test_special_strings_become_their_tokens(tiny):
    assert tiny.encode("<\uff5cUser\uff5c>") == [3]


def test_any_text_and_any_ids(tiny):
    for text in ("naïve 北京 🚀", "\x00\n\t", "a" * 10_000):
        assert tiny.decode(tiny.encode(text)) == text
    assert isinstance(tiny.decode([2047, 999_999, 5]), str)
    assert tiny.vocab_size == 2048


def test_wide_borrows_the_tokenizer_of_tiny(tiny):
    wide = open_model("wide")
    assert wide.tokenizer().encode("a cat") == tiny.encode("a cat")
    assert wide.config.vocab_size >= wide.tokenizer().vocab_size


def test_no_tokenizer(tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TINY / name, tmp_path)
    with pytest.raises(DbgError, match=r"has no tokenizer\.json") as error:
        Checkpoint.open(tmp_path).tokenizer()
    assert "--tokens" in error.value.hint
    model = open_model("tiny")
    with pytest.raises(DbgError, match="the model state_dict has no tokenizer"):
        Checkpoint.from_state_dict(model.config, {k: model.tensor(k) for k in model.keys}).tokenizer()


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b"\xff", b'{"model": {"type": "BPE"}}', b"[" * 10_000])
def test_damaged_tokenizer(tmp_path, text):
    (tmp_path / "tokenizer.json").write_bytes(text)
    with pytest.raises(DbgError, match=r"tokenizer\.json cannot be read") as error:
        Tokenizer.from_dir(tmp_path)
    assert "\n" not in error.value.message
    assert len(error.value.message) < 500


def test_no_chat_form(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    with pytest.raises(DbgError, match=r"has no token .*, so there is no chat form"):
        Tokenizer.from_dir(tmp_path).chat("a")
