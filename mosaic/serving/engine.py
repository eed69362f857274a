"""The engine's process: a model, a session, and a connection over which it is asked and answers.

Nothing of HTTP, of text or of users is here: token ids come in and go out. When the server is gone, so is the process.
"""

from __future__ import annotations

import logging
import math
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from mosaic.decoding.config import GenerationConfig, resolve
from mosaic.decoding.forecast import Forecast
from mosaic.decoding.live import Submission
from mosaic.decoding.rungs import most_of
from mosaic.decoding.session import Session
from mosaic.decoding.stream import MOST_LIVE, Outcome, Stream
from mosaic.errors import DoesNotFit, MosaicError, UsageError
from mosaic.jobs.sampling import submissions
from mosaic.models import load
from mosaic.models.parts import KV
from mosaic.models.step import MAX_TOKENS
from mosaic.runtime.compile import compile
from mosaic.runtime.request_table import MOST_ROWS
from mosaic.serving.logs import configure
from mosaic.serving.messages import (
    Asked,
    Canvas,
    Ended,
    Failed,
    Frame,
    Fresh,
    Picture,
    PlanWanted,
    Ready,
    Refused,
    Stepped,
    Told,
    Watched,
    Wondered,
)

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch import Tensor

    from mosaic.decoding.live import LiveRequest
    from mosaic.decoding.streaming import Step
    from mosaic.runtime.compiled import CompiledModel
    from mosaic.serving.messages import ToEngine, ToServer

__all__ = ["LOAD_FORMATS", "EngineOptions", "run_engine"]

LOAD_FORMATS: Final = ("auto", "dummy")
"""Names of vLLM's for the weights of a checkpoint, and for random ones."""

_AHEAD: Final = 1 << 62
"""Entries are not answered in order here: none waits for an older one."""
_IDLE_S: Final = 3600.0
_LOOKED_S: Final = 1.0
"""Seconds from one look at the memory to the next: the device and the operating system are asked."""
_WATCHED_S: Final = 5.0
"""Seconds for which pictures are made after somebody has looked."""
_PICTURES_S: Final = 0.2
_CANVASES: Final = 32
"""Of so many live requests of each owner, and so many positions of each, around the first one that is open."""
_SHOWN: Final = 256
_WARM_TOKENS: Final = 4096
"""Positions of each request that a session is warm for."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an engine is made of.

    Parameters
    ----------
    model
        A preset or a checkpoint directory.
    compile
        Options of `mosaic.compile`.
    load_format
        One of `LOAD_FORMATS`.
    base
        Options of requests that have none of their own.
    max_num_seqs
        Requests that are live at once, at most.
    warm
        Whether steps are planned, compiled and captured before the first request, as far as requests have the options `base`;
        None: on a card, if such requests have a ladder of steps.
    log_format
        How the process writes its log, one of `logs.FORMATS`; None: as Python does.
    """

    model: str
    compile: Mapping[str, Any] = field(default_factory=dict)
    load_format: str = "auto"
    base: GenerationConfig = field(default_factory=GenerationConfig)
    max_num_seqs: int = MOST_LIVE
    warm: bool | None = None
    log_format: str | None = None


class _Feed:
    """Collects what becomes final of one answer, behind its prompt; if its steps are told, scores and canvases, too."""

    def __init__(self, asked: Asked) -> None:
        self.config, self._scored, self._framed = asked.config, asked.scores, asked.frames
        self.told, self.owner = asked.scores or asked.frames, asked.owner
        self._next = -1  # the first position that is not final; the prompt comes first
        self._decided = dict[int, tuple[int, float]]()
        self._clear()

    def _clear(self) -> None:
        self._ids, self._scores = list[int](), list[float]()
        self._frame: Frame | None = None

    def put(self, value: Tensor) -> None:
        if self._next < 0:
            self._next = len(value)
            return
        self._ids += value.tolist()
        if self.told:
            final = range(self._next, self._next + len(value))
            self._scores += [self._decided.pop(at, (-1, math.nan))[1] for at in final]
            self._next = final.stop

    def end(self) -> None:
        """What ends is in the outcome."""

    def saw(self, step: Step) -> None:
        """Note what a step decided."""
        found = zip(step.positions.tolist(), step.token_ids.tolist(), step.confidence.tolist(), strict=True)
        self._decided |= {at: (token, score) for at, token, score in found}
        self._frame = Frame(step.step, step.block, step.masked, ())

    def take(self) -> Fresh | None:
        """Return what was not sent yet."""
        if not self._ids and (self._frame is None or not self._framed):
            return None
        frame = self._frame if self._framed else None
        if frame is not None:
            known = range(self._next, max(self._decided, default=self._next - 1) + 1)
            frame = frame._replace(ids=[self._decided.get(at, (-1, 0.0))[0] for at in known])
        found = Fresh(self._ids, self._scores if self._scored else (), frame)
        self._clear()
        return found


