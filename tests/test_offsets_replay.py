"""Replay: an order is valid for any sizes, single and batched alike, and survives JSON."""

from __future__ import annotations

import json
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

from mosaic.errors import PlanFormatError, UsageError
from mosaic.planner.offsets import Order, Problem, Solution, lower_bound, solve, validate


def answer(problem: Problem, offsets: list[int], peak: int) -> Solution:
    bound = lower_bound(problem)
    return Solution(
        offsets=tuple(offsets), peak_bytes=peak, lower_bound_bytes=bound, optimal=peak == bound, solver="replay"
    )


@given(problem=problems(), solver=st.sampled_from(["skyline", "greedy_by_size"]), data=st.data())
@relaxed
def test_replay_is_valid_for_any_sizes(problem: Problem, solver: str, data: st.DataObject) -> None:
    order = Order.of(problem, solve(problem, solver=solver))
    n = len(problem)
    batch = data.draw(st.lists(st.lists(st.integers(0, 40), min_size=n, max_size=n), min_size=1, max_size=4))
    for sizes in batch:
        try:
            other = replace(problem, sizes=sizes)
        except UsageError:  # the pins do not go together with these sizes
            return
        offsets, peak = order.replay(sizes)
        assert validate(other, answer(other, offsets, peak)) == []
    offsets_of, peaks = order.replay(np.array(batch, dtype=np.int64))
    for sizes, offsets, peak in zip(batch, offsets_of.tolist(), peaks.tolist(), strict=True):
        assert (offsets, peak) == order.replay(sizes)


@given(problem=problems())
@relaxed
def test_replay_of_the_same_sizes_is_no_higher(problem: Problem) -> None:
    solution = solve(problem, solver="greedy_by_size")
    order = Order.of(problem, solution)
    _, peak = order.replay(problem.sizes)
    assert peak <= solution.peak_bytes
    assert Order.from_json(json.loads(json.dumps(order.to_json()))) == order


def said(problem: Problem, offsets: list[int]) -> dict[str, Any]:
    """Return what an order holds, from its definition: who lies directly below whom where something starts."""
    found = sorted(groups(problem), key=lambda group: (offsets[group.root], offsets[group.root] + group.size))
    starts = {time for group in found for time in group.times if time - 1 not in group.times}
    below: list[tuple[int, ...]] = []
    for number, group in enumerate(found):
        lower = [o for o in range(number) if found[o].pin is None]
        seen = {max(o for o in lower if time in found[o].times) for time in group.times & starts
                if any(time in found[o].times for o in lower)}  # fmt: skip
        if group.pin is not None:
            seen = set()
        below.append(tuple(sorted(o for o in seen if not any(o in below[other] for other in seen))))
    members = [[row for row in range(len(problem)) if root_of(problem, row)[0] == group.root] for group in found]
    pinned = [number for number, group in enumerate(found) if group.pin is not None]
    fixed = [
        tuple(o for o in pinned if o != number and found[o].times & group.times) for number, group in enumerate(found)
    ]
    return {
        "below": tuple(below),
        "rows": tuple(map(tuple, members)),
        "distances": tuple(tuple(root_of(problem, row)[1] for row in rows) for rows in members),
        "alignments": tuple(group.alignment for group in found),
        "pins": tuple(group.pin for group in found),
        "fixed": tuple(fixed) if pinned else (),
        "num_buffers": len(problem),
    }


def fallen(order: dict[str, Any], sizes: list[int]) -> tuple[list[int], int] | None:
    """Let everything fall on what it sees below it, and around what is pinned; None if pinned blocks overlap."""
    size = [
        max(distance + sizes[row] for row, distance in zip(rows, away, strict=True))
        for rows, away in zip(order["rows"], order["distances"], strict=True)
    ]
    low: list[int] = []
    for block, lows in enumerate(order["below"]):
        at, step, pins = max((low[o] + size[o] for o in lows), default=0), order["alignments"][block], order["pins"]
        around = [(pins[o], pins[o] + size[o]) for o in order["fixed"][block] if size[o]] if order["fixed"] else []
        if pins[block] is not None:
            low.append(pins[block])
            if size[block] and any(a < pins[block] + size[block] and pins[block] < b for a, b in around):
                return None
            continue
        while at % step or (size[block] and any(a < at + size[block] and at < b for a, b in around)):
            at += 1
        low.append(at)
    offsets = [0] * len(sizes)
    for block, rows in enumerate(order["rows"]):
        for row, distance in zip(rows, order["distances"][block], strict=True):
            offsets[row] = low[block] + distance
    return offsets, max(map(int.__add__, low, size), default=0)


