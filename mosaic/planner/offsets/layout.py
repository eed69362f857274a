"""Shared by searches of one set of blocks: rows in a fixed order, their sections, neighbours and boundaries."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .blocks import Blocks
from .memory import records_of
from .skyline import PREORDERS, preorder

_SALTS_SEED: Final = 20240427


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Blocks as columns of integers, without pinned ones; `rows` are the blocks in the order of the first preorder.

    Parameters
    ----------
    columns : dict of str to list of int
        Per row: starts (where it may lie at the lowest), sizes, alignments, first and last section, twins, salts; what it
        lists: pieces, neighbours (near), pinned neighbours. Per section: totals, crossing, and lists of rows.
    keys : dict of str to list of int
        What preorders compare, by letter: T the largest load, W the width in sections, A size times width.
    """

    rows: list[int]
    num_sections: int
    columns: dict[str, list[int]]
    keys: dict[str, list[int]]

    @cached_property
    def records(self) -> list[int]:
        """The columns as the records of a search's memory."""
        return records_of(self.columns, self.num_sections)

    @cached_property
    def array(self) -> NDArray[np.int64]:
        """The records as an int64 array."""
        return np.array(self.records, dtype=np.int64)

    @cached_property
    def parts(self) -> list[tuple[int, int, list[int]]]:
        """(first section, end, rows) of each stretch of time that no row leaves."""
        crossing, low = self.columns["crossing"], self.columns["low"]
        found, section = [], 0
        while section < self.num_sections:
            end = section
            while crossing[end] > 0:
                end += 1
            end += 1
            rows = [row for row, first in enumerate(low) if section <= first < end]
            if rows:
                found.append((section, end, rows))
            section = end
        return found


def layout_of(blocks: Blocks) -> Layout:
    """Return the layout of blocks; O(pairs).

    Identical rows are twins: each lies above the one before it, as an answer stays one if they change places.
    """
    rows = [row for row in preorder(blocks, PREORDERS[0]) if blocks.pins is None or blocks.pins[row] is None]
    rank = {row: i for i, row in enumerate(rows)}
    spans = [blocks.sections.spans[row] for row in rows]
    sizes = [blocks.sizes[row] for row in rows]
    count = blocks.sections.count
    near = [sorted(rank[other] for other in blocks.conflicts[row] if other in rank) for row in rows]
    members: list[list[int]] = [[] for _ in range(count)]
    crossing = [0] * count
    for row, pieces in enumerate(spans):
        for a, b in pieces:
            for section in range(a, b):
                members[section].append(row)
        for section in range(pieces[0][0], pieces[-1][1] - 1):
            crossing[section] += 1
    opening, closing, staying = _boundaries(members)
    starts, twins = _twins(blocks, rows)
    pins = [blocks.neighbour_pins[row] for row in rows] if blocks.neighbour_pins is not None else [[]] * len(rows)
    pin_rows = [other for found in pins for other in found]
    pin_low = [blocks.pins[other] or 0 for other in pin_rows] if blocks.pins is not None else []
    totals = [sum(sizes[row] for row in rows_) for rows_ in members]
    widths = [sum(b - a for a, b in pieces) for pieces in spans]
    columns = {
        "starts": starts,
        "sizes": sizes,
        "alignments": [blocks.alignments[row] if blocks.alignments is not None else 1 for row in rows],
        "low": [pieces[0][0] for pieces in spans],
        "high": [pieces[-1][1] for pieces in spans],
        "piece_cuts": _cuts(spans),
        "piece_low": [a for pieces in spans for a, _ in pieces],
        "piece_high": [b for pieces in spans for _, b in pieces],
        "near_cuts": _cuts(near),
        "near": _joined(near),
        "member_cuts": _cuts(members),
        "members": _joined(members),
        "opening_cuts": _cuts(opening),
        "opening": _joined(opening),
        "closing_cuts": _cuts(closing),
        "closing": _joined(closing),
        "staying_cuts": _cuts(staying),
        "staying": _joined(staying),
        "pin_cuts": _cuts(pins),
        "pin_low": pin_low,
        "pin_top": [bottom + blocks.sizes[other] for bottom, other in zip(pin_low, pin_rows, strict=True)],
        "twins": twins,
        "salts": _salts(len(rows)),
        "totals": totals,
        "crossing": crossing,
    }
    keys = {
        "T": [max(totals[section] for a, b in pieces for section in range(a, b)) for pieces in spans],
        "W": widths,
        "A": [size * width for size, width in zip(sizes, widths, strict=True)],
    }
    return Layout(rows=rows, num_sections=count, columns=columns, keys=keys)


def _boundaries(members: list[list[int]]) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Return for each section the rows that are not in the one before, those only there, and those in both."""
    pairs = list(pairwise([set(), *map(set, members)]))
    opening = [sorted(after - before) for before, after in pairs]
    closing = [sorted(before - after) for before, after in pairs]
    staying = [sorted(before & after) for before, after in pairs]
    return opening, closing, staying


def _twins(blocks: Blocks, rows: list[int]) -> tuple[list[int], list[int]]:
    """Return where each row may begin at the lowest, and the next row that is the same in all that counts, or -1."""
    starts: list[int] = []
    twins = [-1] * len(rows)
    last: dict[Any, int] = {}
    for i, row in enumerate(rows):
        alignment = blocks.alignments[row] if blocks.alignments is not None else 1
        key = (blocks.sizes[row], blocks.sections.spans[row], alignment)
        before = last.get(key)
        if before is not None:
            twins[before] = i
        starts.append(blocks.lift(row, 0 if before is None else starts[before] + blocks.sizes[row]))
        last[key] = i
    return starts, twins


def _salts(count: int) -> list[int]:
    """Return fixed odd-looking numbers for fingerprints."""
    draws = random.Random(_SALTS_SEED)
    return [draws.getrandbits(62) for _ in range(count)]


def _cuts(rows: Sequence[Sequence[Any]]) -> list[int]:
    cuts = [0]
    for row in rows:
        cuts.append(cuts[-1] + len(row))
    return cuts


def _joined(rows: Sequence[Sequence[int]]) -> list[int]:
    return [value for row in rows for value in row]
