"""The normal form that every solver works on: alias groups merged, gaps cut out, trivial things dropped.

A block is one rectangle-with-holes: a size, and one or more pieces of time in which it holds a value. Rows of
lists are blocks; `expand` turns block offsets back into one offset per buffer.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TypeVar

from .problem import Interval, Problem, group_alignments, groups_of, largest_load, rectangles

Tick = Callable[[], object]
"""A function that long passes call regularly; it may raise to end the pass."""


def on() -> None:
    """Go on: the tick of passes that nothing limits."""


Item = TypeVar("Item")


def paced(items: Iterable[Item], tick: Tick, every: int) -> Iterator[Item]:
    """Yield the items; tick before each `every`-th."""
    for count, item in enumerate(items, 1):
        if count % every == 0:
            tick()
        yield item


@dataclass(frozen=True, kw_only=True)
class Sections:
    """Time cut at the points that matter: two blocks overlap in time if and only if they share a section.

    A section is a point just before the first end that follows a start; there is one per maximal live set. `spans[i]`
    are the half-open ranges of sections that block `i` occupies.
    """

    count: int
    spans: list[tuple[Interval, ...]]


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Blocks to place, row by row: sizes in bytes, above 0, and the hull of each block's pieces.

    Parameters
    ----------
    pieces : list of interval tuples or None
        The occupied intervals; None if each block has just its hull.
    alignments : list of int or None
        None if every sum of sizes is aligned anyway.
    pins : list of int or None
        Given offsets; None if there are none.
    """

    sizes: list[int]
    starts: list[int]
    ends: list[int]
    pieces: list[tuple[Interval, ...]] | None
    alignments: list[int] | None
    pins: list[int | None] | None
    lower_bound: int
    capacity: int | None
    _rows: list[int] | None  # problem row of each block; None if row i is block i
    problem: Problem

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def plain(self) -> bool:
        """True if there are neither gaps nor pins nor alignment to care about."""
        return self.pieces is None and self.alignments is None and self.pins is None

    @cached_property
    def lengths(self) -> list[int]:
        """Time units that each block is live."""
        if self.pieces is None:
            return [end - start for start, end in zip(self.starts, self.ends, strict=True)]
        return [sum(end - start for start, end in pieces) for pieces in self.pieces]

    @cached_property
    def sections(self) -> Sections:
        """Sections of time; O(n log n)."""
        return _sections(self)

    @cached_property
    def conflicts(self) -> list[list[int]]:
        """For each block the blocks it shares time with; O(n + pairs)."""
        return _conflicts_of_hulls(self) if self.pieces is None else _conflicts_of_pieces(self)

    @cached_property
    def num_pairs(self) -> int:
        """How many pairs of blocks share time (by hulls), without listing them."""
        starts, ends = sorted(self.starts), sorted(self.ends)
        return sum(i - bisect_left(ends, start + 1) for i, start in enumerate(starts))

    @cached_property
    def neighbour_pins(self) -> list[list[int]] | None:
        """For each block the pinned blocks it shares time with, by ascending offset; None if nothing is pinned."""
        if self.pins is None:
            return None
        pins = self.pins
        pinned = sorted((pin, row) for row, pin in enumerate(pins) if pin is not None)
        found: list[list[int]] = [[] for _ in range(len(self))]
        for _, row in pinned:
            for other in range(len(self)):
                if other != row and _meet(self.pieces_of(row), self.pieces_of(other)):
                    found[other].append(row)
        return found

    def pieces_of(self, row: int) -> tuple[Interval, ...]:
        """Return the occupied intervals of a block."""
        return self.pieces[row] if self.pieces is not None else ((self.starts[row], self.ends[row]),)

    def meet(self, row: int, other: int) -> bool:
        """Return whether two blocks share time."""
        return _meet(self.pieces_of(row), self.pieces_of(other))

    def lift(self, row: int, offset: int) -> int:
        """Return the lowest place for a block at or above `offset` that is aligned and hits no pinned block."""
        if self.alignments is not None:
            offset += -offset % self.alignments[row]
        pins = self.neighbour_pins
        if pins is None or not pins[row]:
            return offset
        assert self.pins is not None
        for other in pins[row]:
            low = self.pins[other]
            assert low is not None
            if offset < low + self.sizes[other] and low < offset + self.sizes[row]:
                offset = low + self.sizes[other]
                if self.alignments is not None:
                    offset += -offset % self.alignments[row]
        return offset

    def peak(self, offsets: Sequence[int]) -> int:
        """Return the largest offset + size in bytes."""
        return max(map(int.__add__, offsets, self.sizes), default=0)

    def beside_pins(self, offsets: Mapping[int, int]) -> list[int]:
        """Return one offset per block: where it is pinned, or as given by row."""
        if self.pins is None:
            return [offsets[row] for row in range(len(self))]
        return [offsets[row] if pin is None else pin for row, pin in enumerate(self.pins)]

    def expand(self, offsets: Sequence[int]) -> tuple[int, ...]:
        """Return one offset per buffer of the problem, from one per block."""
        if self._rows is None:
            return tuple(offsets)
        problem = self.problem
        roots, distances = groups_of(problem)
        at_root = {row: offsets[block] for block, row in enumerate(self._rows)}
        if problem.pins is not None:  # blocks of 0 bytes were dropped, but may be pinned
            for row, pin in enumerate(problem.pins):
                if pin is not None:
                    at_root.setdefault(roots[row], pin - distances[row])
        return tuple(at_root.get(root, 0) + distance for root, distance in zip(roots, distances, strict=True))


