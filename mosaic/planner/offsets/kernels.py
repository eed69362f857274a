"""Inner loops of local search in plain Python that only index: they run on lists, and compiled on int64 arrays.

No function here allocates for its caller, reads a clock or raises.
"""

from __future__ import annotations

from typing import Any


def lifted(row: Any, offset: Any, size: Any, alignment: Any, pin_cuts: Any, pin_low: Any, pin_top: Any) -> Any:
    """Return the lowest aligned place at or above `offset` that hits none of the row's pinned neighbours."""
    offset += -offset % alignment
    for i in range(pin_cuts[row], pin_cuts[row + 1]):
        if offset < pin_top[i] and pin_low[i] < offset + size:
            offset = pin_top[i]
            offset += -offset % alignment
    return offset


def drop(order: Any, offsets: Any, tops: Any, sizes: Any, piece_cuts: Any, piece_low: Any, piece_high: Any,
         alignments: Any, pin_cuts: Any, pin_low: Any, pin_top: Any, limit: Any) -> Any:  # fmt: skip
    """Drop the rows one by one on the skyline; return the peak times the number of sections, plus the sum of tops.

    Gives up with -1 once a top is above `limit`.
    """
    for s in range(len(tops)):
        tops[s] = 0
    peak = 0
    for i in range(len(order)):
        row = order[i]
        offset = 0
        for p in range(piece_cuts[row], piece_cuts[row + 1]):
            for s in range(piece_low[p], piece_high[p]):
                if tops[s] > offset:
                    offset = tops[s]
        offset = lifted(row, offset, sizes[row], alignments[row], pin_cuts, pin_low, pin_top)
        offsets[row] = offset
        top = offset + sizes[row]
        if top > limit:
            return -1
        if top > peak:
            peak = top
        for p in range(piece_cuts[row], piece_cuts[row + 1]):
            for s in range(piece_low[p], piece_high[p]):
                tops[s] = top
    total = 0
    for s in range(len(tops)):
        total += tops[s]
    return peak * len(tops) + total


def improve(steps: Any, goal: Any, state: Any, order: Any, best: Any, past: Any, offsets: Any, tops: Any, sizes: Any,
            piece_cuts: Any, piece_low: Any, piece_high: Any, alignments: Any, pin_cuts: Any, pin_low: Any,
            pin_top: Any) -> Any:  # fmt: skip
    """Try `steps` moves of one row in the drop order by late acceptance; keep the best order; return its peak.

    `state` holds the random state, the step, the current cost, the best peak and the best cost. A move takes a row
    that reaches the peak, or one it rests on, and drops it earlier. Late acceptance: a move is taken if it is no
    worse than now or than the cost some steps ago (`past`).
    """
    n = len(order)
    for _ in range(steps):
        if state[3] <= goal:
            break
        state[1] += 1
        draws = state[0]
        draws ^= (draws << 13) & 0x7FFFFFFFFFFFFFFF
        draws ^= draws >> 7
        draws ^= (draws << 17) & 0x7FFFFFFFFFFFFFFF
        state[0] = draws
        source = (draws >> 8) % n
        if draws & 3:  # three in four: the first of a few random rows that lies high
            for k in range(6):
                other = ((draws >> 8) + k * 7919) % n
                if offsets[order[other]] + sizes[order[other]] > offsets[order[source]] + sizes[order[source]]:
                    source = other
        target = (draws >> 32) % n
        if draws & 4 and target > source:
            target = (draws >> 32) % (source + 1)
        move(order, source, target)
        was = past[state[1] % len(past)]
        bound = was if was > state[2] else state[2]
        cost = drop(order, offsets, tops, sizes, piece_cuts, piece_low, piece_high, alignments, pin_cuts, pin_low,
                    pin_top, bound // len(tops))  # fmt: skip
        if cost >= 0 and cost <= bound:
            state[2] = cost
            if cost < state[4]:
                state[4] = cost
                peak = 0
                for i in range(n):
                    best[i] = order[i]
                    if offsets[i] + sizes[i] > peak:
                        peak = offsets[i] + sizes[i]
                state[3] = peak
        else:
            move(order, target, source)
        past[state[1] % len(past)] = state[2]
    return state[3]


def move(order: Any, source: Any, target: Any) -> None:
    """Move what is at one place to another; what lies between moves over by one."""
    row = order[source]
    step = 1 if target > source else -1
    for i in range(source, target, step):
        order[i] = order[i + step]
    order[target] = row
