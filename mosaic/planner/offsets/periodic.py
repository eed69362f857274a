"""Repeating programs: find the period, fold all its repetitions onto one, solve that, and tile the answer.

A stack of L equal layers asks the same question L times. Folding gives all repetitions of a buffer one offset; the
folded block is live, modulo the period, whenever one of them is, so the seam between two periods is part of the
folded problem and any answer to it is one to the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .blocks import Blocks
from .problem import Interval, Problem, united

_LEAST_REPEATS = 3
_MANY_BLOCKS = 6_000


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A smaller problem whose answers are answers to the whole.

    `classes[i]` is the window's block for block `i` of the whole.
    """

    window: Blocks
    classes: list[int]
    period: int

    def unfold(self, offsets: Sequence[int]) -> list[int]:
        """Return one offset per block of the whole."""
        return [offsets[place] for place in self.classes]


def fold(blocks: Blocks) -> Iterator[Folded]:
    """Yield folded problems for the smallest period and its small multiples; nothing if the program does not repeat.

    A multiple is for programs whose buffers change places from one layer to the next (two residuals in turns).
    """
    from .blocks import blocks_of

    if not blocks.plain or not 8 <= len(blocks) <= _MANY_BLOCKS:
        return
    order = sorted(range(len(blocks)), key=lambda row: (blocks.starts[row], blocks.ends[row], blocks.sizes[row]))
    found = _repetition(blocks, order)
    if found is None or 2 * found.covered < len(blocks):
        return
    for multiple in (1, 2, 3):
        stretch = _Stretch(first=found.first, count=found.count * multiple, covered=found.covered)
        if stretch.repeats < _LEAST_REPEATS:
            return
        problem, classes = _folded_problem(blocks, order, stretch)
        if problem is not None:
            window = blocks_of(problem)
            yield Folded(window=window, classes=classes, period=stretch.count)


@dataclass(frozen=True, kw_only=True)
class _Stretch:
    """From the block at `first` on, `covered` blocks in a row tell the same `count` blocks over and over.

    What is left after the last whole telling takes no part in the folding.
    """

    first: int
    count: int
    covered: int

    @property
    def repeats(self) -> int:
        """Whole tellings of the period."""
        return self.covered // self.count


def _repetition(blocks: Blocks, order: list[int]) -> _Stretch | None:
    """Return the stretch that covers most blocks; a longer period has to cover a whole one more."""
    starts = np.array([blocks.starts[row] for row in order])
    lengths = np.array([blocks.ends[row] for row in order]) - starts
    steps = np.diff(starts, prepend=starts[:1])
    sizes = np.array([blocks.sizes[row] for row in order])
    best: _Stretch | None = None
    for count in range(1, len(order) // _LEAST_REPEATS + 1):
        same = (sizes[count:] == sizes[:-count]) & (lengths[count:] == lengths[:-count])
        same[1:] &= steps[count + 1 :] == steps[1:-count]
        edges = np.concatenate(([-1], np.flatnonzero(~same), [len(same)]))
        widths = np.diff(edges) - 1
        at = int(widths.argmax())
        stretch = _Stretch(first=int(edges[at]) + 1, count=count, covered=int(widths[at]) + count)
        if stretch.repeats >= _LEAST_REPEATS and (best is None or stretch.covered > best.covered + count):
            best = stretch
    return best


def _folded_problem(blocks: Blocks, order: list[int], stretch: _Stretch) -> tuple[Problem | None, list[int]]:
    """Return the folded problem and the class of each block; None if a buffer outlives its period."""
    first, count, repeats = stretch.first, stretch.count, stretch.repeats
    begin = blocks.starts[order[first]]
    period = blocks.starts[order[first + count]] - begin
    if period <= 0:
        return None, []
    last = begin + period * (repeats - 1)  # times in [begin, last) fold onto [begin, begin + period)
    classes, members = [-1] * len(blocks), list[list[int]]()
    for place in range(count):
        rows = [order[first + place + count * k] for k in range(repeats)]
        if blocks.ends[rows[0]] - blocks.starts[rows[0]] > period:
            return None, []
        for row in rows:
            classes[row] = len(members)
        members.append(rows)
    for row in range(len(blocks)):
        if classes[row] < 0:
            classes[row] = len(members)
            members.append([row])
    pieces = [united(p for row in rows for p in _mapped(blocks, row, begin, period, last)) for rows in members]
    return (
        Problem(
            sizes=[blocks.sizes[rows[0]] for rows in members],
            starts=[p[0][0] for p in pieces],
            ends=[p[-1][1] for p in pieces],
            gaps=[[(a[1], b[0]) for a, b in itertools.pairwise(p)] for p in pieces],
        ),
        classes,
    )


def _mapped(blocks: Blocks, row: int, begin: int, period: int, last: int) -> Iterator[Interval]:
    """Yield the pieces of a lifetime after folding: before `begin` and from `last` on time stays, between it wraps."""
    start, end = blocks.starts[row], blocks.ends[row]
    if start < begin:
        yield start, min(end, begin)
    if end > last:
        yield max(start, last), end
    low, high = max(start, begin), min(end, last)
    if low >= high:
        return
    if high - low >= period:
        yield begin, begin + period
        return
    a, b = (low - begin) % period, (high - begin - 1) % period + 1
    if a < b:
        yield begin + a, begin + b
    else:
        yield begin, begin + b
        yield begin + a, begin + period
