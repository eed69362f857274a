"""Exact search: branch and bound over canonical placements, resumable, compiled where numba is installed.

Follows what is published of MiniMalloc (Moffitt, ASPLOS 2024): canonical order, floors and totals per section,
dominance, time decomposition. Ours differ in that a search can be stopped and resumed, so several preorders and
capacities take turns without starting over; identical blocks are tried once; pinned blocks are obstacles.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from . import compiled, kernels
from .blocks import Blocks
from .skyline import preorder

__all__ = ["FAILED", "RUNNING", "SOLVED", "Layout", "Search", "layout_of"]

RUNNING: Final = kernels.RUNNING
SOLVED: Final = kernels.SOLVED
FAILED: Final = kernels.FAILED

Int64s = NDArray[np.int64]

_MOVING = ("floors", "totals", "crossing")
_FIXED = (
    "sizes", "low", "high", "piece_cuts", "piece_low", "piece_high", "near_cuts", "near", "member_cuts", "members",
    "alignments", "pin_cuts", "pin_low", "pin_top", "twin", "salts",
)  # fmt: skip

_REMEMBERED = {True: 1 << 18, False: 1 << 14}
"""Slots for refuted states, compiled or not; a power of two. Remembering them cut the search on A to a third.

A fingerprint has 63 bits, 18 of which choose the slot: a lookup matches a wrong state with odds of 2**-45, one in
thirty million for a million lookups. It could make a proof wrong, never an assignment.
"""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a search reads and never writes, in an order of rows: by preorder, pinned blocks left out."""

    rows: list[int]
    starts: list[int]
    num_sections: int
    columns: dict[str, Any]
    parts: list[tuple[int, int, list[int]]]
    trail: int
    floor_trail: int

    @cached_property
    def arrays(self) -> list[Int64s]:
        """The columns that a search only reads, as int64 arrays."""
        return [_array(self.columns[name]) for name in _FIXED]


class Search:
    """A search for a placement within a capacity, which goes on wherever it stopped.

    Parameters
    ----------
    layout : Layout
        From `layout_of`; shared by searches of other capacities.
    capacity : int
        Bytes: the largest peak asked for.
    fast : bool
        Compile with numba; otherwise plain Python lists, about 100 times slower but with nothing to load.

    Examples
    --------
    >>> from mosaic.planner.offsets import Problem, blocks_of
    >>> blocks = blocks_of(Problem(sizes=[4, 4, 8], starts=[0, 1, 2], ends=[2, 3, 4]))
    >>> Search(layout_of(blocks, "TWA"), 12, fast=False).advance(100) == SOLVED
    True
    """

    def __init__(self, layout: Layout, capacity: int, *, fast: bool) -> None:
        self.layout, self.capacity, self.fast = layout, capacity, fast
        self.status: int = RUNNING
        n = len(layout.rows)
        fits = all(s + size <= capacity for s, size in zip(layout.starts, layout.columns["sizes"], strict=True))
        if not fits or max(layout.columns["totals"], default=0) > capacity:
            self.status = FAILED
        elif n == 0:
            self.status = SOLVED
        self._state = self._fresh() if self.status == RUNNING else ()

    @property
    def nodes(self) -> int:
        """Placements tried so far."""
        return int(self._state[0][kernels.NODES]) if self._state else 0

    def advance(self, nodes: int) -> int:
        """Try that many more placements at most; return RUNNING, SOLVED or FAILED (proven: nothing fits)."""
        if self.status == RUNNING:
            run = compiled.compiled("advance") if self.fast else kernels.advance
            self.status = int(run(self.nodes + nodes, *self._state))
        return self.status

    def offsets(self, blocks: Blocks) -> list[int]:
        """Return the placement of a solved search, one offset per block."""
        assert self.status == SOLVED
        found = [pin or 0 for pin in blocks.pins] if blocks.pins is not None else [0] * len(blocks)
        if self._state:
            for row, offset in zip(self.layout.rows, self._state[4], strict=True):
                found[row] = int(offset)
        return found

    def _fresh(self) -> tuple[Any, ...]:
        layout, columns = self.layout, self.layout.columns
        n, sections = len(layout.rows), layout.num_sections
        registers = [0] * 9
        registers[kernels.CAPACITY] = self.capacity
        registers[kernels.PARTS] = len(layout.parts)
        make = _array if self.fast else list
        room = n + n * (n + 1) // 2
        listed = np.zeros(room, dtype=np.int64) if self.fast else [0] * room
        parts = _table(n + len(layout.parts) + 1, 4, self.fast)
        frames = _table(n + 2, kernels.FRAME_WIDTH, self.fast)
        at = 0
        for i, (first, last, rows) in enumerate(layout.parts):
            parts[i][0], parts[i][1], parts[i][2], parts[i][3] = first, last, at, at + len(rows)
            for row in rows:
                listed[at] = row
                at += 1
        registers[kernels.LISTED] = at
        root = frames[0]
        root[kernels.F_ROW] = -1
        root[kernels.F_PARTS_END] = len(layout.parts)
        trail, floor_trail = layout.trail, layout.floor_trail
        zeros = [[0] * length for length in (n, sections, n, trail, trail, floor_trail, floor_trail)]
        if self.fast:
            zeros = [np.zeros(len(column), dtype=np.int64) for column in zeros]  # type: ignore[misc]
        moving = [make(column) for column in (layout.starts, *(columns[name] for name in _MOVING))]
        refuted = np.zeros(_REMEMBERED[True], dtype=np.int64) if self.fast else [0] * _REMEMBERED[False]
        fixed = layout.arrays if self.fast else [columns[name] for name in _FIXED]
        return (make(registers), frames, parts, listed, *moving, *zeros, *fixed, refuted)


