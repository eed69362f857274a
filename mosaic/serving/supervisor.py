"""The engine's process seen from the server: asked and heard without waiting, and started again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import multiprocessing
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from mosaic.decoding.config import GenerationConfig
from mosaic.decoding.forecast import Forecast
from mosaic.errors import MosaicError
from mosaic.serving.engine import EngineOptions, run_engine
from mosaic.serving.messages import Asked, Cancelled, Ended, Failed, PlanWanted, Ready, Stepped, Told, Watched, Wondered

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from mosaic.serving.messages import Fresh, ToEngine, ToServer
    from mosaic.serving.metrics import Metrics

__all__ = ["AnswerLost", "Asks", "Busy", "EngineFailed", "Limits", "Supervisor", "TooLarge"]

Heard: TypeAlias = "Mapping[int, Fresh] | Ended"
"""What a prompt's caller hears: what is new by answer, then the end."""
_STEPS: Final = 16
"""Over about so many steps their time is averaged."""
_TOLD_TOGETHER: Final = 8
"""Callers who hear something in one turn of the loop."""
_MOST_FAILURES: Final = 3
"""An engine that was ready once, and so often in a row ends before it is again, is not started any more."""
_log = logging.getLogger(__name__)


class Busy(MosaicError):
    """Too many requests wait; `seconds` says when to ask again."""

    def __init__(self, message: str, seconds: int) -> None:
        self.seconds = seconds
        super().__init__(message)


class TooLarge(MosaicError):
    """A request that does not fit, with all of the memory its own."""


class EngineFailed(MosaicError):
    """The engine's process ended while it worked on a request, or does not start."""


class AnswerLost(EngineFailed):
    """The process ended for the first time while it worked on a request, and had told something of it: who has sent nothing of that
    may ask again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a server takes.

    Parameters
    ----------
    max_waiting
        Prompts that wait for admission, at most.
    max_body_bytes
        Of a request.
    max_connections
        Open sockets; what is asked over any further one is refused.
    timeout_s
        From the last byte of a request to the end of its answer.
    slow_s
        In which the head of a request has to come, its body, and what is sent has to be read.
    drain_s
        From a signal to the end of what runs.
    """

    max_waiting: int = 1024
    max_body_bytes: int = 16 << 20
    max_connections: int = 4096
    timeout_s: float = 600.0
    slow_s: float = 60.0
    drain_s: float = 60.0


@dataclass(slots=True, kw_only=True)
class _Running:
    """A prompt that the engine works on, and who listens."""

    asked: Asked
    heard: Callable[[Heard | Exception], object]
    name: str
    told: bool = False
    again: bool = False


