"""Greedy first fit in an order of importance: largest blocks first, by one of several measures."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

from .blocks import Blocks, Tick, on
from .stacked import place_in_order


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