def layout_of(blocks: Blocks, keys: str) -> Layout:
    """Return the search layout of blocks for a preorder such as "TWA"; O(pairs)."""
    rows = [row for row in preorder(blocks, keys) if blocks.pins is None or blocks.pins[row] is None]
    rank = {row: i for i, row in enumerate(rows)}
    sections = blocks.sections
    spans = [sections.spans[row] for row in rows]
    sizes = [blocks.sizes[row] for row in rows]
    alignments = [blocks.alignments[row] if blocks.alignments is not None else 1 for row in rows]
    near = [[rank[other] for other in blocks.conflicts[row] if other in rank] for row in rows]
    low, high = [pieces[0][0] for pieces in spans], [pieces[-1][1] for pieces in spans]
    members: list[list[int]] = [[] for _ in range(sections.count)]
    crossing = [0] * sections.count
    for row, pieces in enumerate(spans):
        for a, b in pieces:
            for section in range(a, b):
                members[section].append(row)
        for section in range(low[row], high[row] - 1):
            crossing[section] += 1
    starts = [blocks.lift(row, 0) for row in rows]
    pins = [blocks.neighbour_pins[row] for row in rows] if blocks.neighbour_pins is not None else [[]] * len(rows)
    pin_rows = [other for found in pins for other in found]
    pin_low = [blocks.pins[other] or 0 for other in pin_rows] if blocks.pins is not None else []
    last_twin: dict[Any, int] = {}
    twin = []
    for row, key in enumerate(zip(sizes, spans, alignments, starts, strict=True)):
        twin.append(last_twin.get(key, -1) if not pin_rows else -1)
        last_twin[key] = row
    columns = {
        "sizes": sizes,
        "alignments": alignments,
        "low": low,
        "high": high,
        "piece_cuts": _cuts(spans),
        "piece_low": [a for pieces in spans for a, _ in pieces],
        "piece_high": [b for pieces in spans for _, b in pieces],
        "near_cuts": _cuts(near),
        "near": [other for others in near for other in others],
        "member_cuts": _cuts(members),
        "members": [row for rows_ in members for row in rows_],
        "pin_cuts": _cuts(pins),
        "pin_low": pin_low or [0],
        "pin_top": [bottom + blocks.sizes[other] for bottom, other in zip(pin_low, pin_rows, strict=True)] or [0],
        "twin": twin,
        "salts": _salts(len(rows)),
        "floors": [min((starts[row] for row in rows_), default=0) for rows_ in members],
        "totals": [sum(sizes[row] for row in rows_) for rows_ in members],
        "crossing": crossing,
    }
    reach = sum(high) - sum(low)  # what one placement can raise: its own sections and those of its neighbours
    for row, others in enumerate(near):
        if others:
            reach += max(high[row], max([high[o] for o in others])) - min(low[row], min([low[o] for o in others]))
    return Layout(
        rows=rows,
        starts=starts,
        num_sections=sections.count,
        columns=columns,
        parts=list(_static_parts(columns["totals"], crossing, low)),
        trail=len(columns["near"]) + 1,
        floor_trail=reach + 1,
    )


def _static_parts(totals: list[int], crossing: list[int], low: list[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (first section, last, rows) of each stretch of time that no block leaves."""
    section = 0
    while section < len(totals):
        end = section
        while crossing[end] > 0:
            end += 1
        end += 1
        rows = [row for row, first in enumerate(low) if section <= first < end]
        if rows:
            yield section, end, rows
        section = end


def _salts(count: int) -> list[int]:
    """Return fixed odd-looking numbers for fingerprints."""
    draws = random.Random(20240427)
    return [draws.getrandbits(62) for _ in range(count)]


def _cuts(rows: Sequence[Sequence[Any]]) -> list[int]:
    cuts = [0]
    for row in rows:
        cuts.append(cuts[-1] + len(row))
    return cuts


def _array(column: Sequence[int]) -> Int64s:
    return np.array(column, dtype=np.int64)


def _table(rows: int, width: int, fast: bool) -> Any:
    return np.zeros((rows, width), dtype=np.int64) if fast else [[0] * width for _ in range(rows)]
