"""Propagation of a placement, in plain Python that only indexes: it runs on a list, and compiled on an int64 array.

A section can hold its rest only if the unplaced rows, each above its own lowest place and one on top of the other,
end below the capacity. Where two neighbouring sections have little to spare, a row that lies in both can begin only
where both are filled that far: at a sum of some rows of the one and a sum of some rows of the other.
"""

from __future__ import annotations

from typing import Any

from .memory import (
    ALIGNMENT,
    CAPACITY,
    CHOICES,
    CLOSING,
    CLOSING_END,
    CROSSING,
    DIRTY,
    DIRTY_QUEUE,
    DIRTY_TOP,
    DOUBTFUL,
    DOUBTFUL_QUEUE,
    DOUBTFUL_TOP,
    FAR,
    FIRST_SECTION,
    FLOOR,
    HIGH,
    LOW,
    MEMBERS,
    MEMBERS_END,
    MOST_SUMS,
    NEAR,
    NEAR_END,
    NONE,
    OFFSET,
    OPENING,
    OPENING_END,
    PIECES,
    PIECES_END,
    PINS,
    PINS_END,
    PLACED,
    REACH,
    ROOM,
    SECTION_WIDTH,
    SECTIONS_END,
    SIZE,
    STAYING,
    STAYING_END,
    SUMS,
    TOP,
    TOTAL,
    TRAIL,
    TWIN,
)


def save(at: Any, value: Any, m: Any) -> None:
    """Write a value; the trail keeps the old one."""
    old = m[at]
    if old != value:
        end = m[TRAIL]
        m[end] = at
        m[end + 1] = old
        m[TRAIL] = end + 2
        m[at] = value


def undo(end: Any, m: Any) -> None:
    """Take back what was saved since the trail ended there."""
    at = m[TRAIL]
    while at > end:
        at -= 2
        m[m[at]] = m[at + 1]
    m[TRAIL] = end


def crowded(times: Any, m: Any) -> Any:
    """Return whether the trail lacks room for `times` placements, with what must follow each."""
    return m[TRAIL] + times * m[ROOM] > len(m)


def place(row: Any, m: Any) -> Any:
    """Place a row at its offset, under all that is unplaced; return False if the rest cannot fit."""
    size = m[row + SIZE]
    top = m[row + OFFSET] + size
    save(row + PLACED, 1, m)
    for piece in range(m[row + PIECES], m[row + PIECES_END], 2):
        for section in range(m[piece], m[piece + 1], SECTION_WIDTH):
            save(section + TOTAL, m[section + TOTAL] - size, m)
    for section in range(m[row + LOW], m[row + HIGH] - SECTION_WIDTH, SECTION_WIDTH):
        save(section + CROSSING, m[section + CROSSING] - 1, m)
    touch(row, m)
    good = True
    for i in range(m[row + NEAR], m[row + NEAR_END]):
        other = m[i]
        if good and m[other + PLACED] == 0 and m[other + OFFSET] < top:
            good = lift(other, top, m)
    return settle(good, m)


def refuse(row: Any, m: Any) -> Any:
    """Raise a row whose place was tried in vain; return False if the rest cannot fit.

    In an answer with the least sum of offsets, what lies higher than it might has something in its way: a neighbour
    that begins below the row's top. The row lies above that neighbour.
    """
    top = m[row + OFFSET] + m[row + SIZE]
    least = FAR
    for i in range(m[row + NEAR], m[row + NEAR_END]):
        other = m[i]
        if m[other + PLACED] == 0 and m[other + OFFSET] < top:
            least = min(least, m[other + OFFSET] + m[other + SIZE])
    if least == FAR:
        return False
    good = lift(row, least, m)
    return settle(good, m)


def touch(row: Any, m: Any) -> None:
    """Queue the sections of a row: something about it has changed."""
    for piece in range(m[row + PIECES], m[row + PIECES_END], 2):
        for section in range(m[piece], m[piece + 1], SECTION_WIDTH):
            mark(section, m)


def mark(section: Any, m: Any) -> None:
    """Queue a section, unless it is queued."""
    if m[section + DIRTY] == 0:
        m[section + DIRTY] = 1
        m[m[DIRTY_TOP]] = section
        m[DIRTY_TOP] += 1


def lift(row: Any, least: Any, m: Any) -> Any:
    """Raise an unplaced row to `least` or above, its later twins on top of it; return False if one does not fit."""
    while row != NONE and m[row + PLACED] == 0:
        offset = free(row, least, m)
        if offset <= m[row + OFFSET]:
            return True
        save(row + OFFSET, offset, m)
        touch(row, m)
        least = offset + m[row + SIZE]
        if least > m[CAPACITY]:
            return False
        row = m[row + TWIN]
    return True


def free(row: Any, offset: Any, m: Any) -> Any:
    """Return the lowest aligned place at or above `offset` that hits none of the row's pinned neighbours."""
    size, alignment = m[row + SIZE], m[row + ALIGNMENT]
    offset += -offset % alignment
    for pin in range(m[row + PINS], m[row + PINS_END], 2):
        if offset < m[pin + 1] and m[pin] < offset + size:
            offset = m[pin + 1]
            offset += -offset % alignment
    return offset


