"""First fit: each block goes to the lowest hole that holds it, in a given order.

In program order this is what a run-time allocator does, and needs only the blocks that are live. For any other order
the holes are those between already placed blocks that share time.
"""

from __future__ import annotations

from collections.abc import Sequence

from .blocks import Blocks, Tick, on
from .online import place_online, program_order
from .stacked import place_in_order

__all__ = ["first_fit", "first_fit_in_order"]


def first_fit(blocks: Blocks, tick: Tick = on) -> list[int]:
    """Place blocks by start time, each in the lowest hole."""
    if not blocks.plain:
        return first_fit_in_order(blocks, program_order(blocks), tick)
    return place_online(blocks, best=False, tick=tick)


def first_fit_in_order(blocks: Blocks, order: Sequence[int], tick: Tick = on) -> list[int]:
    """Place blocks in the given order, each in the lowest hole among those already placed that share time with it."""
    return place_in_order(blocks, order, best=False, tick=tick)
