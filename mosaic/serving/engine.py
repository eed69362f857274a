"""The engine's process: a model, a session, and a connection over which it is asked and answers.

Nothing of HTTP, of text or of users is here: token ids come in and go out. When the server is gone, so is the process.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections import deque
from collections.abc import Mapping
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
from mosaic.serving.messages import Asked, Cancelled, Ended, Failed, Ready, Refused, Stepped

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch import Tensor

    from mosaic.runtime.compiled import CompiledModel

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
    """

    model: str
    compile: Mapping[str, Any] = field(default_factory=dict)
    base: GenerationConfig = field(default_factory=GenerationConfig)
    max_num_seqs: int = MOST_LIVE
    warm: bool = False


class _Feed:
    """Collects the tokens of one answer as they become final, behind its prompt."""

    def __init__(self, pending: dict[int, list[int]], place: int) -> None:
        self._pending, self._place, self._began = pending, place, False

    def put(self, value: Tensor) -> None:
        if self._began:
            self._pending.setdefault(self._place, []).extend(value.tolist())
        self._began = True

    def end(self) -> None:
        """What ends is in the outcome."""


class _Engine:
    def __init__(self, model: CompiledModel, session: Session, options: EngineOptions, connection: Connection) -> None:
        self._model, self._session, self._connection = model, session, connection
        self._stream = Stream(session, most_live=options.max_num_seqs, most_ahead=_AHEAD)
        self._waiting = deque[Asked]()
        self._fresh = dict[int, dict[int, list[int]]]()  # by prompt and answer, tokens that were not sent
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
            tokens = {number: dict(found) for number, found in self._fresh.items() if found}
            for found in self._fresh.values():
                found.clear()
            if tokens or outcomes or busy:
                self._connection.send(self._state(tokens, positions))
            for outcome in outcomes:
                del self._fresh[outcome.number]
                self._connection.send(_answer(outcome))

    def _take(self, message: Asked | Cancelled) -> None:
        if isinstance(message, Asked):
            self._waiting.append(message)
            return
        kept = deque(asked for asked in self._waiting if asked.number != message.number)
        if len(kept) < len(self._waiting):
            self._waiting = kept
            self._connection.send(Ended(number=message.number))
        else:
            self._stream.cancel(message.number)

    def _submit(self, asked: Asked) -> None:
        pending = self._fresh[asked.number] = {}
        prompt = torch.tensor(asked.prompt, dtype=torch.int64)
        found = submissions(prompt, asked.config, asked.draws, asked.answers)
        self._stream.put(
            asked.number, [replace(one, streamer=_Feed(pending, place)) for place, one in enumerate(found)]
        )

    def _state(self, tokens: Mapping[int, Mapping[int, list[int]]], positions: int) -> Stepped:
        if (now := time.monotonic()) - self._looked_s >= _LOOKED_S:
            memory, self._looked_s = self._model.memory(), now
            self._memory = {name: (memory.planned[name], memory.committed[name]) for name in memory.planned}
        waiting = len(self._waiting) + self._stream.holds
        return Stepped(
            tokens=tokens, positions=positions, waiting=waiting, running=len(self._session.live), memory=self._memory
        )


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
    try:
        _serve(options, connection)
    except MosaicError as error:
        connection.send(Failed(str(error)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        _log.warning("the server is gone")


def _serve(options: EngineOptions, connection: Connection) -> None:
    model = load(options.model)
    with compile(model, **options.compile) as compiled, Session(compiled) as session:
        if options.warm:
            session.warm(options.base, requests=options.max_num_seqs)
        arch = model.architecture
        context, token = arch.max_context or MAX_TOKENS, int(arch.mask_token_id == 0)
        connection.send(Ready(longest=_longest(session, options.base, token, context)))
        _Engine(compiled, session, options, connection).run()
