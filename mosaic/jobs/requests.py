"""What a line of a job asks for, and the line that answers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mosaic.decoding.config import GenerationConfig, with_options
from mosaic.decoding.prompts import token_ids, tokenizer_of
from mosaic.errors import UnknownName, UsageError
from mosaic.jobs.lines import Answered, object_of
from mosaic.jobs.sampling import submissions

if TYPE_CHECKING:
    from torch import Tensor

    from mosaic.decoding.live import Generation, Submission
    from mosaic.decoding.stream import Outcome
    from mosaic.decoding.tokenizer import Tokenizer
    from mosaic.jobs.lines import Line
    from mosaic.models import Model

__all__ = ["Asked", "Requests"]

_OWN: Final = ("prompt", "messages", "id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a line asks for.

    Parameters
    ----------
    line
        Its number, from 1. It draws as request `line - 1` of `generate`.
    digest
        Of the line and the job.
    prompt
        int64 [P].
    config
        Its options.
    size_bytes
        Of the line.
    id
        What the line has as "id".
    chat
        Whether the answer loses the white space around it.
    """

    line: int
    digest: str
    prompt: Tensor
    config: GenerationConfig
    size_bytes: int
    id: Any = None
    chat: bool = False

    def submissions(self) -> list[Submission]:
        """Return what is submitted for it."""
        return submissions(self.prompt, self.config, self.line - 1, 1)


class Requests:
    """Reads lines of requests, and writes what answers them.

    Parameters
    ----------
    model
        Whose tokenizer reads prompts that are text.
    base
        The options of lines that have none of their own.
    chat
        Whether a "prompt" is put into the chat template.
    digest
        Of a line, by this job.
    """

    def __init__(self, model: Model, base: GenerationConfig, *, chat: bool, digest: Callable[[bytes], str]) -> None:
        self._model, self._base, self._chat, self._digest = model, base, chat, digest
        self._read: Tokenizer | None = None

    def read(self, line: Line) -> Asked:
        """Return what a line asks for.

        Raises
        ------
        UsageError
            If it is no request.
        """
        found = object_of(line.content)
        if ("prompt" in found) == ("messages" in found):
            raise UsageError("give either 'prompt', a text or token ids, or 'messages'")
        options = {name: value for name, value in found.items() if name not in _OWN}
        try:
            config = with_options(self._base, options)
        except UnknownName as error:
            if error.name not in options:
                raise
            raise UnknownName("key", error.name, (*_OWN, *error.known), "What is yours goes under 'id'.") from None
        prompt = found.get("prompt")
        chat = "messages" in found or (self._chat and isinstance(prompt, str))
        messages = found.get("messages", [{"role": "user", "content": prompt}])
        ids = token_ids(messages if chat else prompt, self._tokenizer, which="the prompt")
        return Asked(
            line=line.number, digest=self._digest(line.content), prompt=ids, config=config, id=found.get("id"), chat=chat,
            size_bytes=len(line.content),
        )  # fmt: skip

    def answer(self, asked: Asked, outcome: Outcome) -> dict[str, Any]:
        """Return the line of an outcome."""
        head = {"line": asked.line, "digest": asked.digest, **({} if asked.id is None else {"id": asked.id})}
        if outcome.error is not None:
            return {**head, "error": str(outcome.error)}
        (found,) = outcome.generations
        return {
            **head, "text": self._text(found, asked.chat), "token_ids": found.token_ids.tolist(), "finish": found.finish,
            "prompt_tokens": len(asked.prompt), "steps": found.steps,
        }  # fmt: skip

    @staticmethod
    def answered(document: Mapping[str, Any]) -> Answered:
        """Say which line an answer is to."""
        if not isinstance(document["line"], int) or not isinstance(document["digest"], str):
            raise UsageError("no answer")
        return Answered(document["line"], document["digest"])

    def _text(self, found: Generation, chat: bool) -> str | None:
        if self._model.path is None:
            return None
        text = self._tokenizer().decode(found.token_ids.tolist())
        return text.strip() if chat else text

    def _tokenizer(self) -> Tokenizer:
        self._read = self._read or tokenizer_of(self._model)
        return self._read
