"""The answers to one request, as their tokens become final."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mosaic.errors import MosaicError
from mosaic.serving.messages import Ended, Frame, Fresh
from mosaic.serving.protocol import TokenScore, Usage
from mosaic.serving.text import AnswerText

if TYPE_CHECKING:
    from mosaic.decoding.tokenizer import Tokenizer
    from mosaic.serving.metrics import Metrics
    from mosaic.serving.protocol import Question
    from mosaic.serving.supervisor import Asks, Heard

__all__ = ["Answers", "Piece", "TooLong"]

_NEXT_PROMPT: Final = 1 << 40
"""Between the numbers by which the prompts of one request draw: beyond those of all answers to one."""


class TooLong(MosaicError):
    """The time of a request is over."""


class Piece(NamedTuple):
    """Further text of an answer, and what its tokens were committed by, if asked for; the last piece says why it ends."""

    answer: int
    text: str
    scores: Sequence[TokenScore] = ()
    reason: str | None = None


class Answers:
    """The answers to a question as they become final."""

    def __init__(
        self,
        engine: Asks,
        metrics: Metrics,
        tokenizer: Tokenizer,
        question: Question,
        timeout_s: float,
        came_s: float,
        name: str,
        owner: str,
        first_s: float | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._engine, self._metrics, self._question = engine, metrics, question
        answers = question.params.n
        self.texts = [AnswerText(tokenizer, question.params) for _ in range(answers * len(question.prompts))]
        self.reasons: list[str | None] = [None] * len(self.texts)
        self.frames = dict[int, Frame]()
        """By answer, the last canvas that nobody has taken yet."""
        self._scores = [list[TokenScore]() for _ in self.texts]
        self._steps = [0] * len(self.texts)
        self._cached = [0] * len(question.prompts)
        self._asked = dict[int, Callable[[], object]]()  # what cancels each prompt that has not ended
        self._pieces, self._changed = list[Piece](), asyncio.Event()
        self._error: Exception | None = None
        self.first_s = first_s
        """Seconds from `came_s` to the first final tokens, which were those of an engine that has ended since, if given."""
        self._began, self._name, self._owner = came_s, name, owner

    @property
    def usage(self) -> Usage:
        """What they have taken."""
        return Usage(sum(text.tokens for text in self.texts), sum(self._cached), sum(self._steps))

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """Yield what has come together: further text of answers, or none where there is a new canvas."""
        question = self._question
        over = TooLong(f"the answer has not ended within {self._timeout_s:g} s, the limit here; ask for fewer tokens.")
        left_s = max(self._began + self._timeout_s - time.perf_counter(), 0.0)
        try:
            async with asyncio.timeout(left_s):
                await self._engine.ready()
        except TimeoutError:
            raise over from None
        ending = asyncio.get_running_loop().call_later(left_s, self._fail, over)
        try:
            for place, prompt in enumerate(question.prompts):
                self._asked[place] = self._engine.ask(
                    prompt, question.config, partial(self._hear, place), answers=question.params.n, draws=place * _NEXT_PROMPT,
                    scores=question.logprobs, frames=question.frames, owner=self._owner, name=self._name,
                )  # fmt: skip
            while self._asked or self._pieces:
                if self._pieces:
                    pieces, self._pieces = self._pieces, []
                    yield pieces
                else:
                    self._changed.clear()
                    await self._changed.wait()
            if self._error is not None:
                raise self._error
        finally:
            ending.cancel()
            self._cancel()
        reasons = [reason or "" for reason in self.reasons]
        self._metrics.answered(time.perf_counter() - self._began, self.first_s or 0.0, self.usage.tokens, reasons)

    def _hear(self, place: int, found: Heard | Exception) -> None:
        """Take what is told of a prompt that has not ended, at once: however slowly pieces are read, the engine hears of a stop,
        and only the last canvas is held."""
        if place not in self._asked:
            return
        if isinstance(found, Exception):
            self._fail(found)
            return
        try:
            self._pieces += self._ended(place, found) if isinstance(found, Ended) else self._fresh(place, found)
        except Exception as error:
            self._fail(error)
            return
        answers = self._question.params.n
        if isinstance(found, Ended) or None not in self.reasons[place * answers : (place + 1) * answers]:
            self._asked.pop(place)()
        self._changed.set()

    def _fail(self, error: Exception) -> None:
        """End all prompts by an error, unless they have ended."""
        if self._asked:
            self._error = error
            self._cancel()
            self._changed.set()

    def _cancel(self) -> None:
        while self._asked:
            self._asked.popitem()[1]()

    def _fresh(self, place: int, found: Mapping[int, Fresh]) -> Iterator[Piece]:
        """The pieces of what is new of a prompt's answers."""
        for at, fresh in found.items():
            self._cached[place] = fresh.cached_tokens
            if (piece := self._push(place * self._question.params.n + at, fresh)) is not None:
                yield piece

    def _push(self, index: int, fresh: Fresh) -> Piece | None:
        if self.first_s is None and fresh.ids:
            self.first_s = time.perf_counter() - self._began
            self._metrics.began(self.first_s)
        if self.reasons[index] is None:
            self._steps[index] = fresh.steps
        text, shown = self.texts[index], ""
        if self._question.logprobs:
            for token, score in zip(fresh.ids, fresh.scores, strict=True):
                if text.stopped is None:
                    self._scores[index].append(TokenScore.of(token, score, text.length))
                    shown += text.push([token])
        else:
            shown = text.push(fresh.ids)
        if self.reasons[index] is not None:
            return None
        if text.stopped is not None:
            return self._piece(index, shown, "stop")
        framed = fresh.frame is not None and index not in self.frames
        if fresh.frame is not None:
            self.frames[index] = fresh.frame
        return self._piece(index, shown) if shown or framed else None

    def _piece(self, index: int, shown: str, reason: str | None = None) -> Piece:
        """A piece; without text it leaves what tokens were committed by to the next one, unless it is the last."""
        scores = list[TokenScore]()
        if shown or reason is not None:
            scores, self._scores[index] = self._scores[index], scores
        if reason is not None:
            self.reasons[index] = reason
            self.frames.pop(index, None)
        return Piece(index, shown, scores, reason)

    def _ended(self, place: int, ended: Ended) -> Iterator[Piece]:
        """The last pieces of a prompt's answers."""
        answers = self._question.params.n
        self._cached[place] = ended.cached_tokens
        for at, (finish, steps) in enumerate(zip(ended.finishes, ended.steps, strict=True)):
            index = place * answers + at
            self._steps[index] = steps
            if self.reasons[index] is None:
                shown = self.texts[index].flush()
                stopped = finish == "eos" or self.texts[index].stopped is not None
                yield self._piece(index, shown, "stop" if stopped else finish)
