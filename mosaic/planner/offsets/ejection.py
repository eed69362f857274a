"""Ejection search: squeeze blocks under a target one by one, and throw out what is in the way, cheapest first.

For tens of thousands of blocks, where an exact search gets nowhere. A block that fits nowhere goes where the blocks in
its way weigh least; these are out then, and come next. Each time a block fits nowhere it weighs more, so the search
does not throw the same ones out for ever (guided ejection, Nagata and Bräysy 2009, there for vehicle routing).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .blocks import Blocks, Tick, on
from .incumbent import Incumbent
from .neighbours import Neighbours

_UNIT = 1_000  # weight of a block of mean area (bytes x time)
_BUMP = 10 * _UNIT  # what a block gains each time that it fits nowhere; 1 to 30 units did as well, 0.1 did not
_SMALL_SHARE = 500  # blocks that together never load more than 1/500 of the bound are placed last

_TURN = 500  # blocks put back between two looks at the clock: some 0.05 s
_PATIENCE = 20_000  # blocks put back without getting on, until less is asked for
_SHARE_TO_FINISH = 0.07  # of the time spent: kept for placing what is still out

Int64s = NDArray[np.int64]
_OUT = -1


class Ejection:
    """A placement of most blocks under a target, and a stack of the blocks that are out; goes on wherever it stopped.

    Deterministic. It starts from a valid placement of blocks without gaps and pins. Small blocks, half of what a program has,
    come last: they find room between the others.

    Examples
    --------
    >>> from mosaic.planner.offsets import Problem, blocks_of
    >>> blocks = blocks_of(Problem(sizes=[4, 4, 8], starts=[0, 1, 2], ends=[2, 3, 4]))
    >>> search = Ejection(blocks, [0, 4, 8])
    >>> search.aim(12)
    >>> search.advance(100), blocks.peak(search.offsets())
    (True, 12)
    """

    def __init__(self, blocks: Blocks, offsets: Sequence[int]) -> None:
        assert blocks.pieces is None and blocks.pins is None
        self._near = near = Neighbours(blocks.starts, blocks.ends)
        self._rows = near.rows  # everything below is in this order
        self._sizes = np.array(blocks.sizes, dtype=np.int64)[self._rows]
        self._steps = None if blocks.alignments is None else np.array(blocks.alignments)[self._rows]
        self._lows = np.array(offsets, dtype=np.int64)[self._rows]
        self._areas = self._sizes.astype(np.float64) * (near.ends - near.starts)
        self._weights = 1 + (self._areas * (_UNIT / self._areas.mean())).astype(np.int64)
        self.target = 0
        self._out: list[int] = []
        small = self._sizes <= self._small_size(blocks.lower_bound // _SMALL_SHARE)
        self._throw_out(np.flatnonzero(small))

    @property
    def area_out(self) -> float:
        """Bytes x time of the blocks that are out."""
        return float(self._areas[self._out].sum())

    @property
    def num_out(self) -> int:
        """Blocks that are out."""
        return len(self._out)

    def aim(self, target: int) -> None:
        """Ask for a peak of at most `target` bytes from now on; blocks that reach above it are thrown out."""
        self.target = target
        self._throw_out(np.flatnonzero((self._lows + self._sizes > target) & (self._lows != _OUT)))

    def advance(self, steps: int, tick: Tick = on) -> bool:
        """Put back that many blocks at most; return whether none is out."""
        for _ in range(steps):
            if not self._out:
                break
            tick()
            self._put_back(self._out.pop())
        return not self._out

    def offsets(self, tick: Tick = on) -> list[int]:
        """Return the placement, one offset per block; what is out lies in the lowest hole, above the target if need be."""
        lows, target = self._lows.copy(), self.target
        self.target = int(self._sizes.sum()) * 2
        try:
            for block in sorted(self._out, key=lambda block: -self._areas[block]):
                tick()
                self._lows[block] = self._cheapest(block, *self._around(block))[0]
            found = np.empty_like(lows)
            found[self._rows] = self._lows
        finally:
            self._lows, self.target = lows, target
        placed: list[int] = found.tolist()
        return placed

    def _put_back(self, block: int) -> None:
        around, lows, tops = self._around(block)
        offset, weight = self._cheapest(block, around, lows, tops)
        if weight:
            self._weights[block] += _BUMP
            self._throw_out(around[(lows < offset + self._sizes[block]) & (tops > offset)])
        self._lows[block] = offset

    def _around(self, block: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return the placed blocks that share time with a block, their offsets and tops."""
        near = self._near.of(block)
        lows = self._lows[near]
        near, lows = near[lows != _OUT], lows[lows != _OUT]
        return near, lows, lows + self._sizes[near]

    def _cheapest(self, block: int, around: Int64s, lows: Int64s, tops: Int64s) -> tuple[int, int]:
        """Return the lowest offset under the target where what is in the way weighs least, and that weight."""
        room = self.target - self._sizes[block]
        opens, closes = np.maximum(lows - self._sizes[block] + 1, 0), tops  # offsets in [opens, closes) hit it
        if self._steps is not None:
            step = self._steps[block]
            opens, closes = opens + -opens % step, closes + -closes % step
        weights = self._weights[around]
        events, changes = np.concatenate((closes, opens, [0])), np.concatenate((-weights, weights, [0]))
        order = np.argsort(events, kind="stable")
        events = events[order]
        load = np.cumsum(changes[order])
        last = np.flatnonzero(np.append(events[1:] != events[:-1], True) & (events <= room))
        best = last[load[last].argmin()]
        return int(events[best]), int(load[best])

    def _throw_out(self, blocks: Int64s) -> None:
        """Take blocks out; the one of the largest area comes first when they are put back."""
        self._lows[blocks] = _OUT
        self._out += blocks[np.argsort(self._areas[blocks], kind="stable")].tolist()

    def _small_size(self, room: int) -> int:
        """Return the largest size such that the blocks up to it never load more than `room` bytes together."""
        times = np.concatenate((self._near.ends, self._near.starts))
        order = np.argsort(times, kind="stable")
        low, high = 0, int(self._sizes.max())
        while low < high:
            middle = (low + high + 1) // 2
            sizes = np.where(self._sizes <= middle, self._sizes, 0)
            load = np.cumsum(np.concatenate((-sizes, sizes))[order]).max()
            low, high = (middle, high) if load <= room else (low, middle - 1)
        return low


