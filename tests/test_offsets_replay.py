"""Replay: an order is valid for any sizes."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_offset_definitions import any_problem, groups, naive_order, root_of
from test_offsets import problems, relaxed

from mosaic.errors import UsageError
from mosaic.planner.offsets import Order, Problem, Solution, lower_bound, solve, validate


def answer(problem: Problem, offsets: list[int], peak: int) -> Solution:
    bound = lower_bound(problem)
    return Solution(
        offsets=tuple(offsets), peak_bytes=peak, lower_bound_bytes=bound, optimal=peak == bound, solver="replay"
    )


@given(problem=problems(), solver=st.sampled_from(["skyline", "greedy_by_size"]), data=st.data())
@relaxed
def test_replay_is_valid_for_any_sizes(problem: Problem, solver: str, data: st.DataObject) -> None:
    problem = replace(problem, pins=None)
    order = Order.of(problem, solve(problem, solver=solver))
    n = len(problem)
    batch = data.draw(st.lists(st.lists(st.integers(0, 40), min_size=n, max_size=n), min_size=1, max_size=4))
    for sizes in batch:
        other = replace(problem, sizes=sizes)
        offsets, peak = order.replay(sizes)
        assert validate(other, answer(other, offsets, peak)) == []


@given(problem=problems())
@relaxed
def test_replay_of_the_same_sizes_is_no_higher(problem: Problem) -> None:
    problem = replace(problem, pins=None)
    solution = solve(problem, solver="greedy_by_size")
    order = Order.of(problem, solution)
    _, peak = order.replay(problem.sizes)
    assert peak <= solution.peak_bytes


def said(problem: Problem, offsets: list[int]) -> dict[str, Any]:
    """Return what an order holds, from its definition: who lies directly below whom where something starts."""
    found = sorted(groups(problem), key=lambda group: (offsets[group.root], offsets[group.root] + group.size))
    starts = {time for group in found for time in group.times if time - 1 not in group.times}
    below: list[tuple[int, ...]] = []
    for number, group in enumerate(found):
        seen = {max(o for o in range(number) if time in found[o].times) for time in group.times & starts
                if any(time in found[o].times for o in range(number))}  # fmt: skip
        below.append(tuple(sorted(o for o in seen if not any(o in below[other] for other in seen))))
    members = [[row for row in range(len(problem)) if root_of(problem, row)[0] == group.root] for group in found]
    return {
        "below": tuple(below),
        "rows": tuple(map(tuple, members)),
        "distances": tuple(tuple(root_of(problem, row)[1] for row in rows) for rows in members),
        "alignments": tuple(group.alignment for group in found),
        "num_buffers": len(problem),
    }


def fallen(order: dict[str, Any], sizes: list[int]) -> tuple[list[int], int]:
    """Let everything fall on what it sees below it."""
    size = [
        max(distance + sizes[row] for row, distance in zip(rows, away, strict=True))
        for rows, away in zip(order["rows"], order["distances"], strict=True)
    ]
    low: list[int] = []
    for block, lows in enumerate(order["below"]):
        at = max((low[o] + size[o] for o in lows), default=0)
        while at % order["alignments"][block]:
            at += 1
        low.append(at)
    offsets = [0] * len(sizes)
    for block, rows in enumerate(order["rows"]):
        for row, distance in zip(rows, order["distances"][block], strict=True):
            offsets[row] = low[block] + distance
    return offsets, max(map(int.__add__, low, size), default=0)


def test_an_order_is_who_lies_directly_below_whom() -> None:
    for seed in range(150):
        problem, draw = replace(any_problem(seed), pins=None), random.Random(seed)
        rows = sorted(range(len(problem)), key=lambda _: draw.random())
        offsets = naive_order(problem, rows)
        order = Order.of(problem, answer(problem, offsets, 0))
        expected = said(problem, offsets)
        assert {name: getattr(order, name) for name in expected} == expected
        for sizes in [list(problem.sizes), *([draw.choice((0, draw.randrange(40))) for _ in rows] for _ in range(6))]:
            assert order.replay(sizes) == fallen(expected, sizes)
            placed, peak = order.replay(np.array(sizes))
            assert (placed.tolist(), peak) == fallen(expected, sizes)
            assert placed.dtype == np.int64


def test_forms_of_sizes() -> None:
    problem = Problem(sizes=[4, 4, 8], starts=[0, 1, 2], ends=[2, 3, 4])
    order = Order.of(problem, solve(problem))
    offsets, peak = order.replay(np.array([4, 4, 8], dtype=np.uint8))
    assert isinstance(offsets, np.ndarray) and offsets.dtype == np.int64 and peak == 12
    assert order.replay(list(np.array([4, 4, 8], dtype=np.int32)))[1] == 12
    assert order.replay(np.array([200, 200, 200], dtype=np.uint8))[1] == 400
    bad: Any
    for bad, message in (
        ([1, 2], "2 sizes for an order over 3 buffers"),
        (np.ones(2, dtype=int), "2 sizes for an order over 3 buffers"),
        ([1, 2, -1], "a size is -1 bytes; it must be at least 0"),
        (np.array([1, 2, -7]), "a size is -7 bytes; it must be at least 0"),
        ([1, 2, 3.0], "a size is 3.0; bytes and times are integers, never floats"),
        (np.ones(3), "sizes are float64; bytes are integers, never floats"),
    ):
        with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
            order.replay(bad)
    with pytest.raises(UsageError, match=r"^2 offsets for 3 buffers$"):
        Order.of(problem, answer(problem, [0, 4], 8))


def test_no_buffers_have_an_order_too() -> None:
    nothing = Problem(sizes=[], starts=[], ends=[])
    assert Order.of(nothing, solve(nothing)).replay([]) == ([], 0)


def test_an_order_of_pinned_buffers_is_refused() -> None:
    problem = Problem(sizes=[4, 4], starts=[0, 0], ends=[2, 2], pins=[0, 8])
    with pytest.raises(UsageError, match=r"^an order has no pinned buffers, this problem has pins; solve it again"):
        Order.of(problem, solve(problem))
