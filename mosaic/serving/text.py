"""The text of an answer as its tokens become final, up to what ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from mosaic.decoding.text import Detokenizer

if TYPE_CHECKING:
    from mosaic.jobs.sampling import SamplingParams

__all__ = ["AnswerText"]


class _Tokenizer(Protocol):
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...


class AnswerText:
    """One answer: tokens in, text out that is never taken back. What may be the beginning of a stop string is held back.

    Parameters
    ----------
    tokenizer
        Decodes token ids.
    params
        Where the answer ends.

    Attributes
    ----------
    tokens
        Tokens up to and with the one that ended it.
    length
        Characters of their text, what is held back and what is cut included.
    stopped
        The text or token of the parameters that ended it.
    """

    def __init__(self, tokenizer: _Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(
            lambda ids: tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        )
        self._stops: Sequence[str] = tuple(params.stop or ())
        self._ends = frozenset(params.stop_token_ids or ())
        self._with_stop = params.include_stop_str_in_output
        self._held = ""
        self.tokens = self.length = 0
        self.stopped: str | int | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """Take further tokens; return the text that is certain with them and was not before. Tokens behind the end are left out."""
        if not (self._stops or self._ends):
            self.tokens += len(token_ids)
            return self._taken(self._detokenizer.push(*token_ids))
        shown = ""
        for token in token_ids:
            if self.stopped is not None:
                break
            self.tokens += 1
            ends = token in self._ends
            shown += self._taken("" if ends and not self._with_stop else self._detokenizer.push(token))
            if ends and self.stopped is None:
                shown += self.flush()
                self.stopped = token if self.stopped is None else self.stopped
        return shown

    def flush(self) -> str:
        """Return what was held back, at the end of the answer."""
        if self.stopped is not None:
            return ""
        shown = self._taken(self._detokenizer.flush())
        if self.stopped is None:
            shown, self._held = shown + self._held, ""
        return shown

    def _taken(self, added: str) -> str:
        """Add text; return what of it is certain."""
        self.length += len(added)
        text = self._held + added
        at, stop = min(((text.find(stop), stop) for stop in self._stops if stop in text), default=(-1, ""))
        if stop and self.stopped is None:
            self.stopped, self._held = stop, ""
            return text[: at + len(stop) * self._with_stop]
        kept = max(
            (
                size
                for stop in self._stops
                for size in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:size])
            ),
            default=0,
        )
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]
