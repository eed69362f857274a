"""The limits of a problem, to the byte, and a validator's sentences about an answer."""

from __future__ import annotations

import importlib
import math
import pkgutil
import random
import re
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from test_offset_definitions import any_problem, groups, root_of, times_of

from mosaic.errors import UsageError
from mosaic.planner import offsets
from mosaic.planner.offsets import Guard, Problem, Solution, blocks_of, lower_bound, validate
from mosaic.planner.offsets.problem import largest_load, united
from mosaic.planner.offsets.sweep import first_common

BAD_GAPS = "are not ascending, disjoint, non-empty parts of its lifetime"
GOOD: dict[str, Any] = {"sizes": [4, 4, 4], "starts": [0, 1, 5], "ends": [3, 4, 6], "ids": ["a", "b", "c"]}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"sizes": [0, -1, -2]}, "buffer 'b' has a size of -1 bytes; it must be at least 0"),
        ({"ends": [3, 1, 6]}, "buffer 'b' has an empty lifetime [1, 1); the end must be larger than the start (half-open)"),
        ({"ids": ["b", "a", "a"]}, "id 'a' occurs more than once; ids must be unique"),
        ({"sizes": [4, 1.5, "x"]}, "a size is 1.5; bytes and times are integers, never floats"),
        ({"starts": [0, None, 5]}, "a start is None; bytes and times are integers, never floats"),
        ({"ends": [3, 4, 6.0]}, "a end is 6.0; bytes and times are integers, never floats"),
        ({"starts": [0, 1]}, "column starts has 2 rows, sizes has 3; they must be the same"),
        ({"ends": [3, 4, 6, 7]}, "column ends has 4 rows, sizes has 3; they must be the same"),
        ({"ids": ["a"]}, "column ids has 1 rows, sizes has 3; they must be the same"),
        ({"gaps": [[]]}, "column gaps has 1 rows, sizes has 3; they must be the same"),
        ({"pins": [None]}, "column pins has 1 rows, sizes has 3; they must be the same"),
        ({"alignments": [1, 1]}, "column alignments has 2 rows, sizes has 3; they must be the same"),
        ({"alignments": 0}, "alignment of all buffers is 0; it must be at least 1 byte"),
        ({"alignments": [1, 0, 1]}, "alignment of buffer 'b' is 0; it must be at least 1 byte"),
        ({"alignments": [1, 1.5, 1]}, "a alignment is 1.5; bytes and times are integers, never floats"),
        ({"gaps": [[], [(0, 2)], []]}, f"buffer 'b': gaps [(0, 2)] {BAD_GAPS} [1, 4)"),
        ({"gaps": [[(1, 2), (1, 2)], [], []]}, f"buffer 'a': gaps [(1, 2), (1, 2)] {BAD_GAPS} [0, 3)"),
        ({"gaps": [[(1, 1)], [], []]}, f"buffer 'a': gaps [(1, 1)] {BAD_GAPS} [0, 3)"),
        ({"gaps": [[], [], [(5, 7)]]}, f"buffer 'c': gaps [(5, 7)] {BAD_GAPS} [5, 6)"),
        ({"gaps": [[], [], [(5, 6)]]}, "buffer 'c': gaps [(5, 6)] leave nothing of its lifetime [5, 6); leave the buffer out"),
        ({"aliases": {"a": ("b", -1)}}, "alias 'a' -> 'b': byte offset -1 must be at least 0"),
        ({"aliases": {"x": ("b", 1)}}, "alias 'x' -> 'b': there is no buffer 'x'"),
        ({"aliases": {"a": ("x", 1)}}, "alias 'a' -> 'x': there is no buffer 'x'"),
        ({"aliases": {"a": ("b", 0), "b": ("a", 0)}}, "alias 'a' -> 'b' leads back to itself; one buffer must be the root"),
        ({"aliases": {"a": ("a", 0)}}, "alias 'a' -> 'a' leads back to itself; one buffer must be the root"),
        ({"aliases": {"a": ("b", 3), "b": ("c", 2)}, "alignments": [4, 1, 1]},
         "alias 'a' lies 5 bytes into 'c', not a multiple of its alignment 4"),
        ({"pins": [-1, None, None]}, "buffer 'a' is pinned at -1; it must be a multiple of 1, at least 0"),
        ({"pins": [None, 6, None], "alignments": 4}, "buffer 'b' is pinned at 6; it must be a multiple of 4, at least 0"),
        ({"pins": [0, 3, 0]}, "pinned buffers overlap: buffers a and b are live together from 1 and overlap: [0, 4) and [3, 7)"),
        ({"pins": [0, 8, None], "aliases": {"b": ("a", 4)}},
         "pinned buffers overlap: the alias group of buffer 'a' is pinned to offsets [0, 4]"),
        ({"pins": [None, 3, None], "aliases": {"b": ("a", 4)}},
         "pinned buffers overlap: the alias group of buffer 'a' is pinned to offsets [-1]"),
        ({"capacity": -1}, "capacity is -1 bytes; it must be at least 0"),
    ],
)  # fmt: skip
def test_what_is_refused_is_said_with_its_numbers(columns: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        Problem(**{**GOOD, **columns})


@pytest.mark.parametrize(
    "columns",
    [
        {"sizes": [0, 0, 0], "capacity": 0},
        {"ends": [1, 2, 6]},
        {"alignments": [1, 2, 4], "pins": [0, 4, 4]},
        {"gaps": [[(0, 1), (1, 2)], [(1, 2), (3, 4)], []]},
        {"pins": [0, 4, 0]},
        {"aliases": {"a": ("b", 0), "b": ("c", 4)}, "alignments": [4, 2, 1]},
        {"aliases": {"b": ("a", 4)}, "pins": [0, 4, None]},
        {"pins": [0, 4, None], "aliases": {"c": ("a", 2)}, "sizes": [4, 4, 2]},
    ],
)  # fmt: skip
def test_what_is_just_good_enough_is_taken(columns: dict[str, object]) -> None:
    Problem(**{**GOOD, **columns})


def test_columns_become_pythons_integers() -> None:
    columns: dict[str, Any] = {"sizes": np.array([4, 8]), "starts": range(2), "ends": iter([3, 4])}
    columns |= {"pins": [np.int64(8), None], "gaps": [[(np.int64(1), 2)], []], "alignments": np.array([4, 8])}
    problem = Problem(**columns)
    assert (problem.sizes, problem.starts, problem.ends, problem.ids) == ((4, 8), (0, 1), (3, 4), (0, 1))
    assert (problem.pins, problem.gaps, problem.alignments) == ((8, None), (((1, 2),), ()), (4, 8))
    assert problem.pins is not None and problem.gaps is not None
    plain = [*problem.sizes, *problem.starts, problem.pins[0], problem.gaps[0][0][0], problem.alignment(1)]
    assert {type(value) for value in plain} == {int}
    assert Problem(sizes=[], starts=[], ends=[]).ids == ()


def test_gaps_are_taken_where_they_are_ascending_parts_of_the_lifetime() -> None:
    draw = random.Random(2)
    taken = 0
    for _ in range(2_000):
        gaps = [(draw.randrange(1, 8), draw.randrange(1, 8)) for _ in range(draw.randrange(3))]
        edges = [2, *(time for gap in gaps for time in gap), 6]
        good = all(a <= b for a, b in pairwise(edges)) and all(a < b for a, b in gaps)
        good &= {time for a, b in gaps for time in range(a, b)} != {2, 3, 4, 5}
        try:
            Problem(sizes=[1], starts=[2], ends=[6], gaps=[gaps])
        except UsageError:
            assert not good, gaps
        else:
            assert good, gaps
            taken += len(gaps) > 0
    assert taken > 100


def cells_of(problem: Problem, group: Any, low: int) -> set[tuple[int, int]]:
    return {(time, byte) for time in group.times for byte in range(low, low + group.size)}


def test_pins_are_taken_where_no_byte_is_held_twice() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        taken = 0
        for number in range(30):
            problem = replace(any_problem(600 * seed + number, most=6), pins=None)
            pins = [draw.randrange(0, 24, 4) if draw.random() < 0.5 else None for _ in range(len(problem))]
            good, used = True, set[tuple[int, int]]()
            for group in groups(problem):
                rows = [row for row in range(len(problem)) if root_of(problem, row)[0] == group.root]
                at = {pin - root_of(problem, row)[1] for row in rows if (pin := pins[row]) is not None}
                good &= len(at) <= 1 and min(at, default=0) >= 0
                for low in list(at)[:1]:
                    cells = cells_of(problem, group, low)
                    good &= not cells & used
                    used |= cells
            good &= all(pin is None or pin % problem.alignment(row) == 0 for row, pin in enumerate(pins))
            try:
                replace(problem, pins=pins)
            except UsageError:
                assert not good
            else:
                assert good
                taken += 1
        assert taken > 1


def naive_common(boxes: list[tuple[int, int, int, int]]) -> tuple[int, int] | None:
    """Return the first box by start that overlaps an earlier one, and the one it lies upon: the lowest from its own low
    on, or else the one that begins below it."""
    order = sorted((box for box in range(len(boxes)) if boxes[box][2] < boxes[box][3]), key=lambda b: (boxes[b][0], b))
    for count, box in enumerate(order):
        start, _, low, top = boxes[box]
        hit = [o for o in order[:count] if boxes[o][1] > start and boxes[o][2] < top and low < boxes[o][3]]
        if hit:
            return min(hit, key=lambda o: (boxes[o][2] < low, boxes[o][2])), box
    return None


def test_the_first_two_boxes_that_share_a_point_are_found() -> None:
    draw = random.Random(4)
    seen = [0, 0]
    for _ in range(3_000):
        count = draw.randrange(0, 9)
        boxes = []
        for _ in range(count):
            start, low = draw.randrange(12), draw.randrange(40)
            boxes.append((start, start + draw.randrange(1, 6), low, low + draw.randrange(0, 9)))
        columns = [[box[column] for box in boxes] for column in range(4)]
        found = first_common(*columns)
        assert found == naive_common(boxes)
        seen[found is None] += 1
    assert min(seen) > 500, seen


def test_the_largest_load_is_that_of_some_point_of_time() -> None:
    draw = random.Random(7)
    for _ in range(300):
        starts = [draw.randrange(-5, 9) for _ in range(draw.randrange(8))]
        ends = [start + draw.randrange(1, 6) for start in starts]
        sizes = [draw.randrange(9) for _ in starts]
        loads = [sum(s for s, a, b in zip(sizes, starts, ends, strict=True) if a <= t < b) for t in range(-5, 15)]
        assert largest_load(starts, ends, sizes) == max(loads)
        if starts:
            assert lower_bound(Problem(sizes=sizes, starts=starts, ends=ends)) == max(loads)


def test_united_intervals_hold_the_same_times_and_do_not_touch() -> None:
    draw = random.Random(8)
    for _ in range(500):
        spans = [(start := draw.randrange(30), start + draw.randrange(1, 6)) for _ in range(draw.randrange(9))]
        joined = united(iter(spans))
        assert {t for a, b in joined for t in range(a, b)} == {t for a, b in spans for t in range(a, b)}
        assert all(one[1] < two[0] for one, two in pairwise(joined)) and all(a < b for a, b in joined)


CLASH = re.compile(
    r"buffers (\d+) and (\d+) are live together from (-?\d+) and overlap: \[(\d+), (\d+)\) and \[(\d+), (\d+)\)"
)


def faults(problem: Problem, offsets: list[int]) -> list[str]:
    """Return what is wrong with where single buffers lie."""
    found = []
    for row, offset in enumerate(offsets):
        if offset < 0:
            found.append(f"buffer {row} has a negative offset {offset}")
        if offset % problem.alignment(row):
            found.append(f"buffer {row} at {offset} is not aligned to {problem.alignment(row)}")
        pin = problem.pins[row] if problem.pins is not None else None
        if pin not in (None, offset):
            found.append(f"buffer {row} is pinned at {pin} and lies at {offset}")
        if row in problem.aliases:
            parent, distance = problem.aliases[row]
            assert isinstance(parent, int)
            if offset != offsets[parent] + distance:
                found.append(f"buffer {row} lies at {offset}, not {distance} bytes into buffer {parent}")
    return found


def solved(problem: Problem) -> list[int]:
    """Place groups one above the other; pinned groups lie at their pins."""
    high = max((group.pin + group.size for group in groups(problem) if group.pin is not None), default=0)
    at = {}
    for group in groups(problem):
        if group.pin is not None:
            at[group.root] = group.pin
            continue
        high += -high % group.alignment
        at[group.root] = high
        high += group.size
    return [at[root] + distance for root, distance in (root_of(problem, row) for row in range(len(problem)))]


def stated(problem: Problem, offsets: list[int], **other: Any) -> Solution:
    peak = max(map(int.__add__, offsets, problem.sizes))
    bound = lower_bound(problem)
    facts: dict[str, Any] = {
        "peak_bytes": peak,
        "lower_bound_bytes": bound,
        "optimal": peak == bound,
        "solver": "hand",
    } | other
    return Solution(offsets=tuple(offsets), **facts)


def test_a_validator_says_all_that_is_wrong() -> None:
    for seed in range(150):
        problem, draw = any_problem(seed), random.Random(seed)
        right = solved(problem)
        guard = Guard(problem)
        assert validate(problem, stated(problem, right)) == [] and guard.fault(right) is None
        for _ in range(4):
            moved = list(right)
            for row in range(len(problem)):
                if draw.random() < 0.4:
                    moved[row] += draw.choice((-8, -4, -1, 4, 12))
            solution = stated(problem, moved)
            said = validate(problem, solution)
            expected = faults(problem, moved)
            assert said[: len(expected)] == expected
            rest = said[len(expected) :]
            if solution.peak_bytes < solution.lower_bound_bytes:
                assert rest.pop() == f"peak {solution.peak_bytes} is below the lower bound {solution.lower_bound_bytes}"
            assert_guard(guard.fault(moved), expected, rest)
            tops = {group.root: (moved[group.root], moved[group.root] + group.size) for group in groups(problem)}
            if any("into buffer" in sentence or "negative" in sentence for sentence in expected):
                continue  # where a group lies is not clear then
            cells = [cells_of(problem, group, moved[group.root]) for group in groups(problem)]
            assert len(rest) == (sum(map(len, cells)) > len(set().union(*cells)))
            for sentence in rest:
                assert_clash(problem, sentence, tops)


def assert_guard(fault: str | None, expected: list[str], rest: list[str]) -> None:
    """A guard's fault is one of the validator's, and it reports one whenever the validator does."""
    assert (fault is None) == (not expected and not rest)
    if fault is not None and not CLASH.match(fault) and "into buffer" not in fault:
        assert fault in expected
        for kind in ("negative", "aligned", "pinned"):  # in this order, and by row
            if any(kind in sentence for sentence in expected):
                assert fault == next(sentence for sentence in expected if kind in sentence)
                break


def assert_clash(problem: Problem, sentence: str, tops: dict[int, tuple[int, int]]) -> None:
    found = CLASH.fullmatch(sentence)
    assert found is not None, sentence
    one, other, time, low, top, its_low, its_top = map(int, found.groups())
    assert tops[one] == (low, top) and tops[other] == (its_low, its_top)
    assert low < its_top and its_low < top
    held = {group.root: group.times for group in groups(problem)}
    assert time in held[one] & held[other] and (time - 1 not in held[other])


def test_a_validator_says_what_is_stated_wrongly() -> None:
    problem = Problem(sizes=[4, 4], starts=[0, 1], ends=[2, 3])
    right = stated(problem, [0, 4])
    assert validate(problem, right) == []
    assert validate(problem, replace(right, peak_bytes=9)) == ["the peak is 8, stated as 9"]
    assert validate(problem, replace(right, lower_bound_bytes=9)) == ["the lower bound is 8, stated as 9"]
    assert validate(problem, replace(right, optimal=False)) == [
        "peak 8 equals the lower bound, but the solution is not called optimal"
    ]
    assert validate(problem, replace(right, offsets=(0, 4, 8))) == ["3 offsets for 2 buffers"]
    assert validate(problem, stated(problem, [0, 5])) == []
    nothing = Problem(sizes=[], starts=[], ends=[])
    empty = Solution(offsets=(), peak_bytes=0, lower_bound_bytes=0, optimal=True, solver="hand")
    assert validate(nothing, empty) == [] and Guard(nothing).fault([]) is None


@pytest.mark.parametrize(
    ("capacity", "peak", "proven", "reached", "infeasible"),
    [(None, 9, 9, True, False), (9, 9, 9, True, False), (8, 9, 8, False, False), (8, 9, 9, False, True), (7, 9, 0, False, True)],
)  # fmt: skip
def test_what_a_solution_says_about_its_capacity(
    capacity: int | None, peak: int, proven: int, reached: bool, infeasible: bool
) -> None:
    solution = Solution(
        offsets=(0, 5), peak_bytes=peak, lower_bound_bytes=8, optimal=False, solver="hand", seconds=0.12345678,
        capacity=capacity, proven_bound_bytes=proven,
    )  # fmt: skip
    assert (solution.capacity_reached, solution.infeasible) == (reached, infeasible)
    assert solution == replace(solution, seconds=7.0, history=((0.0, 9),)) and "history" not in repr(solution)


def test_shifting_time_and_scaling_bytes_changes_nothing_else() -> None:
    for seed in range(40):
        problem = any_problem(seed)
        if problem.aliases or problem.pins is not None:
            continue
        gaps = [[(a + 7, b + 7) for a, b in row] for row in problem.gaps] if problem.gaps is not None else None
        moved = replace(
            problem, sizes=[6 * size for size in problem.sizes], starts=[s + 7 for s in problem.starts],
            ends=[end + 7 for end in problem.ends], gaps=gaps, alignments=1,
        )  # fmt: skip
        one, other = blocks_of(replace(problem, alignments=1)), blocks_of(moved)
        assert other.lower_bound == 6 * one.lower_bound and other.conflicts == one.conflicts
        assert other.sections == one.sections and other.lengths == one.lengths


def test_values_cannot_be_changed_and_are_given_by_name() -> None:
    seen = set()
    for module in pkgutil.iter_modules(offsets.__path__, f"{offsets.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and value.__module__ == module.name and is_dataclass(value):
                seen.add(value.__name__)
                assert value.__dataclass_params__.frozen and all(part.kw_only for part in fields(value)), value  # type: ignore[attr-defined]
    assert {"Problem", "Solution", "Blocks", "Sections", "Layout", "Folded", "Order", "Outcome"} <= seen
    assert not hasattr(Problem(sizes=[], starts=[], ends=[]), "__dict__")
    assert not hasattr(stated(Problem(sizes=[1], starts=[0], ends=[1]), [0]), "__dict__")


def test_the_alignment_of_a_group_is_the_least_common_multiple() -> None:
    problem = Problem(
        sizes=[7, 5, 1], starts=[0, 0, 0], ends=[1, 1, 1], alignments=[4, 6, 9], aliases={1: (0, 12)}, ids=(0, 1, 2)
    )
    assert blocks_of(problem).alignments == [math.lcm(4, 6), 9]
    assert times_of(problem, 0) == {0}
