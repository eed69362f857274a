"""Rows of a state by owner, and their extents. Rows are handed out from the front and never move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from threading import RLock
from typing import Final, NamedTuple

import torch
from torch import Tensor

from mosaic.errors import UsageError
from mosaic.runtime.interrupts import interrupts_held
from mosaic.runtime.range_pool import ClosesOnExit
from mosaic.runtime.spans import Span, Spans, joined, total, without

NO_END: Final = 1 << 62
"""Behind all rows that there can be."""


class RowTable:
    """Hands out the rows of one state.

    The state ends with its last owned row: it grows at its end, and shrinks when the rows there are given back.
    Free rows in the middle are handed out first: the smallest hole that holds all rows, or else the largest holes. So owners have
    few extents.

    An extent may have several owners (`OwnedRows.share`): it is free when all have given it back. One that somebody has noted
    (`note`) is *idle* while it is free: whoever noted it may take it again as it is. Idle extents are handed out last, the least
    recently used first.

    Parameters
    ----------
    name
        The state's name; its pool is `state/NAME`.
    extents
        Whether neighbouring rows that are handed out at once go back at once, when their owner has dropped the last of
        them: for states whose rows are laid out so (`mosaic.models.state.State`).
    together
        Whether rows that are handed out at once lie side by side: holes that are too small are left.
    turns
        A re-entrant lock, held while rows change hands and while steps run.
    taken
        Called, in a turn, with the rows that are handed out.

    Examples
    --------
    >>> table = RowTable("kv")
    >>> first, second = table.open("a prompt"), table.open("another")
    >>> first.reserve(3); second.reserve(2); first.reserve(4)
    >>> first.runs(), second.runs(), table.rows
    ([(0, 3), (5, 1)], [(3, 2)], 6)
    >>> first.extents
    ((0, 3, 0, 0), (5, 1, 3, 0))
    >>> second.close()
    >>> table.free, [owned.owner for owned in table.owned]
    ([(3, 5)], ['a prompt'])
    """

    def __init__(
        self,
        name: str,
        *,
        extents: bool = False,
        together: bool = False,
        turns: AbstractContextManager[object] | None = None,
        taken: Callable[[Spans], None] | None = None,
    ) -> None:
        self.name, self.in_extents, self.together = name, extents, together
        self.turns = turns if turns is not None else RLock()
        self._taken = taken
        self._owned: list[OwnedRows] = []
        self._free: list[Span] = []
        self._open: list[Span] = [(0, NO_END)]  # rows that are free and not idle, those behind the last owned one too
        self._sharers = Counter[Span]()  # of extents that have several owners, how many more than one
        self._noted: dict[Span, Callable[[Span], object]] = {}
        self._idle: dict[Span, None] = {}  # least recently used first
        self._extents = 0
        self.positions = 0
        """Positions of all owners: more than there are rows where they share some."""
        self.most = 0
        """Rows up to which the state may grow so that idle extents stay."""
        self.rows = 0
        """Rows that the state needs."""
        self.changes = 0
        """How often rows changed hands."""

    def open(self, owner: Hashable = None) -> OwnedRows:
        """Open an owner without rows.

        Parameters
        ----------
        owner
            A label for reports: a sequence, a layer, a group of heads.
        """
        return OwnedRows(self, owner)

    @property
    def pool(self) -> str:
        """The pool that holds the state."""
        return f"state/{self.name}"

    @property
    def owned(self) -> tuple[OwnedRows, ...]:
        """All owners of rows, in the order of their first row."""
        return tuple(self._owned)

    @property
    def free(self) -> Spans:
        """Free rows `[start, end)` below `rows`."""
        return self._free

    def room(self, count: int, gone: Collection[OwnedRows] = ()) -> int:
        """Return the rows that the state has to have once `gone` have given back theirs, and `count` more are handed out, to any
        number of owners."""
        rows, free = self.rows, self._free
        if gone:
            taken = joined([span for owned in self._owned if owned not in gone for span in owned.spans()])
            rows = taken[-1][1] if taken else 0
            free = list(without([(0, rows)], taken))
        if not free:
            return rows + count
        if self.together:  # a hole that has room for all has room for the last, wherever the others go
            return rows + (0 if any(end - start >= count for start, end in free) else count)
        return rows + max(count - total(free), 0)

    def again(self, count: int, extents: Iterable[Span]) -> int:
        """Return as how many rows `count` more ones count in `room`, if the idle ones among these extents are taken again."""
        idle = [extent for extent in extents if extent in self._idle]
        end = max([end for _, end in idle], default=0)  # it may lie behind all rows that somebody owns
        return max(count + total(idle), end - self.rows + total(self._free)) if idle else count

    def most_extents(self, owners: int) -> int:
        """Return an upper bound of extents after `owners` more owners have reserved once each: each reservation fills
        or cuts a hole, or adds rows at the end."""
        return self._extents + len(self._free) + owners

    def count(self, extents: int, positions: int) -> None:
        """Count the extents and positions that an owner has more, or fewer."""
        self._extents += extents
        self.positions += positions

    # --- extents that are kept ----------------------------------------------------------------------------------------

    @property
    def idle(self) -> tuple[Span, ...]:
        """Noted extents that nobody owns, least recently used first."""
        return tuple(self._idle)

    @property
    def has_idle(self) -> bool:
        """Whether there are any."""
        return bool(self._idle)

    def is_idle(self, extent: Span) -> bool:
        """Whether it is noted, and nobody owns it."""
        return extent in self._idle

    def note(self, extent: Span, forget: Callable[[Span], object]) -> None:
        """Keep an extent that somebody owns when it is given back; `forget` is called when its rows are handed out, or lost."""
        self._noted[extent] = forget

    def unnote(self, extent: Span) -> None:
        """Keep it no longer."""
        if self._noted.pop(extent, None) is not None and extent in self._idle:
            del self._idle[extent]
            self._open = joined([*self._open, extent])

    def lose(self, lost: Callable[[Span], bool]) -> None:
        """Forget the idle extents that are `lost`."""
        for extent in [extent for extent in self._idle if lost(extent)]:
            self._forget(extent)

    def _forget(self, extent: Span) -> None:
        if extent in self._idle:  # unless it went with another one
            self._noted[extent](extent)
            self.unnote(extent)

    def share(self, extents: Iterable[Span], owned: OwnedRows) -> None:
        """Give extents one more owner; those that are idle are taken again."""
        self.changes += 1
        for extent in extents:
            if extent in self._idle:
                del self._idle[extent]
                self._occupy(*extent)
            else:
                self._sharers[extent] += 1
        if owned not in self._owned:
            self._owned.append(owned)

    # --- rows that change hands ---------------------------------------------------------------------------------------

    def take(self, owned: OwnedRows, count: int) -> list[Span]:
        """Hand out `count` rows, free ones first."""
        self.changes += 1
        found: list[Span] = []
        end = max(self.room(count), self.most if self._idle else 0)
        while count:
            start, stop = self._hole(count, end)
            stop = min(stop, start + count)
            self._open = without(self._open, [(start, stop)])
            self._occupy(start, stop)
            found.append((start, stop))
            count -= stop - start
        if owned not in self._owned:
            self._owned.append(owned)
        if self._taken is not None:
            self._taken(found)
        return found

    def _hole(self, count: int, end: int) -> Span:
        """The hole below `end` that rows come into: the smallest that holds them, or else the largest; that at the end comes last.
        Idle extents are forgotten until one holds them, or there are none."""
        while True:
            holes = [(start, min(stop, end)) for start, stop in self._open if start < end]
            whole = [hole for hole in holes if hole[1] - hole[0] >= count]
            if whole:
                return min(whole, key=lambda hole: (hole[0] >= self.rows, hole[1] - hole[0]))
            idle = next((extent for extent in self._idle if extent[0] < end), None)
            if idle is None:
                return max(holes, key=lambda hole: (hole[0] < self.rows, hole[1] - hole[0]))
            self._forget(idle)

    def _occupy(self, start: int, stop: int) -> None:
        """Let free rows be somebody's."""
        if stop > self.rows:
            self._free = joined([*self._free, (self.rows, stop)])
            self.rows = stop
        self._free = without(self._free, [(start, stop)])

    def give(self, owned: OwnedRows, rows: Iterable[Span]) -> None:
        """Take rows back; those of extents that have another owner stay that one's."""
        self.changes += 1
        for span in rows:
            if (others := self._sharers[span]) > 0:
                self._sharers[span] = others - 1
                continue
            del self._sharers[span]
            self._free = joined([*self._free, span])
            if span in self._noted:
                self._idle[span] = None
            else:
                self._open = joined([*self._open, span])
        if self._free and self._free[-1][1] == self.rows:
            self.rows = self._free.pop()[0]
        if not owned.length and owned in self._owned:
            self._owned.remove(owned)


