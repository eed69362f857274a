"""Two boxes of time and address that share a point, found by a sweep over time in Python's integers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def first_common(
    starts: Sequence[int], ends: Sequence[int], lows: Sequence[int], tops: Sequence[int]
) -> tuple[int, int] | None:
    """Return two boxes `[start, end) x [low, top)` that overlap, the earlier one first, or None.

    The one returned begins first among all boxes that begin upon another. Boxes of no bytes share nothing.
    O(n log n), and a move in a list of the live ones per box.
    """
    boxes = [box for box, (low, top) in enumerate(zip(lows, tops, strict=True)) if low < top]
    events = [(starts[box], True, box) for box in boxes] + [(ends[box], False, box) for box in boxes]
    events.sort()  # at equal times, ends come before starts
    live: list[tuple[int, int]] = []  # (low, box), ascending and disjoint
    for _, begins, box in events:
        low = lows[box]
        at = bisect_left(live, (low, -1))
        if not begins:
            del live[at]
        elif at < len(live) and live[at][0] < tops[box]:
            return live[at][1], box
        elif at and tops[live[at - 1][1]] > low:
            return live[at - 1][1], box
        else:
            live.insert(at, (low, box))
    return None
