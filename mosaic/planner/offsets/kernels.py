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


# -- exact search -----------------------------------------------------------------------------------------------------
#
# Depth-first over canonical placements. Rows are numbered by preorder. In a canonical placement every block lies on
# top of what was placed before it, and blocks are placed by non-decreasing offset, equal offsets by row; every
# assignment can be pushed down into one. A frame is a choice: which block of one part (a range of sections that no
# unplaced block leaves) comes next. After a placement the part may fall apart; its parts are solved one by one, and
# if one fails the choice fails, whatever the others found. All state is in arrays, so a search stops at a node limit
# and goes on later.

DEPTH, LISTED, PARTS, OFFSET_TRAIL, FLOOR_TRAIL, PLACED, CAPACITY, NODES, CHOOSING = range(9)
"""Registers: the deepest frame and the fill of each stack, the capacity in bytes, placements so far, and
whether the deepest frame is at a choice (or its parts are to be solved)."""

RUNNING, SOLVED, FAILED = range(3)

F_LOW, F_HIGH, F_OFFSET, F_ROW, F_OFFSETS, F_FLOORS, F_PLACED, F_LIST, F_LIST_END = range(9)
F_PARTS, F_PARTS_END, F_PART, F_LISTED, F_KEY = range(9, 14)
"""Columns of a frame: its sections, the choice it is at (at first: the one before it), marks of the trails, its
list of unplaced rows, the parts its choice left, the next of them, the fill of the list stack below its parts,
and the fingerprint of its state."""
FRAME_WIDTH = 14


def lifted(row: Any, offset: Any, size: Any, alignment: Any, pin_cuts: Any, pin_low: Any, pin_top: Any) -> Any:
    """Return the lowest aligned place at or above `offset` that hits none of the row's pinned neighbours."""
    if alignment > 1:
        offset += -offset % alignment
    for i in range(pin_cuts[row], pin_cuts[row + 1]):
        if offset < pin_top[i] and pin_low[i] < offset + size:
            offset = pin_top[i]
            if alignment > 1:
                offset += -offset % alignment
    return offset


def undo(frame: Any, registers: Any, offsets: Any, floors: Any, totals: Any, crossing: Any, placed: Any, sizes: Any,
         low: Any, high: Any, piece_cuts: Any, piece_low: Any, piece_high: Any, trail_row: Any, trail_offset: Any,
         trail_section: Any, trail_floor: Any, stack: Any) -> None:  # fmt: skip
    """Take back everything that was placed since the frame's choice."""
    for i in range(registers[OFFSET_TRAIL] - 1, frame[F_OFFSETS] - 1, -1):
        offsets[trail_row[i]] = trail_offset[i]
    registers[OFFSET_TRAIL] = frame[F_OFFSETS]
    for i in range(registers[FLOOR_TRAIL] - 1, frame[F_FLOORS] - 1, -1):
        floors[trail_section[i]] = trail_floor[i]
    registers[FLOOR_TRAIL] = frame[F_FLOORS]
    for i in range(registers[PLACED] - 1, frame[F_PLACED] - 1, -1):
        row = stack[i]
        placed[row] = 0
        for p in range(piece_cuts[row], piece_cuts[row + 1]):
            for s in range(piece_low[p], piece_high[p]):
                totals[s] += sizes[row]
        for s in range(low[row], high[row] - 1):
            crossing[s] += 1
    registers[PLACED] = frame[F_PLACED]
    registers[LISTED] = frame[F_LISTED]
    registers[PARTS] = frame[F_PARTS]


def choose(frame: Any, listed: Any, offsets: Any, sizes: Any, placed: Any, twin: Any) -> Any:
    """Return the frame's next candidate after its cursor, or -1.

    Candidates come by (offset, row), not below the last placement, and below the lowest possible top: under a higher
    one there would be room for the block of that top. Of identical blocks only the first unplaced one is tried.
    """
    limit, found, at = -1, -1, -1
    cursor, cursor_row = frame[F_OFFSET], frame[F_ROW]
    for i in range(frame[F_LIST], frame[F_LIST_END]):
        row = listed[i]
        offset = offsets[row]
        top = offset + sizes[row]
        if limit < 0 or top < limit:
            limit = top
        if offset < cursor or (offset == cursor and row <= cursor_row):
            continue
        if (found < 0 or offset < at) and (twin[row] < 0 or placed[twin[row]] == 1):
            found, at = row, offset
    if found < 0 or at >= limit:
        return -1
    return found