def settle(good: Any, m: Any) -> Any:
    """Look at what has changed until nothing follows any more; return False once something cannot fit."""
    while m[DIRTY_TOP] > m[DIRTY_QUEUE] or m[DOUBTFUL_TOP] > m[DOUBTFUL_QUEUE]:
        if m[DIRTY_TOP] > m[DIRTY_QUEUE]:
            m[DIRTY_TOP] -= 1
            section = m[m[DIRTY_TOP]]
            m[section + DIRTY] = 0
            if good:
                good = refresh(section, m)
                doubt(section, m)
                doubt(section + SECTION_WIDTH, m)
        else:
            m[DOUBTFUL_TOP] -= 1
            section = m[m[DOUBTFUL_TOP]]
            m[section + DOUBTFUL] = 0
            if good:
                good = balance(section, m)
    return good


def doubt(section: Any, m: Any) -> None:
    """Queue the boundary between a section and the one before it."""
    if section > m[FIRST_SECTION] and section < m[SECTIONS_END] and m[section + DOUBTFUL] == 0:
        m[section + DOUBTFUL] = 1
        m[m[DOUBTFUL_TOP]] = section
        m[DOUBTFUL_TOP] += 1


def refresh(section: Any, m: Any) -> Any:
    """Work out a section again; return False if its rest ends above the capacity."""
    sort_members(section, m)
    last = m[CAPACITY] - m[section + TOTAL]  # who comes next lies no higher
    floor, reach, top, choices = FAR, 0, FAR, 0
    for i in range(m[section + MEMBERS], m[section + MEMBERS_END]):
        row = m[i]
        if m[row + PLACED] == 1:
            break
        offset = m[row + OFFSET]
        floor = min(floor, offset)
        reach = max(reach, offset) + m[row + SIZE]
        top = min(top, offset + m[row + SIZE])
        if offset <= last:
            choices += 1
    save(section + FLOOR, floor, m)
    save(section + REACH, reach, m)
    save(section + TOP, top, m)
    save(section + CHOICES, choices, m)
    return reach <= m[CAPACITY]


def sort_members(section: Any, m: Any) -> None:
    """Sort a section's rows by offset, placed ones last: they nearly are from the last time."""
    begin = m[section + MEMBERS]
    for i in range(begin + 1, m[section + MEMBERS_END]):
        row = m[i]
        key = FAR if m[row + PLACED] == 1 else m[row + OFFSET]
        at = i
        while at > begin:
            other = m[at - 1]
            if (FAR if m[other + PLACED] == 1 else m[other + OFFSET]) <= key:
                break
            m[at] = other
            at -= 1
        m[at] = row


def balance(section: Any, m: Any) -> Any:
    """Raise the rows that stay over a section's beginning to where both sides can be filled; False if nowhere.

    What lies under the lowest of them are rows that close there on the one side, rows that open there on the other.
    Each side may waste what its section has to spare, no more.
    """
    least = FAR
    for i in range(m[section + STAYING], m[section + STAYING_END]):
        if m[m[i] + PLACED] == 0:
            least = min(least, m[m[i] + OFFSET])
    if least == FAR:
        return True
    former = section - SECTION_WIDTH
    before, after = m[former + FLOOR], m[section + FLOOR]
    spare_before = m[CAPACITY] - before - m[former + TOTAL]
    spare_after = m[CAPACITY] - after - m[section + TOTAL]
    if least - before <= spare_before and least - after <= spare_after:
        return True
    if crowded(1, m):
        return True  # what follows is only help
    num_before = subset_sums(before, m[section + CLOSING], m[section + CLOSING_END], m[SUMS], m)
    num_after = subset_sums(after, m[section + OPENING], m[section + OPENING_END], m[SUMS] + MOST_SUMS, m)
    if num_before == 0 or num_after == 0:
        return True
    at = meeting(least, num_before, spare_before, num_after, spare_after, m)
    if at < 0:
        return False
    good = True
    for i in range(m[section + STAYING], m[section + STAYING_END]):
        row = m[i]
        if good and m[row + PLACED] == 0 and m[row + OFFSET] < at:
            good = lift(row, at, m)
    return good


def subset_sums(base: Any, begin: Any, end: Any, sums: Any, m: Any) -> Any:
    """Write `base` plus every sum of unplaced rows to the scratch `sums`, ascending; return their number.

    Sums above the capacity are left out; 0 if there are too many.
    """
    spare = m[SUMS] + 2 * MOST_SUMS
    m[sums] = base
    count = 1
    for k in range(begin, end):
        if m[m[k] + PLACED] == 1:
            continue
        size = m[m[k] + SIZE]
        for i in range(count):
            m[spare + i] = m[sums + i]
        old, i, j, count = count, 0, 0, 0
        while i < old or j < old:
            if j == old or (i < old and m[spare + i] <= m[spare + j] + size):
                value = m[spare + i]
                i += 1
            else:
                value = m[spare + j] + size
                j += 1
            if value > m[CAPACITY]:
                break
            if count > 0 and m[sums + count - 1] == value:
                continue
            if count == MOST_SUMS:
                return 0
            m[sums + count] = value
            count += 1
    return count


def meeting(at: Any, num_before: Any, spare_before: Any, num_after: Any, spare_after: Any, m: Any) -> Any:
    """Return the least offset from `at` on that lies at most the spare bytes above a sum of each side, or -1."""
    one, two = m[SUMS], m[SUMS] + MOST_SUMS
    last_one, last_two = one + num_before - 1, two + num_after - 1
    while True:
        while one < last_one and m[one + 1] <= at:
            one += 1
        while two < last_two and m[two + 1] <= at:
            two += 1
        higher = at
        if m[one] + spare_before < at:
            if one == last_one:
                return -1
            higher = m[one + 1]
        if m[two] + spare_after < at:
            if two == last_two:
                return -1
            higher = max(higher, m[two + 1])
        if higher == at:
            return at
        at = higher