class _Engine:
    def __init__(self, model: CompiledModel, session: Session, options: EngineOptions, connection: Connection) -> None:
        self._model, self._session, self._connection = model, session, connection
        self._stream = Stream(session, most_live=options.max_num_seqs, most_ahead=_AHEAD)
        self._waiting = deque[Asked]()
        self._newest = 0
        self._most_live = options.max_num_seqs
        self._feeds: dict[int, tuple[list[_Feed], Sequence[LiveRequest]]] = {}  # by prompt
        self._memory, self._looked_s = dict[str, tuple[int, int]](), -math.inf
        self._components, self._keys_used = dict[str, int](), 0.0
        self._room_in: int | None = None
        self._watched_s = self._drawn_s = -math.inf
        self._next: Asked | None = None  # waits for room
        self._last: Step | None = None

    def run(self) -> None:
        """Serve until the server says that it ends."""
        while True:
            busy = bool(self._session.live or self._waiting or self._stream.holds)
            while self._connection.poll(0 if busy else _IDLE_S):
                for message in self._connection.recv():
                    if message is None:
                        return
                    self._take(message)
                busy = True
            while self._waiting and self._stream.wants:
                self._submit(self._waiting.popleft())
            began = time.perf_counter()
            outcomes = self._stream.advance(ordered=False)
            seconds = time.perf_counter() - began
            if self._stream.steps:
                self._last = self._stream.steps[0]
            fresh = {number: found for number, feeds in self._feeds.items() if (found := _taken(*feeds))}
            if fresh or outcomes or busy:
                self._tell(self._state(fresh, seconds), *map(self._answer, outcomes))

    def _tell(self, *messages: ToServer) -> None:
        self._connection.send(messages)

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Asked):
            self._waiting.append(message)
            self._newest = message.number
            return
        if isinstance(message, Watched):
            self._watched_s = time.monotonic()
            return
        if isinstance(message, Wondered):
            self._tell(Told(message.number, self._foretell(message.prompt, message.config)))
            return
        if isinstance(message, PlanWanted):
            document = "no step has run yet." if self._last is None else self._last.plan.document
            self._tell(Told(message.number, document))
            return
        kept = deque(asked for asked in self._waiting if asked.number != message.number)
        if len(kept) < len(self._waiting):
            self._waiting = kept
            self._tell(Ended(number=message.number))
        else:
            self._stream.cancel(message.number)

    def _foretell(self, prompt: Sequence[int], config: GenerationConfig) -> Forecast | str:
        ids = torch.tensor(prompt, dtype=torch.int64)
        try:
            return self._session.forecast(Submission(prompt=ids, config=config))
        except MosaicError as error:
            return str(error)

    def _submit(self, asked: Asked) -> None:
        self._next = asked
        prompt = torch.tensor(asked.prompt, dtype=torch.int64)
        found = submissions(prompt, asked.config, asked.draws, asked.answers)
        feeds = [_Feed(asked) for _ in found]
        requests = self._stream.put(
            asked.number,
            [
                replace(one, streamer=feed, on_step=feed.saw if feed.told else None)
                for one, feed in zip(found, feeds, strict=True)
            ],
        )
        self._feeds[asked.number] = feeds, requests

    def _state(self, fresh: Mapping[int, Mapping[int, Fresh]], seconds: float) -> Stepped:
        now = time.monotonic()
        if now - self._looked_s >= _LOOKED_S:
            memory, self._looked_s = self._model.memory(), now
            self._memory = {name: (memory.planned[name], memory.committed[name]) for name in memory.planned}
            if self._last is not None:
                keys = self._last.plan.dims.get(KV.rows_dim, 0)
                self._components = dict(self._last.plan.components)
                self._keys_used = self._model.state_rows.get(KV.name, 0) / keys if keys else 0.0
            outlook = self._outlook()
            self._room_in = outlook.steps if isinstance(outlook, Forecast) else None
        picture = None
        if now - self._watched_s < _WATCHED_S and (now - self._drawn_s >= _PICTURES_S or not self._session.live):
            self._drawn_s, picture = now, self._picture()
        waiting = len(self._waiting) + self._stream.holds
        return Stepped(
            fresh=fresh, seconds=seconds, waiting=waiting, running=len(self._session.live), newest=self._newest,
            memory=self._memory, components=self._components, keys_used=self._keys_used, room_in=self._room_in, picture=picture,
        )  # fmt: skip

    def _picture(self) -> Picture:
        plan = None if self._last is None else self._last.plan
        return Picture(
            canvases=self._canvases(), rows=dict(self._model.state_rows),
            plan=None if plan is None else {
                "dims": dict(plan.dims), "components": dict(plan.components), "total_bytes": plan.total_bytes,
                "budget_bytes": plan.budget_bytes, "predicted_ms": plan.predicted_step_ms, "device": plan.device,
            },
            outlook=self._outlook(),
        )  # fmt: skip

    def _canvases(self) -> list[Canvas]:
        owners = {request: feeds[0].owner for feeds, requests in self._feeds.values() for request in requests}
        found, shown = list[Canvas](), Counter[str]()
        for request in self._session.live:
            owner = owners[request]
            if shown[owner] < _CANVASES:
                shown[owner] += 1
                found.append(_canvas(request, owner))
        return found

    def _outlook(self) -> Forecast | str | None:
        """When the next prompt has room."""
        if self._stream.holds and self._next is not None:
            return self._foretell(self._next.prompt, self._next.config)
        return (
            f"All {self._most_live} places are taken: the next request waits for another to end."
            if self._waiting and len(self._session.live) >= self._most_live
            else None
        )

    def _answer(self, outcome: Outcome) -> Ended | Refused:
        feeds, _ = self._feeds.pop(outcome.number)
        if outcome.error is not None:
            return Refused(
                number=outcome.number, message=str(outcome.error), fits=not isinstance(outcome.error, DoesNotFit)
            )
        steps = [one.steps for one in outcome.generations]
        return Ended(
            number=outcome.number, finishes=[one.finish for one in outcome.generations], steps=steps,
            positions=sum(steps) * (resolve(feeds[0].config, self._model.architecture).block_length or 1),
            prompt_tokens=max((one.prompt_ids.numel() for one in outcome.generations), default=0),
            cached_tokens=min((one.cached_tokens for one in outcome.generations), default=0),
        )  # fmt: skip


