"""Whether an answer holds, by routes that share no code with the solvers.

`Guard` is cheap enough to stand behind every answer of every solver: it lists the pairs of pieces that share time once
and compares the addresses of all of them at once. `validate` is for people to read: a sweep that answers in sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .problem import Problem, Solution, first_clash, groups_of, lower_bound, rectangles
from .sweep import first_common

_MANY_PAIRS = 100_000  # above this, a sweep is faster than comparing all pairs
_LARGEST = 1 << 61  # bytes; beyond, sums are taken of Python's integers

Column = NDArray[Any]


class Guard:
    """Says what is wrong with offsets for a problem, if anything; built once, asked for every answer.

    Examples
    --------
    >>> guard = Guard(Problem(sizes=[4, 4], starts=[0, 1], ends=[2, 3]))
    >>> guard.fault([0, 4])
    >>> guard.fault([0, 3])
    'buffers 0 and 1 are live together from 1 and overlap: [0, 4) and [3, 7)'
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._starts, self._ends, self._owners = _pieces(problem)
        self._pairs = _pairs(self._starts, self._ends)
        self._roots, self._distances = (np.array(column) for column in groups_of(problem))

    def fault(self, offsets: Sequence[int] | Column, sizes: Sequence[int] | Column | None = None) -> str | None:
        """Return the first thing found wrong with the offsets, or None.

        Offsets and sizes are sequences of int or int64 arrays [n], bytes in the problem's row order; sizes are the problem's by
        default.
        """
        if len(offsets) != len(self._problem):
            return f"{len(offsets)} offsets for {len(self._problem)} buffers"
        if not len(offsets):
            return None
        lows, extents = _columns(offsets, self._problem.sizes if sizes is None else sizes)
        return self._misplaced(lows) or self._clash(lows, lows + extents)

    def _misplaced(self, lows: Column) -> str | None:
        problem = self._problem
        if (row := _first(lows < 0)) is not None:
            return f"buffer {problem.ids[row]} has a negative offset {lows[row]}"
        if problem.alignments != 1 and (row := _first(lows % np.array(problem.alignments) != 0)) is not None:
            return f"buffer {problem.ids[row]} at {lows[row]} is not aligned to {problem.alignment(row)}"
        for row, pin in enumerate(problem.pins or ()):
            if pin is not None and lows[row] != pin:
                return f"buffer {problem.ids[row]} is pinned at {pin} and lies at {lows[row]}"
        if problem.aliases and (row := _first(lows != lows[self._roots] + self._distances)) is not None:
            root = problem.ids[self._roots[row]]
            return f"buffer {problem.ids[row]} lies at {lows[row]}, not {self._distances[row]} bytes into buffer {root}"
        return None

    def _clash(self, lows: Column, tops: Column) -> str | None:
        if self._problem.aliases:  # a group reaches up to the highest end of its members
            highest = tops.copy()
            np.maximum.at(highest, self._roots, tops)
            tops = highest
        lows, tops = lows[self._owners], tops[self._owners]
        if self._pairs is None:
            found = first_common(self._starts.tolist(), self._ends.tolist(), lows.tolist(), tops.tolist())
        else:
            found = _first_overlap(*self._pairs, lows, tops)
        if found is None:
            return None
        one, other = found
        names = [self._problem.ids[self._owners[piece]] for piece in found]
        return (
            f"buffers {names[0]} and {names[1]} are live together from {self._starts[other]} and overlap: "
            f"[{lows[one]}, {tops[one]}) and [{lows[other]}, {tops[other]})"
        )


def _pieces(problem: Problem) -> tuple[Column, Column, Column]:
    """Return start, end and root row of every piece of time in which a group holds a value, by start."""
    if problem.aliases or problem.gaps is not None:
        pieces = [(start, end, row) for row, _, _, spans in rectangles(problem) for start, end in spans]
        starts, ends, owners = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
    else:
        starts, ends = np.array(problem.starts, dtype=np.int64), np.array(problem.ends, dtype=np.int64)
        owners = np.arange(len(problem))
    order = np.argsort(starts, kind="stable")
    return starts[order], ends[order], owners[order]


