"""OpenAI's requests and answers: what a body asks for, and the objects that go back."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, Final, NamedTuple

from mosaic.decoding.algorithms import decides_by_probability
from mosaic.decoding.config import GenerationConfig, resolve
from mosaic.decoding.prompts import check_ids, is_integer, is_text, token_ids
from mosaic.decoding.tokenizer import Tokenizer
from mosaic.errors import UnknownName, UsageError
from mosaic.jobs import batch
from mosaic.jobs.sampling import SamplingParams
from mosaic.models.architecture import Architecture
from mosaic.models.policies.registry import POLICIES
from mosaic.serving.messages import Frame

__all__ = ["CHAT", "MOST_ANSWERS", "Question", "Reply", "TokenScore", "Usage", "error_body", "read"]

CHAT: Final = batch.CHAT
_OF_ANSWERS: Final = frozenset(
    {"stream", "stream_options", "logprobs", "top_logprobs", "diffusion_frames", "stream_mode"}
)
"""Keys that say what goes back, and change no answer."""
_OPTIONS: Final = batch.OPTIONS - _OF_ANSWERS
_SHORT: Final = 1024
"""Characters of options that are kept for requests with the same."""
_REFUSED: Final = {
    "max_nfe": "give 'steps', of the whole answer or, for models that decode block by block, of each block",
    "response_format": "no decoding algorithm here keeps to a format; leave it out",
    "tools": "no tools are called here; leave them out",
    "functions": "no functions are called here; leave them out",
    "suffix": "no text is filled in before another one; leave it out",
    "best_of": "answers are not ranked; ask for 'n'",
    "logprob_token_ids": "of each token, the probability of the one that was committed is known",
}
MARK: Final = "░"
"""An open position of a canvas."""
_LONGEST_MESSAGE: Final = 2000
_LEAST: Final = 1e-300
_LEAST_LOGPROB: Final = -9999.0
_NEUTRAL: Final = ({"type": "text"}, 1)
"""Values of keys that are refused which ask for nothing."""
MOST_ANSWERS: Final = 128
_MOST_SEED: Final = 1 << 31


class Usage(NamedTuple):
    """Tokens of all answers, first tokens of prompts that were cached, and steps of all answers."""

    tokens: int
    cached_tokens: int
    forwards: int


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
    logprobs
        Whether the probabilities that tokens were committed by go back; `top_logprobs` also as the most likely ones, which they
        are at temperature 0.
    frames
        Whether canvases go back while they fill in.
    ignored
        Keys of the body that have no meaning here.
    """

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    config: GenerationConfig
    chat: bool
    stream: bool
    with_usage: bool
    logprobs: bool = False
    top_logprobs: bool = False
    frames: bool = False
    ignored: Sequence[str] = ()


