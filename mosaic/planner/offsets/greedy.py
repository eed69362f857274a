"""Greedy placement, one block after the other, into the holes between those already placed: largest first, by several measures.

Two routes to the same answer: conflict lists for hundreds of blocks (pure Python beats NumPy there), and neighbours looked up
one placement at a time for tens of thousands.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from .blocks import Blocks, Tick, on, paced
from .neighbours import Neighbours

Int64s = NDArray[np.int64]
_NOT_PLACED = -1
_MANY_PAIRS = 400_000  # above this, conflict lists cost more than a look at the placed ones each time


def greedy_by_size(blocks: Blocks, tick: Tick = on) -> list[int]:
    """Place by decreasing size, ties by decreasing lifetime, then start, then row.

    Known from TensorFlow Lite's arena planner (Pisarchyk and Lee); optimal on most transformer traces.
    """
    sizes, lengths, starts = blocks.sizes, blocks.lengths, blocks.starts
    return _largest_first(blocks, lambda row: (-sizes[row], -lengths[row], starts[row]), tick)


def greedy_by_area(blocks: Blocks, tick: Tick = on) -> list[int]:
    """Place by decreasing size times lifetime, ties by decreasing size, then row."""
    sizes, lengths = blocks.sizes, blocks.lengths
    return _largest_first(blocks, lambda row: (-sizes[row] * lengths[row], -sizes[row]), tick)


def greedy_by_conflicts(blocks: Blocks, tick: Tick = on) -> list[int]:
    """Place by decreasing number of blocks that share time, ties by decreasing size, then row."""
    sizes, degrees = blocks.sizes, _degrees(blocks)
    return _largest_first(blocks, lambda row: (-degrees[row], -sizes[row]), tick)


def _largest_first(blocks: Blocks, key: Callable[[int], tuple[int, ...]], tick: Tick) -> list[int]:
    return place_in_order(blocks, sorted(range(len(blocks)), key=key), best=False, tick=tick)


def _degrees(blocks: Blocks) -> list[int]:
    """Return how many blocks share time with each; without gaps those begun before its end less those over, itself too."""
    if blocks.pieces is not None:
        return list(map(len, blocks.conflicts))
    starts, ends = sorted(blocks.starts), sorted(blocks.ends)
    over = [bisect_right(ends, start) for start in blocks.starts]
    return [bisect_left(starts, end) - over[row] for row, end in enumerate(blocks.ends)]


def place_in_order(
    blocks: Blocks, order: Sequence[int], *, best: bool, tick: Tick = on, many_pairs: int = _MANY_PAIRS
) -> list[int]:
    """Place blocks in the given order into the lowest (or, if `best`, the smallest) hole; pinned blocks come first.

    With more than `many_pairs` pairs that share time, neighbours are not listed but looked up.
    """
    if blocks.pins is not None:
        pinned = [row for row, pin in enumerate(blocks.pins) if pin is not None]
        order = [*pinned, *(row for row in order if blocks.pins[row] is None)]
    if blocks.num_pairs > many_pairs:
        return _among_neighbours(blocks, order, best, tick)
    return _with_conflict_lists(blocks, order, best, tick)


def _with_conflict_lists(blocks: Blocks, order: Sequence[int], best: bool, tick: Tick) -> list[int]:
    conflicts, sizes, alignments, pins = blocks.conflicts, blocks.sizes, blocks.alignments, blocks.pins
    placed: dict[int, tuple[int, int]] = {}  # row -> offset, top
    for row in paced(order, tick, every=256):
        size, offset = sizes[row], pins[row] if pins is not None else None
        if offset is None:
            around = sorted([placed[other] for other in conflicts[row] if other in placed])
            alignment = alignments[row] if alignments is not None else 1
            offset = _best_hole(around, size, alignment) if best else _first_hole(around, size, alignment)
        placed[row] = offset, offset + size
    return [placed[row][0] for row in range(len(blocks))]


def _first_hole(around: list[tuple[int, int]], size: int, alignment: int) -> int:
    offset = 0
    for low, top in around:
        if low - offset >= size:
            return offset
        if top > offset:
            offset = top + -top % alignment
    return offset


def _best_hole(around: list[tuple[int, int]], size: int, alignment: int) -> int:
    offset, holes = 0, []
    for low, top in around:
        if low - offset >= size:
            holes.append((low - offset, offset))
        if top > offset:
            offset = top + -top % alignment
    return min(holes)[1] if holes else offset


def _among_neighbours(blocks: Blocks, order: Sequence[int], best: bool, tick: Tick) -> list[int]:
    """Place among the placed neighbours of each block, which are looked up when it is its turn."""
    near = Neighbours(blocks.starts, blocks.ends)
    place_of = np.argsort(near.rows).tolist()
    sizes = np.array(blocks.sizes, np.int64)[near.rows]
    lows = np.full(len(sizes), _NOT_PLACED)
    for row in order:
        tick()
        place, pin = place_of[row], blocks.pins[row] if blocks.pins is not None else None
        if pin is not None:
            lows[place] = pin
            continue
        around = near.of(place)
        around = around[lows[around] != _NOT_PLACED]
        if blocks.pieces is not None:
            around = np.array([i for i in around.tolist() if blocks.meet(row, near.rows[i])], np.int64)
        alignment = blocks.alignments[row] if blocks.alignments is not None else 1
        lows[place] = _hole(lows[around], lows[around] + sizes[around], blocks.sizes[row], alignment, best)
    offsets = np.empty_like(lows)
    offsets[near.rows] = lows
    found: list[int] = offsets.tolist()
    return found


def _hole(lows: Int64s, tops: Int64s, size: int, alignment: int, best: bool) -> int:
    """Return the lowest, or the smallest, sufficient hole between address ranges; above all if there is none."""
    order = np.argsort(lows)
    bases = np.concatenate(([0], np.maximum.accumulate(tops[order])))
    bases += -bases % alignment
    rooms = lows[order] - bases[:-1]
    fits = np.flatnonzero(rooms >= size)
    if not len(fits):
        return int(bases[-1])
    return int(bases[fits[rooms[fits].argmin()] if best else fits[0]])
