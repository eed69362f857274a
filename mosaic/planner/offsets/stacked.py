"""Placing blocks one by one into the holes between those already placed.

Three routes to the same answer: conflict lists for hundreds of blocks (pure Python beats NumPy there), one NumPy mask
per placement for tens of thousands, and the same scan compiled where numba is installed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from . import compiled, kernels
from .blocks import Blocks

__all__ = ["place_in_order"]

_MANY_PAIRS = 400_000  # above this, conflict lists cost more than a scan over all placed blocks


def place_in_order(blocks: Blocks, order: Sequence[int], *, best: bool) -> list[int]:
    """Place blocks in the given order into the lowest (or, if `best`, the smallest) hole; pinned blocks come first.

    Returns
    -------
    list of int
        Offsets in bytes.
    """
    offsets = [0] * len(blocks)
    if blocks.pins is not None:
        for row, pin in enumerate(blocks.pins):
            if pin is not None:
                offsets[row] = pin
        pinned = [row for row, pin in enumerate(blocks.pins) if pin is not None]
        order = [*pinned, *(row for row in order if blocks.pins[row] is None)]
    if blocks.plain and not best and blocks.num_pairs > _MANY_PAIRS:
        return _scan_all(blocks, order)
    return _with_conflict_lists(blocks, order, offsets, best)


def _with_conflict_lists(blocks: Blocks, order: Sequence[int], offsets: list[int], best: bool) -> list[int]:
    conflicts, sizes, alignments, pins = blocks.conflicts, blocks.sizes, blocks.alignments, blocks.pins
    tops = [-1] * len(blocks)  # -1: not placed
    for row in order:
        size = sizes[row]
        if pins is not None and pins[row] is not None:
            tops[row] = offsets[row] + size
            continue
        around = sorted([(offsets[other], tops[other]) for other in conflicts[row] if tops[other] >= 0])
        alignment = alignments[row] if alignments is not None else 1
        offset = _best_hole(around, size, alignment) if best else _first_hole(around, size, alignment)
        offsets[row] = offset
        tops[row] = offset + size
    return offsets


def _first_hole(around: list[tuple[int, int]], size: int, alignment: int) -> int:
    offset = 0
    for low, top in around:
        if low - offset >= size:
            return offset
        if top > offset:
            offset = top if alignment == 1 else -(-top // alignment) * alignment
    return offset


def _best_hole(around: list[tuple[int, int]], size: int, alignment: int) -> int:
    offset, chosen, smallest = 0, -1, 0
    for low, top in around:
        hole = low - offset
        if hole >= size and (chosen < 0 or hole < smallest):
            chosen, smallest = offset, hole
        if top > offset:
            offset = top if alignment == 1 else -(-top // alignment) * alignment
    return chosen if chosen >= 0 else offset


def _scan_all(blocks: Blocks, order: Sequence[int]) -> list[int]:
    columns = [np.asarray(column, dtype=np.int64) for column in (order, blocks.sizes, blocks.starts, blocks.ends)]
    scan = compiled.compiled(kernels.first_fit_scan) if compiled.available() else _numpy_scan
    offsets: NDArray[np.int64] = scan(*columns)
    found: list[int] = offsets.tolist()
    return found


def _numpy_scan(
    order: NDArray[np.int64], sizes: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """First fit by masks over the placed blocks, which are kept in order of offset; O(n) a placement, in NumPy."""
    n = len(order)
    start, end, low, top = (np.empty(n, dtype=np.int64) for _ in range(4))
    offsets = np.zeros(n, dtype=np.int64)
    for placed, row in enumerate(order.tolist()):
        mask = (start[:placed] < ends[row]) & (end[:placed] > starts[row])
        lows, tops = low[:placed][mask], top[:placed][mask]
        size = sizes[row]
        offset = 0
        if len(lows):
            reached = np.maximum.accumulate(tops)
            below = np.concatenate(([0], reached[:-1]))
            holes = np.flatnonzero(lows - below >= size)
            offset = below[holes[0]] if len(holes) else reached[-1]
        offsets[row] = offset
        at = int(np.searchsorted(low[:placed], offset))
        for column, value in ((start, starts[row]), (end, ends[row]), (low, offset), (top, offset + size)):
            column[at + 1 : placed + 1] = column[at:placed]
            column[at] = value
    return offsets