def blocks_of(problem: Problem) -> Blocks:
    """Return the normal form of a problem; O(n log n), cheap for plain ones."""
    plain = not problem.aliases and problem.gaps is None and problem.pins is None
    if plain and (not problem.sizes or min(problem.sizes) > 0):
        sizes, starts, ends = list(problem.sizes), list(problem.starts), list(problem.ends)
        alignments = _needed(problem.alignments, sizes, [])
        return Blocks(
            sizes=sizes, starts=starts, ends=ends, pieces=None, alignments=alignments, pins=None,
            lower_bound=largest_load(starts, ends, sizes), capacity=problem.capacity, _rows=None, problem=problem,
        )  # fmt: skip
    return _general(problem)


def _general(problem: Problem) -> Blocks:
    everything = rectangles(problem)
    kept = [block for block in everything if block[1] > 0]
    rows, sizes = [block[0] for block in kept], [block[1] for block in kept]
    pins = [block[2] for block in kept]
    pieces = [tuple(block[3]) for block in kept]
    by_row = group_alignments(problem)
    alignments = _needed([by_row[row] for row in rows], sizes, [pin for pin in pins if pin is not None])
    load = largest_load(
        [start for block in pieces for start, _ in block],
        [end for block in pieces for _, end in block],
        [size for size, block in zip(sizes, pieces, strict=True) for _ in block],
    )
    pinned_end = max((pin + size for _, size, pin, _ in everything if pin is not None), default=0)
    return Blocks(
        sizes=sizes,
        starts=[block[0][0] for block in pieces],
        ends=[block[-1][1] for block in pieces],
        pieces=pieces if any(len(block) > 1 for block in pieces) else None,
        alignments=alignments,
        pins=pins if any(pin is not None for pin in pins) else None,
        lower_bound=max(load, pinned_end),
        capacity=problem.capacity,
        _rows=rows,
        problem=problem,
    )


def _needed(alignments: Sequence[int] | int, sizes: list[int], pins: list[int]) -> list[int] | None:
    """Return the alignments as a list, or None if sums of sizes and pinned ends satisfy them by themselves."""
    common = alignments if isinstance(alignments, int) else math.lcm(*set(alignments)) if alignments else 1
    if common == 1 or math.gcd(*sizes, *pins) % common == 0:
        return None
    return [alignments] * len(sizes) if isinstance(alignments, int) else list(alignments)


def _meet(first: tuple[Interval, ...], second: tuple[Interval, ...]) -> bool:
    return any(a < d and c < b for a, b in first for c, d in second)


def _sections(blocks: Blocks) -> Sections:
    starts: Sequence[int] = blocks.starts
    ends: Sequence[int] = blocks.ends
    if blocks.pieces is not None:
        starts = [start for pieces in blocks.pieces for start, _ in pieces]
        ends = [end for pieces in blocks.pieces for _, end in pieces]
    opening, closing = set(starts), set(ends)
    number: dict[int, int] = {}  # time -> how many sections lie before it
    current, open_ = 0, False
    for time in sorted(opening | closing):
        if open_ and time in closing:
            current, open_ = current + 1, False
        number[time] = current
        open_ = open_ or time in opening
    at = [number[start] for start in starts]
    until = [number[end] for end in ends]
    pairs = list(zip(at, until, strict=True))
    if blocks.pieces is None:
        return Sections(count=current, spans=[(pair,) for pair in pairs])
    cuts = [0, *accumulate(map(len, blocks.pieces))]
    return Sections(count=current, spans=[tuple(pairs[a:b]) for a, b in pairwise(cuts)])


def _conflicts_of_hulls(blocks: Blocks) -> list[list[int]]:
    starts, ends = blocks.starts, blocks.ends
    found: list[list[int]] = [[] for _ in starts]
    live: list[int] = []
    for row in sorted(range(len(starts)), key=starts.__getitem__):
        now = starts[row]
        live = [other for other in live if ends[other] > now]
        found[row] = live.copy()
        for other in live:
            found[other].append(row)
        live.append(row)
    return found


def _conflicts_of_pieces(blocks: Blocks) -> list[list[int]]:
    spans = blocks.sections.spans
    inside: list[list[int]] = [[] for _ in range(blocks.sections.count)]
    for row, pieces in enumerate(spans):
        for a, b in pieces:
            for section in range(a, b):
                inside[section].append(row)
    found: list[set[int]] = [set() for _ in spans]
    for members in inside:
        for row in members:
            found[row].update(members)
    return [sorted(others - {row}) for row, others in enumerate(found)]
