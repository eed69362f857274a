"""Rows of the state `kv`: which sequence has which. Rows are handed out from the front and never move."""

from __future__ import annotations

from contextlib import AbstractContextManager
from threading import RLock
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from mosaic.errors import UsageError

__all__ = ["KVMemory", "Sequence"]


class KVMemory:
    """Hands out rows of the state.

    The state ends with the last row in use: it grows at its end, and shrinks when the sequences there are closed.

    Parameters
    ----------
    turns
        Held while rows change hands: a re-entrant lock, of whoever runs steps beside that.

    Examples
    --------
    >>> memory = KVMemory()
    >>> first, second = memory.open(), memory.open()
    >>> first.reserve(3); second.reserve(2); first.reserve(4)
    >>> first.slots().tolist(), second.slots().tolist(), memory.rows
    ([0, 1, 2, 5], [3, 4], 6)
    >>> first.close(); memory.rows
    5
    """

    def __init__(self, turns: AbstractContextManager[object] | None = None) -> None:
        self.turns = turns if turns is not None else RLock()
        self._free: list[range] = []
        self.rows = 0
        """Rows that the state has to have."""

    def open(self) -> Sequence:
        """Start a sequence; it has no rows yet."""
        return Sequence(self)

    def take(self, count: int) -> list[range]:
        """Hand out so many rows, free ones first."""
        found: list[range] = []
        while count and self._free:
            first = self._free[0]
            mine = first[:count]
            found.append(mine)
            count -= len(mine)
            self._free[:1] = [first[len(mine) :]] if len(mine) < len(first) else []
        if count:
            found.append(range(self.rows, self.rows + count))
            self.rows += count
        return found

    def give(self, rows: list[range]) -> None:
        """Take rows back."""
        merged: list[range] = []
        for part in sorted([*self._free, *rows], key=lambda part: part.start):
            if merged and merged[-1].stop == part.start:
                merged[-1] = range(merged[-1].start, part.stop)
            else:
                merged.append(part)
        if merged and merged[-1].stop == self.rows:
            self.rows = merged.pop().start
        self._free = merged


class Sequence:
    """The keys and values of one sequence; see `KVMemory`."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory, self._rows = memory, list[range]()
        self._slots = torch.empty(0, dtype=torch.int64)

    @property
    def length(self) -> int:
        """Tokens that there are rows for."""
        return self._slots.numel()

    def reserve(self, tokens: int) -> None:
        """Have rows for so many tokens; what is there stays where it is."""
        with self._memory.turns:
            if tokens <= self.length:
                return
            more = self._memory.take(tokens - self.length)
            self._rows += more
            self._slots = torch.cat([self._slots, *(torch.arange(part.start, part.stop) for part in more)])

    def slots(self, start: int = 0, end: int | None = None) -> Tensor:
        """int64: the rows of the positions [start, end).

        Raises
        ------
        UsageError
            If there are fewer rows.
        """
        stop = self.length if end is None else end
        if not 0 <= start <= stop <= self.length:
            raise UsageError(
                f"positions {start} to {stop} of a sequence that has rows for {self.length}: reserve more."
            )
        return self._slots[start:stop]

    def close(self) -> None:
        """Give the rows back. Closing twice is fine."""
        with self._memory.turns:
            self._memory.give(self._rows)
            self._rows, self._slots = [], self._slots[:0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
