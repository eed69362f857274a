"""Skyline: always the block that can lie lowest, on top of what is placed; ties by a fixed preorder.

One descent of the exact search without going back. No hole is ever filled, so the order it finds replays well for
other sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import accumulate
from operator import mul

from .blocks import Blocks, Tick, on, paced

PREORDERS = ("TWA", "TAW", "ATW", "WAT")
"""Keys, most important first, all decreasing: T the largest load that the block takes part in, W its width in sections,
A its size times width. Each solves some hard instances at once that the others do not; widths in time units instead of
sections made the search fail on one of five."""


def preorder(blocks: Blocks, keys: str) -> list[int]:
    """Return rows by the decreasing keys, ties by row.

    Examples
    --------
    >>> from mosaic.planner.offsets import Problem, blocks_of
    >>> preorder(blocks_of(Problem(sizes=[1, 2, 3], starts=[0, 0, 5], ends=[9, 2, 6])), "WAT")
    [0, 2, 1]
    """
    columns = [_COLUMNS[key](blocks) for key in keys]
    ranks = [tuple(-column[row] for column in columns) for row in range(len(blocks))]
    return sorted(range(len(blocks)), key=ranks.__getitem__)


def skyline(blocks: Blocks, keys: str = "TWA", tick: Tick = on) -> list[int]:
    """Place by lowest possible offset, ties by the preorder; O(n log n + width) in practice.

    The skyline only rises, so a stale offset in the heap is a lower bound and is looked up again when it comes to the
    top.
    """
    spans, lift = blocks.sections.spans, None if blocks.alignments is None and blocks.pins is None else blocks.lift
    sizes = blocks.sizes
    offsets: dict[int, int] = {}
    tops = [0] * blocks.sections.count
    rows = [row for row in preorder(blocks, keys) if blocks.pins is None or blocks.pins[row] is None]
    waiting = [(0, rank) for rank in range(len(rows))]  # a heap already
    for offset, rank in paced(_popped(waiting), tick, every=256):
        row = rows[rank]
        lowest = max([max(tops[a:b]) for a, b in spans[row]])
        if lift is not None:
            lowest = lift(row, lowest)
        if lowest > offset:
            heappush(waiting, (lowest, rank))
            continue
        offsets[row] = lowest
        top = lowest + sizes[row]
        for a, b in spans[row]:
            tops[a:b] = [top] * (b - a)
    return blocks.beside_pins(offsets)


def _popped(heap: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the least entry until there is none; entries may come while it is at it."""
    while heap:
        yield heappop(heap)


def _loads(blocks: Blocks) -> list[int]:
    """Return for each block the largest load in bytes among its sections."""
    sections = blocks.sections
    change = [0] * (sections.count + 1)
    for row, pieces in enumerate(sections.spans):
        for a, b in pieces:
            change[a] += blocks.sizes[row]
            change[b] -= blocks.sizes[row]
    load = list(accumulate(change))
    return [max([max(load[a:b]) for a, b in pieces]) for pieces in sections.spans]


def _widths(blocks: Blocks) -> list[int]:
    return [sum([b - a for a, b in pieces]) for pieces in blocks.sections.spans]


def _areas(blocks: Blocks) -> list[int]:
    return list(map(mul, blocks.sizes, _widths(blocks)))


_COLUMNS = {"T": _loads, "W": _widths, "A": _areas}
