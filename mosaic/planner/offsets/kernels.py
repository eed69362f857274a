"""Inner loops in plain Python that only index: they run on lists, and compiled on int64 arrays.

No function here allocates for its caller, reads a clock or raises.
"""

from __future__ import annotations

from typing import Any

__all__ = ["HELPERS", "first_fit_scan"]

HELPERS: dict[str, tuple[str, ...]] = {}
"""Which functions of this module a function calls, for the compiler."""


def first_fit_scan(order: Any, sizes: Any, starts: Any, ends: Any) -> Any:
    """Place in `order` (int64 arrays [n]) into the lowest hole; placed blocks are kept by offset. O(n) a placement.

    Returns the offsets, int64 [n] (the one new array).
    """
    n = len(order)
    start, end, low, top = starts.copy(), starts.copy(), starts.copy(), starts.copy()
    offsets = starts.copy()
    for placed in range(n):
        row = order[placed]
        size, begins, ceases = sizes[row], starts[row], ends[row]
        offset = 0
        for i in range(placed):
            if start[i] < ceases and end[i] > begins:
                if low[i] - offset >= size:
                    break
                if top[i] > offset:
                    offset = top[i]
        offsets[row] = offset
        i = placed
        while i > 0 and low[i - 1] > offset:
            start[i], end[i], low[i], top[i] = start[i - 1], end[i - 1], low[i - 1], top[i - 1]
            i -= 1
        start[i], end[i], low[i], top[i] = begins, ceases, offset, offset + size
    return offsets
