"""The exact search itself, in plain Python that only indexes: it runs on a list, and compiled on an int64 array.

A choice places one row at the lowest place where it still may lie, under all that is unplaced. If that fails, the row
lies higher, on top of an unplaced neighbour, and is raised: the next choice may be any row. A row can be chosen if no
unplaced neighbour can lie below it. After a placement a part of time may fall apart; its parts are solved one by one,
and if one fails the choice fails, whatever the others found. All state is in the memory, so a search stops at a limit
of placements and goes on later.
"""

from __future__ import annotations

from typing import Any

from .memory import (
    AGAIN,
    CAPACITY,
    CHOICES,
    CHOOSING,
    CROSSING,
    F_HIGH,
    F_KEY,
    F_LIST,
    F_LIST_END,
    F_LOW,
    F_PART,
    F_PARTS_END,
    F_ROW,
    F_TRAIL,
    FAILED,
    FAR,
    FIRST_FRAME,
    FIRST_SECTION,
    FLOOR,
    FRAME,
    FRAME_WIDTH,
    FULL,
    LISTED_TOP,
    LOW,
    MEMBERS,
    MEMBERS_END,
    NEW,
    NODES,
    NONE,
    OFFSET,
    P_HIGH,
    P_LIST,
    P_LIST_END,
    P_LOW,
    P_SLACK,
    PART_WIDTH,
    PARTS_TOP,
    PIECES,
    PIECES_END,
    PLACED,
    RANK,
    REACH,
    REFUTED,
    REFUTED_MASK,
    RULE,
    RUNNING,
    SALT,
    SECTION_WIDTH,
    SECTIONS_END,
    SOLVED,
    STAGE,
    START,
    TOP,
    TOTAL,
    TRAIL,
    UNDER_WAY,
    WEIGHT,
)
from .propagation import crowded, mark, place, refuse, save, settle, undo

BY_CHOICES, BY_FLOOR, BY_OFFSET = range(3)
"""Rules: the section with the fewest rows that may come next; the one with the lowest floor; the lowest row of all."""


def advance(node_limit: Any, m: Any) -> Any:
    """Search on until solved, refuted or `node_limit` placements in all; return RUNNING, SOLVED, FAILED or FULL."""
    if m[STAGE] == NEW:
        if not look(m):
            return FAILED
        m[START] = m[TRAIL]
    if m[STAGE] == AGAIN:
        undo(m[START], m)
        m[FRAME], m[CHOOSING] = m[FIRST_FRAME], False
    m[STAGE] = UNDER_WAY
    while True:
        if not m[CHOOSING]:
            while m[m[FRAME] + F_PART] == m[m[FRAME] + F_PARTS_END]:
                if m[FRAME] == m[FIRST_FRAME]:
                    return SOLVED
                m[FRAME] -= FRAME_WIDTH  # every part is solved: so is the frame
            enter(m)
            if not m[CHOOSING]:
                continue
            if known_hopeless(m):
                if not back(m):
                    return FAILED
                continue
        if m[NODES] >= node_limit:
            return RUNNING
        if crowded(2, m):
            return FULL
        frame = m[FRAME]
        row = choose(frame, m)
        m[frame + F_ROW], m[frame + F_TRAIL] = row, m[TRAIL]
        m[NODES] += 1
        if place(row, m):
            split(frame, m)
            m[CHOOSING] = False
            continue
        undo(m[frame + F_TRAIL], m)
        if not refuse(row, m) and not back(m):
            return FAILED


def look(m: Any) -> Any:
    """Work out every section for the first time; return False if one cannot hold its rows."""
    for section in range(m[FIRST_SECTION], m[SECTIONS_END], SECTION_WIDTH):
        mark(section, m)
    return settle(True, m)


def enter(m: Any) -> None:
    """Begin the next part of the deepest frame; one row alone is placed where it is."""
    parent = m[FRAME]
    part = m[parent + F_PART]
    save(parent + F_PART, part + PART_WIDTH, m)
    if m[part + P_LIST_END] - m[part + P_LIST] == 1:
        m[NODES] += 1
        place(m[m[part + P_LIST]], m)
        return
    child = parent + FRAME_WIDTH
    m[FRAME] = child
    m[child + F_LOW], m[child + F_HIGH] = m[part + P_LOW], m[part + P_HIGH]
    m[child + F_LIST], m[child + F_LIST_END] = m[part + P_LIST], m[part + P_LIST_END]
    m[child + F_KEY] = fingerprint(child, m)
    m[CHOOSING] = True


def known_hopeless(m: Any) -> Any:
    """Return whether the state of the deepest frame was refuted before."""
    key = m[m[FRAME] + F_KEY]
    return m[m[REFUTED] + (key & m[REFUTED_MASK])] == key


