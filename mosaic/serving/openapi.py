"""What `/openapi.json` says of each path: bodies with the fields, types and bounds that the options' own classes have."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

from mosaic.decoding.config import BOUNDS, CHOICES, GenerationConfig
from mosaic.jobs.names import NAMES, XARGS
from mosaic.jobs.sampling import SamplingParams
from mosaic.serving.protocol import MOST_ANSWERS

__all__ = ["completion_body", "described", "object_of"]

_TEXT: Final = {"type": "string"}
_WHOLE: Final = {"type": "integer"}
_TRUTH: Final = {"type": "boolean"}
_IDS: Final = {"type": "array", "items": _WHOLE}
_TYPES: Final[dict[str, dict[str, Any]]] = {
    "int": _WHOLE, "float": {"type": "number"}, "bool": _TRUTH, "str": _TEXT, "Sequence[int]": _IDS,
    "Sequence[str]": {"type": "array", "items": _TEXT},
}  # fmt: skip
"""By how a field is annotated; what else it may be comes from Python alone."""
_TOKENS: Final = {"type": "integer", "minimum": 0}
_PROMPT: Final = {"anyOf": [_TOKENS, _TEXT, {"type": "array", "items": _TOKENS, "minItems": 1}]}
_PROMPTS: Final = {"anyOf": [_TEXT, {"type": "array", "items": _PROMPT, "minItems": 1}]}
_STATUSES: Final = {
    400: "What is asked for cannot be: the message says why.", 401: "No valid API key.",
    403: "The header Host or Origin is no name of this server.", 404: "There is no such model.", 408: "The body came too slowly.",
    413: "The body is too large.", 429: "Too many wait; Retry-After says for how long.",
    499: "The caller has left.", 500: "The server has failed.", 503: "The engine has failed, or too many connections are open.",
    504: "The time of the request is over.",
}  # fmt: skip


def object_of(**properties: Any) -> dict[str, Any]:
    """A JSON object of these properties."""
    return {"type": "object", "properties": properties}


def completion_body(*, chat: bool) -> dict[str, Any]:
    """The schema of a completion's body, or a chat's."""
    known = dict[str, Any]()
    for entry in (*fields(GenerationConfig), *fields(SamplingParams)):
        if (found := _field(entry.name, str(entry.type))) is not None:
            known[entry.name] = found
    known["n"] = known["n"] | {"minimum": 1, "maximum": MOST_ANSWERS}
    known["max_tokens"] = known["gen_length"]
    others = {
        name: known[own] | {"description": f"'{own}', as {whose} has it."} for name, (own, whose) in NAMES.items()
    }
    options = known | others | {
        "model": _TEXT, "user": _TEXT, "stream": _TRUTH, "stream_options": object_of(include_usage=_TRUTH), "stream_mode": {
            "enum": ["denoise", "block_append"]
        }, "diffusion_frames": _TRUTH, "echo": {"enum": [False]}, "vllm_xargs": object_of(
            **{name: known[own] for name, own in XARGS.items()}
        ),
    }  # fmt: skip
    of_chat = {"logprobs": _TRUTH, "top_logprobs": {"enum": [0, 1]}}
    options |= of_chat if chat else {"logprobs": {"enum": [True, False, 0, 1]}}
    body = object_of(**{name: {"anyOf": [one, {"type": "null"}]} for name, one in sorted(options.items())})
    message = object_of(role=_TEXT, content={"anyOf": [_TEXT, {"type": "array", "items": object_of(text=_TEXT)}]})
    asked = {"messages": {"type": "array", "items": message | {"required": ["role", "content"]}, "minItems": 1}}
    body["properties"] |= asked if chat else {"prompt": _PROMPTS}
    return body | {"required": ["messages" if chat else "prompt"]}


def _field(name: str, annotated: str) -> dict[str, Any] | None:
    """The schema of a field; None for one that no body has."""
    if name in BOUNDS:
        return {"type": "integer" if BOUNDS[name].kind is int else "number", **BOUNDS[name].limits}
    if name in CHOICES:
        return {"enum": [*CHOICES[name]]}
    kinds = [_TYPES[part] for part in annotated.split(" | ") if part in _TYPES]
    return None if not kinds or name in _REFUSED else {"anyOf": kinds} if len(kinds) > 1 else kinds[0]


_NAMES_OF_PARAMS: Final = [entry.name for entry in fields(SamplingParams)]
_REFUSED: Final = frozenset(_NAMES_OF_PARAMS[_NAMES_OF_PARAMS.index("extra_args") :])
"""Of these, `SamplingParams` takes their defaults alone."""


def described(body: dict[str, Any] | None, kinds: tuple[str, ...], *statuses: int) -> dict[str, Any]:
    """What FastAPI has to know of a path: its body, the kinds of its answer, and the statuses of its errors."""
    error = object_of(message=_TEXT, type=_TEXT, param={"type": "null"}, code=_WHOLE) | {
        "required": ["message", "type", "code"]
    }
    content = {"application/json": {"schema": object_of(error=error) | {"required": ["error"]}}}
    found: dict[str, Any] = {
        "responses": {status: {"description": _STATUSES[status], "content": content} for status in statuses}
        | {200: {"description": "The answer.", "content": {kind: {} for kind in kinds}}}
    }
    if body is not None:
        found["openapi_extra"] = {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}
    return found
