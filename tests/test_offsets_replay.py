"""Replay: an order is valid for any sizes, single and batched alike, and survives JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
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


def test_forms_of_sizes() -> None:
    problem = Problem(sizes=[4, 4, 8], starts=[0, 1, 2], ends=[2, 3, 4])
    order = Order.of(problem, solve(problem))
    offsets, peak = order.replay(np.array([4, 4, 8]))
    assert isinstance(offsets, np.ndarray) and peak == 12
    assert order.replay(np.zeros((0, 3), dtype=np.int64))[0].shape == (0, 3)
    for bad, message in (([1, 2], "2 sizes"), ([1, 2, -1], "-1 bytes"), (np.ones((1, 3)), "never floats")):
        with pytest.raises(UsageError, match=message):
            order.replay(bad)


def test_pins_that_collide_are_refused_in_a_batch() -> None:
    problem = Problem(sizes=[4, 4], starts=[0, 0], ends=[2, 2], pins=[0, 8])
    order = Order.of(problem, solve(problem))
    with pytest.raises(UsageError, match="pinned at"):
        order.replay([9, 4])
    with pytest.raises(UsageError, match="pinned at"):
        order.replay(np.array([[4, 4], [9, 4]]))


@pytest.mark.parametrize("plain", [{}, {"rows": [[0]], "below": [[0]], "alignments": 1, "num_buffers": 1}])
def test_bad_documents_are_refused(plain: dict[str, object]) -> None:
    with pytest.raises(PlanFormatError):
        Order.from_json(plain)


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
