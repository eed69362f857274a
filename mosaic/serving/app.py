"""The HTTP side: OpenAI's endpoints over a supervised engine."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, Final

from mosaic.decoding.prompts import token_ids
from mosaic.decoding.tokenizer import Tokenizer
from mosaic.errors import MissingExtra, MosaicError, UsageError
from mosaic.models import Model
from mosaic.serving.engine import EngineOptions
from mosaic.serving.messages import Ended
from mosaic.serving.metrics import Metrics
from mosaic.serving.protocol import CHAT, Question, Reply, error_body, read
from mosaic.serving.supervisor import Busy, EngineFailed, Limits, Supervisor, TooLarge
from mosaic.serving.text import AnswerText
from mosaic.version import __version__

try:
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, Response, StreamingResponse
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
except ImportError as error:
    raise MissingExtra("fastapi", "serve", "`mosaic serve`") from error

__all__ = ["create_app"]

_log = logging.getLogger(__name__)

_CHARACTERS: Final = 4
"""A text of so many times as many characters as the longest tokens have together is too long, whatever is normalised away."""
COMPLETIONS: Final = "/v1/completions"
_NEXT_PROMPT: Final = 1 << 40
"""Between the numbers by which the prompts of one request draw: beyond those of all answers to one."""


class _TooLong(MosaicError):
    """The time of a request is over."""


class _Ending(Exception):
    """An answer to a request that is an error: its status, type and headers."""

    def __init__(self, status: int, message: str, kind: str, headers: dict[str, str] | None = None) -> None:
        self.status, self.message, self.kind, self.headers = status, message, kind, headers
        super().__init__(message)

    @classmethod
    def of(cls, error: MosaicError) -> _Ending:
        """What an error of ours means to the caller."""
        if isinstance(error, Busy):
            return cls(429, str(error), "rate_limit_error", {"Retry-After": str(error.seconds)})
        if isinstance(error, _TooLong):
            return cls(504, str(error), "timeout_error")
        if isinstance(error, EngineFailed):
            return cls(503, str(error), "engine_error", {"Retry-After": "1"})
        return cls(400, str(error), "invalid_request_error")

    def response(self) -> Response:
        """The response."""
        body = error_body(self.message, self.kind, self.status)
        return JSONResponse(body, status_code=self.status, headers=self.headers)


class _Answers:
    """The answers to a question as they become final."""

    def __init__(self, server: _Server, question: Question) -> None:
        self._server, self._question = server, question
        answers = question.params.n
        self.texts = [AnswerText(server.tokenizer, question.params) for _ in range(answers * len(question.prompts))]
        self.reasons: list[str | None] = [None] * len(self.texts)
        self.steps = self.cached_tokens = 0
        self._began, self._first = time.perf_counter(), True

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(text.tokens for text in self.texts)

    async def pieces(self) -> AsyncGenerator[tuple[int, str], None]:
        """Yield further text of an answer; one that has ended gets its reason before its last text."""
        heard: asyncio.Queue[tuple[int, str] | MosaicError | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._follow(place, heard)) for place in range(len(self._question.prompts))]
        limit_s = self._server.limits.timeout_s
        over = _TooLong(f"the answer has not ended within {limit_s:g} s, the limit here; ask for fewer tokens.")
        ending = asyncio.get_running_loop().call_later(limit_s, heard.put_nowait, over)
        try:
            open_ = len(tasks)
            while open_:
                found = await heard.get()
                if isinstance(found, MosaicError):
                    raise found
                if found is None:
                    open_ -= 1
                else:
                    yield found
        finally:
            ending.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        reasons = [reason or "" for reason in self.reasons]
        self._server.metrics.answered(time.perf_counter() - self._began, self.tokens, self.steps, reasons)

    async def _follow(self, place: int, heard: asyncio.Queue[tuple[int, str] | MosaicError | None]) -> None:
        """Follow one prompt."""
        question, answers = self._question, self._question.params.n
        first = place * answers
        asked = self._server.engine.answer(
            question.prompts[place], question.config, answers=answers, draws=place * _NEXT_PROMPT
        )
        try:
            async with aclosing(asked):
                async for found in asked:
                    if isinstance(found, Ended):
                        self._end(first, found, heard)
                        break
                    for at, ids in found.items():
                        self._push(first + at, ids, heard)
                    if None not in self.reasons[first : first + answers]:  # all have met a stop
                        break
            heard.put_nowait(None)
        except MosaicError as error:
            heard.put_nowait(error)

    def _push(self, index: int, ids: Sequence[int], heard: asyncio.Queue[Any]) -> None:
        if self._first:
            self._first = False
            self._server.metrics.began(time.perf_counter() - self._began)
        text = self.texts[index]
        shown = text.push(ids)
        if text.stopped is not None and self.reasons[index] is None:
            self.reasons[index] = "stop"
            heard.put_nowait((index, shown))
        elif shown:
            heard.put_nowait((index, shown))

    def _end(self, first: int, ended: Ended, heard: asyncio.Queue[Any]) -> None:
        self.steps += sum(ended.steps)
        self.cached_tokens += ended.cached_tokens
        for place, finish in enumerate(ended.finishes):
            index = first + place
            if self.reasons[index] is None:
                shown = self.texts[index].flush()
                stopped = finish == "eos" or self.texts[index].stopped is not None
                self.reasons[index] = "stop" if stopped else finish
                heard.put_nowait((index, shown))


class _Server:
    """What all requests share."""

    def __init__(
        self, model: Model, name: str, options: EngineOptions, limits: Limits, *, keys: Sequence[str], strict: bool
    ) -> None:  # fmt: skip
        self.model, self.name, self.base, self.limits, self.strict = model, name, options.base, limits, strict
        self.tokenizer = Tokenizer(_path(model))
        self.metrics = Metrics(name)
        self.engine = Supervisor(options, limits, self.metrics)
        self._keys = [key.encode() for key in keys]
        self._began = int(time.time())

    def allow(self, request: Request) -> None:
        """Refuse who has no key, where there are keys."""
        if not self._keys:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not any(hmac.compare_digest(given.encode(), key) for key in self._keys):
            raise _Ending(401, "no valid API key: send 'Authorization: Bearer KEY'.", "authentication_error")

    def admit(self, request: Request) -> None:
        """Refuse what comes over a connection beyond the limit."""
        if getattr(request.state, "crowded", False):
            said = f"{self.limits.max_connections:,} connections are open, which is as many as may; ask again later."
            raise _Ending(503, said, "overloaded_error", {"Connection": "close", "Retry-After": "1"})

    async def body(self, request: Request) -> Any:
        """The JSON of a request."""
        found, limits = bytearray(), self.limits
        try:
            async with asyncio.timeout(limits.slow_s):
                async for part in request.stream():
                    found += part
                    if len(found) > limits.max_body_bytes:
                        said = f"the body has more than {limits.max_body_bytes:,} bytes."
                        raise _Ending(413, said, "invalid_request_error")
            return json.loads(found)
        except TimeoutError:
            said = f"the body has not come within {limits.slow_s:g} s."
            raise _Ending(408, said, "timeout_error", {"Connection": "close"}) from None
        except (ValueError, RecursionError) as error:
            raise _Ending(400, f"the body is no JSON: {error}.", "invalid_request_error") from None
        except ClientDisconnect:
            raise _Ending(499, "the caller has left.", "cancelled") from None

    async def complete(self, request: Request) -> Response:
        """Answer a completion, of a prompt or a chat."""
        self.allow(request)
        body = await self.body(request)
        if isinstance(body, dict) and body.get("model") not in (None, self.name):
            raise _Ending(
                404, f"the model {body['model']!r} is not here; this server has '{self.name}'.", "not_found_error"
            )
        self._check_text(body)
        question = await asyncio.to_thread(
            read, body, request.url.path, self.base, self.model.architecture, self.tokenizer, strict=self.strict
        )
        self._check(question)
        self.metrics.asked(sum(map(len, question.prompts)))
        reply, answers = Reply(question, self.name), _Answers(self, question)
        headers = {"X-Mosaic-Ignored": ", ".join(question.ignored)} if question.ignored else {}
        if question.stream:
            return await self._streamed(reply, answers, headers)
        texts = await self._whole(request, answers)
        return JSONResponse(
            reply.whole(texts, [reason or "" for reason in answers.reasons], answers.tokens, answers.cached_tokens),
            headers=headers,
        )

    def _check_text(self, body: Any) -> None:
        """Refuse text of which no tokenizer makes few enough tokens, before it is read: that may take many seconds."""
        most = _CHARACTERS * self.engine.longest * self.tokenizer.longest_token
        if self.engine.longest and (length := _length(body)) > most:
            raise TooLarge(
                f"the text has {length:,} characters, no request that fits has more than {most:,}; shorten it."
            )

    def _check(self, question: Question) -> None:
        """Refuse what is longer than any request that fits, before it waits."""
        longest = self.engine.longest
        length = max(map(len, question.prompts)) + question.config.gen_length
        if longest and length > longest:
            raise TooLarge(
                f"prompt and answer take {length:,} positions, the largest request that fits has {longest:,}; shorten the prompt, "
                "or ask for fewer tokens."
            )

    async def _whole(self, request: Request, answers: _Answers) -> list[str]:
        """The texts of all answers; a caller who leaves cancels them."""
        texts = [""] * len(answers.texts)

        async def collect() -> None:
            async with aclosing(answers.pieces()) as pieces:
                async for index, text in pieces:
                    texts[index] += text

        collecting = asyncio.create_task(collect())
        leaving = asyncio.create_task(_left(request))
        await asyncio.wait((collecting, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not collecting.done():
            collecting.cancel()
            with suppress(asyncio.CancelledError):
                await collecting
            raise _Ending(499, "the caller has left.", "cancelled")
        collecting.result()
        return texts

    async def _streamed(self, reply: Reply, answers: _Answers, headers: dict[str, str]) -> Response:
        """A response that begins when there is something to send: what is refused before has its status."""
        pieces = answers.pieces()
        try:
            first = await anext(pieces)
        except BaseException:
            await pieces.aclose()
            raise

        async def events() -> AsyncIterator[str]:
            shown = set[int]()
            async with aclosing(pieces):
                try:
                    async for index, text in _after(first, pieces):
                        role = index not in shown
                        shown.add(index)
                        if role and reply.question.chat:
                            yield _event(reply.piece(index, "", role=True))
                        if text:
                            yield _event(reply.piece(index, text))
                        if (reason := answers.reasons[index]) is not None:
                            yield _event(reply.piece(index, reason=reason))
                except MosaicError as error:
                    ending = _Ending.of(error)
                    yield _event(error_body(ending.message, ending.kind, ending.status))
            if reply.question.with_usage:
                yield _event(reply.last(answers.tokens, answers.cached_tokens))
            yield "data: [DONE]\n\n"

        return StreamingResponse(
            events(), media_type="text/event-stream", headers={**headers, "Cache-Control": "no-store"}
        )

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation."""
        self.allow(request)
        body = await self.body(request)
        if not isinstance(body, dict) or ("prompt" in body) == ("messages" in body):
            raise UsageError("give either 'prompt', a text, or 'messages'.")
        prompt = body.get("prompt", body.get("messages"))
        ids = token_ids(prompt, lambda: self.tokenizer, which="the prompt").tolist()
        return JSONResponse({"count": len(ids), "max_model_len": self.engine.longest, "tokens": ids})

    def models(self) -> Response:
        """The model, with the most positions of a request as planned."""
        one = {
            "id": self.name, "object": "model", "created": self._began, "owned_by": "mosaic",
            "max_model_len": self.engine.longest or None,
        }  # fmt: skip
        return JSONResponse({"object": "list", "data": [one]})

    def health(self) -> Response:
        """Whether requests are answered now."""
        engine = self.engine
        found = {
            "status": engine.state, "version": __version__, "restarts": engine.restarts, "engine_pid": engine.pid
        }  # fmt: skip
        if engine.state == "ready":
            return JSONResponse(found)
        return JSONResponse(found | {"reason": engine.failure}, status_code=503)


