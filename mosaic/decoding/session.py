"""Sessions: requests of one model, submitted and cancelled at any time, advanced by steps that they share.

Requests share nothing but steps, so each gets the tokens that it would get alone. Most requests of the shipped algorithms are
rows of a table that steps themselves move on (`scheduler.py`). The others are generators (`generators.py`), whose steps are waited
for. If there are both, they take turns. A request is refused when it is submitted, or it runs to its end: each of its steps fits
beside all live requests of its model's sessions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import torch
from torch import Tensor

from mosaic.decoding.algorithms import expected_steps, longest_row, repeated_steps
from mosaic.decoding.canvas import Canvas
from mosaic.decoding.config import GenerationConfig, resolve, uncut, with_options
from mosaic.decoding.deadlines import Deadlines
from mosaic.decoding.described import Described, admitted, describe, rows_of
from mosaic.decoding.forecast import Forecast
from mosaic.decoding.generators import Generators
from mosaic.decoding.live import LiveRequest, Submission
from mosaic.decoding.pinned import Pins
from mosaic.decoding.prompts import Prompt, check_prompt, is_integer, is_text, token_ids, tokenizer_of
from mosaic.decoding.rows import TableRow
from mosaic.decoding.scheduler import DELAY_MS, MOST_TOKENS, Scheduler
from mosaic.decoding.streaming import OnStep, Step, Steps, Streamer
from mosaic.decoding.tabled import ServedSteps, TabledRequest
from mosaic.decoding.warm import Warmed, make_warm
from mosaic.errors import DoesNotFit, UsageError
from mosaic.models.parts import REQUESTS
from mosaic.models.step import MAX_TOKENS, StepSize
from mosaic.runtime.interrupts import interrupts_held, interrupts_let_through
from mosaic.runtime.range_pool import ClosesOnExit
from mosaic.runtime.request_table import MOST_ROWS, RequestTable
from mosaic.runtime.room import SEEN

if TYPE_CHECKING:
    from mosaic.decoding.live import Early
    from mosaic.decoding.tokenizer import Tokenizer
    from mosaic.models.state import State
    from mosaic.runtime.prefixes import Prefix
    from mosaic.runtime.steps import StepResult, StepRunner

__all__ = ["Session"]

LEFT_OUT: Final = (
    "request %d: eviction left out: by the plans it saves no time with %d a step; expect more to evict (requests=64)"
)
_log = logging.getLogger(__name__)


class Session(ClosesOnExit):
    """The live requests of a model.

    Closing it, or leaving its `with` block, cancels what is live. Each call holds the model for its time, so threads may
    submit and cancel while another one advances.

    Parameters
    ----------
    runner
        What runs the steps: a compiled model.
    max_num_batched_tokens
        Tokens of a step over requests of the table, prompts in chunks included, unless one request alone needs more.
    max_delay_ms
        How much longer a step may take with chunks of prompts than without, by the last ones on a device or by its plan; where
        more requests wait than run, as many times that.

    Attributes
    ----------
    warmed
        What the last `warm` has made, and what it has taken.

    Raises
    ------
    UsageError
        If an option cannot be.

    Examples
    --------
    >>> import mosaic, torch
    >>> config = {"model_type": "llada", "d_model": 32, "n_layers": 1, "n_heads": 2, "mlp_hidden_size": 48,
    ...           "embedding_size": 64, "mask_token_id": 63, "torch_dtype": "float32"}
    >>> options = GenerationConfig(gen_length=4, block_length=4, steps=2)
    >>> with mosaic.compile(config) as model, Session(model) as session:
    ...     first = session.submit(torch.tensor([1, 2]), options)
    ...     _ = session.advance()
    ...     second = session.submit(torch.tensor([3]), options, steps=4)
    ...     while session.live:
    ...         _ = session.advance()
    ...     len(first.generation.token_ids), len(second.generation.token_ids), second.steps
    (4, 4, 4)
    """

    def __init__(
        self, runner: StepRunner, *, max_num_batched_tokens: int = MOST_TOKENS, max_delay_ms: float = DELAY_MS
    ) -> None:
        if not hasattr(runner, "architecture"):
            raise UsageError(f"a session is of a compiled model, got {type(runner).__name__}.")
        self._runner = runner
        self._live: dict[LiveRequest, None] = {}
        self._given = WeakSet[LiveRequest]()  # live and ended requests
        self._untold = Steps()  # of calls of `advance` that raised
        self._submitted = self._turns = 0
        self.warmed: Warmed | None = None
        self._closed = self._giving = False
        self._deadlines = Deadlines()
        self._read: Tokenizer | None = None
        with runner.exclusive():
            self._shared = runner.sharing()
            self._table: RequestTable | None = getattr(runner, "request_table", lambda: None)()
        limits = max_num_batched_tokens, max_delay_ms
        self._scheduler = self._shared.table = None if self._table is None else Scheduler(runner, self._table, *limits)
        self._generators, self._tabled_last = Generators(runner, max_delay_ms), False
        self.prefixes = Pins(runner, self._table, self._has_room, self._compute, self._tokenizer)
        """Pins first tokens of prompts, and loads saved ones."""

    @property
    def live(self) -> tuple[LiveRequest, ...]:
        """Requests that are neither finished nor cancelled, in order of submission."""
        return tuple(self._live)

    def warm(
        self,
        config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        requests: int = 64,
        tokens: int = 4096,
        progress: Callable[[str], object] = _log.info,
        **options: Any,
    ) -> int:
        """Plan, compile and capture the steps that requests of a table may need, before they come; they take a minute or two.

        Afterwards no request waits for a plan, a kernel, a capture or memory; one too many waits for others, or is refused if too
        few positions are left. Beyond 512 steps, or as many graphs as there is room for, larger steps serve. All take steps that
        serve every warm config.

        Parameters
        ----------
        config
            Of the requests, or several where they differ in more than length, quotas and thresholds; with `options`, fields of
            each by name.
        requests
            How many are served together at most.
        tokens
            Positions of a request at most, prompt and answer.
        progress
            Called with a line for each kernel that is compiled, each step, and what was made; by default the library's log.

        Returns
        -------
        int
            How many requests of `tokens` positions fit: `requests`, or fewer; or more that have as many together.

        Raises
        ------
        UsageError
            If an option cannot be, or such requests are generators, which have no ladder of steps.
        DoesNotFit
            If one request does not fit.
        """
        longest = self._runner.architecture.max_context or MAX_TOKENS
        for name, value, most in (("requests", requests, MOST_ROWS), ("tokens", tokens, longest)):
            if not is_integer(value) or not 1 <= value <= most:
                raise UsageError(f"{name}: expected a number from 1 to {most:,}, got {value!r}.")
        if not callable(progress):
            raise UsageError(f"progress: expected a function of a line, got {type(progress).__name__}.")
        configs: Sequence[Any] = config if config and isinstance(config, list | tuple) else [config]
        with interrupts_held(), self._runner.exclusive(), interrupts_let_through():
            if self._closed:
                raise UsageError("the session is closed: open another one.")
            rows = [longest_row(self._runner, self._table, with_options(one, options), tokens) for one in configs]
        assert self._scheduler is not None and self._table is not None  # a request has a row
        self.warmed = make_warm(self._runner, self._scheduler, self._table, rows, requests, progress)
        progress(str(self.warmed))
        return self.warmed.requests

    def admits(self, *submissions: Submission) -> bool:
        """Return whether every future step fits the budget, with all that is live and these requests added; as for `submit`."""
        with interrupts_held(), self._runner.exclusive(), interrupts_let_through():
            return admitted(self._described(submissions), self._has_room) is not None

    def forecast(self, submission: Submission) -> Forecast:
        """Return what a request would take, and when there is room for it; nothing changes. Raises as `submit` does."""
        with self._runner.exclusive():
            found = self._described([submission])
            admits, alone = admitted(found, self._has_room) is not None, found[0].alone()
            return Forecast.of(alone, self._runner.architecture, admits, lambda: self._refuse([alone]))

    def submit(
        self, prompt: Prompt, config: GenerationConfig | None = None, *, request_id: int | None = None,
        streamer: Streamer | None = None, on_step: OnStep | None = None, priority: int = 0, deadline_s: float | None = None,
        **options: Any,
    ) -> LiveRequest:  # fmt: skip
        """Add a request, described as in `Submission`; `options` are fields of its config by name. Nothing runs before `advance`.

        Raises
        ------
        UsageError
            If an option or the prompt cannot be, or the session is closed.
        CheckpointError
            If the prompt is text and there is no tokenizer.
        DoesNotFit
            If a future step would not fit the budget beside what is live.
        """
        return self.submit_all([Submission(
            prompt=prompt, config=with_options(config, options), request_id=request_id, streamer=streamer, on_step=on_step,
            priority=priority, deadline_s=deadline_s,
        )])[0]  # fmt: skip

    def submit_all(self, submissions: Sequence[Submission]) -> list[LiveRequest]:
        """Add several requests, or none where one of them is refused or cannot begin; as for `submit`."""
        with interrupts_held() as raise_pending, self._runner.exclusive(), ExitStack() as withdrawing:
            with interrupts_let_through():
                described = self._described(submissions)
                if (found := admitted(described, self._has_room)) is None:
                    self._refuse(found := [one.alone() for one in described])
                with interrupts_held():
                    prefixes = [one.open(self._table, withdrawing) for one in found]  # all, before one is given rows
                for one in () if self._live else found:
                    if steps := repeated_steps(one.config, one.largest):
                        self._runner.place(*steps)
            started = list(map(self._made, found, prefixes))
            for request in started:
                withdrawing.callback(self.cancel, request)
                self._start(request)
            for request in started:  # all have their rows: a streamer may cancel, or submit others
                request.show_prompt()
            raise_pending()  # an interrupted caller gets no request
            withdrawing.pop_all()
            return started

    def _described(self, submissions: Sequence[Submission]) -> list[Described]:
        """Check submissions and describe their requests."""
        if self._closed:
            raise UsageError("the session is closed: open another one.")
        if not isinstance(submissions, list | tuple):
            raise UsageError(f"expected a list of Submission(prompt=…), got {type(submissions).__name__}.")
        arch, found = self._runner.architecture, []
        for place, submission in enumerate(submissions):
            if not isinstance(submission, Submission):
                raise UsageError(f"expected Submission(prompt=…), got {type(submission).__name__}.")
            number = self._submitted + place if submission.request_id is None else submission.request_id
            which = f"prompt {place}" if len(submissions) > 1 else "the prompt"
            config = resolve(submission.config, arch)
            tokens = token_ids(submission.prompt, self._tokenizer, which=which)
            prompt = check_prompt(tokens, config, arch, which=which)
            expected = next(expected_steps(config, arch, len(prompt)), None) if config.eviction is not None else None
            if expected is not None and not self._runner.pays(expected):
                _log.warning(LEFT_OUT, number, len(expected.windows))
                config = resolve(uncut(submission.config), arch)
            found.append(describe(submission, number, prompt, config, arch, self._table))
        return found

    def _tokenizer(self) -> Tokenizer:
        """The tokenizer of the model's directory, read once."""
        self._read = self._read or tokenizer_of(getattr(self._runner, "model", None))
        return self._read

    def _has_room(self, more: Sequence[Described]) -> bool:
        """Whether each step that live requests of all sessions and `more` may share fits."""
        sizes, tabled, rows = self._asked(more)
        if sizes and not self._runner.admits(sizes, more={state: rows[state] for state in rows if state is not SEEN}):
            return False
        tables = self._shared.tables
        if not all(table.admits(tabled if table is self._scheduler else (), rows) for table in tables):
            return False
        if self._table is not None:
            self._table.keep_idle(alone=len(tables) == 1 and not sizes)
        return True

    def _refuse(self, more: Sequence[Described]) -> None:
        """Say what is missing, and when there will be room; or what would fit."""
        sizes, tabled, rows = self._asked(more)
        for table in self._shared.tables:
            sizes += table.sizes(tabled if table is self._scheduler else (), rows)
        try:
            self._runner.check(sizes, more=rows)
            for table in self._shared.tables:
                table.require(rows)
        except DoesNotFit as refused:
            scheduler = self._scheduler
            if scheduler is None or len(tabled) < len(more) or scheduler.count < len(self._live):
                refused.never = not self._live and len(more) == 1
                raise  # nobody knows how long a generator takes
            steps, never, outlook = scheduler.outlook(tabled, rows)
            raise DoesNotFit(
                f"{refused}{outlook}", needed_bytes=refused.needed_bytes, available_bytes=refused.available_bytes,
                steps=steps, never=never,
            ) from None  # fmt: skip

    def _asked(self, more: Sequence[Described]) -> tuple[list[StepSize], list[TableRow], dict[State, int]]:
        """The largest steps that generators may share, who comes to the table, and the rows that `more` take."""
        rows = rows_of(more, self._table)
        tabled = [described.row for described in more if described.row is not None]
        if tabled and self._table is not None and not self._table.is_open:
            rows[REQUESTS] = self._table.rows_to_open
        return self._shared.beside([one.largest for one in more if one.row is None], rows=bool(tabled)), tabled, rows

    def _made(self, described: Described, prefix: Prefix | None) -> LiveRequest:
        """Make a live request that has asked for no step yet."""
        canvas = Canvas(
            prompt=torch.from_numpy(described.prompt), config=described.config, architecture=self._runner.architecture,
            request=described.number, length=described.length, demand=described.demand, open_state=self._runner.open_rows,
        )  # fmt: skip
        decode = self._tokenizer().decode if is_text(described.submission.prompt) else None
        request: LiveRequest
        if described.row is not None and self._table is not None and self._scheduler is not None:
            group = self._scheduler.group_of(described.row)
            request = TabledRequest(
                self._submitted, described.submission, canvas, described.row, group, self._table, decode, prefix
            )
        else:
            request = LiveRequest(self._submitted, described.submission, canvas, described.largest, decode)
        self._submitted += 1
        request.wait(self._turns)
        return request

    def _start(self, request: LiveRequest) -> None:
        """Take the request's rows and let it ask for its first step."""
        self._given.add(request)
        self._live[request] = None
        self._deadlines.add(request)
        if not isinstance(request, TabledRequest):
            self._shared.add(request, request.largest)
        request.begin()
        if self._scheduler is not None and isinstance(request, TabledRequest):
            self._scheduler.add(request)
        if request.generation is not None:
            self._forget(request)

    def _forget(self, request: LiveRequest) -> bool:
        """Remove a request from the live ones; False if it was not live."""
        if request not in self._live:
            return False
        if self._scheduler is not None and isinstance(request, TabledRequest):
            self._scheduler.forget(request)
        self._generators.forget(request)
        self._shared.remove(request)
        self._deadlines.remove(request)
        del self._live[request]
        return True

    def launch(self) -> bool:
        """Let a device begin with prompts that fill a step, while others are submitted; return whether a step has ended."""
        with interrupts_held(), self._runner.exclusive(), interrupts_let_through():
            scheduler = self._scheduler if self._runner.asynchronous else None
            return scheduler is not None and scheduler.count == len(self._live) and scheduler.launch()

    def advance(self, steps: int = 1) -> Steps:
        """Run up to `steps` steps, each for the group that has waited longest. Before each, requests end whose deadline has passed.

        If a callback raises, its request goes on with the next call. If an algorithm raises, its request ends as "failed". The
        next call returns what steps did before an error.

        Returns
        -------
        Steps
            What each step did for each of its requests, in order.

        Raises
        ------
        UsageError
            If a callback of this session calls it, or `steps` cannot be.
        """
        if not is_integer(steps) or steps < 0:
            raise UsageError(f"steps: expected an integer, at least 0, got {steps!r}.")
        done = Steps()
        try:
            done, self._untold = self._untold, done
            for _ in range(steps):
                with interrupts_held(), self._runner.exclusive():
                    if self._giving:
                        raise UsageError("a callback cannot advance its session: return, and advance it from outside.")
                    self._deadlines.expire(self._end)
                    with interrupts_let_through():
                        served, group, results = self._next()
                    if served is None and not group:
                        break
                    if served is not None and self._scheduler is not None:
                        self._scheduler.taken()
                    self._turns += 1
                    self._giving, self._tabled_last = True, served is not None
                    try:
                        if served is None:
                            self._give(group, results, done)
                        else:
                            done.add(served)
                            self._show(served)
                    finally:
                        self._giving = False
        except BaseException:
            self._untold.add(done)
            raise
        return done

    def _next(self) -> tuple[ServedSteps | None, Sequence[LiveRequest], Sequence[StepResult]]:
        """Run the next step, and return its outcome; nothing if nobody asks for one. The table and generators take turns; before
        each comes the next part of a step in parts."""
        scheduler = self._scheduler
        while True:
            group, results = self._generators.go_on()
            if group:
                return None, group, results
            divided = len(self._generators.divided)
            alone = scheduler is not None and scheduler.count + divided == len(self._live)
            if scheduler is not None and scheduler.live and (alone or not self._tabled_last):
                return scheduler.step(alone=not divided), (), ()
            if group := self._generators.next_group(self._live):
                outcome = self._generators.run(group, beside=len(group) < len(self._live))
                if outcome is not None:
                    return None, group, outcome
            elif not divided:
                return None, (), ()

    def _show(self, served: ServedSteps) -> None:
        """End the requests that a step has ended, and tell whoever wants to know; the first error is raised when all is done."""
        raised, ends = list[BaseException](), served.ends
        for place in served.noted:
            request = served.requests[place]
            if request.generation is not None:  # a callback has cancelled it
                continue
            try:
                with interrupts_held():
                    step = served[place] if request.told else None
                    if ends[place]:
                        self._forget(request)
                        request.end()
                    if step is not None:
                        request.tell(step)
            except BaseException as error:
                raised.append(error)
        if raised:
            raise raised[0]

    def _give(self, group: Sequence[LiveRequest], results: Sequence[StepResult], done: Steps) -> None:
        """Give each request its outcome, unless a callback has cancelled it, and list what was done.

        All requests get their outcomes, also after a callback has raised; the first error is raised then.
        """
        raised, mine = list[BaseException](), list[Step]()
        done.add(mine)
        for request, result in zip(group, results, strict=True):
            if request.generation is not None:
                continue
            request.wait(self._turns)
            try:
                with interrupts_held():
                    mine.append(request.take(result))
                    request.tell(mine[-1])
            except BaseException as error:
                raised.append(error)
            if request.generation is not None:
                self._forget(request)
        if raised:
            raise raised[0]

    def _compute(self, prompt: Tensor) -> None:
        """Let a request with a prompt come and end; the next call of `advance` returns what steps did meanwhile."""
        request, told = self.submit(prompt, gen_length=self._runner.architecture.block, stop_at_eos=False), Steps()
        try:
            while request.generation is None:
                told.add(self.advance())
        finally:
            self.cancel(request)  # after an error it would go on for nobody
            self._untold = told + self._untold

    def cancel(self, request: LiveRequest) -> None:
        """End a request now: what is final becomes its `generation`. A request that has ended stays as it is.

        Raises
        ------
        UsageError
            If it is not a request of this session.
        """
        with interrupts_held(), self._runner.exclusive():
            if not isinstance(request, LiveRequest):
                raise UsageError(f"cancel: expected a request, as `submit` returns it, got {type(request).__name__}.")
            if request not in self._given:
                raise UsageError(f"cancel: request {request.number} is of another session; cancel it there.")
            self._end(request, "cancelled")

    def _end(self, request: LiveRequest, how: Early) -> None:
        if self._forget(request) and request.generation is None:
            request.end(how)

    def close(self) -> None:
        """Cancel what is live, all of it where a streamer raises too. Closing twice is fine."""
        with interrupts_held(), self._runner.exclusive(), ExitStack() as ending:
            self._closed = True
            if self._table is not None:
                ending.callback(self._table.close)
                ending.callback(self.prefixes.close)
            for request in reversed(self.live):
                ending.callback(self.cancel, request)