def test_an_order_is_who_lies_directly_below_whom() -> None:
    for seed in range(150):
        problem, draw = any_problem(seed), random.Random(seed)
        rows = sorted(range(len(problem)), key=lambda _: draw.random())
        offsets = (
            naive_order(replace(problem, pins=None), rows)
            if problem.pins is None
            else list(solve(problem, solver="first_fit").offsets)
        )
        order = Order.of(problem, answer(problem, offsets, 0))
        expected = said(problem, offsets)
        assert {name: getattr(order, name) for name in expected} == expected
        assert Order.from_json(json.loads(json.dumps(order.to_json()))) == order
        batch = [list(problem.sizes), *([draw.choice((0, draw.randrange(40))) for _ in rows] for _ in range(6))]
        answers = [fallen(expected, sizes) for sizes in batch]
        for sizes, fell in zip(batch, answers, strict=True):
            if fell is None:
                for refused in (sizes, np.array(sizes), np.array([problem.sizes, sizes])):
                    with pytest.raises(
                        UsageError, match=r"^buffers \d+ and \d+ are pinned at \d+ and \d+; with sizes of"
                    ):
                        order.replay(refused)
                continue
            assert order.replay(sizes) == fell
        held = [(sizes, fell) for sizes, fell in zip(batch, answers, strict=True) if fell is not None]
        placed, peaks = order.replay(np.array([sizes for sizes, _ in held]))
        assert placed.tolist() == [fell[0] for _, fell in held] and peaks.tolist() == [fell[1] for _, fell in held]
        assert placed.dtype == peaks.dtype == np.int64


def test_forms_of_sizes() -> None:
    problem = Problem(sizes=[4, 4, 8], starts=[0, 1, 2], ends=[2, 3, 4])
    order = Order.of(problem, solve(problem))
    offsets, peak = order.replay(np.array([4, 4, 8], dtype=np.uint8))
    assert isinstance(offsets, np.ndarray) and offsets.dtype == np.int64 and peak == 12
    assert order.replay(list(np.array([4, 4, 8], dtype=np.int32)))[1] == 12
    assert order.replay(np.array([[200, 200, 200]], dtype=np.uint8))[1].tolist() == [400]
    placed, peaks = order.replay(np.zeros((0, 3), dtype=np.int64))
    assert placed.shape == (0, 3) and peaks.shape == (0,)
    bad: Any
    for bad, message in (
        ([1, 2], "2 sizes for an order over 3 buffers"),
        (np.ones((4, 2), dtype=int), "2 sizes for an order over 3 buffers"),
        ([1, 2, -1], "a size is -1 bytes; it must be at least 0"),
        (np.array([[1, 2, 3], [1, 2, -7]]), "a size is -7 bytes; it must be at least 0"),
        ([1, 2, 3.0], "a size is 3.0; bytes and times are integers, never floats"),
        (np.ones((1, 3)), "sizes are float64; bytes are integers, never floats"),
        (np.ones((1, 1, 3), dtype=int), "sizes have 3 axes; expected [n] or [k, n]"),
    ):
        with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
            order.replay(bad)
    with pytest.raises(UsageError, match=r"^2 offsets for 3 buffers$"):
        Order.of(problem, answer(problem, [0, 4], 8))


def test_no_buffers_have_an_order_too() -> None:
    nothing = Problem(sizes=[], starts=[], ends=[])
    order = Order.of(nothing, solve(nothing))
    assert order.replay([]) == ([], 0)
    offsets, peaks = order.replay(np.zeros((2, 0), dtype=np.int64))
    assert offsets.shape == (2, 0) and peaks.tolist() == [0, 0]
    assert Order.from_json(order.to_json()) == order


