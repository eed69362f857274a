"""A stream of requests through a session: as many live as are admitted, and no more in memory than a window of the stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mosaic.errors import DoesNotFit, MosaicError, UsageError

if TYPE_CHECKING:
    from mosaic.decoding.live import Generation, LiveRequest, Submission
    from mosaic.decoding.session import Session
    from mosaic.decoding.streaming import Step

__all__ = ["MOST_AHEAD", "MOST_LIVE", "Outcome", "Stream"]

MOST_LIVE: Final = 256
MOST_AHEAD: Final = 1024
SHARE: Final = 8
"""One of so many live requests has to be submitted since the last step, at least, before the next one is due: short steps would
each let in one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one entry of a stream.

    Parameters
    ----------
    number
        The entry's.
    generations
        One for each of its submissions, in order; none where there is an error.
    error
        Why the session refused one of them, which it would have done alone, too.
    """

    number: int
    generations: tuple[Generation, ...] = ()
    error: MosaicError | None = None


@dataclass(slots=True, eq=False)
class _Entry:
    """An entry of the stream: what is not submitted yet, what was, and how many of these are live."""

    number: int
    waiting: deque[Submission]
    requests: list[LiveRequest] = field(default_factory=list)
    live: int = 0
    error: MosaicError | None = None

    @property
    def ended(self) -> bool:
        return self.error is not None or not (self.waiting or self.live)


class Stream:
    """Submits entries in order, each as soon as the session admits it, and advances the session.

    An entry is a number and submissions, such as several answers to one prompt, or none where the outcome is known. Numbers ascend.
    Who is refused waits for the next request to end, and is not asked again before.

    Parameters
    ----------
    session
        Where requests are submitted.
    most_live
        The most requests that are live at once.
    most_ahead
        No entry is submitted whose number is so much above that of the oldest entry without an outcome: this bounds what waits for
        its turn in order, and how far outcomes are out of order.
    after_step
        Called with the stream after each step of the session.

    Attributes
    ----------
    forwards
        Steps that were run.
    tokens
        Tokens of the requests that have ended.
    steps
        What the last one did.

    Examples
    --------
    >>> import mosaic, torch
    >>> from mosaic.decoding import GenerationConfig, Session, Submission
    >>> config = {"model_type": "llada", "d_model": 32, "n_layers": 1, "n_heads": 2, "mlp_hidden_size": 48,
    ...           "embedding_size": 64, "mask_token_id": 63, "torch_dtype": "float32"}
    >>> options = GenerationConfig(gen_length=4, block_length=4, steps=2)
    >>> entries = ((n, [Submission(prompt=torch.tensor([n]), config=options, request_id=n)]) for n in range(9))
    >>> with mosaic.compile(config) as model, Session(model) as session:
    ...     [outcome.number for outcome in Stream(session, most_live=2).run(entries)]
    [0, 1, 2, 3, 4, 5, 6, 7, 8]
    """

    def __init__(
        self, session: Session, *, most_live: int = MOST_LIVE, most_ahead: int = MOST_AHEAD,
        after_step: Callable[[Stream], object] | None = None,
    ) -> None:  # fmt: skip
        for name, value in (("most_live", most_live), ("most_ahead", most_ahead)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}: expected a number, at least 1, got {value!r}.")
        self._session, self._most_live, self._most_ahead, self._after_step = session, most_live, most_ahead, after_step
        self.forwards = self.tokens = 0
        self.steps: Sequence[Step] = ()
        self._entries: dict[_Entry, None] = {}  # without an outcome that was handed on, by number
        self._live: dict[LiveRequest, _Entry] = {}
        self._held: _Entry | None = None
        self._refused = self._ended = self._due = False
        self._fresh = 0  # requests that were submitted since the last step

    @property
    def wants(self) -> bool:
        """Whether another entry can be `put`: none waits for room, and no outcome waited for `advance` when the last one came."""
        return not (self.holds or self._due) and len(self._live) < self._most_live

    @property
    def holds(self) -> bool:
        """Whether an entry waits for room."""
        return self._held is not None

    def put(self, number: int, submissions: Sequence[Submission]) -> Sequence[LiveRequest]:
        """Add an entry, if the stream wants one; return its requests, which become more as they are admitted."""
        entry = _Entry(number, deque(submissions))
        self._entries[entry] = None
        self._held, self._ended = None if entry.ended else entry, self._ended or entry.ended
        self._submit()
        return entry.requests

    def advance(self, *, ordered: bool = True) -> list[Outcome]:
        """Run a step, and return the outcomes that are due: in the order of the entries, or of all that have ended."""
        self._submit()
        self._fresh, self._due = 0, False
        if self._session.live:
            self.steps = self._session.advance()
            self.forwards += bool(self.steps)
            self._note_ends()
            if self._after_step is not None:
                self._after_step(self)
        if not self._ended:
            return []
        self._ended, due = False, list[_Entry]()
        for entry in self._entries:
            if entry.ended:
                due.append(entry)
            elif ordered:
                break
        for entry in due:
            del self._entries[entry]
        return [_outcome(entry) for entry in due]

    def cancel(self, number: int) -> None:
        """End an entry, if it has no outcome yet: its outcome has what is final of the requests that were live."""
        entry = next((entry for entry in self._entries if entry.number == number), None)
        if entry is None or entry.ended:
            return
        entry.waiting.clear()
        if self._held is entry:
            self._held, self._refused = None, False
        for request in entry.requests:
            self._session.cancel(request)
        self._note_ends()
        self._ended = True

    def run(self, entries: Iterable[tuple[int, Sequence[Submission]]], *, ordered: bool = True) -> Iterator[Outcome]:
        """Yield the outcome of each entry, which are taken as they are needed; in their order, or as they end.

        An error of the iterable is raised when what came before it has ended. If the iterator is closed early, or interrupted,
        its requests are cancelled.
        """
        source: Iterator[tuple[int, Sequence[Submission]]] | None = iter(entries)
        failure: Exception | None = None
        try:
            while True:
                while source is not None and self.wants:
                    try:
                        self.put(*next(source))
                    except StopIteration:
                        source = None
                    except Exception as error:
                        source, failure = None, error
                if not self._entries:
                    break
                yield from self.advance(ordered=ordered)
            if failure is not None:
                raise failure
        finally:
            for request in [*self._live]:
                self._session.cancel(request)

    def _submit(self) -> None:
        """Submit what is held, as far as there is room."""
        entry = self._held
        if entry is None or self._refused or entry.number - next(iter(self._entries)).number >= self._most_ahead:
            return
        while entry.waiting and len(self._live) < self._most_live:
            try:
                (request,) = self._session.submit_all([entry.waiting[0]])
            except DoesNotFit as error:
                if self._session.live and not error.never:
                    self._refused = bool(self._live)  # nobody tells when those of others end
                    return
                self._fail(entry, error)
            except UsageError as error:
                self._fail(entry, error)
            else:
                del entry.waiting[0]
                entry.requests.append(request)
                entry.live += 1
                self._live[request] = entry
                self._fresh += 1
                self._due = self._session.launch() and SHARE * self._fresh >= len(self._live)
        if not entry.waiting:
            self._held = None

    def _fail(self, entry: _Entry, error: MosaicError) -> None:
        """End an entry whose submission was refused."""
        entry.error = error
        entry.waiting.clear()
        self._ended = True
        for request in entry.requests:
            self._session.cancel(request)

    def _note_ends(self) -> None:
        ended = [(request, found) for request in self._live if (found := request.generation) is not None]
        for request, generation in ended:
            self._live.pop(request).live -= 1
            self._refused, self._ended = False, True
            self.tokens += len(generation.token_ids)


def _outcome(entry: _Entry) -> Outcome:
    if entry.error is not None:
        return Outcome(number=entry.number, error=entry.error)
    found = (request.generation for request in entry.requests)
    return Outcome(number=entry.number, generations=tuple(one for one in found if one is not None))