class Asks(Protocol):
    """What answers requests: a supervisor, or replicas of it. Attributes and methods are those of `Supervisor`."""

    @property
    def started(self) -> bool: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def state(self) -> str: ...
    @property
    def failure(self) -> str: ...
    @property
    def longest(self) -> int: ...
    @property
    def restarts(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def step_s(self) -> float: ...

    def start(self) -> None: ...
    def end(self) -> None: ...
    def watch(self) -> None: ...
    async def ready(self) -> None: ...
    async def close(self) -> None: ...
    async def forecast(self, prompt: Sequence[int], config: GenerationConfig) -> Forecast: ...
    async def plan(self) -> Mapping[str, Any]: ...
    def ask(
        self, prompt: Sequence[int], config: GenerationConfig, heard: Callable[[Heard | Exception], object], *, answers: int,
        draws: int, scores: bool = False, frames: bool = False, owner: str = "", name: str = "",
    ) -> Callable[[], object]: ...  # fmt: skip


class Supervisor:
    """Starts an engine, asks it, and starts it again if it ends.

    All methods are called in the loop in which it was started.

    Attributes
    ----------
    state
        "starting", "ready", "failed" or "closed".
    longest
        The most positions of a request; 0 before the engine was ready.
    restarts
        How often the engine has been started again.
    failure
        Why it is not ready, after it has failed.
    step_s
        Seconds of a step of late.
    waiting
        Prompts that wait for admission.
    """

    def __init__(self, options: EngineOptions, limits: Limits, stepped: Callable[[Stepped], object], metrics: Metrics
    ) -> None:  # fmt: skip
        self._options, self._limits, self._stepped, self._metrics = options, limits, stepped, metrics
        self.state, self.failure = "starting", ""
        self.longest = self.restarts = 0
        self._numbers = self._failures = self.waiting = 0
        self.step_s, self._stepped_s = 0.0, math.inf
        self._room_in: int | None = None
        self._running = dict[int, _Running]()
        self._found = deque[tuple[_Running, Any]]()
        self._wondering = dict[int, asyncio.Future[Forecast | Mapping[str, Any] | str]]()
        self._outbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._rate = _Rate()
        self._changed = asyncio.Event()
        self._process: Any = None

    @property
    def started(self) -> bool:
        """Whether `start` was called."""
        return self._process is not None

    @property
    def pid(self) -> int | None:
        """The process of the engine."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the engine's process; it is ready later."""
        self._loop = asyncio.get_running_loop()
        self.state = "starting"
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=run_engine, args=(self._options, theirs), name="engine")
        self._process.start()
        theirs.close()
        self._outbox = queue.SimpleQueue()
        for work, args in ((_send, (ours, self._outbox)), (self._receive, (ours, self._process))):
            threading.Thread(target=work, args=args, daemon=True, name="engine").start()

    async def ready(self) -> None:
        """Wait until the engine is ready.

        Raises
        ------
        EngineFailed
            If it does not start.
        """
        while self.state == "starting":
            self._changed.clear()
            await self._changed.wait()
        if self.state != "ready":
            raise EngineFailed(self.failure or "the server is closed")

    def end(self) -> None:
        """Answer whoever still listens that the server ends."""
        for number, running in [*self._running.items()]:
            del self._running[number]
            self._hand(running, EngineFailed("the server ends; ask again, it may be another one."))
            self._outbox.put(Cancelled(number))

    async def close(self) -> None:
        """End the engine's process."""
        listens, self.state = self.state == "ready", "closed"
        self._changed.set()
        self._outbox.put(None)
        process = self._process
        if process is not None:
            await asyncio.to_thread(process.join, 5.0 * listens)
            if process.is_alive():
                process.kill()
                await asyncio.to_thread(process.join)

    def ask(
        self, prompt: Sequence[int], config: GenerationConfig, heard: Callable[[Heard | Exception], object], *, answers: int,
        draws: int, scores: bool = False, frames: bool = False, owner: str = "", name: str = "",
    ) -> Callable[[], object]:  # fmt: skip
        """Ask the engine, which was `ready`; return what cancels the request, unless it has ended.

        In later turns of the loop `heard` is called with what is new by answer, and with the end, or with an error: `TooLarge` if
        it does not fit, `EngineFailed` if the engine has ended after it had told something of the request, or twice, another
        `MosaicError` if it cannot be. The other arguments are those of `Asked`; the log calls the request `name`.

        Raises
        ------
        Busy
            If too many wait.
        """
        if self.waiting >= self._limits.max_waiting:
            raise Busy(f"{self.waiting:,} requests wait, which is as many as may; ask again later.", self.retry_s)
        self._numbers += 1
        number = self._numbers
        self._running[number] = running = _Running(name=name, heard=heard, asked=Asked(
            number=number, prompt=prompt, config=config, answers=answers, draws=draws, scores=scores, frames=frames,
            owner=owner,
        ))  # fmt: skip
        self.waiting += 1
        self._outbox.put(running.asked)
        return partial(self._cancel, number)

    def _cancel(self, number: int) -> None:
        if self._running.pop(number, None) is not None:
            self._outbox.put(Cancelled(number))

    async def forecast(self, prompt: Sequence[int], config: GenerationConfig) -> Forecast:
        """Return what a request would take, and when there is room for it.

        Raises
        ------
        EngineFailed
            If the engine does not start, or ends before it has told.
        MosaicError
            If it cannot be.
        """
        found = await self._tell(lambda number: Wondered(number=number, prompt=prompt, config=config))
        assert isinstance(found, Forecast)
        return found

    async def plan(self) -> Mapping[str, Any]:
        """Return the document of the plan of the last step; as for `forecast`."""
        found = await self._tell(PlanWanted)
        assert isinstance(found, Mapping)
        return found

    def watch(self) -> None:
        """Let the engine send pictures for a while."""
        if self.state == "ready":
            self._outbox.put(Watched())

    async def _tell(self, wondered: Callable[[int], ToEngine]) -> Forecast | Mapping[str, Any]:
        await self.ready()
        self._numbers += 1
        number = self._numbers
        told: asyncio.Future[Forecast | Mapping[str, Any] | str] = self._loop.create_future()
        self._wondering[number] = told
        self._outbox.put(wondered(number))
        try:
            found = await told
        finally:
            del self._wondering[number]
        if isinstance(found, str):
            raise MosaicError(found)
        return found

    @property
    def retry_s(self) -> int:
        """Seconds until the next request is admitted, so that one more may wait: by the engine's forecast, or where nobody can say,
        by how fast requests end."""
        steps = self._room_in
        seconds = self._rate.seconds_each if steps is None else steps * self.step_s
        return max(round(min(seconds, self._limits.timeout_s)), 1)

    def _receive(self, connection: Connection, process: Any) -> None:
        """In a thread of its own: hand on what the engine tells, until it ends."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            with contextlib.suppress(EOFError, OSError):
                while True:
                    for message in connection.recv():
                        self._loop.call_soon_threadsafe(self._take, message)
            process.join()
            self._loop.call_soon_threadsafe(self._ended, process.exitcode)

    def _take(self, message: ToServer) -> None:
        if self.state == "closed":
            return
        if isinstance(message, Ready):
            self.state, self.longest, self._failures = "ready", message.longest, 0
            self.failure = ""
            self._changed.set()
        elif isinstance(message, Failed):
            self.failure = message.message
        elif isinstance(message, Stepped):
            unseen = takewhile(lambda number: number > message.newest, reversed(self._running))
            self.waiting, self._room_in = message.waiting + sum(1 for _ in unseen), message.room_in
            self._stepped(replace(message, waiting=self.waiting))
            self._time(message.running)
            for number, fresh in message.fresh.items():
                if (running := self._running.get(number)) is not None:
                    running.told = True
                    self._hand(running, fresh)
        elif isinstance(message, Told):
            if (told := self._wondering.get(message.number)) is not None and not told.done():
                told.set_result(message.found)
        elif isinstance(message, Ended):
            self._rate.note()
            self._metrics.ended(message)
            if (running := self._running.pop(message.number, None)) is not None:
                self._hand(running, message)
        elif (running := self._running.pop(message.number, None)) is not None:
            self._hand(running, MosaicError(message.message) if message.fits else TooLarge(message.message))

    def _hand(self, running: _Running, found: Heard | Exception) -> None:
        """Let a prompt's caller hear something, in order. Few hear in one turn of the loop: where many answers end together, the
        first of their callers ask again while the others are told."""
        self._found.append((running, found))
        if len(self._found) == 1:
            self._loop.call_soon(self._hand_on)

    def _hand_on(self) -> None:
        for _ in range(min(len(self._found), _TOLD_TOGETHER)):
            running, found = self._found.popleft()
            self._loop.call_soon(running.heard, found)  # so that an error of one caller is nothing to the others
        if self._found:
            self._loop.call_soon(self._hand_on)

    def _time(self, running: int) -> None:
        """Note when a step has ended; one that followed another at once says how long it took."""
        now = time.monotonic()
        if now > self._stepped_s:
            self.step_s += (now - self._stepped_s - self.step_s) / (_STEPS if self.step_s else 1)
        self._stepped_s = now if running else math.inf
        if not running:
            self._rate = _Rate()  # what comes later says nothing of how fast requests end

    def _ended(self, code: int | None) -> None:
        """The process has ended: start it again, and ask it again what nobody has heard anything of."""
        if self.state == "closed":
            return
        self._outbox.put(None)
        for told in self._wondering.values():
            if not told.done():
                told.set_exception(EngineFailed("the engine has failed; ask again."))
        self._failures += self.state == "starting"
        if self._failures >= _MOST_FAILURES or (self._failures and not self.longest):
            self.state = "failed"
            self.failure = self.failure or f"the engine does not start: its process ended with exit code {code}."
        again, hit = [], []
        for number, running in [*self._running.items()]:
            if self.state == "failed" or running.told or running.again:
                del self._running[number]
                hit.append(running.name)
                failed = EngineFailed if self.state == "failed" or running.again else AnswerLost
                self._hand(running, failed("the engine has failed while it worked on this request; ask again."))
            else:
                running.again = True
                again.append(running.asked)
        if hit or again or not self.failure:
            repeated = [running.name for running in self._running.values()]
            _log.error(
                "the engine's process has ended with exit code %s; requests that failed: %s; asked again: %s",
                code, ", ".join(hit) or "none", ", ".join(repeated) or "none",
            )  # fmt: skip
        if self.state != "failed":
            self.restarts += 1
            self.waiting = len(again)
            self.start()
            for asked in again:
                self._outbox.put(asked)
        self._changed.set()


class _Rate:
    """How fast requests end, by the last ones."""

    _KEPT: Final = 64

    def __init__(self) -> None:
        self._ends = deque[float](maxlen=self._KEPT)

    def note(self) -> None:
        self._ends.append(time.monotonic())

    @property
    def seconds_each(self) -> float:
        if len(self._ends) < 2:
            return 1.0
        return (time.monotonic() - self._ends[0]) / (len(self._ends) - 1)


def _send(connection: Connection, outbox: queue.SimpleQueue[ToEngine | None]) -> None:
    """In a thread of its own: tell the engine, which may be in the middle of a step. What has come meanwhile goes out together, for
    the thread waits for its turn after each write."""
    with contextlib.suppress(OSError):
        messages: list[ToEngine | None] = []
        while None not in messages:
            messages = [outbox.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    messages.append(outbox.get_nowait())
            connection.send(messages)
