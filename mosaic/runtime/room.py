"""What the steps of a table have room for, in few numbers: each is a plan."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from mosaic.models.parts import HELD_EXTENTS, KEPT
from mosaic.models.policies.packed_keys import Packed
from mosaic.models.state import State
from mosaic.models.step import MOST_DOUBLED, StepSize

if TYPE_CHECKING:
    from mosaic.models.phase import Phase

__all__ = ["SEEN", "Room", "Shape"]

SEEN: Final = State(name="seen")
"""Not a state: in counts of rows, the keys that all requests see together, where they are more than there are rows."""
DECIDED: Final = (1, 2, 4, 8)
"""Eighths of a step's tokens that it has rows to decide for: unembedding takes a tenth of a step, and each is a plan more."""
CUT_DECIDED: Final = DECIDED[2:]
"""The same of a cut step, which unembeds no more rows than its second graph keeps: each is as many plans more as that has sizes."""


class Room(NamedTuple):
    """What a step has room for: windows, blocks of so many tokens, and rows to decide."""

    phase: Phase
    windows: int
    blocks: int
    block: int
    rows: int

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, phase: Phase, requests: int, blocks: int, block: int, rows: int) -> Room:
        """Return room for one request or as many as there are blocks, and at least so many rows, in one of few numbers."""
        return cls(
            phase, 1 if requests == 1 else blocks, blocks, block, decided(rows, blocks * block, phase.cut is not None)
        )

    @classmethod
    def ladder(cls, phase: Phase, requests: int, blocks: int, block: int, own_rows: int) -> list[Room]:
        """Return all rooms of so many blocks for up to so many requests, each of which decides up to `own_rows` rows; the most rows
        first."""
        found, cut = dict[Room, None](), phase.cut is not None
        for count in sorted({1, min(blocks, requests)}):
            least, most = (decided(rows, blocks * block, cut) for rows in (own_rows, own_rows * count))
            for rows in decisions(blocks * block, cut):
                if least <= rows <= most:
                    found[cls.of(phase, count, blocks, block, rows)] = None
        return list(found)[::-1]

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return self.blocks * self.block

    def size(self, states: Iterable[tuple[State, int]], longest: int) -> StepSize:
        """Return the size of a step with this room beside rows of states. No window sees more keys than the `longest` request has,
        unless the step may rank those of all; 0: nobody knows."""
        taken, (phase, windows, blocks, block, decided) = dict(states), self
        kept = phase.cache.kept
        if kept is None:  # attention to one whole sequence has no room for others' tokens behind it
            others = max(windows, 2) - 1
            each = self.tokens // (others + 1)
            lengths = [self.tokens - each * others, *[each] * others]
            taken.pop(SEEN, None)
            return StepSize(phase=phase, windows=tuple(lengths), rows=decided, states=taken, exact=True)
        lengths = [block * (blocks // windows + int(number < blocks % windows)) for number in range(windows)]
        rows, seen = taken.get(kept, 0), taken.pop(SEEN, 0)
        alone = phase.cache == KEPT or isinstance(phase.cache, Packed)
        most = longest if longest and alone else rows
        owned = max(min(-(-max(rows, seen) // windows), most, rows), lengths[0])
        return StepSize(
            phase=phase, windows=tuple(lengths), keys=(owned,) * windows, rows=decided, extents=max(taken.get(HELD_EXTENTS, 0), 1),
            states={**taken, kept: max(rows, owned)}, exact=True,
        )  # fmt: skip

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, {self.rows:,} rows to decide"


def decided(rows: int, tokens: int, cut: bool = False) -> int:
    """Return the rows to decide that a step of some tokens has room for, of at least `rows`: one of few numbers.

    >>> decided(4, 64), decided(300, 1024), decided(700, 1024), decided(0, 8192), decided(0, 8192, cut=True)
    (64, 512, 1024, 1024, 4096)
    """
    return (found := decisions(tokens, cut))[bisect_left(found, min(rows, tokens))]


def decisions(tokens: int, cut: bool = False) -> list[int]:
    """Return all that `decided` returns for steps of so many tokens, ascending."""
    if tokens <= MOST_DOUBLED:  # unembedding them all takes as long as unembedding one
        return [tokens]
    return [-(-tokens * share // DECIDED[-1]) for share in (CUT_DECIDED if cut else DECIDED)]


class Shape(NamedTuple):
    """A step as it is launched: its room, the groups that it serves, by bits, and whether it is marked."""

    room: Room
    groups: int
    marked: bool
