"""Systems that serve requests by plain PyTorch: static batches, padded or packed, and dLLM-Serve's scheduler.

A static batch takes who waits when the one before has ended. Padded as published, all of it ends together; packed, a request ends
when its own answer does. dLLM-Serve's scheduler admits requests between steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final, Protocol, TypeAlias

from torch import Tensor

from benchmarks.bench.baselines import Transformer
from benchmarks.dllm_serve.padded import Padded
from benchmarks.dllm_serve.phases import Live, PackedSteps
from benchmarks.dllm_serve.selection import OPTIONS
from benchmarks.dllm_serve.trace import BLOCK, Asked

__all__ = ["Found", "Queue", "Scheduled", "Static", "System", "packed_loop", "padded_loop", "pages_of", "rows_of"]

Found: TypeAlias = Sequence[tuple[Asked, Tensor]]
"""Requests with their prompts int64 [P], or with their answers where they have ended."""
PAGE: Final = 256
"""Rows of a page of dLLM-Serve's pool."""


class System(Protocol):
    """What serves requests.

    Attributes
    ----------
    decided
        Tokens of requests' answers that have been decided.
    asynchronous
        Whether a card may still run a step that has returned.
    waiting
        Requests that have not begun, with their prompts.
    """

    decided: int
    asynchronous: bool
    waiting: deque[tuple[Asked, Tensor]]

    @property
    def is_busy(self) -> bool:
        """Whether requests wait or run."""

    def submit(self, asked: Asked, prompt: Tensor) -> None:
        """Let a request with a prompt int64 [P] wait."""

    def step(self) -> Found:
        """Run a step, of which there is one if the system is busy; return who has ended, with their answers."""

    def reset(self) -> None:
        """Forget all requests."""


class Queue:
    """Requests that wait, in the order in which they came."""

    asynchronous = True

    def __init__(self) -> None:
        self.decided = 0
        self.waiting = deque[tuple[Asked, Tensor]]()

    def submit(self, asked: Asked, prompt: Tensor) -> None:
        """Let a request wait."""
        self.waiting.append((asked, prompt))


class Static(Queue):
    """A loop over up to `batch` requests at a time, which yields after every step who has ended."""

    def __init__(self, loop: Callable[[Found], Generator[Found, None, None]], batch: int) -> None:
        super().__init__()
        self._loop, self._batch = loop, batch
        self._running: Generator[Found, None, None] | None = None
        self._answers, self._steps = list[int](), 0

    @property
    def is_busy(self) -> bool:
        """Whether requests wait or run."""
        return bool(self.waiting or self._running)

    def reset(self) -> None:
        """Forget all requests."""
        self.waiting.clear()
        if self._running is not None:
            self._running.close()
        self._running = None

    def step(self) -> Found:
        """Run a step of the batch."""
        if self._running is None:
            found = [self.waiting.popleft() for _ in range(min(self._batch, len(self.waiting)))]
            self._answers, self._steps = [asked.answer for asked, _ in found], 0
            self._running = self._loop(found)
        ended = next(self._running)
        self._steps += 1
        self.decided += sum(answer >= self._steps for answer in self._answers)
        if self._steps == max(self._answers):
            self._running.close()
            self._running = None
        return ended


def padded_loop(
    network: Transformer, loop: Callable[[Transformer, Padded], Iterator[None]]
) -> Callable[[Found], Generator[Found, None, None]]:
    """Make a loop of `padded` one of `Static`."""

    def run(found: Found) -> Generator[Found, None, None]:
        longest = max(asked.answer for asked, _ in found)
        batch = Padded.of(network, [prompt for _, prompt in found], longest)
        for step, _ in enumerate(loop(network, batch), start=1):
            answers = batch.answers() if step == longest else ()
            yield [(asked, answer[: asked.answer]) for (asked, _), answer in zip(found, answers, strict=False)]

    return run


def packed_loop(steps: PackedSteps, *, dual: bool) -> Callable[[Found], Generator[Found, None, None]]:
    """Return Fast-dLLM's or Sparse-dLLM's loop over packed requests: those with the longest answers first, so that the keys of
    who is left lie side by side."""

    def run(found: Found) -> Generator[Found, None, None]:
        lives = list[Live]()
        try:
            for asked, prompt in sorted(found, key=lambda one: -one[0].answer):
                live = steps.begin(asked, prompt, rows_of(asked, dual=dual), dual=dual)
                assert live is not None, "the pool has rows for a batch of the longest requests"
                lives.append(live)
            while lives:
                steps.step(lives)
                over = [live for live in lives if live.is_over]
                lives = [live for live in lives if not live.is_over]
                yield [(live.asked, steps.end(live)) for live in over]
        finally:
            for live in lives:
                steps.end(live)

    return run


def rows_of(asked: Asked, *, dual: bool) -> int:
    """Return the rows of the pool that a request needs: for all keys, or for those that are kept and its block's."""
    return asked.length if dual else OPTIONS.kept(asked.length - BLOCK) + BLOCK


def pages_of(asked: Asked) -> int:
    """Return the rows of dLLM-Serve's pages for a request: whole pages for the kept keys."""
    return -(-OPTIONS.kept(asked.length - BLOCK) // PAGE) * PAGE


class Scheduled(Queue):
    """Requests in mixed phases under a bound on the tokens of a step, as dLLM-Serve's public scheduler has them.

    Running requests are walked until the first whose step does not fit; those that wait are admitted with what is left, and stand
    before the running ones that were left out.
    """

    def __init__(self, steps: PackedSteps, most_tokens: int) -> None:
        super().__init__()
        self._steps, self._most = steps, most_tokens
        self._running = deque[Live]()

    @property
    def is_busy(self) -> bool:
        """Whether requests wait or run."""
        return bool(self.waiting or self._running)

    def reset(self) -> None:
        """Forget all requests."""
        self.waiting.clear()
        for live in self._running:
            self._steps.end(live)
        self._running.clear()

    def step(self) -> Found:
        """Run a step of who fits."""
        chosen, left = list[Live](), self._most
        while self._running and self._running[0].tokens <= left:
            chosen.append(self._running.popleft())
            left -= chosen[-1].tokens
        while self.waiting and self.waiting[0][0].length <= left:
            asked, prompt = self.waiting[0]
            rows = pages_of(asked) if self._steps.published else rows_of(asked, dual=False)
            live = self._steps.begin(asked, prompt, rows, dual=False)
            if live is None:
                break
            self.waiting.popleft()
            chosen.append(live)
            left -= asked.length
        assert chosen, "a step of the longest request fits"
        self._steps.step(chosen)
        self.decided += len(chosen)
        ended = [(live.asked, self._steps.end(live)) for live in chosen if live.is_over]
        self._running.extendleft(live for live in reversed(chosen) if not live.is_over)
        return ended
