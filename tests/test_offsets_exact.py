"""The exact search: it finds what fits, refutes what does not, and takes the same steps however it is stopped."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from offset_instances import perfect

from mosaic.planner.offsets import Problem, blocks_of, solve, validate
from mosaic.planner.offsets.exact import FAILED, LANES, RUNNING, SOLVED, Search, layout_of, luby


def times_of(problem: Problem, row: int) -> set[int]:
    """Return the points of time in which a buffer holds a value."""
    times = set(range(problem.starts[row], problem.ends[row]))
    for start, end in problem.gaps[row] if problem.gaps is not None else ():
        times -= set(range(start, end))
    return times


def least_peak(problem: Problem) -> int:
    """Return the optimum by dropping buffers into the lowest hole in every order; buffers with pins first.

    Some order gives an optimum: that of its offsets.
    """
    n = len(problem)
    times = [times_of(problem, row) for row in range(n)]
    pins = problem.pins if problem.pins is not None else [None] * n
    pinned = [(pin, pin + problem.sizes[row], times[row]) for row, pin in enumerate(pins) if pin is not None]
    free = [row for row in range(n) if pins[row] is None and problem.sizes[row] > 0]
    best = 1 << 60
    for order in itertools.permutations(free):
        placed = list(pinned)
        for row in order:
            step = problem.alignments if isinstance(problem.alignments, int) else problem.alignments[row]
            offset, size = 0, problem.sizes[row]
            while any(low < offset + size and offset < top and times[row] & other for low, top, other in placed):
                offset += step
            placed.append((offset, offset + size, times[row]))
        best = min(best, max((top for _, top, _ in placed), default=0))
    return best


def valid(problem: Problem, offsets: Sequence[int]) -> bool:
    """Return whether alignments and pins hold, and no two buffers lie on the same byte at the same time."""
    used: set[tuple[int, int]] = set()
    for row, offset in enumerate(offsets):
        cells = {(t, at) for t in times_of(problem, row) for at in range(offset, offset + problem.sizes[row])}
        step = problem.alignments if isinstance(problem.alignments, int) else problem.alignments[row]
        pin = problem.pins[row] if problem.pins is not None else None
        if offset % step or pin not in (None, offset) or cells & used:
            return False
        used |= cells
    return True


def random_problem(seed: int, count: int) -> Problem:
    """Draw a problem with gaps, alignments, twins and pins, each now and then."""
    draw = random.Random(seed)
    starts = [draw.randrange(7) for _ in range(count)]
    ends = [start + draw.randrange(1, 6) for start in starts]
    sizes = [draw.randrange(1, 9) for _ in range(count)]
    for row in range(1, count):
        if draw.random() < 0.25:
            starts[row], ends[row], sizes[row] = starts[row - 1], ends[row - 1], sizes[row - 1]
    gaps = [
        ((start + 1, start + 2),) if end - start > 2 and draw.random() < 0.4 else ()
        for start, end in zip(starts, ends, strict=True)
    ]
    problem = Problem(
        sizes=sizes,
        starts=starts,
        ends=ends,
        gaps=gaps if draw.random() < 0.4 else None,
        alignments=draw.choice((1, 1, 4, [draw.choice((1, 2, 3, 8)) for _ in range(count)])),
    )
    if draw.random() < 0.4:
        offsets = solve(problem, solver="first_fit").offsets
        problem = replace(problem, pins=[o + 24 if draw.random() < 0.4 else None for o in offsets])
    return problem


@pytest.mark.parametrize("seed", range(40))
def test_what_fits_is_found_and_what_does_not_is_refuted(seed: int) -> None:
    problem = random_problem(seed, count=6)
    blocks = blocks_of(problem)
    layout = layout_of(blocks)
    least = least_peak(problem)
    for lane in range(LANES + 7):
        search = Search(layout, least, fast=False, lane=lane)
        assert search.advance(20_000) == SOLVED
        offsets = blocks.expand(search.offsets(blocks))
        assert max(o + s for o, s in zip(offsets, problem.sizes, strict=True)) == least
        assert valid(problem, offsets)
    if layout.rows and least > max((p + s for p, s in pinned_ends(problem)), default=0):
        for lane in range(LANES + 7):
            assert Search(layout, least - 1, fast=False, lane=lane).advance(200_000) == FAILED


def pinned_ends(problem: Problem) -> list[tuple[int, int]]:
    """Return offset and size of pinned buffers."""
    pins = problem.pins if problem.pins is not None else [None] * len(problem)
    return [(pin, size) for pin, size in zip(pins, problem.sizes, strict=True) if pin is not None]


@pytest.mark.parametrize("count", [20, 40])
@pytest.mark.parametrize("seed", range(4))
def test_perfect_cuts_are_put_together_again(seed: int, count: int) -> None:
    problem = perfect(count, seed)
    solution = solve(problem, solver="exact", node_limit=20_000)
    assert validate(problem, solution) == []
    assert solution.peak_bytes == problem.capacity


def test_a_stopped_search_goes_on_where_it_was() -> None:
    blocks = blocks_of(perfect(60, 23, height=32))
    layout = layout_of(blocks)
    at_once, in_steps = (Search(layout, blocks.lower_bound, fast=False) for _ in range(2))
    assert at_once.advance(1_010) == RUNNING  # into the second turn
    strides = itertools.cycle([1, 7, 133])
    while in_steps.nodes < at_once.nodes:
        in_steps.advance(min(next(strides), at_once.nodes - in_steps.nodes))
    assert at_once.advance(50_000) == in_steps.advance(50_000) == SOLVED
    assert at_once.nodes == in_steps.nodes
    assert at_once.offsets(blocks) == in_steps.offsets(blocks)


def test_turns_grow_as_luby_has_them() -> None:
    """Each block of turns is the one before twice over, and then a turn twice as long as its longest."""
    block = [1]
    for _ in range(6):
        block = [*block, *block, 2 * block[-1]]
    assert [luby(turn) for turn in range(1, len(block) + 1)] == block
