"""Text out of tokens, piece by piece, never splitting a character. Torch-free."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TextIO

__all__ = ["Detokenizer", "TextStreamer", "token_texts"]

_UNFINISHED: Final = "\ufffd"
"""What tokenizers decode an unfinished character to."""
_LONGEST_TAIL: Final = 3
"""An unfinished UTF-8 character has at most three bytes, and every one may become a replacement character."""


class _Decodes(Protocol):
    def decode(self, token_ids: list[int], /) -> str: ...


class Detokenizer:
    r"""Tokens in, text out: every call returns what its tokens add, and holds back incomplete characters.

    They are decoded together with those of the last call, from one before the last complete character, as tokenizers change
    spaces at the beginning of what they decode. Constant cost per token for valid text.

    Parameters
    ----------
    decode
        Token ids to text.

    Examples
    --------
    >>> def decode(ids):
    ...     return bytes(ids).decode("utf-8", "replace")
    >>> detokenizer = Detokenizer(decode)
    >>> [detokenizer.push(byte) for byte in "aé!".encode()]
    ['a', '', 'é', '!']
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []  # decoded together
        self._read = 0  # tokens of the window whose text is all out
        self._out = 0  # characters of the window's text that are out

    def push(self, *token_ids: int) -> str:
        """Take the next tokens; return the text that is complete with them and was not before."""
        self._window += token_ids
        text = self._decode(self._window)
        tail = min(len(text) - len(text.rstrip(_UNFINISHED)), _LONGEST_TAIL)
        added = text[self._out : len(text) - tail]
        self._out = max(self._out, len(text) - tail)
        if not tail:
            self._window = self._window[self._read :]
            self._read = len(self._window)
            self._out = len(self._decode(self._window))
        return added

    def flush(self) -> str:
        """Return what was held back, however incomplete, and start over."""
        rest = self._decode(self._window)[self._out :] if self._window else ""
        self._window, self._read, self._out = [], 0, 0
        return rest


def token_texts(decode: Callable[[list[int]], str], token_ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text of a run; a character counts to the token that completes it.

    >>> token_texts(lambda ids: bytes(ids).decode("utf-8", "replace"), list("é!".encode()))
    ['', 'é', '!']
    """
    detokenizer = Detokenizer(decode)
    texts = [detokenizer.push(token) for token in token_ids]
    if texts:
        texts[-1] += detokenizer.flush()
    return texts


class TextStreamer:
    """Writes committed text as it becomes final, in the manner of transformers' class of this name.

    Parameters
    ----------
    tokenizer
        With `decode(token_ids) -> str`: of tokenizers, of transformers, or Mosaic's.
    file
        Where to write; standard output by default. Characters that its encoding lacks are written as "?".
    skip_prompt
        Write the answer alone: what comes first is the prompt.
    """

    def __init__(self, tokenizer: _Decodes, file: TextIO | None = None, *, skip_prompt: bool = False) -> None:
        self._file = sys.stdout if file is None else file
        self._skip, self._skips_next = skip_prompt, skip_prompt
        self._detokenizer = Detokenizer(tokenizer.decode)

    def put(self, value: Any) -> None:
        """Write the text that these tokens, an int64 tensor or a sequence of numbers, complete."""
        if self._skips_next:
            self._skips_next = False
            return
        ids = value.tolist() if hasattr(value, "tolist") else value
        self._write(self._detokenizer.push(*ids))

    def end(self) -> None:
        """Write what was held back and end the line."""
        self._write(self._detokenizer.flush() + "\n")
        self._skips_next = self._skip

    def _write(self, text: str) -> None:
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        self._file.write(text.encode(encoding, "replace").decode(encoding))
        self._file.flush()