def fingerprint(frame: Any, listed: Any, offsets: Any, salts: Any) -> Any:
    """Return a 63-bit hash of what a part's outcome depends on: its rows, their offsets, which may be chosen."""
    total = 1
    cursor, cursor_row = frame[F_OFFSET], frame[F_ROW]
    for i in range(frame[F_LIST], frame[F_LIST_END]):
        row = listed[i]
        offset = offsets[row]
        code = 2 * offset
        if offset < cursor or (offset == cursor and row <= cursor_row):
            code += 1
        code = ((code ^ salts[row]) * 0x1E3779B97F4A7C15) & 0x7FFFFFFFFFFFFFFF
        code = ((code ^ (code >> 31)) * 0x3F58476D1CE4E5B9) & 0x7FFFFFFFFFFFFFFF
        total = (total + (code ^ (code >> 29))) & 0x7FFFFFFFFFFFFFFF
    return total


def put(row: Any, frame: Any, registers: Any, offsets: Any, floors: Any, totals: Any, crossing: Any, placed: Any,
        sizes: Any, low: Any, high: Any, piece_cuts: Any, piece_low: Any, piece_high: Any, trail_row: Any,
        trail_offset: Any, trail_section: Any, trail_floor: Any, stack: Any, near_cuts: Any, near: Any,
        member_cuts: Any, members: Any, alignments: Any, pin_cuts: Any, pin_low: Any, pin_top: Any,
        dirty: Any) -> Any:  # fmt: skip
    """Place a row at its offset; raise what lies over it; return False if some section cannot hold its rest."""
    capacity = registers[CAPACITY]
    at = offsets[row]
    top = at + sizes[row]
    placed[row] = 1
    stack[registers[PLACED]] = row
    registers[PLACED] += 1
    for p in range(piece_cuts[row], piece_cuts[row + 1]):
        for s in range(piece_low[p], piece_high[p]):
            totals[s] -= sizes[row]
    for s in range(low[row], high[row] - 1):
        crossing[s] -= 1
    first, last = low[row], high[row]
    good = True
    for i in range(near_cuts[row], near_cuts[row + 1]):
        other = near[i]
        if placed[other] == 1 or offsets[other] >= top:
            continue
        new = lifted(other, top, sizes[other], alignments[other], pin_cuts, pin_low, pin_top)
        trail_row[registers[OFFSET_TRAIL]] = other
        trail_offset[registers[OFFSET_TRAIL]] = offsets[other]
        registers[OFFSET_TRAIL] += 1
        offsets[other] = new
        good = good and new + sizes[other] <= capacity
        for p in range(piece_cuts[other], piece_cuts[other + 1]):
            for s in range(piece_low[p], piece_high[p]):
                dirty[s] = 1
        if low[other] < first:
            first = low[other]
        if high[other] > last:
            last = high[other]
    for s in range(first, last):
        if dirty[s] == 0:
            continue
        dirty[s] = 0
        if not good or totals[s] == 0:
            continue
        lowest = -1
        for i in range(member_cuts[s], member_cuts[s + 1]):
            other = members[i]
            if placed[other] == 0 and (lowest < 0 or offsets[other] < lowest):
                lowest = offsets[other]
        if lowest > floors[s]:
            trail_section[registers[FLOOR_TRAIL]] = s
            trail_floor[registers[FLOOR_TRAIL]] = floors[s]
            registers[FLOOR_TRAIL] += 1
            floors[s] = lowest
            if lowest + totals[s] > capacity:
                good = False
    if not good:
        return False
    for s in range(frame[F_LOW], frame[F_HIGH]):  # noqa: SIM110  (numba compiles loops, not generators)
        if totals[s] > 0 and floors[s] < at and at + totals[s] > capacity:
            return False
    return True


def split(
    frame: Any, registers: Any, totals: Any, crossing: Any, placed: Any, low: Any, listed: Any, parts: Any
) -> None:
    """List the parts that the frame's choice left of its sections, each with its unplaced rows."""
    section = frame[F_LOW]
    while section < frame[F_HIGH]:
        if totals[section] == 0:
            section += 1
            continue
        end = section
        while crossing[end] > 0:
            end += 1
        end += 1
        begin = registers[LISTED]
        for i in range(frame[F_LIST], frame[F_LIST_END]):
            row = listed[i]
            if placed[row] == 0 and section <= low[row] < end:
                listed[registers[LISTED]] = row
                registers[LISTED] += 1
        part = parts[registers[PARTS]]
        part[0], part[1], part[2], part[3] = section, end, begin, registers[LISTED]
        registers[PARTS] += 1
        section = end
    frame[F_PARTS_END] = registers[PARTS]
    frame[F_PART] = frame[F_PARTS]


