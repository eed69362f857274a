"""Steps that are ready to launch, where one is asked for that is not: making it stops the requests of all."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from mosaic.models.phase import shared_phase
from mosaic.runtime.engine import MAKING_MS, SLOWER
from mosaic.runtime.recent import Recent
from mosaic.runtime.request_table import KEPT_STEPS, Shape

if TYPE_CHECKING:
    from collections.abc import Hashable

    from mosaic.runtime.request_table import RequestTable

__all__ = ["Substitutes"]


class Substitutes:
    """Which steps stand in for others: each until that has cost as much as making the other one would.

    So nobody pays more than twice of what would have been best, whatever comes.

    Parameters
    ----------
    table
        Whose steps they are.
    most_tokens
        Of a step that stands in for one that has no more.
    """

    def __init__(self, table: RequestTable, most_tokens: int) -> None:
        self._table, self._most_tokens = table, most_tokens
        self._lost: defaultdict[Shape, float] = defaultdict(float)
        self._found: Recent[Hashable, Shape] = Recent(KEPT_STEPS)

    def of(self, asked: Shape, fewest: int, limit_ms: float = math.inf) -> Shape:
        """Return the step to launch for one that is asked for.

        Parameters
        ----------
        fewest
            The blocks that it must have room for.
        limit_ms
            How long it may take, as predicted.
        """
        table = self._table
        if table.is_ready(asked):
            return asked
        key = asked, fewest, limit_ms, table.planned, len(table.ready)
        found = self._found.find(key, lambda: self._best(asked, fewest, limit_ms))
        if found == asked or not table.is_ready(found):
            return asked
        self._lost[asked] += self._cost_ms(found, asked) - table.predicted_ms(asked.room)
        return asked if self._lost[asked] > MAKING_MS else found

    def _best(self, asked: Shape, fewest: int, limit_ms: float) -> Shape:
        """The ready step that costs least, if that is not much more than what is asked for."""
        most_ms = SLOWER * self._table.predicted_ms(asked.room)
        able = [
            (cost, found)
            for found in self._table.ready
            if _serves(found, asked, fewest)
            and found.room.tokens <= max(asked.room.tokens, self._most_tokens)
            and self._table.predicted_ms(found.room) <= limit_ms
            and (cost := self._cost_ms(found, asked)) <= most_ms
        ]
        return min(able, key=lambda one: one[0], default=(0.0, asked))[1]

    def _cost_ms(self, found: Shape, asked: Shape) -> float:
        """The time in which it does what the other one would."""
        return self._table.predicted_ms(found.room) * max(asked.room.blocks / found.room.blocks, 1.0)


def _serves(found: Shape, asked: Shape, fewest: int) -> bool:
    """Whether a step does what another one would, for so many blocks at least."""
    able, room = found.room, asked.room
    return (
        found.groups & asked.groups == asked.groups
        and found.marked >= asked.marked
        and (able.phase.cut is None) == (room.phase.cut is None)
        and shared_phase([able.phase, room.phase]) == able.phase
        and (able.windows > 1 or room.windows == 1)
        and able.block == room.block
        and fewest <= able.blocks <= 2 * room.blocks
        and able.rows >= min(room.rows, able.tokens)
    )