def read(
    body: Any, url: str, base: GenerationConfig, architecture: Architecture, tokenizer: Tokenizer, *, strict: bool,
    policies: Collection[str] | None = None, most_prompts: int = 1024,
) -> Question:  # fmt: skip
    """Read a body.

    Parameters
    ----------
    policies
        The presets of caches, sparse attention and eviction that it may ask for; None: all.
    most_prompts
        Prompts of one body, at most.

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
    for name, instead in _REFUSED.items():
        if body.get(name) and body[name] not in _NEUTRAL:
            raise UsageError(f"{name}: {instead}.")
    ignored = sorted({*body} - batch.KEYS - _OF_ANSWERS - {"echo", *_REFUSED})
    if ignored and strict:
        raise UnknownName("key of the body", ignored[0], sorted(batch.KEYS | _OF_ANSWERS))
    given = {name: value for name, value in body.items() if name in _OPTIONS}
    if policies is not None:
        _check_policies(given, policies)
    options = json.dumps(given)
    read_options = _options if len(options) <= _SHORT else _options.__wrapped__
    params, config, resolved = read_options(options, base, architecture)
    if params.seed is None:
        config = replace(config, seed=secrets.randbelow(_MOST_SEED))
    logprobs, top = _logprobs(body, chat=chat)
    if logprobs and not decides_by_probability(resolved, architecture):
        raise UsageError("logprobs: these options commit tokens by a score that is no probability; leave them out.")
    if top and config.temperature > 0:
        raise UsageError(
            "logprobs: above temperature 0 the most likely tokens are not known; ask for those of the answer alone (logprobs 0 of "
            "a completion, top_logprobs 0 of a chat)."
        )
    usage = body.get("stream_options") or {}
    if not isinstance(usage, Mapping):
        raise UsageError(f"stream_options: expected an object, got {usage!r}.")
    key = "messages" if chat else "prompt"
    if body.get(key) is None:
        raise UsageError(f"{key}: missing.")
    prompts = [_messages(body[key])] if chat else _prompts(body[key])
    if len(prompts) > most_prompts:
        raise UsageError(f"prompt: expected at most {most_prompts:,} prompts, got {len(prompts):,}.")
    stream, frames = _truth(body, "stream"), _frames(body)
    if frames and not stream:
        raise UsageError("diffusion_frames: canvases are sent while they fill in; set 'stream', too.")
    if chat and (not is_text(prompts[0]) or isinstance(prompts[0], str)):
        raise UsageError("messages: expected a list of messages of 'role' and 'content'.")
    return Question(
        prompts=[
            tokenizer.encode(one)
            if isinstance(one, str)
            else check_ids(token_ids(one, lambda: tokenizer, which=key), architecture, which=key).tolist()
            for one in prompts
        ],
        params=params, config=config, chat=chat, stream=stream, with_usage=bool(usage.get("include_usage")), logprobs=logprobs,
        top_logprobs=top, frames=frames, ignored=ignored,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _options(
    given: str, base: GenerationConfig, architecture: Architecture
) -> tuple[SamplingParams, GenerationConfig, GenerationConfig]:
    """Where answers end, how they are decoded, and all that this means; of options that most requests share, in JSON."""
    params = batch.parameters(json.loads(given), base)
    if params.n > MOST_ANSWERS:
        raise UsageError(f"n: expected at most {MOST_ANSWERS}, got {params.n}.")
    config = params.config(base, architecture)
    return params, config, resolve(config, architecture)


def _truth(body: Mapping[str, Any], name: str) -> bool:
    if not isinstance(value := body.get(name) or False, bool):
        raise UsageError(f"{name}: expected true or false, got {value!r}.")
    return value


def _frames(body: Mapping[str, Any]) -> bool:
    """Whether canvases are asked for, in our word or Diffulex's."""
    mode = body.get("stream_mode")
    if mode not in (None, "denoise", "block_append"):
        raise UnknownName("stream_mode", mode, ("denoise", "block_append"))
    return _truth(body, "diffusion_frames") or mode == "denoise"


def _logprobs(body: Mapping[str, Any], *, chat: bool) -> tuple[bool, bool]:
    """Whether the probabilities of an answer's tokens are asked for, and those of the most likely ones: a completion has
    `logprobs`, a number of these, a chat says `logprobs` and has `top_logprobs`."""
    wanted, top = body.get("logprobs"), body.get("top_logprobs") or 0
    if chat:
        wanted = _truth(body, "logprobs")
        if top and not wanted:
            raise UsageError("top_logprobs: set 'logprobs', too.")
    else:
        wanted, top = wanted is not None and wanted is not False, wanted or 0
    if not is_integer(top) and not isinstance(top, bool):
        raise UsageError(f"logprobs: expected a number, got {top!r}.")
    if top not in (0, 1):
        raise UsageError(
            f"logprobs: of each token, only the probability of the one that was committed is known; ask for 1 at most, not {top}."
        )
    return wanted, bool(top)


def _check_policies(given: Mapping[str, Any], policies: Collection[str]) -> None:
    """Refuse presets that the operator has not allowed."""
    for name in POLICIES:
        value = given.get(name)
        for part in value.split("+") if isinstance(value, str) else ():
            if (preset := part.partition(":")[0]) not in policies:
                allowed = f"allows {', '.join(sorted(policies))}" if policies else "allows none"
                raise UsageError(f"{name}: this server does not allow '{preset}', it {allowed}.")


def _messages(given: Any) -> Any:
    """A conversation whose contents are texts, also where they come as a list of parts, or as null."""
    if not isinstance(given, list):
        return given
    found = []
    for one in given:
        if isinstance(one, dict):
            if one.get("tool_calls"):
                raise UsageError("messages: no tools are called here; leave 'tool_calls' out.")
            content = one.get("content", 0)
            if content is None or isinstance(content, list):
                one = one | {"content": _joined(content or ())}
        found.append(one)
    return found


def _joined(parts: Sequence[Any]) -> str:
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise UsageError(f"messages: a part of a content is of type {kind!r}; this model reads text alone.")
    return "".join(part["text"] for part in parts)


def _prompts(given: Any) -> list[Any]:
    """The prompts of a completion: one or several, as texts or token ids."""
    if isinstance(given, str) or (isinstance(given, list) and given and all(map(is_integer, given))):
        return [given]
    if not isinstance(given, list) or not given:
        raise UsageError("prompt: expected a text, token ids, or a list of them.")
    wrong = [(at, one) for at, one in enumerate(given) if not isinstance(one, str | list)]
    if wrong:
        at, one = next((found for found in wrong if not is_integer(found[1])), wrong[0])
        raise UsageError(
            f"prompt: expected a text, token ids, or a list of them, got {one!r:.80} at place {at} of a list."
        )
    return given