class _Piece(NamedTuple):
    """Rows [first, last) of consecutive positions, and the rows of the reservation that they came from."""

    first: int
    last: int
    extent: Span


class OwnedRows(ClosesOnExit):
    """The rows that one owner has in a state, by position; see `RowTable`.

    Attributes
    ----------
    extents
        For a state with extents, by piece in order of position: its first row, its rows, its first position, and the
        rows of its extent that come before it.
    length
        Positions that have rows.
    """

    def __init__(self, table: RowTable, owner: Hashable) -> None:
        self._table, self.owner = table, owner
        self._pieces = list[_Piece]()
        self.piece = 0
        """Positions of which multiples end an extent that is reserved: rows are shared, and go back, few at a time. 0: none."""
        self.extents: tuple[tuple[int, int, int, int], ...] = ()
        self.length = 0

    def reserve(self, count: int) -> None:
        """Have rows for `count` positions; existing rows stay where they are."""
        with self._table.turns, interrupts_held():
            more, length = list[_Piece](), self.length
            while length < count:
                stop = min(count, (length // self.piece + 1) * self.piece) if self.piece else count
                more += [_Piece(*span, span) for span in self._table.take(self, stop - length)]
                length = stop
            if more:
                self._hold([*self._pieces, *more])

    def share(self, pieces: Sequence[tuple[int, int, Span]]) -> None:
        """Have rows of others' extents, or of idle ones, as those of the next positions: [first, last) of each extent."""
        with self._table.turns, interrupts_held():
            self._table.share(dict.fromkeys(extent for _, _, extent in pieces), self)
            self._hold([*self._pieces, *(_Piece(*piece) for piece in pieces)])

    def is_of(self, table: RowTable) -> bool:
        """Whether these are rows of this table."""
        return table is self._table

    def drop(self, start: int, end: int | None = None) -> None:
        """Give the rows of the positions `[start, end)` back. Later positions move up to `start`; no row moves.

        In a state with extents, the rows of an extent are given back when all of them are dropped.

        Raises
        ------
        UsageError
            If there are fewer rows.
        """
        with self._table.turns, interrupts_held():
            stop = self._stop(start, end)
            gone = self._between(start, stop)
            self._hold([*self._between(0, start), *self._between(stop, self.length)])
            held = {piece.extent for piece in self._pieces}
            whole = [extent for extent in dict.fromkeys(piece.extent for piece in reversed(gone)) if extent not in held]
            self._table.give(self, whole if self._table.in_extents else [piece[:2] for piece in gone])

    def slots(self, start: int = 0, end: int | None = None) -> Tensor:
        """Return the rows of the positions `[start, end)`, int64.

        Raises
        ------
        UsageError
            If there are fewer rows.
        """
        found = [torch.arange(first, first + count) for first, count in self.runs(start, end)]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)

    def runs(self, start: int = 0, end: int | None = None) -> list[tuple[int, int]]:
        """Return the same rows as runs of consecutive ones, in order of position: (first row, count).

        Raises
        ------
        UsageError
            If there are fewer rows.
        """
        return [(piece.first, piece.last - piece.first) for piece in self._between(start, self._stop(start, end))]

    def spans(self) -> list[Span]:
        """Return the rows that are not others' before they are given back."""
        return [piece.extent if self._table.in_extents else piece[:2] for piece in self._pieces]

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

    def _between(self, start: int, end: int) -> list[_Piece]:
        """The pieces of the positions `[start, end)`."""
        found, position = [], 0
        for first, last, extent in self._pieces:
            low, high = max(first, first + start - position), min(last, first + end - position)
            if low < high:
                found.append(_Piece(low, high, extent))
            position += last - first
        return found

    def _hold(self, pieces: Iterable[_Piece]) -> None:
        """Take over these rows, in order of position; neighbouring pieces are joined if they are of one extent."""
        held: list[_Piece] = []
        for piece in pieces:
            before = held[-1] if held else None
            if before is None or before.last != piece.first:
                held.append(piece)
            elif before.extent == piece.extent:
                held[-1] = before._replace(last=piece.last)
            elif self._table.in_extents:
                held.append(piece)
            else:
                held[-1] = _Piece(before.first, piece.last, (before.extent[0], piece.extent[1]))
        before_length, found = self.length, []
        self._pieces, self.length = held, 0
        for first, last, (start, end) in held:
            found.append((start, end - start, self.length, first - start))
            self.length += last - first
        self._table.count(len(found) - len(self.extents), self.length - before_length)
        self.extents = tuple(found)
