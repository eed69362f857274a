"""The memory of an exact search: one flat list, or int64 array, of records that point at each other.

A pointer is an index. Registers come first, then rows, sections, what they list, the stacks, and the trail at the end,
which may grow. Compiled code that takes one array is compiled in seconds; with fifty it took minutes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

RUNNING, SOLVED, FAILED, FULL = range(4)
"""The results of a search. FULL: the trail needs more room before it can go on."""

NEW, AGAIN, UNDER_WAY = range(3)
"""Stages: nothing was looked at yet; a turn begins; a turn is under way."""

NONE: Final = 0
"""A pointer to nothing: registers lie there."""

FAR: Final = 1 << 62
"""An offset that no row reaches: the floor of a section in which nothing is left to place."""

CAPACITY, NODES, STAGE, RULE, CHOOSING, FRAME, FIRST_FRAME, TRAIL, START = range(9)
LISTED_TOP, PARTS_TOP, FIRST_SECTION, SECTIONS_END, DIRTY_QUEUE, DIRTY_TOP, DOUBTFUL_QUEUE, DOUBTFUL_TOP = range(9, 17)
SUMS, REFUTED, REFUTED_MASK, ROOM, NUM_REGISTERS = range(17, 22)
"""Registers: the capacity in bytes; placements so far; the stage; the rule of choice; whether the deepest frame is at a
choice (or its parts are to be solved); the deepest frame and the first; the end of the trail, and what it was at the
start of a turn; the ends of the lists and parts; the sections; two queues of sections; scratch for sums; the table of
refuted states; the room that the trail needs for one placement; and how many registers there are."""

OFFSET, SIZE, PLACED, RANK, ALIGNMENT, LOW, HIGH, TWIN, SALT = range(9)
PIECES, PIECES_END, NEAR, NEAR_END, PINS, PINS_END, ROW_WIDTH = range(9, 16)
"""Fields of a row: where it lies or the lowest place where it still may; its size in bytes; whether it is placed; its
rank; its alignment; its first section and the end of its last; the next identical row or NONE; a random number; and what
it lists: pieces (first section, end), neighbours, pinned neighbours (low, top). Last, how many fields there are."""

_ROW_COLUMNS: Final = {OFFSET: "starts", SIZE: "sizes", ALIGNMENT: "alignments", SALT: "salts"}

FLOOR, REACH, TOP, CHOICES, TOTAL, CROSSING, DIRTY, DOUBTFUL, WEIGHT = range(9)
MEMBERS, MEMBERS_END, OPENING, OPENING_END, CLOSING, CLOSING_END, STAYING, STAYING_END, SECTION_WIDTH = range(9, 18)
"""Fields of a section. Of its unplaced rows: the lowest offset, what they reach at least one on top of the other, the
lowest top, how many may come next, their bytes, and how many have begun and end later. Whether it is in either queue.
Its weight in this turn's choices. What it lists: rows in it, only in it and not in the one before, only in that one,
in both. Last, how many fields there are."""

F_TRAIL, F_ROW, F_KEY, F_LOW, F_HIGH, F_LIST, F_LIST_END, F_PART, F_PARTS_END, FRAME_WIDTH = range(10)
"""Fields of a frame: the end of the trail at its choice, the row it has placed, the fingerprint of its state, its
sections, its list of unplaced rows, and the parts that its choice left. Last, how many fields there are."""

P_LOW, P_HIGH, P_LIST, P_LIST_END, P_SLACK, PART_WIDTH = range(6)
"""Fields of a part: its sections, its list of unplaced rows, the least room to spare in one of its sections. Last, how many
fields there are."""

MOST_SUMS: Final = 1024
"""Sums of subsets kept for one side of a boundary; with more, nothing is concluded from it."""

_REMEMBERED: Final = {True: 1 << 18, False: 1 << 14}
"""Slots for refuted states, compiled or not; a power of two.

