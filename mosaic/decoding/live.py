"""A request: as it is submitted, while it is live, and its generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from operator import index
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np
from torch import Tensor

from mosaic.decoding.algorithms import algorithm_of
from mosaic.decoding.canvas import Canvas, Decision, Steps
from mosaic.decoding.config import GenerationConfig
from mosaic.decoding.prompts import Prompt, is_integer
from mosaic.decoding.streaming import DraftStreamer, OnStep, Step, Streamer
from mosaic.errors import UsageError
from mosaic.runtime.interrupts import interrupts_let_through

if TYPE_CHECKING:
    from mosaic.models.step import StepSize
    from mosaic.runtime.steps import StepRequest, StepResult

__all__ = ["Generation", "LiveRequest", "Submission"]


Early: TypeAlias = Literal["cancelled", "expired", "failed"]
Finish: TypeAlias = Literal["eos", "length"] | Early
MOST_TURNS: Final = 1 << 30
"""The highest priority."""
MOST_S: Final = 1e9
"""The latest deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What one request generated.

    Parameters
    ----------
    prompt_ids
        int64 [P].
    token_ids
        int64 [n], the answer, up to and with the first end-of-sequence token where generation stops at it.
    confidence
        float32 [n], the score that each token was committed by.
    finish
        "eos", "length", "cancelled", "expired" at its deadline, or "failed" if the algorithm raised an error. In the last three
        cases the request has the tokens that were final by then.
    steps
        Steps that were run for it, prefill and commits included.
    text
        The answer as text, if the prompt was text.
    cached_tokens
        First tokens of the prompt that were not computed for it: other requests of its session had their keys.
    """

    prompt_ids: Tensor
    token_ids: Tensor
    confidence: Tensor
    finish: Finish
    steps: int
    text: str | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request as it is submitted.

    Parameters
    ----------
    prompt
        Text, token ids [P] or a conversation.
    config
        As given by the caller; what it leaves out is the algorithm's own.
    request_id
        The number that stands for the request in random draws: with the same number it draws the same tokens, alone or
        beside others. None: its place among all requests of the session.
    streamer
        Is fed the answer as it becomes final.
    on_step
        Called with every `Step` of the request.
    priority
        Steps by which it goes before others, as if it had waited so much longer. So nobody waits for it any longer than that.
    deadline_s
        Seconds after its submission at which it ends as "expired", if it is still live then; None: it has no deadline.

    Raises
    ------
    UsageError
        If one of them is something else; a session checks the prompt.
    """

    prompt: Prompt
    config: GenerationConfig = field(default_factory=GenerationConfig)
    request_id: int | None = None
    streamer: Streamer | None = None
    on_step: OnStep | None = None
    priority: int = 0
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.config, GenerationConfig):
            raise UsageError(f"config: expected GenerationConfig(…), got {type(self.config).__name__}.")
        if self.request_id is not None:
            try:
                if isinstance(self.request_id, bool):
                    raise TypeError
                object.__setattr__(self, "request_id", index(self.request_id))
            except TypeError:
                raise UsageError(f"request_id: expected an integer, got {self.request_id!r}.") from None
        shown, told = self.streamer, self.on_step
        if shown is not None and not all(callable(getattr(shown, name, None)) for name in ("put", "end")):
            raise UsageError(f"streamer: expected an object with put(ids) and end(), got {type(shown).__name__}.")
        if told is not None and not callable(told):
            raise UsageError(f"on_step: expected a function of a Step, got {type(told).__name__}.")
        if not is_integer(self.priority) or abs(self.priority) > MOST_TURNS:
            raise UsageError(
                f"priority: expected a number of steps, from {-MOST_TURNS:,} to {MOST_TURNS:,}, got {self.priority!r}."
            )
        late = self.deadline_s
        if late is not None and (isinstance(late, bool) or not isinstance(late, int | float) or not 0 < late <= MOST_S):
            raise UsageError(f"deadline_s: expected seconds, above 0 and at most {MOST_S:g}, got {late!r}.")


