"""The HTTP side: OpenAI's endpoints over a supervised engine."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from mosaic.decoding.forecast import Forecast
from mosaic.decoding.prompts import is_integer, token_ids
from mosaic.decoding.tokenizer import Tokenizer, has_tokenizer
from mosaic.decoding.words import WordTokenizer
from mosaic.errors import MissingExtra, UsageError
from mosaic.models import Model
from mosaic.models.policies.registry import POLICIES
from mosaic.serving import openapi
from mosaic.serving.answers import Answers
from mosaic.serving.endings import Ending
from mosaic.serving.engine import EngineOptions
from mosaic.serving.events import events
from mosaic.serving.gate import Gate
from mosaic.serving.logs import Logged, Note
from mosaic.serving.metrics import Metrics
from mosaic.serving.protocol import CHAT, Question, Reply, TokenScore, error_body, read
from mosaic.serving.supervisor import AnswerLost, Limits, Supervisor, TooLarge
from mosaic.serving.watch import Watch
from mosaic.version import __version__
from mosaic.viz.report import html_report

try:
    from fastapi import FastAPI, Request
    from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
except ImportError as error:
    raise MissingExtra("fastapi", "serve", "`mosaic serve`") from error

if TYPE_CHECKING:
    from mosaic.serving.messages import Stepped
    from mosaic.serving.supervisor import Asks

__all__ = ["create_app", "name_of"]

_PAGE: Final = Path(__file__).with_name("status.html")
_POLICY: Final = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
MakesEngine: TypeAlias = "Callable[[Callable[[Stepped], object], Metrics], Asks]"
_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_CHARACTERS: Final = 4
"""A text of so many times as many characters as the longest tokens have together is too long, whatever is normalised away."""
_SHORT: Final = 4096
"""A body of so many bytes is read in less time than a thread takes to begin while others are answered."""
_NAME, _NAMES = 64, 16
"""Characters and number of the keys that a header names."""
COMPLETIONS: Final = "/v1/completions"


class _Server:
    """What all requests share."""

    def __init__(
        self, model: Model, name: str, options: EngineOptions, limits: Limits, *, keys: Sequence[str], strict: bool,
        policies: Collection[str] | None, hosts: Sequence[str] | None, engine: MakesEngine | None,
    ) -> None:  # fmt: skip
        self.model, self.name, self.base, self.limits = model, name, options.base, limits
        self.strict, self.policies = strict, policies
        self.tokenizer = _tokenizer(model, options.load_format)
        self.metrics, self.watch = Metrics(name), Watch(self.tokenizer)
        self.gate = Gate(keys, limits.max_connections, hosts)
        self.engine = (engine or partial(Supervisor, options, limits))(self._stepped, self.metrics)
        self._began = int(time.time())

    async def body(self, request: Request) -> tuple[Any, int]:
        """The JSON of a request, and its bytes."""
        found, limits = bytearray(), self.limits
        try:
            async with asyncio.timeout(limits.slow_s):
                async for part in request.stream():
                    found += part
                    if len(found) > limits.max_body_bytes:
                        said = f"the body has more than {limits.max_body_bytes:,} bytes."
                        raise Ending(413, said, "invalid_request_error")
            return json.loads(found), len(found)
        except TimeoutError:
            said = f"the body has not come within {limits.slow_s:g} s."
            raise Ending(408, said, "timeout_error", {"Connection": "close"}) from None
        except (ValueError, RecursionError) as error:
            raise Ending(400, f"the body is no JSON: {error}.", "invalid_request_error") from None
        except ClientDisconnect:
            raise Ending(499, "the caller has left.", "cancelled") from None

    async def complete(self, request: Request) -> Response:
        """Answer a completion, of a prompt or a chat."""
        owner = self.gate.allow(request)
        question = await self._asked(request, request.url.path)
        self._check(question)
        note: Note = request.state.note
        note.prompt_tokens = sum(map(len, question.prompts))
        reply, came_s = Reply(question, self.name, self.tokenizer), time.perf_counter()

        def asking(first_s: float | None = None) -> Answers:
            note.answers = Answers(
                self.engine, self.metrics, self.tokenizer, question, self.limits.timeout_s, came_s, note.id, owner, first_s
            )  # fmt: skip
            return note.answers

        headers = {"X-Mosaic-Ignored": _listed(question.ignored)} if question.ignored else {}
        answered, answers = self._streamed if question.stream else self._whole, asking()
        try:
            return await answered(request, reply, answers, headers)
        except AnswerLost:  # nothing is sent yet
            return await answered(request, reply, asking(answers.first_s), headers)

    async def _asked(self, request: Request, url: str | None = None) -> Question:
        """What a request asks for, as of this address, or as of a chat's if it has messages."""
        body, size = await self.body(request)
        if isinstance(body, dict):
            self._require(body.get("model"))
        self._check_text(body)
        url = url or (CHAT if isinstance(body, dict) and "messages" in body else COMPLETIONS)
        reading = partial(
            read, body, url, self.base, self.model.architecture, self.tokenizer, strict=self.strict, policies=self.policies,
            most_prompts=self.limits.max_waiting,
        )  # fmt: skip
        return reading() if size <= _SHORT else await asyncio.to_thread(reading)

    async def plan(self, request: Request) -> Response:
        """Whether a request would fit, when, and what it would take; its body is that of a completion or a chat."""
        self.gate.allow(request)
        question = await self._asked(request)
        prompt = max(question.prompts, key=len)
        try:
            self._check(question)
        except TooLarge as error:
            positions = len(prompt) + question.config.gen_length
            found = Forecast(fits="never", steps=None, positions=positions, state_bytes={}, why=str(error))
        else:
            found = await self.engine.forecast(prompt, question.config)
        seconds = None if found.steps is None else round(found.steps * self.engine.step_s, 3)
        return JSONResponse({
            "fits": found.fits, "wait_steps": found.steps, "wait_seconds": seconds, "prompt_tokens": len(prompt),
            "positions": found.positions, "max_model_len": self.engine.longest, "bytes": dict(found.state_bytes),
            "requests": question.params.n * len(question.prompts), "waiting": self.engine.waiting, "message": found.why,
        })  # fmt: skip

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens by themselves, special ones included."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _check_text(self, body: Any) -> None:
        """Refuse text of which no tokenizer makes few enough tokens, before it is read: that may take many seconds."""
        most = _CHARACTERS * self.engine.longest * self.tokenizer.longest_token
        if self.engine.longest and (length := _length(body)) > most:
            raise TooLarge(
                f"the text has {length:,} characters, no request that fits has more than {most:,}; shorten it."
            )

    def _check(self, question: Question) -> None:
        """Refuse what is longer than any request with the policies of `base` that fits; of others the model's context says it."""
        config = question.config
        length = max(map(len, question.prompts)) + config.gen_length
        own = all(getattr(config, name) == getattr(self.base, name) for name in POLICIES)
        longest = self.engine.longest if own else self.model.architecture.max_context
        if longest and length > longest:
            raise TooLarge(
                f"prompt and answer take {length:,} positions, the largest request that fits has {longest:,}; shorten the prompt, "
                "or ask for fewer tokens."
            )

    async def _whole(self, request: Request, reply: Reply, answers: Answers, headers: dict[str, str]) -> Response:
        """A response with all answers; a caller who leaves cancels them."""
        texts, scores = [""] * len(answers.texts), [list[TokenScore]() for _ in answers.texts]

        async def collect() -> None:
            async with aclosing(answers.pieces()) as pieces:
                async for some in pieces:
                    for index, text, found, _ in some:
                        texts[index] += text
                        scores[index] += found

        await _unless_left(request, collect())
        reasons = [reason or "" for reason in answers.reasons]
        return JSONResponse(reply.whole(texts, reasons, scores, answers.usage), headers=headers)

    async def _streamed(self, request: Request, reply: Reply, answers: Answers, headers: dict[str, str]) -> Response:
        """A response that begins when there is something to send: what is refused before has its status."""
        pieces = answers.pieces()
        try:
            first = await _unless_left(request, anext(pieces))
        except BaseException:
            await pieces.aclose()
            raise

        return StreamingResponse(
            events(first, pieces, answers, reply, partial(_ending, note=request.state.note)),
            media_type="text/event-stream",
            headers={**headers, "Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation."""
        self.gate.allow(request)
        body, _ = await self.body(request)
        if not isinstance(body, dict) or ("prompt" in body) == ("messages" in body):
            raise UsageError("give either 'prompt', a text, or 'messages'.")
        self._check_text(body)
        return JSONResponse(await asyncio.to_thread(self._tokens, body))

    def _tokens(self, body: Mapping[str, Any]) -> dict[str, Any]:
        ids = self._ids(body)
        strings = {"token_strs": [self.decode([one]) for one in ids]} if body.get("return_token_strs") else {}
        return {"count": len(ids), "max_model_len": self.engine.longest, "tokens": ids, **strings}

    def _ids(self, body: Mapping[str, Any]) -> list[int]:
        if isinstance(prompt := body.get("prompt"), str):
            return self.tokenizer.encode(prompt, add_special_tokens=body.get("add_special_tokens") is not False)
        given = prompt if "prompt" in body else body["messages"]
        return list(token_ids(given, lambda: self.tokenizer, which="the prompt").tolist())

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        self.gate.allow(request)
        body, _ = await self.body(request)
        ids = body.get("tokens") if isinstance(body, dict) else None
        most, longest = self.model.architecture.vocabulary, self.engine.longest
        if isinstance(ids, list) and longest and len(ids) > longest:
            raise TooLarge(f"tokens: {len(ids):,} tokens, no request that fits has more than {longest:,}; send fewer.")
        if not isinstance(ids, list) or not all(is_integer(one) and 0 <= one < most for one in ids):
            raise UsageError(f"tokens: expected a list of token ids, from 0 to {most - 1:,}.")
        return JSONResponse({"prompt": self.decode(ids)})

    async def tokenizer_info(self, request: Request) -> Response:
        """What tokenizer_config.json says."""
        self.gate.allow(request)
        return JSONResponse(self.tokenizer.info())

    def _stepped(self, step: Stepped) -> None:
        self.metrics.stepped(step)
        self.watch.stepped(step)

    async def status(self, request: Request) -> Response:
        """What the status page shows to whoever asks."""
        owner = self.gate.allow(request)
        self.engine.watch()
        engine = self.engine
        return JSONResponse(
            {
                "model": self.name, "version": __version__, "state": engine.state, "reason": engine.failure,
                "restarts": engine.restarts, "step_s": engine.step_s, **self.watch.status(owner),
            }
        )  # fmt: skip

    async def drawn_plan(self, request: Request) -> Response:
        """The report of the plan in force, a page."""
        self.gate.allow(request)
        return HTMLResponse(await asyncio.to_thread(html_report, await self.engine.plan()))

    def _require(self, name: Any) -> None:
        """Refuse a model that this server does not have."""
        if name not in (None, self.name):
            raise Ending(404, f"the model {name!r} is not here; this server has '{self.name}'.", "not_found_error")

    def models(self, name: str | None) -> Response:
        """The model, with the most positions of a request as planned: by its name, or as a list of one."""
        self._require(name)
        one = {
            "id": self.name, "object": "model", "created": self._began, "owned_by": "mosaic",
            "max_model_len": self.engine.longest or None,
        }  # fmt: skip
        return JSONResponse({"object": "list", "data": [one]} if name is None else one)

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
    strict: bool = False, policies: Collection[str] | None = None, hosts: Sequence[str] | None = None,
    engine: MakesEngine | None = None,
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
    policies
        The presets of caches, sparse attention and eviction that a request may ask for; None: all that the model has.
    hosts
        Without keys, what a request's `Host` has to name, with any port: `gate.hosts_of` where the server listens; None: anything.
    engine
        Makes what is asked, of who is told of each step, and the metrics; a supervisor of `options`, if not given.

    Raises
    ------
    UsageError
        If the model is a preset, and its weights are not to be random.
    """
    server = _Server(
        model,
        name,
        options,
        limits or Limits(),
        keys=keys,
        strict=strict,
        policies=policies,
        hosts=hosts,
        engine=engine,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if not server.engine.started:
            server.engine.start()
        try:
            yield
        finally:
            await server.engine.close()

    app = FastAPI(title="Mosaic", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.engine = server.engine
    app.add_middleware(Logged)

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: HTTPException) -> Response:
        said = f"{request.method} {request.url.path}: {error.detail}."
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        return JSONResponse(error_body(said, kind, error.status_code), error.status_code, error.headers)

    def route(path: str, method: str, answer: Callable[[Request], Awaitable[Response]], **more: Any) -> None:
        async def answered(request: Request) -> Response:
            try:
                server.gate.name(request)
                if answer not in (health, metrics):  # those who watch a server are not turned away
                    server.gate.admit(request)
                return await answer(request)
            except Exception as error:
                ending = _ending(error, request.state.note)
            server.metrics.refused(ending.reason)
            return ending.response()

        app.add_api_route(path, answered, methods=[method], name=path, response_model=None, **more)

    async def models(request: Request) -> Response:
        server.gate.allow(request)
        return server.models(request.path_params.get("model"))

    async def health(request: Request) -> Response:
        return server.health()

    async def metrics(request: Request) -> Response:
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")

    json_, of_any = ("application/json",), (401, 403, 500, 503)
    of_bodies = (400, 408, 413, 499, *of_any)
    bodies = {path: openapi.completion_body(chat=path == CHAT) for path in (COMPLETIONS, CHAT)}
    for path, body in bodies.items():
        kinds = (*json_, "text/event-stream")
        route(path, "POST", server.complete, **openapi.described(body, kinds, 404, 429, 504, *of_bodies))
    text, ids = {"type": "string"}, {"type": "array", "items": {"type": "integer"}}
    asked: dict[str, Any] = {
        "/tokenize": (server.tokenize, openapi.object_of(prompt=text, messages={"type": "array"})),
        "/detokenize": (server.detokenize, openapi.object_of(tokens=ids) | {"required": ["tokens"]}),
        "/plan": (server.plan, {"anyOf": [*bodies.values()]}),
    }
    for path, (answer, body) in asked.items():
        route(path, "POST", answer, **openapi.described(body, json_, 404, *of_bodies))

    async def page(request: Request) -> Response:
        return HTMLResponse(_PAGE.read_bytes(), headers={"Content-Security-Policy": _POLICY})

    shown: dict[str, Any] = {
        "/": (page, "text/html"), "/status": (server.status, *json_), "/status/plan": (server.drawn_plan, "text/html"),
        "/v1/models": (models, *json_), "/health": (health, *json_), "/metrics": (metrics, "text/plain; version=0.0.4"),
        "/tokenizer_info": (server.tokenizer_info, *json_),
    }  # fmt: skip
    for path, (answer, kind) in shown.items():
        route(path, "GET", answer, **openapi.described(None, (kind,), *of_any))
    named = {"parameters": [{"in": "path", "name": "model", "required": True, "schema": text}]}
    route("/v1/models/{model:path}", "GET", models, openapi_extra=named, **openapi.described(None, json_, 404, *of_any))
    return app


def name_of(model: str, described: Model) -> str:
    """Return what requests call a model: a preset by its name, a checkpoint by its directory's."""
    return described.name if Path(model).exists() else model


def _length(body: Any) -> int:
    """Characters of all texts of a body."""
    if isinstance(body, str):
        return len(body)
    parts = body.values() if isinstance(body, dict) else body if isinstance(body, list) else ()
    return sum(map(_length, parts))


def _ending(error: Exception, note: Note) -> Ending:
    """What an error means to the caller; one that nobody expects is logged."""
    ending = Ending.of(error)
    if ending.status == 500:
        _log.error("request %s has failed", note.id, exc_info=error)
    note.error = ending.kind
    return ending


def _listed(keys: Sequence[str]) -> str:
    """Names of anybody's choice as a header can have them: in ASCII, in one line, not too many, and in quotes where spaces are at
    an end, or there is nothing else."""
    names = [key[:_NAME] for key in keys[:_NAMES]]
    shown = [ascii(name)[1:-1] if name.strip(" ") == name != "" else ascii(name) for name in names]
    return ", ".join(shown if len(keys) <= _NAMES else [*shown, f"and {len(keys) - _NAMES:,} more"])


async def _left(request: Request) -> None:
    """Wait until the caller has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _unless_left(request: Request, work: Awaitable[_T]) -> _T:
    """Return what work does, which ends if the caller leaves. It begins at once, before others that wait for their turn."""
    task, works, left = asyncio.current_task(), True, False
    assert task is not None

    def leave(_: asyncio.Task[None]) -> None:  # perhaps in the turn after the work has ended
        nonlocal left
        left = works and task.cancel()

    leaving = asyncio.create_task(_left(request))
    leaving.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if not left or task.uncancel():
            raise
        raise Ending(499, "the caller has left.", "cancelled") from None
    finally:
        works = False
        leaving.cancel()


def _tokenizer(model: Model, load_format: str) -> Tokenizer:
    """The checkpoint's own; of random weights without one, words."""
    path = model.path
    if load_format == "dummy" and (path is None or not has_tokenizer(path)):
        return WordTokenizer(model.architecture)
    if path is None:
        raise UsageError(
            f"{model.name} is a preset without weights and tokenizer: serve a checkpoint directory, or random weights by "
            "--load-format dummy."
        )
    return Tokenizer(path, mask=model.architecture.mask_token_id)
