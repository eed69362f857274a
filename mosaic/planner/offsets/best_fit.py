"""Best fit: each block goes to the smallest hole that holds it, in a given order; above all if none does."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from heapq import heappop, heappush

from .blocks import Blocks
from .first_fit import program_order
from .stacked import place_in_order

__all__ = ["best_fit", "best_fit_in_order"]


def best_fit(blocks: Blocks) -> list[int]:
    """Place blocks by start time, each in the smallest sufficient hole; O(n * live)."""
    if not blocks.plain:
        return best_fit_in_order(blocks, program_order(blocks))
    sizes, starts, ends = blocks.sizes, blocks.starts, blocks.ends
    offsets = [0] * len(sizes)
    live: list[tuple[int, int]] = []
    expiring: list[tuple[int, tuple[int, int]]] = []
    for row in program_order(blocks):
        now, size = starts[row], sizes[row]
        while expiring and expiring[0][0] <= now:
            block = heappop(expiring)[1]
            del live[bisect_right(live, block) - 1]
        base, chosen, smallest = 0, -1, 0
        for low, top in live:
            hole = low - base
            if hole >= size and (chosen < 0 or hole < smallest):
                chosen, smallest = base, hole
            base = top
        offset = chosen if chosen >= 0 else base
        offsets[row] = offset
        block = (offset, offset + size)
        insort(live, block)
        heappush(expiring, (ends[row], block))
    return offsets


def best_fit_in_order(blocks: Blocks, order: Sequence[int]) -> list[int]:
    """Place blocks in the given order, each in the smallest sufficient hole."""
    return place_in_order(blocks, order, best=True)
