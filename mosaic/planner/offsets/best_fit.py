"""Best fit: each block goes to the smallest hole that holds it, in a given order; above all if none does."""

from __future__ import annotations

from collections.abc import Sequence

from .blocks import Blocks, Tick, on
from .online import place_online, program_order
from .stacked import place_in_order

__all__ = ["best_fit", "best_fit_in_order"]


def best_fit(blocks: Blocks, tick: Tick = on) -> list[int]:
    """Place blocks by start time, each in the smallest sufficient hole."""
    if not blocks.plain:
        return best_fit_in_order(blocks, program_order(blocks), tick)
    return place_online(blocks, best=True, tick=tick)


def best_fit_in_order(blocks: Blocks, order: Sequence[int], tick: Tick = on) -> list[int]:
    """Place blocks in the given order, each in the smallest sufficient hole."""
    return place_in_order(blocks, order, best=True, tick=tick)