def squeeze(blocks: Blocks, best: Incumbent, steps: int | None) -> None:
    """Ask for a target near the goal (bound or capacity), for a nearer one when it is met, for less when the search gets stuck.

    `best` holds an answer to start from. At most `steps` blocks are put back, or any number until `best` is late.
    """
    assert best.offsets is not None
    search = Ejection(blocks, best.offsets)
    search.aim(best.goal + (best.peak - best.goal) // 8)
    least, stale, left = math.inf, 0, steps if steps is not None else math.inf
    while not best.done and left > 0 and best.seconds_left > _SHARE_TO_FINISH * best.seconds:
        met, left, stale = search.advance(_TURN, best.tick), left - _TURN, stale + _TURN
        if search.area_out < 0.99 * least:
            least, stale = search.area_out, 0
        if not met and stale < _PATIENCE:
            continue
        best.offer(search.offsets(best.tick), "ejection")
        search.aim(_next_target(search.target, best, met))
        least = math.inf
    if not best.done:
        best.offer(search.offsets(best.tick), "ejection")


def _next_target(target: int, best: Incumbent, met: bool) -> int:
    if met:
        return best.goal + (target - best.goal) // 2
    higher = target + max(1, (best.peak - target) // 4)
    return higher if higher < best.peak else (best.goal + best.peak) // 2
