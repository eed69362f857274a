"""One plan for a family of shapes: the vertical order of a solution, replayed for other sizes.

Each block keeps only the blocks that it sees directly below it; its offset is the aligned maximum of their tops. Any
two blocks that share time are linked by a chain of such edges, so the result is valid for every vector of non-
negative sizes, and the peak is an explicit maximum of sums (a max-plus form). Nothing here looks for a better order:
compare the peak with the lower bound, and solve again where it is higher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mosaic.errors import PlanFormatError, UsageError

from .problem import Interval, Problem, Solution, group_alignments, groups_of, integers, rectangles

Int64s = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
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
    pins : tuple of int or None
        Per block; a pinned block is no block's edge: the others go around it, see `fixed`.
    fixed : tuple of int tuples
        For each block the pinned blocks it shares time with, by ascending offset; empty if there are none.

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
    pins: tuple[int | None, ...]
    fixed: tuple[tuple[int, ...], ...]
    num_buffers: int

    @classmethod
    def of(cls, problem: Problem, solution: Solution) -> Order:
        """Read the order off a solution; a few milliseconds for 500 buffers.

        Zero-sized buffers take part too, so that they may grow in a replay. O(sum of lifetimes in distinct times).
        """
        return _order_of(problem, solution.offsets)

    def replay(self, sizes: Sequence[int] | Int64s) -> tuple[Any, Any]:
        """Return (offsets, peak) for new sizes, in bytes.

        Parameters
        ----------
        sizes : sequence of int, length n, or array int64 [k, n]
            Bytes per buffer of the problem, at least 0. Members of an alias group keep their distances.

        Returns
        -------
        offsets : list of int, or array int64 [n], or array int64 [k, n]
            In the form that `sizes` came in.
        peak : int, or array int64 [k]

        Raises
        ------
        UsageError
            A wrong number of sizes, a negative or a non-integer size, or sizes at which pinned buffers would overlap.
        """
        if not isinstance(sizes, np.ndarray):
            return self._replay_one(integers("size", sizes))
        if sizes.dtype.kind not in "iu":
            raise UsageError(f"sizes are {sizes.dtype}; bytes are integers, never floats")
        if sizes.ndim == 1:
            offsets, peak = self._replay_one(sizes.tolist())
            return np.array(offsets, dtype=np.int64), peak
        if sizes.ndim != 2:
            raise UsageError(f"sizes have {sizes.ndim} axes; expected [n] or [k, n]")
        found = [self._replay_one(row) for row in sizes.tolist()]
        placed = np.array([offsets for offsets, _ in found], dtype=np.int64).reshape(sizes.shape)
        return placed, np.array([peak for _, peak in found], dtype=np.int64)

    def to_json(self) -> dict[str, Any]:
        """Return the order as plain lists of ints."""
        plain: dict[str, Any] = {"num_buffers": self.num_buffers, "below": [list(b) for b in self.below]}
        plain["rows"] = [list(row) for row in self.rows]
        if any(any(d) for d in self.distances):
            plain["distances"] = [list(d) for d in self.distances]
        plain["alignments"] = self.alignments[0] if len(set(self.alignments)) == 1 else list(self.alignments)
        if self.fixed:
            plain["pins"], plain["fixed"] = list(self.pins), [list(f) for f in self.fixed]
        return plain

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Order:
        """Read what `to_json` wrote.

        Raises
        ------
        PlanFormatError
            If it is not such a document, or an edge does not lead upwards.
        """
        try:
            rows = _numbers(plain["rows"])
            below = _numbers(plain["below"])
            uniform = plain["alignments"]
            order = cls(
                below=below,
                rows=rows,
                distances=_numbers(plain["distances"]) if "distances" in plain else tuple((0,) * len(r) for r in rows),
                alignments=(uniform,) * len(rows) if isinstance(uniform, int) else tuple(map(index, uniform)),
                pins=tuple(None if p is None else index(p) for p in plain.get("pins", [None] * len(rows))),
                fixed=_numbers(plain.get("fixed", [])),
                num_buffers=index(plain["num_buffers"]),
            )
        except (KeyError, TypeError) as error:
            raise PlanFormatError(f"not an order of buffers: {error!r}") from error
        if sorted(r for row in rows for r in row) != list(range(order.num_buffers)):
            raise PlanFormatError(f"an order over {order.num_buffers} buffers must name each of them once")
        if {len(below), len(order.alignments), len(order.pins), len(order.fixed) or len(rows)} != {len(rows)} or (
            list(map(len, order.distances)) != list(map(len, rows))
        ):
            raise PlanFormatError(f"an order of {len(rows)} blocks must state as many of everything")
        if any(not 0 <= low < block for block, lows in enumerate(below) for low in lows):
            raise PlanFormatError("an order's edges must lead from lower blocks to higher ones")
        if min(order.alignments, default=1) < 1:
            raise PlanFormatError(f"an order's alignments must be at least 1; one is {min(order.alignments)}")
        pinned = {block for block, pin in enumerate(order.pins) if pin is not None}
        if not pinned.issuperset(other for around in order.fixed for other in around):
            raise PlanFormatError("an order's blocks can only go around pinned ones")
        return order

    def _replay_one(self, sizes: Sequence[int]) -> tuple[list[int], int]:
        self._check_sizes(len(sizes), min(sizes, default=0))
        blocks = self._block_sizes(sizes)
        tops: list[int] = []
        offsets = [0] * self.num_buffers
        simple = not self.fixed and self._single
        for block, (lows, alignment, size) in enumerate(zip(self.below, self.alignments, blocks, strict=True)):
            offset = 0
            for low in lows:
                if tops[low] > offset:
                    offset = tops[low]
            if alignment != 1:
                offset += -offset % alignment
            if self.fixed:
                offset = self._around_pins(block, offset, blocks)
            tops.append(offset + size)
            if simple:
                (row,) = self.rows[block]
                offsets[row] = offset
            else:
                for row, distance in zip(self.rows[block], self.distances[block], strict=True):
                    offsets[row] = offset + distance
        return offsets, max(tops, default=0)

    def _around_pins(self, block: int, offset: int, sizes: list[int]) -> int:
        if self.pins[block] is not None:
            for other in self.fixed[block]:
                self._check_pins(block, other, sizes[block], sizes[other])
            return self._pin(block)
        for other in self.fixed[block]:
            low = self._pin(other)
            if sizes[other] and sizes[block] and offset < low + sizes[other] and low < offset + sizes[block]:
                offset = low + sizes[other]
                offset += -offset % self.alignments[block]
        return offset

    def _check_pins(self, block: int, other: int, mine: int, its: int) -> None:
        low, other_low = self._pin(block), self._pin(other)
        if mine and its and low < other_low + its and other_low < low + mine:
            raise UsageError(
                f"buffers {self.rows[block][0]} and {self.rows[other][0]} are pinned at {low} and {other_low}; "
                f"with sizes of {mine} and {its} bytes they overlap"
            )

    def _pin(self, block: int) -> int:
        pin = self.pins[block]
        assert pin is not None
        return pin

    def _check_sizes(self, got: int, smallest: int) -> None:
        if got != self.num_buffers:
            raise UsageError(f"{got} sizes for an order over {self.num_buffers} buffers")
        if smallest < 0:
            raise UsageError(f"a size is {smallest} bytes; it must be at least 0")

    def _block_sizes(self, sizes: Sequence[int]) -> list[int]:
        if self._single:
            return [sizes[row] for (row,) in self.rows]
        pairs = zip(self.rows, self.distances, strict=True)
        return [max([d + sizes[r] for r, d in zip(row, away, strict=True)]) for row, away in pairs]

    @cached_property
    def _single(self) -> bool:
        """True if every block is one buffer."""
        return len(self.rows) == self.num_buffers


def _numbers(lists: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(index, numbers)) for numbers in lists)


def _order_of(problem: Problem, offsets: Sequence[int]) -> Order:
    if len(offsets) != len(problem):
        raise UsageError(f"{len(offsets)} offsets for {len(problem)} buffers")
    roots, distances = groups_of(problem)
    found: list[tuple[int, int, int | None, tuple[Interval, ...]]]
    if not problem.aliases and problem.gaps is None and problem.pins is None:
        starts, ends = problem.starts, problem.ends
        found = [(row, size, None, ((starts[row], ends[row]),)) for row, size in enumerate(problem.sizes)]
    else:
        found = [(row, size, pin, tuple(pieces)) for row, size, pin, pieces in rectangles(problem)]
    found.sort(key=lambda block: (offsets[block[0]], offsets[block[0]] + block[1]))
    pins = tuple(block[2] for block in found)
    pieces = [block[3] for block in found]
    number = {block[0]: i for i, block in enumerate(found)}
    rows: list[list[int]] = [[] for _ in found]
    for row, root in enumerate(roots):
        rows[number[root]].append(row)
    alignments = group_alignments(problem) if not isinstance(problem.alignments, int) or problem.aliases else None
    uniform = problem.alignments if isinstance(problem.alignments, int) else 1
    return Order(
        below=_visible_below(pieces, pins),
        rows=tuple(map(tuple, rows)),
        distances=tuple(tuple(distances[row] for row in block) for block in rows),
        alignments=tuple(alignments[block[0]] if alignments is not None else uniform for block in found),
        pins=pins,
        fixed=_pinned_neighbours(pieces, pins),
        num_buffers=len(problem),
    )


def _visible_below(pieces: list[tuple[Interval, ...]], pins: tuple[int | None, ...]) -> tuple[tuple[int, ...], ...]:
    """Return for each block, bottom up, the blocks it would touch if all fell down, without those implied by others."""
    times = sorted({start for block in pieces for start, _ in block})
    number = {time: i for i, time in enumerate(times)}
    ends = sorted({end for block in pieces for _, end in block})
    at = 0
    for end in ends:  # an end counts the starts before it: half-open ranges over starts
        while at < len(times) and times[at] < end:
            at += 1
        number.setdefault(end, at)
    owner = [-1] * len(times)
    below: list[tuple[int, ...]] = []
    for block, spans in enumerate(pieces):
        seen: set[int] = set()
        ranges = [(number[start], number[end]) for start, end in spans]
        for a, b in ranges:
            seen.update(owner[a:b])
        if pins[block] is not None:
            below.append(())
            continue
        for a, b in ranges:
            owner[a:b] = [block] * (b - a)
        seen.discard(-1)
        if len(seen) > 1:
            implied = {lower for other in seen for lower in below[other]}
            seen -= implied
        below.append(tuple(sorted(seen)))
    return tuple(below)


def _pinned_neighbours(pieces: list[tuple[Interval, ...]], pins: tuple[int | None, ...]) -> tuple[tuple[int, ...], ...]:
    pinned = [block for block, pin in enumerate(pins) if pin is not None]  # ascending offsets already
    if not pinned:
        return ()
    return tuple(
        tuple(
            other
            for other in pinned
            if other != block and any(a < d and c < b for a, b in pieces[block] for c, d in pieces[other])
        )
        for block in range(len(pieces))
    )
