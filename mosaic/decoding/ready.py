"""Steps that are ready to launch, where one is asked for that is not: making it stops the requests of all."""

from __future__ import annotations

import math
from collections import defaultdict
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from mosaic.models.phase import shared_phase
from mosaic.runtime.engine import MAKING_MS
from mosaic.runtime.recent import Recent
from mosaic.runtime.request_table import KEPT_STEPS
from mosaic.runtime.room import Shape

if TYPE_CHECKING:
    from collections.abc import Hashable

    from mosaic.models.state import State
    from mosaic.runtime.request_table import RequestTable

__all__ = ["Substitutes"]

LARGER: Final = 2
"""How many times as many blocks a step may have as the one that it stands in for."""


class Substitutes:
    """Which steps stand in for others: each until that may have cost as much as making the other one would.

    So nobody pays more than twice of what would have been best, whatever comes.

    Parameters
    ----------
    table
        Whose steps they are.
    most_tokens
        Of a step that stands in for one that has no more.

    Attributes
    ----------
    warm_for
        The rows of states for which all steps were made ready; None: for none.
    """

    def __init__(self, table: RequestTable, most_tokens: int) -> None:
        self._table, self._most_tokens = table, most_tokens
        self.warm_for: frozenset[tuple[State, int]] | None = None
        self._lost: defaultdict[Shape, float] = defaultdict(float)
        self._found: Recent[Hashable, Shape] = Recent(KEPT_STEPS)

    @property
    def patience_ms(self) -> float:
        """What a step may cost before one is made in its place. While all were made ready it is endless, and a step that is much
        larger stands in as well."""
        return math.inf if self._table.planned == self.warm_for else MAKING_MS

    def of(self, asked: Shape, fewest: int, longest: float = math.inf) -> Shape:
        """Return the step to launch for one that is asked for.

        Parameters
        ----------
        fewest
            The blocks that it must have room for.
        longest
            The blocks that it may have at most.
        """
        found = self._best(asked, fewest, longest)
        if found == asked:
            return asked
        self._lost[asked] += self._loss_ms(found, asked)
        return asked if self._lost[asked] > self.patience_ms else found

    def predicted_ms(self, asked: Shape, fewest: int) -> float:
        """Return how long the step takes, as predicted, that would be launched."""
        return self._table.predicted_ms(self._best(asked, fewest, math.inf).room)

    def _best(self, asked: Shape, fewest: int, longest: float) -> Shape:
        """The step itself if it is ready, or nothing else serves; or the ready one that costs least."""
        table = self._table
        if table.is_ready(asked):
            return asked
        key = asked, fewest, longest, table.planned, len(table.ready)
        found = self._found.find(key, lambda: self._cheapest(asked, fewest, longest))
        return found if table.is_ready(found) else asked

    def _cheapest(self, asked: Shape, fewest: int, longest: float) -> Shape:
        near, limits = min(longest, LARGER * asked.room.blocks), (math.inf,) if math.isinf(self.patience_ms) else ()
        for most in (near, *limits):
            able = [
                (self._table.predicted_ms(found.room) * max(asked.room.blocks / found.room.blocks, 1.0), found)
                for found in self._table.ready
                if fewest <= found.room.blocks <= most
                and found.room.tokens <= max(asked.room.tokens, self._most_tokens)
                and _serves(found, asked)
            ]
            if able:
                return min(able, key=itemgetter(0))[1]
        return asked

    def _loss_ms(self, found: Shape, asked: Shape) -> float:
        """How much longer it takes at most; a step of the same kind takes at least its share of blocks or of rows to decide."""
        found_ms, blocks = self._table.predicted_ms(found.room), asked.room.blocks / found.room.blocks
        if found.room.phase == asked.room.phase:
            return found_ms * (max(blocks, 1.0) - min(blocks, asked.room.rows / found.room.rows, 1.0))
        return found_ms * max(blocks, 1.0) - self._table.predicted_ms(asked.room)


def _serves(found: Shape, asked: Shape) -> bool:
    """Whether a step does what another one would, for as many blocks as it has."""
    able, room = found.room, asked.room
    return (
        found.groups & asked.groups == asked.groups
        and found.marked >= asked.marked
        and (able.phase.cut is None) == (room.phase.cut is None)
        and shared_phase([able.phase, room.phase]) == able.phase
        and (able.windows > 1 or room.windows == 1)
        and able.block == room.block
        and able.rows >= min(room.rows, able.tokens)
    )
