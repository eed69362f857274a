"""One plan for a family of shapes: the vertical order of a solution, replayed for other sizes.

Each block keeps only the blocks that it sees directly below it; its offset is the aligned maximum of their tops. Any
two blocks that share time are linked by a chain of such edges, so the result is valid for every vector of non-
negative sizes, and the peak is an explicit maximum of sums (a max-plus form). Nothing here looks for a better order:
compare the peak with the lower bound, and solve again where it is higher.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mosaic.errors import UsageError

from .problem import Interval, Problem, Solution, group_alignments, groups_of, integers, rectangles

__all__ = ["Order"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order graph of a solution over its blocks (buffers, or whole alias groups).

    Blocks are numbered bottom up: every edge leads from a lower number to a higher one.

    Parameters
    ----------
    below : tuple of int tuples
        For each block the blocks directly visible below it.
    rows : tuple of int tuples
        For each block the problem rows in it, with `distances` in bytes from the block's offset.
    alignments : tuple of int
        Bytes, per block.
    num_buffers : int
        Rows of the problem.

    Examples
    --------
    >>> from mosaic.planner.offsets import Problem, solve
    >>> problem = Problem(sizes=[4, 4, 8], starts=[0, 1, 2], ends=[2, 3, 4])
    >>> order = Order.of(problem, solve(problem))
    >>> order.replay([10, 10, 30])
    ([0, 30, 0], 40)
    """

    below: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[int, ...], ...]
    distances: tuple[tuple[int, ...], ...]
    alignments: tuple[int, ...]
    num_buffers: int

    @classmethod
    def of(cls, problem: Problem, solution: Solution) -> Order:
        """Read the order off a solution; a few milliseconds for 500 buffers.

        Zero-sized buffers take part too, so that they may grow in a replay. O(sum of lifetimes in distinct times).

        Raises
        ------
        UsageError
            A solution of another problem, or a problem with pins, which hold for one vector of sizes.
        """
        if len(solution.offsets) != len(problem):
            raise UsageError(f"{len(solution.offsets)} offsets for {len(problem)} buffers")
        if problem.pins is not None:
            raise UsageError("an order has no pinned buffers, this problem has pins; solve it again for other sizes.")
        return _order_of(problem, solution.offsets)

    def replay(self, sizes: Sequence[int] | NDArray[np.integer]) -> tuple[Any, int]:
        """Return (offsets, peak) in bytes for other sizes, a sequence of int or an array of integers [n].

        Offsets are a list, or int64 [n] for an array. Members of an alias group keep their distances.

        Raises
        ------
        UsageError
            A wrong number of sizes, a negative or a non-integer size.
        """
        if not isinstance(sizes, np.ndarray):
            return self._replay(integers("size", sizes))
        if sizes.dtype.kind not in "iu":
            raise UsageError(f"sizes are {sizes.dtype}; bytes are integers, never floats")
        offsets, peak = self._replay(sizes.tolist())
        return np.array(offsets, dtype=np.int64), peak

    def _replay(self, sizes: Sequence[int]) -> tuple[list[int], int]:
        if len(sizes) != self.num_buffers:
            raise UsageError(f"{len(sizes)} sizes for an order over {self.num_buffers} buffers")
        if (smallest := min(sizes, default=0)) < 0:
            raise UsageError(f"a size is {smallest} bytes; it must be at least 0")
        tops: list[int] = []
        offsets = [0] * self.num_buffers
        single = len(self.rows) == self.num_buffers
        for lows, alignment, rows, distances in zip(
            self.below, self.alignments, self.rows, self.distances, strict=True
        ):
            offset = 0
            for low in lows:
                if tops[low] > offset:
                    offset = tops[low]
            if alignment != 1:
                offset += -offset % alignment
            if single:
                tops.append(offset + sizes[rows[0]])
                offsets[rows[0]] = offset
            else:
                tops.append(offset + max([d + sizes[row] for row, d in zip(rows, distances, strict=True)]))
                for row, distance in zip(rows, distances, strict=True):
                    offsets[row] = offset + distance
        return offsets, max(tops, default=0)


def _order_of(problem: Problem, offsets: Sequence[int]) -> Order:
    roots, distances = groups_of(problem)
    found = [(row, size, pieces) for row, size, _, pieces in rectangles(problem)]
    found.sort(key=lambda block: (offsets[block[0]], offsets[block[0]] + block[1]))
    number = {block[0]: i for i, block in enumerate(found)}
    rows: list[list[int]] = [[] for _ in found]
    for row, root in enumerate(roots):
        rows[number[root]].append(row)
    alignments = group_alignments(problem)
    return Order(
        below=_visible_below([block[2] for block in found]),
        rows=tuple(map(tuple, rows)),
        distances=tuple(tuple(distances[row] for row in block) for block in rows),
        alignments=tuple(alignments[block[0]] for block in found),
        num_buffers=len(problem),
    )


def _visible_below(pieces: list[list[Interval]]) -> tuple[tuple[int, ...], ...]:
    """Return for each block, bottom up, the blocks it would touch if all fell down, without those implied by others."""
    times = sorted({start for block in pieces for start, _ in block})
    number = {time: bisect_left(times, time) for block in pieces for piece in block for time in piece}
    owner = [-1] * len(times)
    below: list[tuple[int, ...]] = []
    for block, spans in enumerate(pieces):
        seen: set[int] = set()
        ranges = [(number[start], number[end]) for start, end in spans]
        for a, b in ranges:
            seen.update(owner[a:b])
        for a, b in ranges:
            owner[a:b] = [block] * (b - a)
        seen.discard(-1)
        if len(seen) > 1:
            implied = {lower for other in seen for lower in below[other]}
            seen -= implied
        below.append(tuple(sorted(seen)))
    return tuple(below)
