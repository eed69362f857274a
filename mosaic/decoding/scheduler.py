"""Which step a session's table takes next: how many tokens and rows to decide there is room for.

The device chooses whom a step serves (`pack_requests`). The host chooses the size, a rung of a ladder, by what it knows of the
table: on a device that is a step late. Requests inside a block come first. Prompts get what is left, in chunks, as far as running
blocks are not delayed beyond a bound.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from mosaic.decoding.rows import ALL
from mosaic.decoding.tabled import ServedSteps
from mosaic.kernels.shared.requests import bits, closes, quotas, wanted
from mosaic.models.parts import KEPT, REQUESTS, CachePolicy, Cut
from mosaic.models.phase import Phase, shared_phase
from mosaic.models.policies.policy import with_parts
from mosaic.models.step import StepSize, bucket
from mosaic.registrar.request_table import CANVAS_LONG, ENDED, OPEN_ONES, WHOLE, Column, Reported
from mosaic.runtime.interrupts import interrupts_held
from mosaic.runtime.request_table import decided

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
_NEVER: Final = bits(ALL)
AHEAD: Final = 2
"""Steps that are launched before the first of them is read, on a device."""


class _Kind(NamedTuple):
    """What the size of a step has to know of a request: its group, the kind of step, tokens of its largest one, and of a block."""

    group: int
    phase: Phase
    tokens: int
    block: int


class _InFlight(NamedTuple):
    """A step that is on its way: of which group, whether it is marked, and its room."""

    group: int
    marked: bool
    tokens: int
    rows: int


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
        self._groups: dict[tuple[CachePolicy, Cut | None], int] = {(KEPT, None): 0}
        self._turns: list[int] = [0]  # by group, the launch in which it had its last one
        self._launches = self._deciding = self._decided = 0
        self._in_flight: deque[_InFlight] = deque()
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
        """Return whether the smallest steps that serve any live request and these fit once `more` rows of states are taken."""
        return all(self._table.admits(*least, more) for least in self._least(rows))

    def sizes(self, rows: Iterable[TableRow], more: Mapping[State, int]) -> list[StepSize]:
        """Return the sizes of these steps, one a group."""
        return [self._table.size(*least, self._table.beside(more)) for least in self._least(rows)]

    def _least(self, rows: Iterable[TableRow]) -> list[tuple[Phase, int, int, int]]:
        """Of each group's smallest step that cannot be cut: its kind, blocks, tokens of a block and rows to decide."""
        kinds = [*self._kinds, *(kind for row in rows for kind in self._kinds_of(row))]
        found = []
        for group in {kind.group: None for kind in kinds}:
            mine = [kind for kind in kinds if kind.group == group]
            least, block, most = _needed(mine)
            found.append((_phase(mine, marked=True), _rung(least, block), block, most))
        return found

    def group_of(self, row: TableRow) -> int:
        """Return the number of the requests that share steps with this one."""
        return self._groups.setdefault((row.cache.covering, row.cut), len(self._groups))

    def _kinds_of(self, row: TableRow) -> list[_Kind]:
        """The kinds of steps of a request: those of its group, and those that write its prompt."""
        group, phase = self.group_of(row), row.phase
        found = [_Kind(group, phase, row.most_tokens, row.block)]
        if group and row.prefix:
            found.append(_Kind(0, replace(phase, cache=KEPT, cut=None), row.span, row.block))
        return found

    def add(self, request: TabledRequest) -> None:
        """Take a request that has begun."""
        self._kinds.update(self._kinds_of(request.row))
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
        self._kinds -= Counter(self._kinds_of(request.row))  # leaves out those of nobody

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
                self._in_flight.popleft()
                self._served = self._of_live(table.read())
        return self._served

    def taken(self) -> None:
        """Take note that the session has the outcome of the last step."""
        self._served = None

    def _of_live(self, served: Served) -> ServedSteps | None:
        """What a step did for live requests, if it served any."""
        numbers = served.report[:, Reported.ROW]
        self._deciding += int((np.diff(served.report[:, Reported.ROWS], prepend=0) > 0).sum())
        self._decided += int(served.committed.sum())
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
        columns = self._expected()
        asked = wanted(columns)
        groups = asked.group[asked.running]
        while len(self._turns) < len(self._groups):
            self._turns.append(0)
        group = min(groups.tolist() or [0], key=self._turns.__getitem__)
        asks = asked.running & (asked.group == group)
        length = asked.end - asked.begin
        decides, fills = asks & ~asked.fills, asks & asked.fills
        deciding, prompts = int(length[decides].sum()), int(length[fills].sum())
        kinds = [kind for kind in self._kinds if kind.group == group]
        needed, block, own_rows = _needed(kinds)
        rows = min(max(int(asked.rows[decides].sum()), own_rows), deciding or own_rows)
        least = max(needed, min(deciding, self._most_tokens))
        most = max(least, min(deciding + prompts, self._most_tokens))
        marked = bool(asked.marked[decides].any())
        phase = _phase(kinds, marked=marked)
        blocks, rows = self._room(phase, least, most, rows, kinds, several=deciding > 0 and prompts > 0)
        self._table.launch(phase, group, blocks, block, rows, marked=marked)
        self._launches += 1
        self._turns[group] = self._launches
        self._in_flight.append(_InFlight(group, marked, blocks * block, rows))

    def _expected(self) -> NDArray[np.int64]:
        """The table as it will be when what is in flight has ended: requests decide what they have to, or what is usual."""
        columns = self._table.columns
        for step in self._in_flight:
            columns = columns.copy()
            _go_on(columns, step, self._decided // max(self._deciding, 1))
        return columns

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

    def _room(
        self, phase: Phase, least: int, most: int, rows: int, kinds: Collection[_Kind], *, several: bool
    ) -> tuple[int, int]:
        """Blocks and rows to decide of the next step: as many as are asked for, fit, and delay nobody too long."""
        table, (needed, block, own_rows) = self._table, _needed(kinds)
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
        return blocks, decided(rows, blocks * block)


def _go_on(columns: NDArray[np.int64], step: _InFlight, usual: int) -> None:
    """Move a table on by a step, as far as the host can say: requests decide as many tokens as they have to, or as is usual."""
    asked, column = wanted(columns), columns.T
    asks = asked.running & (asked.group == step.group) & (~asked.marked | step.marked)
    order = np.argsort(column[Column.SERVED], kind="stable")
    length = asked.end - asked.begin
    decides = order[(asks & ~asked.fills)[order]]
    tokens = np.cumsum(length[decides])
    fit = (tokens <= step.tokens) & (np.cumsum(asked.rows[decides]) <= step.rows)
    served, used = decides[fit], int(tokens[fit][-1]) if fit.any() else 0
    fills = order[(asks & asked.fills)[order]]
    before = np.cumsum(length[fills]) - length[fills]
    given = np.clip(step.tokens - used - before, 0, length[fills])
    column[Column.WRITTEN, fills] += given // column[Column.SPAN, fills] * column[Column.SPAN, fills]
    least = quotas(columns[served])
    exactly = (column[Column.THRESHOLD, served] == _NEVER) | (column[Column.DECIDES, served] != OPEN_ONES)
    column[Column.SERVED, served] = column[Column.SERVED].max(initial=0) + 1
    column[Column.OPEN, served] -= np.minimum(np.where(exactly, least, np.maximum(least, usual)), asked.rows[served])
    column[Column.NUMBER, served] += ~closes(columns[served])
    column[Column.BEFORE, served] = 0
    done = served[column[Column.OPEN, served] <= 0]
    column[Column.START, done] += column[Column.BLOCK, done]
    column[Column.OPEN, done], span = column[Column.BLOCK, done], column[Column.SPAN, done]
    column[Column.BEFORE, done] = np.where(column[Column.START, done] % span, 0, span)
    column[Column.NUMBER, done[(column[Column.BEFORE, done] > 0) | (span == CANVAS_LONG)]] = 0
    column[Column.WIDE, served] = (column[Column.WINDOW, served] == WHOLE) | (column[Column.NUMBER, served] == 0)
    column[Column.STATE, done[column[Column.START, done] >= column[Column.END, done]]] = ENDED


def _needed(kinds: Collection[_Kind]) -> tuple[int, int, int]:
    """Tokens of the largest step that cannot be cut, the smallest block, and the rows that one request decides at most."""
    blocks = [kind.block for kind in kinds]
    return max([kind.tokens for kind in kinds]), min(blocks), max(blocks)


def _phase(kinds: Collection[_Kind], *, marked: bool) -> Phase:
    """The kind of step that serves all of a group."""
    phase = shared_phase([kind.phase for kind in kinds])
    return with_parts(phase, cache=phase.cache.covering) if marked else phase


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
