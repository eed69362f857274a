"""Rows of a state: which owner has which. Rows are handed out from the front and never move."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from threading import RLock

import torch
from torch import Tensor

from mosaic.errors import UsageError
from mosaic.runtime.range_pool import ClosesOnExit
from mosaic.runtime.spans import Span, Spans, joined

__all__ = ["OwnedRows", "RowTable"]


class RowTable:
    """Hands out the rows of one state.

    The state ends with the last row that is owned: it grows at its end, and shrinks when owners give the rows there back.
    Rows that come free in the middle are the first to be handed out again.

    Parameters
    ----------
    name
        The state's; its pool is `state/NAME`.
    turns
        Held while rows change hands: a re-entrant lock, the same that steps hold while they run.
    drained
        Called, in a turn, when the last row was given back.
    taken
        Called, in a turn, with the rows that are handed out.

    Examples
    --------
    >>> table = RowTable("kv")
    >>> first, second = table.open("a prompt"), table.open("another")
    >>> first.reserve(3); second.reserve(2); first.reserve(4)
    >>> first.runs(), second.runs(), table.rows
    ([(0, 3), (5, 1)], [(3, 2)], 6)
    >>> second.close()
    >>> table.free, [owned.owner for owned in table.owned]
    ([(3, 5)], ['a prompt'])
    """

    def __init__(
        self,
        name: str,
        turns: AbstractContextManager[object] | None = None,
        drained: Callable[[], None] | None = None,
        taken: Callable[[Spans], None] | None = None,
    ) -> None:
        self.name = name
        self.turns = turns if turns is not None else RLock()
        self._drained, self._taken = drained, taken
        self._owned: list[OwnedRows] = []
        self._free: list[Span] = []
        self.rows = 0
        """Rows that the state has to have."""
        self.changes = 0
        """How often rows changed hands."""

    def open(self, owner: Hashable = None) -> OwnedRows:
        """Start an owner's rows, of which there are none yet.

        Parameters
        ----------
        owner
            Whose they are, for reports: a sequence, a layer, a group of heads.
        """
        return OwnedRows(self, owner)

    @property
    def pool(self) -> str:
        """The pool that holds the state."""
        return f"state/{self.name}"

    @property
    def owned(self) -> tuple[OwnedRows, ...]:
        """All that own rows, in the order of their first."""
        return tuple(self._owned)

    @property
    def free(self) -> Spans:
        """Rows `[start, end)` below `rows` that nobody owns."""
        return self._free

    def take(self, owned: OwnedRows, count: int) -> list[Span]:
        """Hand out `count` rows, free ones first."""
        self.changes += 1
        found: list[Span] = []
        while count and self._free:
            start, end = self._free.pop(0)
            mine = start, min(end, start + count)
            if mine[1] < end:
                self._free.insert(0, (mine[1], end))
            found.append(mine)
            count -= mine[1] - mine[0]
        if count:
            found.append((self.rows, self.rows + count))
            self.rows += count
        if owned not in self._owned:
            self._owned.append(owned)
        if self._taken is not None:
            self._taken(found)
        return found

    def give(self, owned: OwnedRows, rows: Iterable[Span]) -> None:
        """Take rows back."""
        self.changes += 1
        self._free = joined([*self._free, *rows])
        if self._free and self._free[-1][1] == self.rows:
            self.rows = self._free.pop()[0]
        if not owned.length and owned in self._owned:
            self._owned.remove(owned)
            if not self._owned and self._drained is not None:
                self._drained()


class OwnedRows(ClosesOnExit):
    """The rows that one owner has in a state, by position; see `RowTable`."""

    def __init__(self, table: RowTable, owner: Hashable) -> None:
        self._table, self.owner = table, owner
        self._spans = list[Span]()
        self._length = 0

    @property
    def length(self) -> int:
        """Positions that there are rows for."""
        return self._length

    def reserve(self, count: int) -> None:
        """Have rows for `count` positions; those that are there stay where they are."""
        with self._table.turns:
            if count > self.length:
                self._hold([*self._spans, *self._table.take(self, count - self.length)])

    def drop(self, start: int, end: int | None = None) -> None:
        """Give the rows of the positions `[start, end)` back. Later positions count from `start` on; no row moves.

        Raises
        ------
        UsageError
            If there are fewer rows.
        """
        with self._table.turns:
            stop = self._stop(start, end)
            gone = self._between(start, stop)
            self._hold([*self._between(0, start), *self._between(stop, self.length)])
            self._table.give(self, gone)

    def slots(self, start: int = 0, end: int | None = None) -> Tensor:
        """Return the rows of the positions `[start, end)`, int64.

        Raises
        ------
        UsageError
            If there are fewer rows.
        """
        found = [torch.arange(run.start, run.stop) for run in self.ranges(start, end)]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)

    def ranges(self, start: int = 0, end: int | None = None) -> tuple[range, ...]:
        """Return the same rows as ranges of consecutive ones, in order of position.

        Raises
        ------
        UsageError
            If there are fewer rows.
        """
        return tuple(range(first, last) for first, last in self._between(start, self._stop(start, end)))

    def runs(self, start: int = 0, end: int | None = None) -> list[tuple[int, int]]:
        """Return the same rows as runs of consecutive ones, in order of position: (first row, count).

        Raises
        ------
        UsageError
            If there are fewer rows.
        """
        return [(first, last - first) for first, last in self._between(start, self._stop(start, end))]

    def close(self) -> None:
        """Give all rows back. Closing twice is fine."""
        self.drop(0)

    def _stop(self, start: int, end: int | None) -> int:
        stop = self.length if end is None else end
        if not 0 <= start <= stop <= self.length:
            raise UsageError(
                f"positions {start} to {stop} of a sequence that has rows for {self.length}: reserve more."
            )
        return stop

    def _between(self, start: int, end: int) -> list[Span]:
        """The spans of the positions `[start, end)`."""
        found, position = [], 0
        for first, last in self._spans:
            mine = max(first, first + start - position), min(last, first + end - position)
            if mine[0] < mine[1]:
                found.append(mine)
            position += last - first
        return found

    def _hold(self, spans: Iterable[Span]) -> None:
        """Have these rows, in order of position."""
        self._spans = []
        for first, last in spans:
            if self._spans and self._spans[-1][1] == first:
                self._spans[-1] = self._spans[-1][0], last
            else:
                self._spans.append((first, last))
        self._length = sum(last - first for first, last in self._spans)
