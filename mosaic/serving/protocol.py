"""OpenAI's requests and answers: what a body asks for, and the objects that go back."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from mosaic.decoding.config import GenerationConfig, resolve
from mosaic.decoding.prompts import is_integer, is_text, token_ids
from mosaic.decoding.tokenizer import Tokenizer
from mosaic.errors import UnknownName, UsageError
from mosaic.jobs import batch
from mosaic.jobs.sampling import SamplingParams
from mosaic.models.architecture import Architecture

__all__ = ["CHAT", "Question", "Reply", "error_body", "read"]

CHAT: Final = batch.CHAT
_STREAMED: Final = frozenset({"stream", "stream_options"})
_MOST_ANSWERS: Final = 128
_MOST_SEED: Final = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a request asks for.

    Parameters
    ----------
    prompts
        Token ids of each prompt; a chat has one.
    params, config
        Where answers end, and how they are decoded.
    chat, stream, with_usage
        Which objects go back.
    ignored
        Keys of the body that have no meaning here.
    """

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    config: GenerationConfig
    chat: bool
    stream: bool
    with_usage: bool
    ignored: Sequence[str] = ()


def read(
    body: Any, url: str, base: GenerationConfig, architecture: Architecture, tokenizer: Tokenizer, *, strict: bool
) -> Question:  # fmt: skip
    """Read a body.

    Raises
    ------
    UsageError
        In one line, if it cannot be answered; `UnknownName` for a key without a meaning, if `strict`.
    """
    if not isinstance(body, dict):
        raise UsageError(f"the body: expected a JSON object, got {type(body).__name__}.")
    chat = url == CHAT
    if body.get("echo"):
        raise UsageError("echo: a diffusion model has no likelihood of a prompt token by token; leave it out.")
    ignored = sorted({*body} - batch.KEYS - _STREAMED - {"echo"})
    if ignored and strict:
        raise UnknownName("key of the body", ignored[0], sorted(batch.KEYS))
    given = {name: value for name, value in body.items() if name in batch.KEYS and name != "stream"}
    params = batch.parameters(given, base)
    if params.n > _MOST_ANSWERS:
        raise UsageError(f"n: expected at most {_MOST_ANSWERS}, got {params.n}.")
    config = params.config(base, architecture)
    if params.seed is None:
        config = replace(config, seed=secrets.randbelow(_MOST_SEED))
    resolve(config, architecture)
    usage = body.get("stream_options") or {}
    if not isinstance(usage, Mapping):
        raise UsageError(f"stream_options: expected an object, got {usage!r}.")
    key = "messages" if chat else "prompt"
    if body.get(key) is None:
        raise UsageError(f"{key}: missing.")
    prompts = [body[key]] if chat else _prompts(body[key])
    if chat and (not is_text(prompts[0]) or isinstance(prompts[0], str)):
        raise UsageError("messages: expected a list of messages of 'role' and 'content'.")
    return Question(
        prompts=[token_ids(one, lambda: tokenizer, which=key).tolist() for one in prompts], params=params, config=config,
        chat=chat, stream=bool(body.get("stream")), with_usage=bool(usage.get("include_usage")), ignored=ignored,
    )  # fmt: skip


def _prompts(given: Any) -> list[Any]:
    """The prompts of a completion: one or several, as texts or token ids."""
    if isinstance(given, str) or (isinstance(given, list) and given and all(map(is_integer, given))):
        return [given]
    if isinstance(given, list) and given and not any(isinstance(one, Mapping) for one in given):
        return given
    raise UsageError("prompt: expected a text, token ids, or a list of them.")


@dataclass(slots=True)
class Reply:
    """The objects that answer a question; all share an id."""

    question: Question
    model: str
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.question.chat else 'cmpl'}-{secrets.token_hex(12)}"

    def whole(self, texts: Sequence[str], reasons: Sequence[str], tokens: int, cached: int) -> dict[str, Any]:
        """All answers at once, by index."""
        named = "message" if self.question.chat else "text"
        choices = [
            {"index": index, named: {"role": "assistant", "content": text} if self.question.chat else text}
            | {"logprobs": None, "finish_reason": reason}
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return self._object("" if not self.question.chat else "chat.completion", choices) | {
            "usage": self.usage(tokens, cached)
        }

    def piece(
        self, index: int, text: str | None = None, *, role: bool = False, reason: str | None = None
    ) -> dict[str, Any]:
        """A part of one answer: its first one says who speaks, its last one why it ends."""
        delta = {**({"role": "assistant"} if role else {}), **({} if text is None else {"content": text})}
        shown = {"delta": delta} if self.question.chat else {"text": text or ""}
        choice = {"index": index, **shown, "logprobs": None, "finish_reason": reason}
        return self._object("chat.completion.chunk" if self.question.chat else "", [choice])

    def last(self, tokens: int, cached: int) -> dict[str, Any]:
        """The piece that has the usage alone."""
        return self._object("chat.completion.chunk" if self.question.chat else "", []) | {
            "usage": self.usage(tokens, cached)
        }

    def usage(self, tokens: int, cached: int) -> dict[str, Any]:
        """Tokens of the prompts, of which so many were cached, and of the answers."""
        prompts = sum(map(len, self.question.prompts))
        return {
            "prompt_tokens": prompts, "completion_tokens": tokens, "total_tokens": prompts + tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip

    def _object(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind or "text_completion", "created": self.created, "model": self.model, "choices": choices
        }  # fmt: skip


def error_body(message: str, kind: str, code: int) -> dict[str, Any]:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
