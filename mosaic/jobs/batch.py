"""OpenAI's batch format: lines of `custom_id`, `method`, `url` and `body`, and the lines that answer them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from mosaic.decoding.config import GenerationConfig
from mosaic.errors import UnknownName, UsageError
from mosaic.jobs.lines import Answered
from mosaic.jobs.names import NAMES, own_names
from mosaic.jobs.sampling import CompletionOutput, SamplingParams

__all__ = ["CHAT", "KEYS", "OPTIONS", "URLS", "answer_line", "answered", "check", "parameters"]

CHAT: Final = "/v1/chat/completions"
URLS: Final = ("/v1/completions", CHAT)
_ID: Final = "batch_req_"
_PARAMS: Final = frozenset(entry.name for entry in fields(SamplingParams)) - {"extra_args"}
_OPTIONS: Final = frozenset(entry.name for entry in fields(GenerationConfig))
_OF_CALLER: Final = frozenset({
    "model", "prompt", "messages", "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"
})  # fmt: skip
"""Keys of a body that change no answer, and the prompt."""
OPTIONS: Final = _PARAMS | _OPTIONS | {*NAMES, "vllm_xargs", "stream"}
"""Keys that `parameters` reads."""
KEYS: Final = OPTIONS | _OF_CALLER
"""All keys of a body that have a meaning."""


def check(found: Mapping[str, Any]) -> None:
    """Check the outside of a line.

    Raises
    ------
    UsageError
        If it is no line of a batch.
    """
    if not isinstance(found.get("custom_id"), str):
        raise UsageError(f"custom_id: expected a text, got {found.get('custom_id')!r}")
    if found.get("method", "POST") != "POST":
        raise UsageError(f"method: expected POST, got {found['method']!r}")
    if found.get("url") not in URLS:
        raise UnknownName("url", found.get("url"), URLS)
    if not isinstance(found.get("body"), dict):
        raise UsageError(f"body: expected a JSON object, got {type(found.get('body')).__name__}")


def parameters(body: Mapping[str, Any], base: GenerationConfig) -> SamplingParams:
    """Return the options of a body, under any of their names; those that it leaves out are of `base`.

    Raises
    ------
    UsageError
        In one line, if an option is unknown or its value cannot be.
    """
    given = {name: value for name, value in own_names(body).items() if name not in _OF_CALLER and value is not None}
    if given.pop("stream", False):
        raise UsageError("stream: a batch has whole answers; leave it out.")
    if given.get("logprobs") is False:
        del given["logprobs"]
    own = {name: given.pop(name) for name in sorted(_OPTIONS - _PARAMS) if name in given}
    for name in given:
        if name not in _PARAMS:
            raise UnknownName("key of the body", name, sorted({*_PARAMS, *_OPTIONS}))
    left = {"temperature": base.temperature, "max_tokens": base.gen_length, "top_p": base.top_p, "top_k": base.top_k}
    return SamplingParams(**{**left, "ignore_eos": not base.stop_at_eos, "extra_args": own, **given})


def answer_line(
    digest: Answered, custom_id: str, url: str, model: str, prompt_tokens: int,
    answers: Sequence[CompletionOutput], error: str | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the line that answers a line: status 200 and a completion, or 400 and why there is none."""
    name, body = f"{digest.number}-{digest.digest}", dict[str, Any]()
    if error is not None:
        status, body = 400, {"error": {
            "message": error, "type": "invalid_request_error", "param": None, "code": None,
        }}  # fmt: skip
    else:
        chat, tokens = url == CHAT, sum(len(one.token_ids) for one in answers)
        status, body = 200, {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "choices": [
                {"index": one.index, "finish_reason": one.finish_reason, "logprobs": None}
                | ({"message": {"role": "assistant", "content": one.text}} if chat else {"text": one.text})
                for one in answers
            ],
            "usage": {
                "prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens,
            },
        }  # fmt: skip
    response = {"status_code": status, "request_id": f"req_{name}", "body": body}
    return {"id": f"{_ID}{name}", "custom_id": custom_id, "response": response, "error": None}


def answered(document: Mapping[str, Any]) -> Answered:
    """Say which line an answer is to."""
    number, _, digest = document["id"].removeprefix(_ID).partition("-")
    return Answered(int(number), digest)
