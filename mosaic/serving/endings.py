"""What an error means to the caller: a status, a type in OpenAI's words, and headers."""

from __future__ import annotations

from mosaic.errors import MissingExtra, MosaicError
from mosaic.serving.answers import TooLong
from mosaic.serving.protocol import error_body
from mosaic.serving.supervisor import Busy, EngineFailed, TooLarge

try:
    from fastapi.responses import JSONResponse
except ImportError as error:
    raise MissingExtra("fastapi", "serve", "`mosaic serve`") from error

__all__ = ["Ending"]


class Ending(Exception):
    """An answer to a request that is an error: its status, type and headers, and what counts it."""

    def __init__(self, status: int, message: str, kind: str, headers: dict[str, str] | None = None) -> None:
        self.status, self.message, self.kind, self.headers = status, message, kind, headers
        self.reason = kind.removesuffix("_error")
        super().__init__(message)

    @classmethod
    def of(cls, error: Exception) -> Ending:
        """What an error means to the caller; one that nobody expects is the server's own."""
        if isinstance(error, Ending):
            return error
        if isinstance(error, RecursionError):
            return cls(400, "the body is nested too deeply.", "invalid_request_error")
        if not isinstance(error, MosaicError):
            return cls(500, "the server has failed at this request; its log says how.", "server_error")
        if isinstance(error, Busy):
            return cls(429, str(error), "rate_limit_error", {"Retry-After": str(error.seconds)})
        if isinstance(error, TooLong):
            return cls(504, str(error), "timeout_error")
        if isinstance(error, EngineFailed):
            return cls(503, str(error), "engine_error", {"Retry-After": "1"})
        found = cls(400, str(error).replace("gen_length", "max_tokens"), "invalid_request_error")  # its name here
        if isinstance(error, TooLarge):
            found.reason = "does_not_fit"
        return found

    def response(self) -> JSONResponse:
        """The response."""
        body = error_body(self.message, self.kind, self.status)
        return JSONResponse(body, status_code=self.status, headers=self.headers)