def advance(node_limit: Any, registers: Any, frames: Any, parts: Any, listed: Any, offsets: Any, floors: Any,
            totals: Any, crossing: Any, placed: Any, dirty: Any, stack: Any, trail_row: Any, trail_offset: Any,
            trail_section: Any, trail_floor: Any, sizes: Any, low: Any, high: Any, piece_cuts: Any, piece_low: Any,
            piece_high: Any, near_cuts: Any, near: Any, member_cuts: Any, members: Any, alignments: Any, pin_cuts: Any,
            pin_low: Any, pin_top: Any, twin: Any, salts: Any, refuted: Any) -> Any:  # fmt: skip
    """Search on until solved, refuted or `node_limit` placements in all; return RUNNING, SOLVED or FAILED."""
    while True:
        frame = frames[registers[DEPTH]]
        if registers[CHOOSING] == 0:
            while frame[F_PART] == frame[F_PARTS_END]:  # every part is solved: so is the frame
                if registers[DEPTH] == 0:
                    return SOLVED
                registers[DEPTH] -= 1
                frame = frames[registers[DEPTH]]
            part = parts[frame[F_PART]]
            frame[F_PART] += 1
            registers[DEPTH] += 1
            child = frames[registers[DEPTH]]
            child[F_LOW], child[F_HIGH] = part[0], part[1]
            child[F_LIST], child[F_LIST_END] = part[2], part[3]
            child[F_OFFSET], child[F_ROW] = frame[F_OFFSET], frame[F_ROW]
            child[F_OFFSETS], child[F_FLOORS] = registers[OFFSET_TRAIL], registers[FLOOR_TRAIL]
            child[F_PLACED], child[F_LISTED] = registers[PLACED], registers[LISTED]
            child[F_PARTS] = registers[PARTS]
            frame = child
            registers[CHOOSING] = 1
            if part[3] - part[2] == 1:  # no unplaced block touches it: where it lies matters to nobody
                registers[NODES] += 1
                put(listed[part[2]], frame, registers, offsets, floors, totals, crossing, placed, sizes, low, high,
                    piece_cuts, piece_low, piece_high, trail_row, trail_offset, trail_section, trail_floor, stack,
                    near_cuts, near, member_cuts, members, alignments, pin_cuts, pin_low, pin_top, dirty)  # fmt: skip
                frame[F_PART] = frame[F_PARTS_END] = registers[PARTS]
                registers[CHOOSING] = 0
                continue
            frame[F_KEY] = fingerprint(frame, listed, offsets, salts)
            if refuted[frame[F_KEY] & (len(refuted) - 1)] == frame[F_KEY]:
                frame[F_OFFSET] = registers[CAPACITY]  # nothing is left to choose
        if registers[NODES] >= node_limit:
            return RUNNING
        row = choose(frame, listed, offsets, sizes, placed, twin)
        if row >= 0:
            frame[F_OFFSET], frame[F_ROW] = offsets[row], row
            registers[NODES] += 1
            if put(row, frame, registers, offsets, floors, totals, crossing, placed, sizes, low, high, piece_cuts,
                   piece_low, piece_high, trail_row, trail_offset, trail_section, trail_floor, stack, near_cuts, near,
                   member_cuts, members, alignments, pin_cuts, pin_low, pin_top, dirty):  # fmt: skip
                split(frame, registers, totals, crossing, placed, low, listed, parts)
                registers[CHOOSING] = 0
                continue
        else:
            refuted[frame[F_KEY] & (len(refuted) - 1)] = frame[F_KEY]
            registers[DEPTH] -= 1
            if registers[DEPTH] == 0:
                return FAILED
            frame = frames[registers[DEPTH]]
        undo(frame, registers, offsets, floors, totals, crossing, placed, sizes, low, high, piece_cuts, piece_low,
             piece_high, trail_row, trail_offset, trail_section, trail_floor, stack)  # fmt: skip


# -- local search ----------------------------------------------------------------------------------------------------


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
    none = 1 << 62
    if state[1] == 0:
        cost = drop(order, offsets, tops, sizes, piece_cuts, piece_low, piece_high, alignments, pin_cuts, pin_low,
                    pin_top, none)  # fmt: skip
        state[2], state[4] = cost, cost
        state[3] = 0
        for i in range(n):
            if offsets[i] + sizes[i] > state[3]:
                state[3] = offsets[i] + sizes[i]
        for i in range(len(past)):
            past[i] = cost
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
        row = order[source]
        if target < source:
            for i in range(source, target, -1):
                order[i] = order[i - 1]
        else:
            for i in range(source, target):
                order[i] = order[i + 1]
        order[target] = row
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
            if target < source:
                for i in range(target, source):
                    order[i] = order[i + 1]
            else:
                for i in range(target, source, -1):
                    order[i] = order[i - 1]
            order[source] = row
        past[state[1] % len(past)] = state[2]
    return state[3]


HELPERS["drop"] = ("lifted",)
HELPERS["improve"] = ("drop",)
HELPERS["put"] = ("lifted",)
HELPERS["advance"] = ("put", "undo", "choose", "split", "fingerprint")
