"""Prefixes that requests of a session share: which rows have the keys of which tokens, found by the tokens themselves.

Where attention is causal by blocks, the keys of a block depend on the tokens up to its end alone. So the keys of whole blocks whose
tokens are final serve every request that begins with the same tokens. They are shared by *units*: a few whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mosaic.runtime.spans import Span
    from mosaic.runtime.state_rows import OwnedRows, RowTable

__all__ = ["Found", "Prefix", "Prefixes", "piece_of", "unit_of"]

UNIT: Final = 64
"""Fewest tokens of a unit: a tile of keys, and a look-up for each run of them."""
PIECE: Final = 1024
"""Most tokens of an extent, where a unit has no more: what others share of it, and what goes when rows are needed, is little more
than what is used. Segments of `kv_attention` have as many keys at least."""
WIDTH: Final = 8
"""Bytes of a token, as runs are compared by bytes: a tenth of the time."""


def unit_of(block: int) -> int:
    """Return the tokens of a unit of blocks of so many tokens.

    >>> unit_of(4), unit_of(24), unit_of(128)
    (64, 72, 128)
    """
    return -(-UNIT // block) * block


def piece_of(block: int) -> int:
    """Return the positions of which multiples end an extent: whole units.

    >>> piece_of(4), piece_of(24), piece_of(2048)
    (1024, 1008, 2048)
    """
    return max(PIECE // unit_of(block), 1) * unit_of(block)


class _Run:
    """Units of one extent that follow each other: a node of the tree.

    Parameters
    ----------
    parent, key
        The run before, and its key there: after how many units it begins, and the bytes of its first unit.
    extent, row
        Where its keys lie: an extent, and the row of its first token.
    tokens
        Bytes of whole units, 8 a token.
    ready
        Units whose keys are written.
    writer
        Who writes the others; None: nobody, until somebody who has the extent goes on.
    """

    __slots__ = ("children", "extent", "key", "parent", "ready", "row", "start", "tokens", "writer")

    def __init__(
        self, parent: _Run | None, key: tuple[int, bytes], extent: Span, row: int, start: int, tokens: bytes, ready: int,
        writer: Prefix | None,
    ) -> None:  # fmt: skip
        self.parent, self.key, self.extent, self.row, self.start = parent, key, extent, row, start
        self.tokens, self.ready, self.writer = tokens, ready, writer
        self.children: dict[tuple[int, bytes], _Run] = {}


Found: TypeAlias = list[tuple[_Run, int]]
"""The runs that some tokens begin with, and how many units of each."""


class Prefixes:
    """The units that are kept, as a tree whose every path is what a request may begin with.

    No two paths have the same tokens, so the longest match is the only one. A unit is kept while its extent is owned, or idle
    (`RowTable.note`); with it go all that come after it.

    Parameters
    ----------
    table
        Of the state of keys.
    block
        Tokens of a block in which the model attends.
    """

    def __init__(self, table: RowTable, block: int) -> None:
        self.table, self.unit, self.piece = table, unit_of(block), piece_of(block)
        self._root = _Run(None, (0, b""), (0, 0), 0, 0, b"", 0, None)
        self._runs: dict[Span, list[_Run]] = {}

    def open(self, tokens: NDArray[np.int64], most: int, priority: int = 0) -> Prefix:
        """Take the longest kept prefix of a request's tokens, at most `most` of them, as its first rows.

        Units that another request writes count if it has no lower priority: this one waits for it.
        """
        return Prefix(self, tokens, most, priority)

    def units(self, tokens: NDArray[np.int64]) -> int:
        """Return how many first tokens are kept with their keys, whole units."""
        return _ready(self.match(tokens, len(tokens), None)) * self.unit

    def match(self, tokens: NDArray[np.int64], most: int, priority: int | None) -> Found:
        """Return what tokens begin with, at most `most` of them; with a priority only what a request of it may take."""
        unit, run, count, at, found = self.unit * WIDTH, self._root, 0, 0, Found()
        if (0, tokens[: self.unit].tobytes()) not in run.children:
            return found
        given, end = tokens.tobytes(), most * WIDTH
        while at + unit <= end and (child := run.children.get((count, given[at : at + unit]))) is not None:
            alike = min(len(child.tokens), end - at) // unit
            known = child.tokens[: alike * unit]
            if not given.startswith(known, at):
                alike = next(
                    n for n in range(alike) if not given.startswith(known[n * unit : (n + 1) * unit], at + n * unit)
                )
            run, count = child, alike
            if priority is not None and count > run.ready and not self._may_wait(run, priority):
                count = run.ready
            if count:
                found.append((run, count))
            if count < alike:
                break
            at += count * unit
        return found

    def fresh(self, positions: int, found: Sequence[Found]) -> int:
        """Return the rows that are handed out if requests of so many positions take what was found for them."""
        taken = [run for runs in found for run in runs]
        left = positions - sum([count for _, count in taken]) * self.unit
        return self.table.again(left, {run.extent for run, _ in taken}) if self.table.has_idle else left

    def _may_wait(self, run: _Run, priority: int) -> bool:
        return not self.table.is_idle(run.extent) and (run.writer is None or run.writer.priority >= priority)

    def units_of(self, run: _Run) -> int:
        """Return how many units a run has."""
        return len(run.tokens) // (self.unit * WIDTH)

    def add(self, rows: OwnedRows, tokens: NDArray[np.int64], end: int, writer: Prefix | None) -> list[_Run]:
        """Keep the whole units of tokens before `end` that are not kept yet, in runs of the owner's extents; return these. They are
        ready, or will be written by `writer`. A unit that lies in two extents ends it."""
        unit, found, added = self.unit, self.match(tokens, end, None), list[_Run]()
        position = sum(count for _, count in found) * unit
        parent, count = found[-1] if found else (self._root, 0)
        ends = [first for _, _, first, _ in rows.extents[1:]] + [rows.length]
        for (row, size, first, before), stop in zip(rows.extents, ends, strict=True):
            units = (min(stop, end) - position) // unit
            if units > 0:
                mine = tokens[position : position + units * unit].tobytes()
                run = _Run(
                    parent, (count, mine[: unit * WIDTH]), (row, row + size), row + before + position - first, position, mine,
                    0 if writer else units, writer,
                )  # fmt: skip
                parent.children[run.key] = run
                self._runs.setdefault(run.extent, []).append(run)
                self.table.note(run.extent, self._forget)
                position += units * unit
                parent, count = run, units
                added.append(run)
            if first <= position < stop < end:
                break
        return added

    def trim(self, run: _Run) -> None:
        """Forget the units of a run that nobody is to write."""
        kept = run in self._runs.get(run.extent, ()) and run.writer is None
        if not kept or run.ready >= self.units_of(run) or not self.table.is_idle(run.extent):
            return
        if not run.ready:
            self._remove(run)
            return
        for child in [child for (at, _), child in run.children.items() if at > run.ready]:
            self._remove(child)
        run.tokens = run.tokens[: run.ready * self.unit * WIDTH]

    def _forget(self, extent: Span) -> None:
        """Forget what lies in an extent that others get."""
        while runs := self._runs.get(extent):
            self._remove(runs[-1])

    def _remove(self, run: _Run) -> None:
        """Forget a run, and all that come after it."""
        if run.parent is not None:
            run.parent.children.pop(run.key, None)
        left = [run]
        while left:
            gone = left.pop()
            left += gone.children.values()
            gone.children.clear()
            runs = self._runs[gone.extent]
            runs.remove(gone)
            if not runs:
                del self._runs[gone.extent]
                self.table.unnote(gone.extent)

    def close(self) -> None:
        """Forget everything."""
        for child in [*self._root.children.values()]:
            self._remove(child)


class Prefix:
    """What one request shares with others: the first of its rows of keys, and the units of its own that others may take.

    Attributes
    ----------
    rows
        Its rows of keys: those that it shares, until the others are reserved.
    length
        Tokens of the rows that it shares, whole units.
    extents
        Runs that it shared at first.
    """

    def __init__(self, prefixes: Prefixes, tokens: NDArray[np.int64], most: int, priority: int) -> None:
        self._prefixes, self._tokens, self._most, self.priority = prefixes, tokens, most, priority
        self._taken = Found()
        self._own = Found()  # which it writes, and how many units of each
        self.length = 0
        self.rows = self._open()
        self._take(prefixes.match(tokens, most, priority))
        self.extents = len(self._taken)

    def _open(self) -> OwnedRows:
        rows = self._prefixes.table.open("a request")
        rows.piece = self._prefixes.piece
        return rows

    def _take(self, found: Found) -> None:
        """Share these, if they are more."""
        unit = self._prefixes.unit
        if (length := sum(count for _, count in found) * unit) > self.length:
            longer = self._open() if self.length else self.rows
            longer.share([(run.row, run.row + count * unit, run.extent) for run, count in found])
            if longer is not self.rows:
                self.rows.close()
            self.rows, self.length, self._taken = longer, length, found

    def drop(self) -> None:
        """Share nothing."""
        if self.length:
            self.rows.close()
            self.length, self._taken = 0, []

    def extend(self) -> None:
        """Share more, if others own more by now; the other rows are not reserved yet."""
        found = self._prefixes.match(self._tokens, self._most, self.priority)
        idle = [self._prefixes.table.is_idle(run.extent) for run, _ in found]
        self._take(found[: (*idle, True).index(True)])

    @property
    def ready(self) -> int:
        """Tokens of the shared rows whose keys are written, from the first on."""
        return _ready(self._taken) * self._prefixes.unit

    @property
    def waits(self) -> bool:
        """Whether another request is to write some of them."""
        return any(run.ready < count and run.writer not in (None, self) for run, count in self._taken)

    def promise(self) -> None:
        """Let others share what this request writes of its prompt; all rows are reserved."""
        added = self._prefixes.add(self.rows, self._tokens, self._most, self)
        self._own = [(run, self._prefixes.units_of(run)) for run in added]

    def lead(self) -> int:
        """Go on with what others have left unwritten; return how many tokens need not be."""
        for run, count in self._taken:
            if run.ready < count and run.writer is None:
                run.writer = self
                self._own.append((run, count))
        return self.ready

    def wrote(self, end: int) -> None:
        """Take note that the keys of the tokens before `end` are written."""
        for run, count in self._own:
            run.ready = max(run.ready, min((end - run.start) // self._prefixes.unit, count))
            if run.ready >= count:
                run.writer = None  # others may need more of it

    def keep(self, tokens: NDArray[np.int64], end: int) -> None:
        """Keep what the request has written, up to `end` of its final tokens: it gives its rows back."""
        self.wrote(min(end, self._most))
        self._prefixes.add(self.rows, tokens, end, None)

    def close(self) -> None:
        """Give back the shared rows, if the others were not reserved, and leave to others what is not written."""
        self.rows.close()
        for run, _ in (*self._own, *self._taken):
            run.writer = None if run.writer is self else run.writer
            self._prefixes.trim(run)
        self._own.clear()
        self._taken.clear()


def _ready(runs: Found) -> int:
    """How many units, from the first on, have their keys."""
    found = 0
    for run, count in runs:
        found += min(run.ready, count)
        if run.ready < count:
            break
    return found
