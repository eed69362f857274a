"""Greedy first fit in an order of importance: largest blocks first, by one of several measures."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from .blocks import Blocks, Tick, on
from .first_fit import first_fit_in_order

__all__ = ["greedy_by_area", "greedy_by_conflicts", "greedy_by_size"]


def greedy_by_size(blocks: Blocks, tick: Tick = on) -> list[int]:
    """Place by decreasing size, ties by decreasing lifetime, then start, then row.

    Known from TensorFlow Lite's arena planner (Pisarchyk and Lee); optimal on most transformer traces.
    """
    lengths, sizes, starts = blocks.lengths, blocks.sizes, blocks.starts
    keys = [(-size, -length, start) for size, length, start in zip(sizes, lengths, starts, strict=True)]
    return first_fit_in_order(blocks, sorted(range(len(sizes)), key=keys.__getitem__), tick)


def greedy_by_area(blocks: Blocks, tick: Tick = on) -> list[int]:
    """Place by decreasing size times lifetime, ties by decreasing size, then row."""
    keys = [(-size * length, -size) for size, length in zip(blocks.sizes, blocks.lengths, strict=True)]
    return first_fit_in_order(blocks, sorted(range(len(keys)), key=keys.__getitem__), tick)


def greedy_by_conflicts(blocks: Blocks, tick: Tick = on) -> list[int]:
    """Place by decreasing number of blocks that share time, ties by decreasing size, then row."""
    keys = [(-degree, -size) for degree, size in zip(_degrees(blocks), blocks.sizes, strict=True)]
    return first_fit_in_order(blocks, sorted(range(len(keys)), key=keys.__getitem__), tick)


def _degrees(blocks: Blocks) -> list[int]:
    """Return how many blocks share time with each, itself among them: those begun before its end that are not over."""
    if blocks.pieces is not None:
        return [1 + len(others) for others in blocks.conflicts]
    starts, ends = sorted(blocks.starts), sorted(blocks.ends)
    spans = zip(blocks.starts, blocks.ends, strict=True)
    return [bisect_left(starts, end) - bisect_right(ends, start) for start, end in spans]
