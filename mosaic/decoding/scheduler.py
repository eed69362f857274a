"""Which step a session's table takes next: how many tokens and rows to decide there is room for.

The device chooses whom a step serves (`pack_requests`). The host chooses the size, a rung of a ladder, by what it knows of the
table: on a device that is a step late. Requests inside a block come first. Prompts get what is left, in chunks, as far as running
blocks are not delayed beyond a bound.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from mosaic.decoding.tabled import ServedSteps
from mosaic.kernels.shared.requests import wanted
from mosaic.models.parts import REQUESTS
from mosaic.models.phase import Phase, shared_phase
from mosaic.models.step import StepSize, bucket
from mosaic.registrar.request_table import Reported
from mosaic.runtime.interrupts import interrupts_held

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mosaic.decoding.rows import TableRow
    from mosaic.decoding.tabled import TabledRequest
    from mosaic.models.state import State
    from mosaic.runtime.request_table import RequestTable, Served
    from mosaic.runtime.steps import StepRunner

__all__ = ["DELAY_MS", "MOST_TOKENS", "Scheduler"]

MOST_TOKENS: Final = 8192
DELAY_MS: Final = 50.0
SHARES: Final = 8
"""Rungs between a number of blocks and twice as many."""
AHEAD: Final = 2
"""Steps that are launched before the first of them is read, on a device."""


class _Kind(NamedTuple):
    """What the size of a step has to know of a request: the kind of step, tokens of its largest one, and of a block."""

    phase: Phase
    tokens: int
    block: int


class Scheduler:
    """The requests of a session that are rows of a table, and their steps; the session holds the model.

    Parameters
    ----------
    runner
        The model.
    table
        Of the session.
    most_tokens
        Tokens of a step, unless one request alone needs more.
    delay_ms
        How long a step with prompts in it may take, as predicted, unless the step without them takes longer.

    Attributes
    ----------
    in_vain
        Steps that served nobody who was still live.
    """

    def __init__(self, runner: StepRunner, table: RequestTable, most_tokens: int, delay_ms: float) -> None:
        self._runner, self._table = runner, table
        self._most_tokens, self._delay_ms = most_tokens, delay_ms
        self._requests: NDArray[Any] = np.full(len(table.columns), None, dtype=object)
        self._live, self._told = np.zeros((2, len(table.columns)), dtype=np.bool_)
        self._waiting: deque[TabledRequest] = deque()
        self._kinds = Counter[_Kind]()
        self._served: ServedSteps | None = None
        self.in_vain = 0

    @property
    def count(self) -> int:
        """How many requests there are."""
        return len(self._waiting) + int(self._live.sum())

    @property
    def live(self) -> bool:
        """Whether there is one."""
        return self.count > 0

    def admits(self, rows: Iterable[TableRow], more: Mapping[State, int]) -> bool:
        """Return whether the smallest step that serves any live request and these fits once `more` rows of states are taken."""
        least = self._least(rows)
        return least is None or self._table.admits(*least, more)

    def least(self, rows: Iterable[TableRow], more: Mapping[State, int]) -> list[StepSize]:
        """Return the size of that step; none if there are no requests."""
        least = self._least(rows)
        return [] if least is None else [self._table.size(*least, self._table.beside(more))]

    def _least(self, rows: Iterable[TableRow]) -> tuple[Phase, int, int, int] | None:
        """The kind of that step, its blocks, tokens of a block and rows to decide."""
        kinds = [*self._kinds, *map(_kind_of, rows)]
        if not kinds:
            return None
        least, block, most = _needed(kinds)
        return _phase(kinds), _rung(least, block), block, most

    def add(self, request: TabledRequest) -> None:
        """Take a request that has begun."""
        self._kinds[_kind_of(request.row)] += 1
        self._placed(request)

    def _placed(self, request: TabledRequest) -> None:
        if request.place is None:
            self._waiting.append(request)
        else:
            self._requests[request.place], self._live[request.place] = request, True
            self._told[request.place] = request.told

    def forget(self, request: TabledRequest) -> None:
        """Let go of a request; it has its row still, or waits for one."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request.place is not None and self._requests[request.place] is request:
            self._requests[request.place], self._live[request.place] = None, False
        else:
            return
        self._kinds[_kind_of(request.row)] -= 1
        self._kinds += Counter()  # leaves out those of nobody

    def step(self) -> ServedSteps:
        """Run a step; on a device, launch the one after it before its outcome is waited for.

        Its outcome is returned again until it is `taken`: whoever is interrupted loses none.
        """
        table = self._table
        while self._served is None:
            most = AHEAD if self._runner.asynchronous and table.is_sure else 1
            while table.in_flight < most and self.live and not (table.in_flight and self._waiting):
                self._launch()
            table.wait()
            with interrupts_held():
                self._served = self._of_live(table.read())
        return self._served

    def taken(self) -> None:
        """Take note that the session has the outcome of the last step."""
        self._served = None

    def _of_live(self, served: Served) -> ServedSteps | None:
        """What a step did for live requests, if it served any."""
        numbers = served.report[:, Reported.ROW]
        places = self._live[numbers].nonzero()[0]
        if not len(places):
            self.in_vain += 1
            return None
        told = self._told[numbers[places]]
        return ServedSteps(served, places, self._requests[numbers[places]].tolist(), told)

    def _launch(self) -> None:
        with interrupts_held():
            while self._waiting and (not self._table.is_full or self._grow()):
                request = self._waiting.popleft()
                request.enter()
                self._placed(request)
        columns = self._table.columns
        asked = wanted(columns)
        length = asked.end - asked.begin
        decides, fills = asked.running & ~asked.fills, asked.running & asked.fills
        deciding, prompts = int(length[decides].sum()), int(length[fills].sum())
        needed, block, own_rows = _needed(self._kinds)
        rows = min(max(int(asked.rows[decides].sum()), own_rows), deciding or own_rows)
        least = max(needed, min(deciding, self._most_tokens))
        most = min(deciding + prompts, max(least, self._most_tokens))
        phase = _phase(self._kinds)
        blocks, rows = self._room(phase, least, most, rows, several=deciding > 0 and prompts > 0)
        self._table.launch(phase, blocks, block, rows)

    def _grow(self) -> bool:
        """Make the table larger for those who wait, if the smallest step fits beside it then."""
        table = self._table
        if not self.admits((), {REQUESTS: 3 * len(table.columns)}) or not table.grow():
            return False
        more = len(table.columns) - len(self._live)
        self._requests = np.concatenate([self._requests, np.full(more, None, dtype=object)])
        self._live, self._told = (
            np.concatenate([flags, np.zeros(more, dtype=np.bool_)]) for flags in (self._live, self._told)
        )
        return True

    def _room(self, phase: Phase, least: int, most: int, rows: int, *, several: bool) -> tuple[int, int]:
        """Blocks and rows to decide of the next step: as many as are asked for, fit, and delay nobody too long."""
        table, (needed, block, own_rows) = self._table, _needed(self._kinds)
        fewest, blocks, own = _rung(needed, block), _rung(most, block), _rung(least, block)
        table.cover(phase, fewest, own, block, own_rows)
        while blocks > fewest and not table.fits(phase, blocks, block, rows):
            blocks = max(_below(blocks), fewest)
        if blocks <= fewest and not table.fits(phase, blocks, block, rows):
            rows = min(rows, own_rows)  # of one request, as it was admitted
        if several:
            limit = max(self._delay_ms, table.predicted_ms(phase, min(own, blocks), block, rows))
            while blocks > own and table.predicted_ms(phase, blocks, block, rows) > limit:
                blocks = max(_below(blocks), own)
        return blocks, rows


def _kind_of(row: TableRow) -> _Kind:
    return _Kind(row.phase, row.most_tokens, row.block)


def _needed(kinds: Collection[_Kind]) -> tuple[int, int, int]:
    """Tokens of the largest step that cannot be cut, the smallest block, and the rows that one request decides at most."""
    blocks = [kind.block for kind in kinds]
    return max([kind.tokens for kind in kinds]), min(blocks), max(blocks)


def _phase(kinds: Collection[_Kind]) -> Phase:
    """The kind of step that serves all."""
    return shared_phase([kind.phase for kind in kinds])


def _rung(tokens: int, block: int) -> int:
    """Blocks that hold so many tokens, rounded up by at most an eighth."""
    return bucket(-(-tokens // block), share=SHARES)


def _below(blocks: int) -> int:
    """The next lower rung.

    >>> [_below(blocks) for blocks in (2, 16, 18, 128)]
    [1, 15, 16, 120]
    """
    step = 1 << max((blocks - 1).bit_length() - SHARES.bit_length(), 0)
    return (blocks - 1) // step * step
