"""First fit: each block goes to the lowest hole that holds it, in a given order.

In program order this is what a run-time allocator does, and needs only the blocks that are live. For any other order
the holes are those between already placed blocks that share time.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from heapq import heappop, heappush

from .blocks import Blocks
from .stacked import place_in_order

__all__ = ["first_fit", "first_fit_in_order", "program_order"]


def program_order(blocks: Blocks) -> list[int]:
    """Return rows by start, ties by row."""
    return sorted(range(len(blocks)), key=blocks.starts.__getitem__)


def first_fit(blocks: Blocks) -> list[int]:
    """Place blocks by start time, each in the lowest hole; O(n * live)."""
    if not blocks.plain:
        return first_fit_in_order(blocks, program_order(blocks))
    sizes, starts, ends = blocks.sizes, blocks.starts, blocks.ends
    offsets = [0] * len(sizes)
    live: list[tuple[int, int]] = []  # (offset, top), ascending
    expiring: list[tuple[int, tuple[int, int]]] = []
    for row in program_order(blocks):
        now, size = starts[row], sizes[row]
        while expiring and expiring[0][0] <= now:
            block = heappop(expiring)[1]
            del live[bisect_right(live, block) - 1]
        offset = 0
        for low, top in live:
            if low - offset >= size:
                break
            offset = top
        offsets[row] = offset
        block = (offset, offset + size)
        insort(live, block)
        heappush(expiring, (ends[row], block))
    return offsets


def first_fit_in_order(blocks: Blocks, order: Sequence[int]) -> list[int]:
    """Place blocks in the given order, each in the lowest hole among those already placed that share time with it."""
    return place_in_order(blocks, order, best=False)