def create_app(
    model: Model, name: str, options: EngineOptions, limits: Limits | None = None, *, keys: Sequence[str] = (),
    strict: bool = False,
) -> FastAPI:  # fmt: skip
    """Return the application; its lifespan starts the engine, unless `state.engine` was started before, and ends it.

    Parameters
    ----------
    model
        What the engine serves: its tokenizer and its architecture are read here.
    name
        Of the model, in requests and answers.
    keys
        API keys, one of which each request has to have; none: nobody is asked.
    strict
        Whether a key of a body that has no meaning is refused, rather than named in the header `X-Mosaic-Ignored`.

    Raises
    ------
    UsageError
        If the model has no tokenizer.
    """
    server = _Server(model, name, options, limits or Limits(), keys=keys, strict=strict)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if server.engine.pid is None:
            server.engine.start()
        try:
            yield
        finally:
            await server.engine.close()

    app = FastAPI(title="Mosaic", version=__version__, lifespan=lifespan)
    app.state.engine = server.engine

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: HTTPException) -> Response:
        said = f"{request.method} {request.url.path}: {error.detail}."
        return JSONResponse(error_body(said, "not_found_error", error.status_code), status_code=error.status_code)

    def route(path: str, method: str, answer: Callable[[Request], Awaitable[Response]]) -> None:
        async def answered(request: Request) -> Response:
            try:
                if answer not in (health, metrics):  # those who watch a server are not turned away
                    server.admit(request)
                return await answer(request)
            except _Ending as ending:
                return ending.response()
            except MosaicError as error:
                return _Ending.of(error).response()
            except Exception:
                _log.exception("a request has failed")
                return _Ending(
                    500, "the server has failed at this request; its log says how.", "server_error"
                ).response()

        app.add_api_route(path, answered, methods=[method], name=path, response_model=None)

    async def models(request: Request) -> Response:
        server.allow(request)
        return server.models()

    async def health(request: Request) -> Response:
        return server.health()

    async def metrics(request: Request) -> Response:
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")

    for path in (COMPLETIONS, CHAT):
        route(path, "POST", server.complete)
    route("/tokenize", "POST", server.tokenize)
    for path, answer in (("/v1/models", models), ("/health", health), ("/metrics", metrics)):
        route(path, "GET", answer)
    return app


def _length(body: Any) -> int:
    """Characters of all texts of a body."""
    if isinstance(body, str):
        return len(body)
    parts = body.values() if isinstance(body, dict) else body if isinstance(body, list) else ()
    return sum(map(_length, parts))


async def _left(request: Request) -> None:
    """Wait until the caller has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _after(first: tuple[int, str], others: AsyncIterator[tuple[int, str]]) -> AsyncIterator[tuple[int, str]]:
    yield first
    async for one in others:
        yield one


def _event(found: dict[str, Any]) -> str:
    return f"data: {json.dumps(found, ensure_ascii=False)}\n\n"


def _path(model: Model) -> Any:
    if model.path is None:
        raise UsageError(f"{model.name} is a preset without a tokenizer: serve a checkpoint directory.")
    return model.path
