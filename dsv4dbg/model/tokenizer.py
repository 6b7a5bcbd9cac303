"""Tokenizer: text to token ids and back, with the model's tokenizer.json.

A raw prompt gets no begin-of-sentence token, as in the official code; the chat form writes it itself::

    tokenizer = open_model("tiny").tokenizer()
    tokenizer.encode("The capital of France is")      # 5 ids, no BOS
    tokenizer.chat("Capital of Japan?")               # BOS, User, the text, Assistant, </think>
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from dsv4dbg.errors import DbgError
from dsv4dbg.model.checkpoint_files import one_line

# the names have a fullwidth bar (U+FF5C) and a lower block (U+2581) for a space
BOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
USER = "<\uff5cUser\uff5c>"
ASSISTANT = "<\uff5cAssistant\uff5c>"
END_THINK = "</think>"


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer`; special strings in a text become their tokens, as in the official encoder."""

    def __init__(self, inner: tokenizers.Tokenizer, source: str) -> None:
        self._inner = inner
        self._source = source

    @classmethod
    def from_dir(cls, directory: Path | str) -> Tokenizer:
        """Read ``tokenizer.json`` of a checkpoint.

        Raises:
            DbgError: there is none, or it cannot be read.
        """
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise DbgError(f"{directory} has no tokenizer.json", "give token ids with --tokens")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)), str(path))
        # the library raises bare Exception for every kind of damage
        except Exception as e:
            raise DbgError(f"{path} cannot be read: {one_line(str(e), 200)}") from e

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return self._inner.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; nothing is put in front or behind."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD, ids without a token nothing."""
        return self._inner.decode(list(ids), skip_special_tokens=skip_special)

    def chat(self, text: str) -> list[int]:
        """Token ids of one user turn that asks for an answer without thinking: BOS User text Assistant </think>.

        Raises:
            DbgError: the tokenizer lacks one of the four special tokens.
        """
        for token in (BOS, USER, ASSISTANT, END_THINK):
            if self._inner.token_to_id(token) is None:
                raise DbgError(f"{self._source} has no token {token}, so there is no chat form")
        return self.encode(f"{BOS}{USER}{text}{ASSISTANT}{END_THINK}")
