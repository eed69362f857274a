"""The exact search: it finds what fits, refutes what does not, and takes the same steps however it is stopped."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from offset_instances import perfect

from mosaic.planner.offsets import Problem, blocks_of, memory, propagation, solve, validate
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


@pytest.mark.some
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


def sums_of(rows: list[tuple[int, bool]], base: int, capacity: int) -> list[int]:
    """Return base plus every sum of the sizes that are not placed, up to the capacity."""
    sizes = [size for size, placed in rows if not placed]
    chosen = itertools.product((0, 1), repeat=len(sizes))
    return sorted({base + sum(itertools.compress(sizes, pick)) for pick in chosen} & set(range(capacity + 1)))


@pytest.mark.parametrize("seed", range(40))
def test_two_sides_of_a_boundary_meet_where_both_can_be_filled(seed: int) -> None:
    draw = random.Random(seed)
    capacity = draw.randrange(10, 60)
    sides = [[(draw.randrange(1, 12), draw.random() < 0.2) for _ in range(draw.randrange(6))] for _ in range(2)]
    bases, spares = ([draw.randrange(5) for _ in range(2)] for _ in range(2))
    m = [0] * memory.NUM_REGISTERS
    ranges = []
    for side in sides:
        first = len(m)
        for size, placed in side:
            record = [0] * memory.ROW_WIDTH
            record[memory.SIZE], record[memory.PLACED] = size, int(placed)
            m += record
        ranges.append((len(m), len(m) + len(side)))
        m += range(first, first + memory.ROW_WIDTH * len(side), memory.ROW_WIDTH)
    m[memory.CAPACITY], m[memory.SUMS] = capacity, len(m)
    m += [0] * (3 * memory.MOST_SUMS)
    expected = [sums_of(side, base, capacity) for side, base in zip(sides, bases, strict=True)]
    for i, sums in enumerate(expected):
        at = m[memory.SUMS] + i * memory.MOST_SUMS
        assert propagation.subset_sums(bases[i], *ranges[i], at, m) == len(sums)
        assert m[at : at + len(sums)] == sums
    for least in range(max(bases), capacity + 1):
        meets = (
            at
            for at in range(least, capacity + 1)
            if all(any(at - spare <= s <= at for s in sums) for sums, spare in zip(expected, spares, strict=True))
        )
        got = propagation.meeting(least, len(expected[0]), spares[0], len(expected[1]), spares[1], m)
        assert got == next(meets, -1)


def test_parts_that_time_separates_are_solved_one_by_one() -> None:
    """Ten stretches over one long buffer: the placements add up, they do not multiply."""
    rows = [(2, 0, 60)]
    for first in range(0, 60, 6):
        late = first == 54
        rows += [(5, first, first + 3), (3, first + 1, first + 5), (4 if late else 2, first + 2, first + 4)]
        rows += [(4, first + 3, first + 6), (3, first + 4, first + 6)]
    sizes, starts, ends = ([row[column] for row in rows] for column in range(3))
    blocks = blocks_of(Problem(sizes=sizes, starts=starts, ends=ends))
    least = solve(Problem(sizes=sizes, starts=starts, ends=ends), solver="exact", node_limit=20_000)
    assert least.optimal
    search = Search(layout_of(blocks), least.peak_bytes, fast=False)
    assert search.advance(2 * len(rows)) == SOLVED