class TokenScore(NamedTuple):
    """A token of an answer, the logarithm of the probability that it was committed by, and where its text begins."""

    id: int
    logprob: float
    offset: int

    @classmethod
    def of(cls, token: int, probability: float, offset: int) -> TokenScore:
        """Return that of a token; no logarithm is below vLLM's least."""
        return cls(token, math.log(probability) if probability > _LEAST else _LEAST_LOGPROB, offset)


@dataclass(slots=True)
class Reply:
    """The objects that answer a question; all share an id."""

    question: Question
    model: str
    tokenizer: Tokenizer
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.question.chat else 'cmpl'}-{secrets.token_hex(12)}"

    def whole(
        self, texts: Sequence[str], reasons: Sequence[str], scores: Sequence[Sequence[TokenScore]], usage: Usage
    ) -> dict[str, Any]:
        """All answers at once, by index."""
        named = "message" if self.question.chat else "text"
        choices: list[dict[str, Any]] = [
            {"index": index, named: {"role": "assistant", "content": text} if self.question.chat else text}
            | {"logprobs": self._logprobs(found), "finish_reason": reason}
            for index, (text, reason, found) in enumerate(zip(texts, reasons, scores, strict=True))
        ]
        return self._object("" if not self.question.chat else "chat.completion", choices) | {"usage": self.usage(usage)}

    def piece(
        self, index: int, text: str | None = None, *, role: bool = False, reason: str | None = None,
        scores: Sequence[TokenScore] = (),
    ) -> dict[str, Any]:  # fmt: skip
        """A part of one answer: its first one says who speaks, its last one why it ends."""
        delta = {**({"role": "assistant"} if role else {}), **({} if text is None else {"content": text})}
        shown = {"delta": delta} if self.question.chat else {"text": text or ""}
        choice = {
            "index": index,
            **shown,
            "logprobs": self._logprobs(scores) if scores else None,
            "finish_reason": reason,
        }
        return self._object("chat.completion.chunk" if self.question.chat else "", [choice])

    def frame(self, index: int, frame: Frame) -> dict[str, Any]:
        """A piece without text that has the canvas behind what is final: a block, a mark for each open position."""
        skip = self.question.params.skip_special_tokens
        text = "".join(
            MARK * len([*run]) if open_ else self.tokenizer.decode([*run], skip_special_tokens=skip)
            for open_, run in groupby(frame.ids, key=lambda token: token < 0)
        )
        shown: dict[str, Any] = {"type": "diffusion_frame", "index": index, "block": frame.block, "step": frame.step}
        shown |= {"masked": frame.masked, "text": text}
        return self.piece(index) | {"diffusion_frame": shown}

    def last(self, usage: Usage) -> dict[str, Any]:
        """The piece that has the usage alone."""
        return self._object("chat.completion.chunk" if self.question.chat else "", []) | {"usage": self.usage(usage)}

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Tokens of the prompts and of the answers, and the forwards that these took."""
        prompts = sum(map(len, self.question.prompts))
        return {
            "prompt_tokens": prompts, "completion_tokens": usage.tokens, "total_tokens": prompts + usage.tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens}, "forwards": usage.forwards,
        }  # fmt: skip

    def _logprobs(self, found: Sequence[TokenScore]) -> dict[str, Any] | None:
        """Probabilities in the form of a chat or of a completion."""
        if not self.question.logprobs:
            return None
        texts = [self.tokenizer.decode([one.id], skip_special_tokens=False) for one in found]
        top = self.question.top_logprobs
        if self.question.chat:
            content: list[dict[str, Any]] = [
                {"token": text, "logprob": one.logprob, "bytes": [*text.encode()]}
                for text, one in zip(texts, found, strict=True)
            ]
            return {"content": [one | {"top_logprobs": [one] if top else []} for one in content], "refusal": None}
        values = [one.logprob for one in found]
        return {
            "tokens": texts, "token_logprobs": values, "text_offset": [one.offset for one in found],
            "top_logprobs": [{text: value} for text, value in zip(texts, values, strict=True)] if top else None,
        }  # fmt: skip

    def _object(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind or "text_completion", "created": self.created, "model": self.model, "choices": choices
        }  # fmt: skip


def error_body(message: str, kind: str, code: int) -> dict[str, Any]:
    """An error in OpenAI's form; what its message quotes of a body may be no text that can be sent."""
    message = message.encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": message[:_LONGEST_MESSAGE], "type": kind, "param": None, "code": code}}