def test_pins_that_collide_are_refused_in_a_batch() -> None:
    problem = Problem(sizes=[4, 4], starts=[0, 0], ends=[2, 2], pins=[0, 8])
    order = Order.of(problem, solve(problem))
    message = re.escape("buffers 1 and 0 are pinned at 8 and 0; with sizes of 4 and 9 bytes they overlap")
    other = re.escape("buffers 0 and 1 are pinned at 0 and 8; with sizes of 9 and 4 bytes they overlap")
    for sizes in ([9, 4], np.array([[4, 4], [9, 4]])):
        with pytest.raises(UsageError, match=f"^({message}|{other})$"):
            order.replay(sizes)
    assert order.replay([8, 4])[1] == 12 and order.replay([9, 0])[1] == 9


PLAIN: dict[str, Any] = {"num_buffers": 3, "below": [[], [0]], "rows": [[0, 2], [1]], "alignments": 1}


def test_an_order_in_json_leaves_out_what_is_usual() -> None:
    usual = Order.from_json(PLAIN)
    assert usual.to_json() == PLAIN
    assert usual.replay([4, 8, 6]) == ([0, 6, 0], 14)
    assert usual.distances == ((0, 0), (0,)) and usual.alignments == (1, 1) and usual.pins == (None, None)
    full = PLAIN | {"distances": [[0, 4], [0]], "alignments": [1, 4], "pins": [None, 8], "fixed": [[1], []]}
    order = Order.from_json(full)
    assert order.to_json() == full and order.replay([4, 8, 6]) == ([16, 8, 20], 26)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": None}, "not an order of buffers: TypeError"),
        ({"below": [["a"], []]}, "not an order of buffers: TypeError"),
        ({"num_buffers": 2.5}, "not an order of buffers: TypeError"),
        ({"alignments": [1, 1.5]}, "not an order of buffers: TypeError"),
        ({"alignments": None}, "not an order of buffers: TypeError"),
        ({"pins": ["x", None]}, "not an order of buffers: TypeError"),
        ({"fixed": [[], [None]]}, "not an order of buffers: TypeError"),
        ({"distances": [[0, "4"], [0]]}, "not an order of buffers: TypeError"),
        ({"distances": [[0], [0]]}, "an order of 2 blocks must state as many of everything"),
        ({"distances": [[0, 0]]}, "an order of 2 blocks must state as many of everything"),
        ({"below": [[]]}, "an order of 2 blocks must state as many of everything"),
        ({"alignments": [1]}, "an order of 2 blocks must state as many of everything"),
        ({"pins": [None]}, "an order of 2 blocks must state as many of everything"),
        ({"pins": [4, None], "fixed": [[]]}, "an order of 2 blocks must state as many of everything"),
        ({"alignments": 0}, "an order's alignments must be at least 1; one is 0"),
        ({"alignments": [4, -1]}, "an order's alignments must be at least 1; one is -1"),
        ({"pins": [None, 8], "fixed": [[], [0]]}, "an order's blocks can only go around pinned ones"),
        ({"pins": [None, 8], "fixed": [[2], []]}, "an order's blocks can only go around pinned ones"),
        ({"rows": [[0, 2]]}, "an order over 3 buffers must name each of them once"),
        ({"rows": [[0, 2], [2]]}, "an order over 3 buffers must name each of them once"),
        ({"num_buffers": 4}, "an order over 4 buffers must name each of them once"),
        ({"below": [[], [1]]}, "an order's edges must lead from lower blocks to higher ones"),
        ({"below": [[], [-1]]}, "an order's edges must lead from lower blocks to higher ones"),
        ({"below": [[1], []]}, "an order's edges must lead from lower blocks to higher ones"),
    ],
)
def test_what_is_no_order_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanFormatError, match=f"^{message}"):
        Order.from_json(PLAIN | changes)
    for name in PLAIN:
        with pytest.raises(PlanFormatError, match=f"^not an order of buffers: KeyError\\('{name}'"):
            Order.from_json({key: value for key, value in PLAIN.items() if key != name})


def test_buffers_of_no_bytes_stand_in_nobodys_way() -> None:
    """Pins of zero bytes inside another block's addresses; found by the property above."""
    problem = Problem(
        sizes=(0, 0, 0, 0, 1, 0), starts=(0,) * 6, ends=(1,) * 6, pins=(24, 24, None, 24, None, 24),
        aliases={1: (0, 0), 4: (2, 24)},
    )  # fmt: skip
    solution = solve(problem)
    order = Order.of(problem, solution)
    assert order.replay(problem.sizes)[1] <= solution.peak_bytes
    assert int(order.replay(np.array([problem.sizes]))[1][0]) <= solution.peak_bytes
