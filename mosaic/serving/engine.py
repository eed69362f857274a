"""The engine's process: a model, a session, and a connection over which it is asked and answers.

Nothing of HTTP, of text or of users is here: token ids come in and go out. When the server is gone, so is the process.
"""

from __future__ import annotations

import logging
import math
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from mosaic.decoding.config import GenerationConfig
from mosaic.decoding.live import Submission
from mosaic.decoding.session import Session
from mosaic.decoding.stream import MOST_LIVE, Outcome, Stream
from mosaic.errors import DoesNotFit, MosaicError
from mosaic.jobs.sampling import submissions
from mosaic.models import load
from mosaic.models.step import MAX_TOKENS
from mosaic.runtime.compile import compile
from mosaic.serving.logs import configure
from mosaic.serving.messages import Asked, Ended, Failed, Foretold, Frame, Fresh, Ready, Refused, Stepped, Wondered

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch import Tensor

    from mosaic.decoding.forecast import Forecast
    from mosaic.decoding.streaming import Step
    from mosaic.runtime.compiled import CompiledModel
    from mosaic.serving.messages import ToEngine

__all__ = ["EngineOptions", "run_engine"]

_AHEAD: Final = 1 << 62
"""Entries are not answered in order here: none waits for an older one."""
_IDLE_S: Final = 3600.0
_LOOKED_S: Final = 1.0
"""Seconds from one look at the memory to the next: the device and the operating system are asked."""
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
    base
        Options of requests that have none of their own.
    max_num_seqs
        Requests that are live at once, at most.
    warm
        Whether steps are planned, compiled and captured before the first request.
    log_format
        How the process writes its log, one of `logs.FORMATS`; None: as Python does.
    """

    model: str
    compile: Mapping[str, Any] = field(default_factory=dict)
    base: GenerationConfig = field(default_factory=GenerationConfig)
    max_num_seqs: int = MOST_LIVE
    warm: bool = False
    log_format: str | None = None


class _Feed:
    """Collects what becomes final of one answer, behind its prompt; if its steps are told, scores and canvases, too."""

    def __init__(self, asked: Asked) -> None:
        self._scored, self._framed = asked.scores, asked.frames
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
        for token in value.tolist():
            _, score = self._decided.pop(self._next, (token, math.nan))
            self._ids.append(token)
            self._scores.append(score)
            self._next += 1

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
        self._feeds = dict[int, list[_Feed]]()  # by prompt
        self._memory, self._looked_s = dict[str, tuple[int, int]](), -math.inf

    def run(self) -> None:
        """Serve until the server says that it ends."""
        while True:
            busy = bool(self._session.live or self._waiting)
            while self._connection.poll(0 if busy else _IDLE_S):
                message = self._connection.recv()
                if message is None:
                    return
                self._take(message)
                busy = True
            while self._waiting and self._stream.wants:
                self._submit(self._waiting.popleft())
            positions = sum(request.config.block_length or 1 for request in self._session.live)
            outcomes = self._stream.advance(ordered=False)
            fresh = {number: found for number, feeds in self._feeds.items() if (found := _taken(feeds))}
            if fresh or outcomes or busy:
                self._connection.send(self._state(fresh, positions))
            for outcome in outcomes:
                del self._feeds[outcome.number]
                self._connection.send(_answer(outcome))

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Asked):
            self._waiting.append(message)
            return
        if isinstance(message, Wondered):
            self._connection.send(Foretold(message.number, self._foretell(message)))
            return
        kept = deque(asked for asked in self._waiting if asked.number != message.number)
        if len(kept) < len(self._waiting):
            self._waiting = kept
            self._connection.send(Ended(number=message.number))
        else:
            self._stream.cancel(message.number)

    def _foretell(self, wondered: Wondered) -> Forecast | str:
        prompt = torch.tensor(wondered.prompt, dtype=torch.int64)
        try:
            return self._session.forecast(Submission(prompt=prompt, config=wondered.config))
        except MosaicError as error:
            return str(error)

    def _submit(self, asked: Asked) -> None:
        prompt = torch.tensor(asked.prompt, dtype=torch.int64)
        found = submissions(prompt, asked.config, asked.draws, asked.answers)
        feeds = self._feeds[asked.number] = [_Feed(asked) for _ in found]
        told = asked.scores or asked.frames
        self._stream.put(
            asked.number,
            [
                replace(one, streamer=feed, on_step=feed.saw if told else None)
                for one, feed in zip(found, feeds, strict=True)
            ],
        )

    def _state(self, fresh: Mapping[int, Mapping[int, Fresh]], positions: int) -> Stepped:
        if (now := time.monotonic()) - self._looked_s >= _LOOKED_S:
            memory, self._looked_s = self._model.memory(), now
            self._memory = {name: (memory.planned[name], memory.committed[name]) for name in memory.planned}
        waiting = len(self._waiting) + self._stream.holds
        return Stepped(
            fresh=fresh, positions=positions, waiting=waiting, running=len(self._session.live), memory=self._memory
        )


def _taken(feeds: Sequence[_Feed]) -> dict[int, Fresh]:
    return {place: found for place, feed in enumerate(feeds) if (found := feed.take()) is not None}


def _answer(outcome: Outcome) -> Ended | Refused:
    if outcome.error is not None:
        return Refused(
            number=outcome.number, message=str(outcome.error), fits=not isinstance(outcome.error, DoesNotFit)
        )
    return Ended(
        number=outcome.number, finishes=[one.finish for one in outcome.generations],
        steps=[one.steps for one in outcome.generations],
        cached_tokens=min((one.cached_tokens for one in outcome.generations), default=0),
    )  # fmt: skip


def _longest(session: Session, base: GenerationConfig, token: int, most: int) -> int:
    """The most positions, up to `most`, of one request that the idle session admits; 0 for none."""

    def fits(positions: int) -> bool:
        prompt = torch.full((max(positions - base_length, 1),), token, dtype=torch.int64)
        return session.admits(Submission(prompt=prompt, config=replace(base, gen_length=min(positions, base_length))))

    base_length = base.block_length or 32
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


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
        connection.send(Failed(str(error)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        _log.warning("the server is gone")
    except Exception:
        _log.exception("the engine has failed")
        sys.exit(1)


def _serve(options: EngineOptions, connection: Connection) -> None:
    model = load(options.model)
    with compile(model, **options.compile) as compiled, Session(compiled) as session:
        if options.warm:
            session.warm(options.base, requests=options.max_num_seqs)
        arch = model.architecture
        context, token = arch.max_context or MAX_TOKENS, int(arch.mask_token_id == 0)
        connection.send(Ready(longest=_longest(session, options.base, token, context)))
        _Engine(compiled, session, options, connection).run()