class LiveRequest:
    """One request of a session: its canvas, its algorithm, the step it waits for, and what has been shown.

    Attributes
    ----------
    number
        Its place among all requests of the session.
    generation
        The outcome; None while the request is live.
    steps
        Steps that were run for it.
    largest
        The largest steps that it asks for.
    pending
        The step that it waits for; None once it has ended.
    waiting_since
        The turn of the session since which it waits, or seems to by its priority.
    cached_tokens
        First tokens of the prompt whose keys others had.
    """

    def __init__(
        self,
        number: int,
        submission: Submission,
        canvas: Canvas,
        largest: Sequence[StepSize],
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        self.number, self.steps = number, 0
        self.generation: Generation | None = None
        self.largest = tuple(largest)
        self.pending: StepRequest | None = None
        self.waiting_since = self.cached_tokens = 0
        self._canvas, self._submission, self._decode = canvas, submission, decode
        self._algorithm: Steps | None = None
        self._shown = canvas.prompt_len

    @property
    def config(self) -> GenerationConfig:
        """The options, resolved."""
        return self._canvas.config

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        return self._canvas.prompt_len

    @property
    def deadline_s(self) -> float | None:
        """Seconds that it has from its submission on."""
        return self._submission.deadline_s

    def look(self) -> None:
        """Bring canvas and number of steps up to date; those of a generator are."""

    def draft(self) -> Tensor:
        """Return the answer as it stands after the last step, int64 [G], -1 where nothing is decided."""
        self.look()
        answer = slice(self._canvas.prompt_len, self._canvas.end)
        return self._canvas.tokens[answer].masked_fill(self._canvas.masked[answer], -1)

    def wait(self, turn: int) -> None:
        """Let it wait for its next step."""
        self.waiting_since = turn - self._submission.priority

    def begin(self) -> None:
        """Take the rows of all states, and ask for the first step."""
        try:
            self._canvas.reserve()
            self._algorithm = algorithm_of(self._canvas.config).decode(self._canvas)
            self.pending = next(self._algorithm, None)
        except BaseException:
            self.end("failed")
            raise
        if self.pending is None:
            self.end()

    def show_prompt(self) -> None:
        """Feed the streamer the prompt, and the answer if that is complete, unless another's streamer has cancelled the request."""
        complete = self.generation
        if complete is not None and complete.finish == "cancelled":
            return
        if self._submission.streamer is not None:
            with interrupts_let_through():
                self._submission.streamer.put(self._canvas.prompt.clone())
        if complete is not None:
            self._show()

    def take(self, result: StepResult) -> Step:
        """Go on with an outcome, to the next step or the end. If the algorithm raises, the request has failed."""
        assert self.pending is not None and self._algorithm is not None
        canvas, phase = self._canvas, self.pending.phase
        canvas.last, block = None, canvas.block
        self.steps += 1
        try:
            self.pending = self._algorithm.send(result)
        except StopIteration:
            self.pending = None
        except BaseException:
            self.end("failed")
            raise
        step = self._report(phase.name, block, result)
        if self.pending is None:
            self.end()
        return step

    def tell(self, step: Step) -> None:
        """Tell the callback and the streamer what a step did."""
        going = self.generation is None
        try:
            if self._submission.on_step is not None:
                with interrupts_let_through():
                    self._submission.on_step(step)
        finally:
            if not (
                going and self.generation is not None
            ):  # unless the callback has cancelled it: that has shown its end
                self._show()

    def end(self, early: Early | None = None) -> None:
        """Give back its rows and make its generation; an early end is also shown to the streamer."""
        canvas = self._canvas
        self.pending = None
        answer = slice(canvas.prompt_len, self._final)
        self.generation = Generation(
            prompt_ids=canvas.prompt,
            token_ids=canvas.tokens[answer].clone(),
            confidence=canvas.confidence[answer].clone(),
            finish=early or ("length" if canvas.eos is None else "eos"),
            steps=self.steps,
            cached_tokens=self.cached_tokens,
        )
        with ExitStack() as leaving:  # all of it, also if a user's algorithm or streamer raises
            if early is not None:
                leaving.callback(self._show)
            leaving.callback(canvas.close)
            if self._algorithm is not None:
                leaving.callback(self._algorithm.close)
            if self._decode is not None:
                self.generation = replace(self.generation, text=self._decode(self.generation.token_ids.tolist()))

    @property
    def _final(self) -> int:
        """Where the final text ends: after the first end-of-sequence token, if generation stops at it."""
        return self._canvas.final if self._canvas.eos is None else self._canvas.eos + 1

    def _report(self, phase: str, block: int, result: StepResult) -> Step:
        canvas, last = self._canvas, self._canvas.last or Decision.nothing()
        return Step(
            request=self.number,
            step=self.steps,
            block=block,
            phase=phase,
            masked=int(np.count_nonzero(canvas.mask_array[canvas.prompt_len : canvas.end])),
            positions=last.positions,
            token_ids=last.token_ids,
            confidence=last.confidence,
            plan=result.plan,
            peak_bytes=result.plan.total_bytes,
            seconds=result.seconds,
        )

    def _show(self) -> None:
        """Feed the streamer new text, and its end, even if it raises."""
        canvas, streamer = self._canvas, self._submission.streamer
        if streamer is None:
            return
        with ExitStack() as shown:
            shown.enter_context(interrupts_let_through())
            if self.generation is not None:
                shown.callback(streamer.end)
            if isinstance(streamer, DraftStreamer):
                answer = slice(canvas.prompt_len, canvas.end)
                streamer.put_draft(canvas.tokens[answer].clone(), canvas.confidence[answer].clone())
            if self._final > self._shown:
                streamer.put(canvas.tokens[self._shown : self._final].clone())
                self._shown = self._final