def _canvas(request: LiveRequest, owner: str) -> Canvas:
    draft = request.draft()
    open_ = (draft < 0).nonzero()
    first = max(int(open_[0]) - _SHOWN // 2, 0) if len(open_) else 0
    return Canvas(
        number=request.number, owner=owner, prompt_tokens=request.prompt_tokens, length=len(draft), steps=request.steps,
        masked=len(open_), first=first, ids=draft[first : first + _SHOWN].tolist(),
    )  # fmt: skip


def _taken(feeds: Sequence[_Feed], requests: Sequence[LiveRequest]) -> dict[int, Fresh]:
    """What is new of each answer; those that are not admitted yet have nothing new."""
    return {
        place: found._replace(steps=request.steps, cached_tokens=request.cached_tokens)
        for place, (feed, request) in enumerate(zip(feeds, requests, strict=False))
        if (found := feed.take()) is not None
    }


def _longest(session: Session, base: GenerationConfig, token: int, most: int) -> int:
    """The most positions, up to `most`, of one request that the idle session admits; 0 for none."""

    def fits(positions: int) -> bool:
        prompt = torch.full((max(positions - base_length, 1),), token, dtype=torch.int64)
        return session.admits(Submission(prompt=prompt, config=replace(base, gen_length=min(positions, base_length))))

    base_length = base.block_length or 32
    return most_of(most, fits)


def run_engine(options: EngineOptions, connection: Connection) -> None:
    """Serve over a connection until it ends. An error ends the process, and with it what was running."""
    # A terminal or a service manager sends these to all; the server says when to end.
    for sent in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sent, signal.SIG_IGN)
    if options.log_format is not None:
        configure(options.log_format)
    try:
        _serve(options, connection)
    except MosaicError as error:
        connection.send((Failed(str(error)),))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        _log.warning("the server is gone")
    except Exception:
        _log.exception("the engine has failed")
        sys.exit(1)


def _warm(session: Session, options: EngineOptions, context: int) -> None:
    """Make the session warm, unless nobody asked for it and such requests have no ladder of steps, or no room."""
    try:
        session.warm(options.base, requests=min(options.max_num_seqs, MOST_ROWS), tokens=min(_WARM_TOKENS, context))
    except (UsageError, DoesNotFit) as error:
        if options.warm:
            raise
        _log.warning("steps are made as they come: %s", error)


def _serve(options: EngineOptions, connection: Connection) -> None:
    model = load(options.model)
    if options.load_format == "dummy":
        model = replace(model, path=None)
    with compile(model, **options.compile) as compiled, Session(compiled) as session:
        arch = model.architecture
        context, token = arch.max_context or MAX_TOKENS, int(arch.mask_token_id == 0)
        if compiled.asynchronous if options.warm is None else options.warm:
            _warm(session, options, context)
        connection.send((Ready(longest=_longest(session, options.base, token, context)),))
        _Engine(compiled, session, options, connection).run()