def _pairs(starts: Column, ends: Column) -> tuple[Column, Column] | None:
    """Return the pairs of pieces that share time: each with every piece that starts after it and before its end."""
    at = np.arange(len(starts))
    later = np.searchsorted(starts, ends) - at - 1
    total = int(later.sum())
    if total > _MANY_PAIRS:
        return None
    first = np.repeat(at, later)
    before = np.cumsum(later) - later
    return first, np.arange(total) - np.repeat(before - at - 1, later)


def _first_overlap(first: Column, second: Column, lows: Column, tops: Column) -> tuple[int, int] | None:
    shared = np.maximum(lows[first], lows[second]) < np.minimum(tops[first], tops[second])
    pair = _first(shared)
    return None if pair is None else (int(first[pair]), int(second[pair]))


def _first(mask: Column) -> int | None:
    """Return the first place that is true, or None."""
    place = int(mask.argmax()) if len(mask) else 0
    return place if len(mask) and mask[place] else None


def _columns(offsets: Sequence[int] | Column, sizes: Sequence[int] | Column) -> tuple[Column, Column]:
    """Return both as int64 where no sum can overflow, else as Python integers."""
    if isinstance(offsets, np.ndarray) and isinstance(sizes, np.ndarray):
        return offsets, sizes
    small = max(map(abs, offsets)) < _LARGEST and max(sizes) < _LARGEST
    return np.array(offsets, dtype=np.int64 if small else object), np.array(sizes, dtype=np.int64 if small else object)


def validate(problem: Problem, solution: Solution) -> list[str]:
    """Return what is wrong with a solution, by a sweep that shares no code with the solvers.

    Checks the number and sign of offsets, alignment, pins, aliases, overlaps of what is live together, the stated peak,
    the lower bound and the claim of optimality by bound. An empty list means valid. O(n log n + n * live).

    Examples
    --------
    >>> problem = Problem(sizes=[4, 4], starts=[0, 1], ends=[2, 3])
    >>> validate(problem, Solution(offsets=(0, 2), peak_bytes=6, lower_bound_bytes=8, optimal=False, solver="hand"))
    ['buffers 0 and 1 are live together from 1 and overlap: [0, 4) and [2, 6)', 'peak 6 is below the lower bound 8']
    """
    if len(solution.offsets) != len(problem):
        return [f"{len(solution.offsets)} offsets for {len(problem)} buffers"]
    found = []
    rows = {buffer: row for row, buffer in enumerate(problem.ids)}
    for row, (buffer, offset) in enumerate(zip(problem.ids, solution.offsets, strict=True)):
        if offset < 0:
            found.append(f"buffer {buffer} has a negative offset {offset}")
        if offset % problem.alignment(row):
            found.append(f"buffer {buffer} at {offset} is not aligned to {problem.alignment(row)}")
        pin = problem.pins[row] if problem.pins is not None else None
        if pin is not None and pin != offset:
            found.append(f"buffer {buffer} is pinned at {pin} and lies at {offset}")
        if buffer in problem.aliases:
            root, distance = problem.aliases[buffer]
            if offset != solution.offsets[rows[root]] + distance:
                found.append(f"buffer {buffer} lies at {offset}, not {distance} bytes into buffer {root}")
    if clash := first_clash(problem, list(solution.offsets)):
        found.append(clash)
    peak = max((o + s for o, s in zip(solution.offsets, problem.sizes, strict=True)), default=0)
    bound = lower_bound(problem)
    if peak != solution.peak_bytes:
        found.append(f"the peak is {peak}, stated as {solution.peak_bytes}")
    if bound != solution.lower_bound_bytes:
        found.append(f"the lower bound is {bound}, stated as {solution.lower_bound_bytes}")
    if peak < bound:
        found.append(f"peak {peak} is below the lower bound {bound}")
    if peak == bound and not solution.optimal:
        found.append(f"peak {peak} equals the lower bound, but the solution is not called optimal")
    return found