A fingerprint has 63 bits, 18 of which choose the slot: a lookup matches a wrong state with odds of 2**-45, one in
thirty million for a million lookups. It could make a proof wrong, never an assignment.
"""


def records_of(columns: Mapping[str, Sequence[int]], num_sections: int) -> list[int]:
    """Return registers, rows, sections and what they list, for the columns of a layout."""
    num_rows = len(columns["sizes"])
    first_section = NUM_REGISTERS + num_rows * ROW_WIDTH
    end = first_section + num_sections * SECTION_WIDTH
    to_row = [NUM_REGISTERS + row * ROW_WIDTH for row in range(num_rows)]
    to_section = [first_section + section * SECTION_WIDTH for section in range(num_sections + 1)]
    memory = [0] * end
    memory[FIRST_SECTION], memory[SECTIONS_END] = first_section, end
    for field, name in _ROW_COLUMNS.items():
        memory[NUM_REGISTERS + field : first_section : ROW_WIDTH] = columns[name]
    for field, name in ((LOW, "low"), (HIGH, "high")):
        memory[NUM_REGISTERS + field : first_section : ROW_WIDTH] = [to_section[s] for s in columns[name]]
    memory[NUM_REGISTERS + TWIN : first_section : ROW_WIDTH] = [to_row[t] if t >= 0 else NONE for t in columns["twins"]]
    for field, name in ((TOTAL, "totals"), (CROSSING, "crossing")):
        memory[first_section + field : end : SECTION_WIDTH] = columns[name]
    pieces = [(to_section[a], to_section[b]) for a, b in zip(columns["piece_low"], columns["piece_high"], strict=True)]
    pins = list(zip(columns["pin_low"], columns["pin_top"], strict=True))
    _pairs(memory, to_row, PIECES, columns["piece_cuts"], pieces)
    _pairs(memory, to_row, PINS, columns["pin_cuts"], pins)
    _lists(memory, to_row, NEAR, columns["near_cuts"], columns["near"], to_row)
    for field, name in ((MEMBERS, "member"), (OPENING, "opening"), (CLOSING, "closing"), (STAYING, "staying")):
        listed = columns["members" if field == MEMBERS else name]
        _lists(memory, to_section[:-1], field, columns[f"{name}_cuts"], listed, to_row)
    return memory


def _lists(
    memory: list[int], owners: list[int], field: int, cuts: Sequence[int], listed: Sequence[int], to_row: list[int]
) -> None:
    """Append what each record lists, as pointers to rows; note where it begins and ends."""
    first = len(memory)
    memory += [to_row[row] for row in listed]
    for i, owner in enumerate(owners):
        memory[owner + field], memory[owner + field + 1] = first + cuts[i], first + cuts[i + 1]


def _pairs(
    memory: list[int], owners: list[int], field: int, cuts: Sequence[int], pairs: Sequence[tuple[int, int]]
) -> None:
    """Append the pairs that each record lists; note where they begin and end."""
    first = len(memory)
    memory += [value for pair in pairs for value in pair]
    for i, owner in enumerate(owners):
        memory[owner + field], memory[owner + field + 1] = first + 2 * cuts[i], first + 2 * cuts[i + 1]


def memory_of(
    records: Sequence[int] | NDArray[np.int64], parts: Sequence[tuple[int, int, list[int]]], capacity: int, fast: bool
) -> Any:
    """Return the memory of a search that has not begun: an int64 array if `fast`, else a list.

    `records` are from `records_of`, `parts` (first section, end, rows) the stretches of time that no row leaves.
    """
    first_section, sections_end = int(records[FIRST_SECTION]), int(records[SECTIONS_END])
    num_rows = (first_section - NUM_REGISTERS) // ROW_WIDTH
    num_sections = (sections_end - first_section) // SECTION_WIDTH
    room = 16 * (num_rows + 4 * num_sections) + 64
    lengths = {
        DIRTY_QUEUE: num_sections,
        DOUBTFUL_QUEUE: num_sections,
        FIRST_FRAME: (num_rows + 1) * FRAME_WIDTH,  # each has placed a row of its own, but for the first
        LISTED_TOP: num_rows * (num_rows + 1) // 2,  # a part has placed a row of its own when it lists the rest
        PARTS_TOP: num_rows * PART_WIDTH,
        SUMS: 3 * MOST_SUMS,
        REFUTED: _REMEMBERED[fast],
        TRAIL: 2 * room,
    }
    more = sum(lengths.values())
    memory: Any = [*records, *[0] * more] if not fast else np.zeros(len(records) + more, np.int64)
    if fast:
        memory[: len(records)] = records
    at = len(records)
    for register, length in lengths.items():
        memory[register] = at
        at += length
    memory[CAPACITY], memory[ROOM], memory[REFUTED_MASK] = capacity, room, _REMEMBERED[fast] - 1
    memory[DIRTY_TOP], memory[DOUBTFUL_TOP] = memory[DIRTY_QUEUE], memory[DOUBTFUL_QUEUE]
    memory[FRAME] = memory[FIRST_FRAME]
    memory[memory[FRAME] + F_PART] = memory[PARTS_TOP]
    for low, high, rows in parts:
        _push_part(memory, first_section, low, high, rows)
    memory[memory[FRAME] + F_PARTS_END] = memory[PARTS_TOP]
    return memory


def _push_part(memory: Any, first_section: int, low: int, high: int, rows: list[int]) -> None:
    part, begin = memory[PARTS_TOP], memory[LISTED_TOP]
    for i, row in enumerate(rows):
        memory[begin + i] = NUM_REGISTERS + row * ROW_WIDTH
    memory[LISTED_TOP] = begin + len(rows)
    memory[PARTS_TOP] = part + PART_WIDTH
    memory[part + P_LOW], memory[part + P_HIGH] = (first_section + s * SECTION_WIDTH for s in (low, high))
    memory[part + P_LIST], memory[part + P_LIST_END] = begin, begin + len(rows)
