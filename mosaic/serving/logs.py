"""One line for each request, and all other lines of a server, as text or as JSON. Nothing of prompts or answers is in them."""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias
from urllib.parse import quote

if TYPE_CHECKING:
    from mosaic.serving.protocol import Usage

__all__ = ["FORMATS", "Logged", "Note", "configure"]

FORMATS: Final = ("text", "json")
_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PATH: Final = 200
_WATCHED: Final = ("/health", "/metrics", "/status")
"""Paths that are asked every few seconds: only their failures have a line."""
_log = logging.getLogger("mosaic.serving.requests")
_Message: TypeAlias = MutableMapping[str, Any]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]
_App: TypeAlias = Callable[[Any, Any, _Send], Awaitable[None]]


class _Answers(Protocol):
    reasons: list[str | None]
    first_s: float | None

    @property
    def usage(self) -> Usage: ...


@dataclass(slots=True, kw_only=True)
class Note:
    """What is known of a request while it is answered.

    Parameters
    ----------
    id
        From the header `X-Request-Id`, if it is a plain word of at most 128 characters; else a new one.
    prompt_tokens, answers
        Of a completion or a chat.
    error
        The type of the error that it was answered with.
    """

    id: str
    prompt_tokens: int = 0
    answers: _Answers | None = None
    error: str = ""

    @property
    def ended(self) -> str:
        """Why it ended: an error, "left" if its caller did, or what ended its answers."""
        if self.error or self.answers is None:
            return self.error
        reasons = {reason or "left" for reason in self.answers.reasons}
        return "left" if "left" in reasons else ",".join(sorted(reasons))

    def fields(self) -> dict[str, Any]:
        """What the line says of the answers."""
        if self.answers is None:
            return {"ended": self.ended} if self.error else {}
        usage, first_s = self.answers.usage, self.answers.first_s
        return {
            "prompt_tokens": self.prompt_tokens, "tokens": usage.tokens, "forwards": usage.forwards,
            "cached_tokens": usage.cached_tokens, "first_token_s": None if first_s is None else round(first_s, 4),
            "ended": self.ended,
        }  # fmt: skip


class Logged:
    """An application that gives each request a `Note`, as `request.state.note`, its id back in `X-Request-Id`, and a line."""

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: _Send) -> None:
        """Answer as the application does."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        note = Note(id=given if _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}")
        scope["state"] = {**scope.get("state", {}), "note": note}
        began, status = time.perf_counter(), 500

        async def sent(message: _Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", note.id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            if scope["path"] not in _WATCHED or status != 200:
                found = {
                    "id": note.id, "method": scope["method"], "path": quote(scope["path"][:_PATH]), "status": status,
                    **note.fields(), "seconds": round(time.perf_counter() - began, 4),
                }  # fmt: skip
                _log.info(" ".join(f"{name}={value}" for name, value in found.items()), extra={"fields": found})


def configure(form: str) -> None:
    """Write all records of this process to its standard error, in one of `FORMATS`."""
    handler = _StandardError()
    handler.setFormatter(_Json() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("mosaic").setLevel(logging.INFO)


class _StandardError(logging.StreamHandler[Any]):
    """Writes to what is the process's standard error now: one that was replaced may be closed."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None)
        found: dict[str, Any] = {"time": round(record.created, 3), "level": record.levelname, "logger": record.name}
        found |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found)
