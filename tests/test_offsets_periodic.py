"""Repeating programs: whatever is folded, the tiled answer holds, and it is as low as the window's."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mosaic.planner.offsets import Problem, blocks_of, lower_bound, solve, validate
from mosaic.planner.offsets.greedy import greedy_by_size
from mosaic.planner.offsets.periodic import fold

Row = tuple[int, int, int]  # size, start, end


def problem_of(rows: list[Row]) -> Problem:
    return Problem(sizes=[r[0] for r in rows], starts=[r[1] for r in rows], ends=[r[2] for r in rows])


def overlaps(problem: Problem, offsets: list[int] | tuple[int, ...]) -> list[tuple[int, int]]:
    """Every pair that shares time and bytes, by comparing each with each."""
    start, end, low, size = np.array([problem.starts, problem.ends, offsets, problem.sizes])
    together = (start[:, None] < end) & (start < end[:, None])
    clash = together & (low[:, None] < low + size) & (low < low[:, None] + size[:, None])
    return [(int(i), int(j)) for i, j in np.argwhere(np.triu(clash, 1))]


def random_rows(draw: random.Random, count: int, span: int, longest: int) -> list[Row]:
    starts = sorted(draw.randrange(span) for _ in range(count))
    return [(draw.randrange(1, 12), start, start + draw.randrange(1, longest + 1)) for start in starts]


def shifted(rows: list[Row], by: int) -> list[Row]:
    return [(size, start + by, end + by) for size, start, end in rows]


def random_repeating(draw: random.Random) -> Problem:
    """A window told several times between a prologue and an epilogue; the last telling may stop in the middle."""
    period = draw.randrange(2, 9)
    window = random_rows(draw, draw.randrange(1, 6), period, draw.choice((period, 2 * period)))
    repeats = draw.randrange(3, 13)
    body = [row for k in range(repeats) for row in shifted(window, k * period)]
    cut = draw.randrange(len(window))
    body = body[: len(body) - cut]
    begin = draw.randrange(4)
    head = random_rows(draw, draw.randrange(4), begin + 1, 6) if begin else []
    tail = shifted(random_rows(draw, draw.randrange(5), 4, 6), begin + repeats * period)
    across = [(draw.randrange(1, 9), 0, begin + repeats * period + 9)] if draw.random() < 0.3 else []
    return problem_of([*head, *shifted(body, begin), *tail, *across])


def test_repetitions_that_end_within_a_multiple_of_the_period() -> None:
    """Five windows of three: a period of two windows has two and a half repetitions, and the rest is no part of it."""
    problem = Problem(
        sizes=[9, 3, 4] * 5 + [11, 21, 7],
        starts=range(18),
        ends=[4, 2, 3, 7, 5, 6, 10, 8, 9, 13, 11, 12, 16, 14, 15, 19, 17, 21],
    )
    solution = solve(problem, solver="periodic")
    assert overlaps(problem, solution.offsets) == []
    assert validate(problem, solution) == []


def test_any_answer_to_a_window_is_one_to_the_whole() -> None:
    draw = random.Random(11)
    multiples = dict.fromkeys((1, 2, 3), 0)
    for _ in range(2_000):
        problem = random_repeating(draw)
        first = 0
        for folded in fold(blocks_of(problem)):
            first = first or folded.period
            multiples[folded.period // first] += 1
            window = folded.window
            found = greedy_by_size(window)
            offsets = folded.unfold(found)
            assert overlaps(problem, offsets) == [], problem
            assert max(map(int.__add__, offsets, problem.sizes)) == window.peak(found)
            assert [window.sizes[place] for place in folded.classes] == list(problem.sizes)
    assert min(multiples.values()) > 150, multiples


@pytest.mark.parametrize("seed", range(3))
def test_the_solver_answers_validly(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        problem = random_repeating(draw)
        solution = solve(problem, solver="periodic", node_limit=200)
        assert overlaps(problem, solution.offsets) == [], problem
        assert validate(problem, solution) == []


@pytest.mark.parametrize("repeats", [6, 9, 12])
def test_folding_asks_for_no_more_than_the_whole_does(repeats: int) -> None:
    """What comes before and after is as large as the largest live set, and stays where it is in time."""
    window = [(3, 0, 2), (5, 1, 4), (2, 1, 3), (4, 3, 6), (6, 4, 6), (3, 2, 5), (2, 5, 7)]
    body = [row for k in range(repeats) for row in shifted(window, 3 + 6 * k)]
    bound = lower_bound(problem_of(body))
    end = 3 + 6 * repeats + 1
    problem = problem_of([(bound, 0, 3), *body, (bound - 1, end, end + 2), (bound, end + 2, end + 5)])
    windows = [folded.window for folded in fold(blocks_of(problem))]
    assert windows
    assert [window.lower_bound for window in windows] == [bound] * len(windows)
