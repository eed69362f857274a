"""What a line of a job asks for, and the line that answers it; lines of a batch are answered in OpenAI's format."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from mosaic.decoding.config import GenerationConfig, with_options
from mosaic.decoding.prompts import is_text, token_ids, tokenizer_of
from mosaic.errors import MosaicError, UnknownName, UsageError
from mosaic.jobs import batch
from mosaic.jobs.lines import Answered, object_of
from mosaic.jobs.names import length_name
from mosaic.jobs.sampling import SamplingParams, completion, submissions

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
    params, url, length_name
        Of a line of a batch: where its answers end, what they look like, and its name for `gen_length`.
    error
        Why there is no answer, if it is known.
    """

    line: int
    digest: str
    prompt: Tensor
    config: GenerationConfig
    size_bytes: int
    id: Any = None
    chat: bool = False
    params: SamplingParams | None = None
    url: str = ""
    length_name: str = ""
    error: MosaicError | None = None

    def submissions(self) -> list[Submission]:
        """Return what is submitted for it."""
        if self.error is not None:
            return []
        return submissions(self.prompt, self.config, self.line - 1, 1 if self.params is None else self.params.n)


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
        if "custom_id" in found:
            return self._of_batch(line, found)
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

    def _of_batch(self, line: Line, found: dict[str, Any]) -> Asked:
        """The same for a line of OpenAI's batch format: an error of its body is its answer."""
        batch.check(found)
        body, chat, error = found["body"], found["url"] == batch.CHAT, None
        params, config, ids = None, self._base, torch.zeros(0, dtype=torch.int64)
        try:
            params = batch.parameters(body, self._base)
            config = params.config(self._base, self._model.architecture)
            prompt = body.get("messages" if chat else "prompt")
            if chat != (is_text(prompt) and not isinstance(prompt, str)):
                raise UsageError(
                    "messages: expected a list of messages" if chat else "prompt: expected a text or token ids"
                )
            ids = token_ids(prompt, self._tokenizer, which="the prompt")
        except UsageError as refused:
            error = refused
        return Asked(
            line=line.number, digest=self._digest(line.content), prompt=ids, config=config, size_bytes=len(line.content),
            id=found["custom_id"], chat=chat, params=params, url=found["url"], length_name=length_name(body), error=error,
        )  # fmt: skip

    def answer(self, asked: Asked, outcome: Outcome) -> dict[str, Any]:
        """Return the line of an outcome."""
        if asked.url:
            tokenizer = None if self._model.path is None else self._tokenizer()
            answers = [
                completion(place, one, asked.params or SamplingParams(), tokenizer)
                for place, one in enumerate(outcome.generations)
            ]
            of_line, error = Answered(asked.line, asked.digest), asked.error or outcome.error
            said = None if error is None else re.sub(r"\bgen_length\b", asked.length_name, str(error))
            return batch.answer_line(of_line, asked.id, asked.url, self._model.name, len(asked.prompt), answers, said)
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
        if "custom_id" in document:
            return batch.answered(document)
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
