"""Exact search: branch and bound over active placements, in turns of growing length, compiled where numba is there.

Each turn searches from the start by another rule and order, and all remember what any of them refuted. How long a
search takes depends on luck with its first choices: of seven public instances each falls to some order in
milliseconds, and none of the orders solves them all in seconds.
"""

from __future__ import annotations

import random
from typing import Any, Final

import numpy as np

from . import branching, compiled, memory
from .blocks import Blocks
from .layout import Layout, layout_of
from .memory import FAILED, FULL, RUNNING, SOLVED, memory_of

__all__ = ["FAILED", "LANES", "RUNNING", "SOLVED", "Layout", "Search", "layout_of", "luby"]

_TURNS: Final = (1000, 8000)
"""Placements of the shortest turn, for even and odd lanes. Short ones suit instances with a little to spare; of 38
perfect cuts into 400, turns of 10,000 solved 33 where turns of 1,000 solved 28."""

_PLANS: Final = tuple(
    (rule, keys)
    for keys in ("TWA", "TAW", "ATW")
    for rule in (branching.BY_CHOICES, branching.BY_FLOOR, branching.BY_OFFSET)
)
"""Rules and preorders, taken in turns."""

LANES: Final = 2
"""Lanes share out the plans of a round; two threads run them side by side."""

_NOISE: Final = 0.3
"""From the second round on, keys and weights are scaled by a factor drawn from 1 - noise to 1 + noise."""

_WEIGHT: Final = 1000


class Search:
    """A search for a placement within a capacity, which goes on wherever it stopped.

    The same layout, capacity and lane take the same steps, compiled or not.

    Parameters
    ----------
    capacity : int
        Bytes: the largest peak asked for.
    fast : bool
        Compile with numba; otherwise plain Python lists, about 100 times slower but with nothing to load.
    lane : int
        Searches of other lanes begin with other rules and draw other orders.
    turn : int, optional
        Placements of the shortest turn; by default `_TURNS` of the lane.

    Examples
    --------
    >>> from mosaic.planner.offsets import Problem, blocks_of
    >>> blocks = blocks_of(Problem(sizes=[4, 4, 8], starts=[0, 1, 2], ends=[2, 3, 4]))
    >>> Search(layout_of(blocks), 12, fast=False).advance(100) == SOLVED
    True
    """

    def __init__(self, layout: Layout, capacity: int, *, fast: bool, lane: int = 0, turn: int | None = None) -> None:
        self.layout, self.capacity, self.fast = layout, capacity, fast
        self.status: int = RUNNING
        self._draws = random.Random(lane)
        self._lane, self._turns, self._turn_ends = lane, 0, 0
        self._turn = turn if turn is not None else _TURNS[lane % 2]
        records = layout.array if fast else layout.records
        self._memory = memory_of(records, layout.parts, capacity, fast)

    @property
    def nodes(self) -> int:
        """Placements tried so far."""
        return int(self._memory[memory.NODES])

    def advance(self, nodes: int) -> int:
        """Try that many more placements at most; return RUNNING, SOLVED or FAILED (proven: nothing fits)."""
        limit = self.nodes + nodes
        run: Any = compiled.compiled(branching.advance) if self.fast else branching.advance
        while self.status == RUNNING and self.nodes < limit:
            if self.nodes >= self._turn_ends:
                self._next_turn()
            status = int(run(min(limit, self._turn_ends), self._memory))
            if status == FULL:
                self._make_room()
            else:
                self.status = status
        return self.status

    def offsets(self, blocks: Blocks) -> list[int]:
        """Return the placement of a solved search, one offset per block."""
        assert self.status == SOLVED
        offsets = self._column(memory.OFFSET)
        return blocks.beside_pins({row: int(offsets[i]) for i, row in enumerate(self.layout.rows)})

    def _next_turn(self) -> None:
        """Go back to the start with the next rule, and an order of its own."""
        m = self._memory
        m[memory.STAGE] = memory.AGAIN if self._turns else memory.NEW
        round_, at = divmod(LANES * self._turns + self._lane, len(_PLANS))
        m[memory.RULE], keys = _PLANS[at]
        noise = _NOISE if round_ else 0.0
        m[self._field(memory.RANK)] = self._ranks(keys, noise)
        weights = [round(_WEIGHT * self._draws.uniform(1 - noise, 1 + noise)) for _ in range(self.layout.num_sections)]
        m[m[memory.FIRST_SECTION] + memory.WEIGHT : m[memory.SECTIONS_END] : memory.SECTION_WIDTH] = weights
        self._turn_ends = self.nodes + self._turn * luby(round_ + 1)
        self._turns += 1

    def _ranks(self, keys: str, noise: float) -> list[int]:
        """Return the place of each row by decreasing keys, all of a row's scaled by one random factor."""
        scales = [self._draws.uniform(1 - noise, 1 + noise) for _ in self.layout.rows]
        columns = [self.layout.keys[key] for key in keys]
        order = sorted(range(len(scales)), key=lambda row: [-column[row] * scales[row] for column in columns])
        ranks = [0] * len(order)
        for rank, row in enumerate(order):
            ranks[row] = rank
        return ranks

    def _column(self, field: int) -> Any:
        return self._memory[self._field(field)]

    def _field(self, field: int) -> slice:
        """Return where all rows keep a field."""
        return slice(memory.NUM_REGISTERS + field, int(self._memory[memory.FIRST_SECTION]), memory.ROW_WIDTH)

    def _make_room(self) -> None:
        """Let the trail grow by as much as all of the memory."""
        more = len(self._memory)
        self._memory = np.append(self._memory, np.zeros(more, np.int64)) if self.fast else self._memory + [0] * more


def luby(turn: int) -> int:
    """Return the length of a turn, numbered from 1: 1, 1, 2, 1, 1, 2, 4, 1, ... (Luby, Sinclair, Zuckerman 1993).

    Examples
    --------
    >>> [luby(turn) for turn in range(1, 16)]
    [1, 1, 2, 1, 1, 2, 4, 1, 1, 2, 1, 1, 2, 4, 8]
    """
    power = turn.bit_length()
    return 1 << power - 1 if turn == (1 << power) - 1 else luby(turn - (1 << power - 1) + 1)
