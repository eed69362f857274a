"""Repeating programs: whatever is folded, the tiled answer holds, and it is as low as the window's."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

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
    for _ in range(500):
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
    assert min(multiples.values()) > 35, multiples


class Window:
    """A folded problem, from its definition; every stretch of blocks and every point of time is looked at."""

    def __init__(self, rows: list[Row], order: list[int], first: int, count: int, covered: int) -> None:
        repeats = covered // count
        begin = rows[order[first]][1]
        self.period = rows[order[first + count]][1] - begin
        last = begin + self.period * (repeats - 1)
        told = [[order[first + place + count * k] for k in range(repeats)] for place in range(count)]
        taken = {row for members in told for row in members}
        self.members = told + [[row] for row in range(len(rows)) if row not in taken]
        self.holds = self.period > 0 and all(rows[m[0]][2] - rows[m[0]][1] <= self.period for m in told)
        self.sizes = [rows[members[0]][0] for members in self.members]
        if self.holds:
            self.times = [
                {
                    time if time < begin or time >= last else begin + (time - begin) % self.period
                    for row in members
                    for time in range(rows[row][1], rows[row][2])
                }
                for members in self.members
            ]


def windows_of(rows: list[Row]) -> list[tuple[int, Window]]:
    order = sorted(range(len(rows)), key=lambda row: (rows[row][1], rows[row][2], rows[row][0]))
    told = [(rows[row][0], rows[row][2] - rows[row][1]) for row in order]
    steps = [0] + [rows[b][1] - rows[a][1] for a, b in itertools.pairwise(order)]
    best = (0, 0, 0)  # first, count, covered
    for count in range(1, len(rows) // 3 + 1):
        longest = (0, 0)
        for first in range(len(rows) - count):
            end = first
            while (
                end + count < len(rows)
                and told[end] == told[end + count]
                and (end == 0 or steps[end] == steps[end + count])
            ):
                end += 1
            longest = max(longest, (end - first, -first))
        covered = longest[0] + count
        if covered // count >= 3 and (best[1] == 0 or covered > best[2] + count):
            best = (-longest[1], count, covered)
    first, count, covered = best
    if not count or 2 * covered < len(rows):
        return []
    multiples = itertools.takewhile(lambda multiple: covered // (count * multiple) >= 3, (1, 2, 3))
    found = [(count * multiple, Window(rows, order, first, count * multiple, covered)) for multiple in multiples]
    return [(count, window) for count, window in found if window.holds]


def test_windows_are_those_of_the_definition() -> None:
    draw = random.Random(23)
    seen = [0, 0]
    for _ in range(400):
        problem = random_repeating(draw)
        rows = list(zip(problem.sizes, problem.starts, problem.ends, strict=True))
        if draw.random() < 0.3:  # not quite a repetition, or none
            rows = [(size + (draw.random() < 0.05), start, end) for size, start, end in rows]
        draw.shuffle(rows)
        found = list(fold(blocks_of(problem_of(rows))))
        expected = windows_of(rows) if len(rows) >= 8 else []
        assert [folded.period for folded in found] == [count for count, _ in expected]
        seen[bool(found)] += 1
        for folded, (_, window) in zip(found, expected, strict=True):
            assert folded.window.sizes == window.sizes
            assert [
                [row for row, place in enumerate(folded.classes) if place == i] for i in range(len(window.sizes))
            ] == [sorted(members) for members in window.members]
            pieces = [folded.window.pieces_of(row) for row in range(len(window.sizes))]
            assert [{t for a, b in spans for t in range(a, b)} for spans in pieces] == window.times
            assert folded.unfold(range(100, 100 + len(pieces))) == [100 + place for place in folded.classes]
    assert min(seen) > 50, seen


def test_what_is_too_short_too_long_or_not_plain_is_not_folded() -> None:
    row = [(1, time, time + 1) for time in range(6_001)]
    for count, folds in ((7, False), (8, True), (6_000, True), (6_001, False)):
        assert (next(fold(blocks_of(problem_of(row[:count]))), None) is not None) == folds
    plain = problem_of(row[:30])
    assert list(fold(blocks_of(replace(plain, pins=[0, *[None] * 29])))) == []
    assert list(fold(blocks_of(replace(plain, ends=[3, *plain.ends[1:]], gaps=[[(1, 2)], *[[]] * 29])))) == []
    other = [(size, 20 + size, 21 + size) for size in range(2, 12)]
    assert next(fold(blocks_of(problem_of([*row[:10], *other]))), None) is not None  # just half of it repeats
    assert next(fold(blocks_of(problem_of([*row[:10], *other, (12, 32, 33)]))), None) is None


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
    """Buffers before and after are as large as the largest live set, and keep their times."""
    window = [(3, 0, 2), (5, 1, 4), (2, 1, 3), (4, 3, 6), (6, 4, 6), (3, 2, 5), (2, 5, 7)]
    body = [row for k in range(repeats) for row in shifted(window, 3 + 6 * k)]
    bound = lower_bound(problem_of(body))
    end = 3 + 6 * repeats + 1
    problem = problem_of([(bound, 0, 3), *body, (bound - 1, end, end + 2), (bound, end + 2, end + 5)])
    windows = [folded.window for folded in fold(blocks_of(problem))]
    assert windows
    assert [window.lower_bound for window in windows] == [bound] * len(windows)