def back(m: Any) -> Any:
    """Leave the deepest frame, which failed, and every frame that fails with it; return False if none is left."""
    while True:
        key = m[m[FRAME] + F_KEY]
        m[m[REFUTED] + (key & m[REFUTED_MASK])] = key
        m[FRAME] -= FRAME_WIDTH
        frame = m[FRAME]
        if frame == m[FIRST_FRAME]:
            return False
        undo(m[frame + F_TRAIL], m)
        m[CHOOSING] = True
        if refuse(m[frame + F_ROW], m):
            return True


def choose(frame: Any, m: Any) -> Any:
    """Return the row to place next by this turn's rule, then slack, then rank.

    Where the row with the lowest top lies, the lowest row can always be chosen: there is one in any part.
    """
    if m[RULE] == BY_OFFSET:
        return lowest_of_all(frame, m)
    found, least, least_slack = NONE, FAR, FAR
    for section in range(m[frame + F_LOW], m[frame + F_HIGH], SECTION_WIDTH):
        if m[section + TOTAL] == 0:
            continue
        slack = m[CAPACITY] - m[section + REACH]
        score = m[section + WEIGHT] * (m[section + CHOICES] if m[RULE] == BY_CHOICES else m[section + FLOOR])
        if score > least or (score == least and slack >= least_slack):
            continue
        row = lowest_of(section, m)
        if row != NONE:
            found, least, least_slack = row, score, slack
    return found


def lowest_of_all(frame: Any, m: Any) -> Any:
    """Return the lowest unplaced row of a frame, the first by rank."""
    found = NONE
    for i in range(m[frame + F_LIST], m[frame + F_LIST_END]):
        if found == NONE or lies_before(m[i], found, m):
            found = m[i]
    return found


def lies_before(row: Any, other: Any, m: Any) -> Any:
    """Return whether a row lies lower than another, or as low with a lower rank."""
    return (m[row + OFFSET], m[row + RANK]) < (m[other + OFFSET], m[other + RANK])


def lowest_of(section: Any, m: Any) -> Any:
    """Return the first by rank of a section's lowest unplaced rows that can be chosen, or NONE."""
    found = NONE
    for i in range(m[section + MEMBERS], m[section + MEMBERS_END]):
        row = m[i]
        if m[row + PLACED] == 1 or m[row + OFFSET] > m[section + FLOOR]:
            continue
        if (found == NONE or m[row + RANK] < m[found + RANK]) and grounded(row, m):
            found = row
    return found


def grounded(row: Any, m: Any) -> Any:
    """Return whether no unplaced neighbour can lie below a row."""
    for piece in range(m[row + PIECES], m[row + PIECES_END], 2):
        for section in range(m[piece], m[piece + 1], SECTION_WIDTH):
            if m[section + TOP] <= m[row + OFFSET]:
                return False
    return True


def fingerprint(frame: Any, m: Any) -> Any:
    """Return a 63-bit hash of what a part's outcome depends on: its rows, and how low each may lie."""
    code = 1
    for i in range(m[frame + F_LIST], m[frame + F_LIST_END]):
        row = m[i]
        code = ((code ^ m[row + OFFSET] ^ m[row + SALT]) * 0x3F58476D1CE4E5B9) & 0x7FFFFFFFFFFFFFFF
        code ^= code >> 31
    return code


def split(frame: Any, m: Any) -> None:
    """List the parts that the frame's choice left of its sections, each with its rows, the tightest first."""
    first = m[PARTS_TOP]
    parts, listed = first, m[LISTED_TOP]
    section = m[frame + F_LOW]
    while section < m[frame + F_HIGH]:
        if m[section + TOTAL] == 0:
            section += SECTION_WIDTH
            continue
        end, slack = section, m[CAPACITY] - m[section + REACH]
        while m[end + CROSSING] > 0:
            end += SECTION_WIDTH
            slack = min(slack, m[CAPACITY] - m[end + REACH])
        end += SECTION_WIDTH
        part = insertion(first, parts, slack, m)
        parts += PART_WIDTH
        m[part + P_LOW], m[part + P_HIGH], m[part + P_SLACK], m[part + P_LIST] = section, end, slack, listed
        for i in range(m[frame + F_LIST], m[frame + F_LIST_END]):
            row = m[i]
            if m[row + PLACED] == 0 and section <= m[row + LOW] and m[row + LOW] < end:
                m[listed] = row
                listed += 1
        m[part + P_LIST_END] = listed
        section = end
    m[frame + F_PART], m[frame + F_PARTS_END] = first, parts
    save(PARTS_TOP, parts, m)
    save(LISTED_TOP, listed, m)


def insertion(first: Any, end: Any, slack: Any, m: Any) -> Any:
    """Make room among the parts from `first` to `end`, sorted by slack; return where the new one belongs."""
    at = end
    while at > first and m[at - PART_WIDTH + P_SLACK] > slack:
        at -= PART_WIDTH
        for field in range(PART_WIDTH):
            m[at + PART_WIDTH + field] = m[at + field]
    return at
