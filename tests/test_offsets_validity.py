"""Nothing invalid gets past: the guard sees what a comparison byte by byte sees, and a faulty solver is passed over."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_offsets import problems, relaxed

from mosaic.planner import placement
from mosaic.planner.offsets import SOLVERS, Blocks, Guard, Problem, blocks_of, lower_bound, solve, validate
from mosaic.planner.offsets.incumbent import Incumbent
from mosaic.planner.space import Space
from tests.small_programs import CARD, Exact, dims, template


def holds(problem: Problem, offsets: Sequence[int]) -> bool:
    """Say whether offsets are an answer, time by time and byte by byte."""
    row_of = {buffer: row for row, buffer in enumerate(problem.ids)}
    root_of = list(range(len(problem)))
    for row, buffer in enumerate(problem.ids):
        while buffer in problem.aliases:
            buffer = problem.aliases[buffer][0]
        root_of[row] = row_of[buffer]
    for row, buffer in enumerate(problem.ids):
        pin = problem.pins[row] if problem.pins is not None else None
        parent, distance = problem.aliases.get(buffer, (buffer, 0))
        if offsets[row] < 0 or offsets[row] % problem.alignment(row) or pin not in (None, offsets[row]):
            return False
        if offsets[row] != offsets[row_of[parent]] + distance:
            return False
    reach = {
        root: max(offsets[r] + problem.sizes[r] for r in range(len(problem)) if root_of[r] == root) for root in root_of
    }
    for time in range(min(problem.starts, default=0), max(problem.ends, default=0)):
        live = {root_of[row] for row in range(len(problem)) if live_at(problem, row, time)}
        held = [byte for root in live for byte in range(offsets[root], reach[root])]
        if len(held) != len(set(held)):
            return False
    return True


def live_at(problem: Problem, row: int, time: int) -> bool:
    gaps = problem.gaps[row] if problem.gaps is not None else ()
    return problem.starts[row] <= time < problem.ends[row] and not any(a <= time < b for a, b in gaps)


@given(problem=problems(), data=st.data())
@relaxed
def test_the_guard_sees_what_is_wrong_and_nothing_else(problem: Problem, data: st.DataObject) -> None:
    guard = Guard(problem)
    right = list(solve(problem, solver="first_fit").offsets)
    assert guard.fault(right) is None and holds(problem, right)
    for _ in range(6):
        row = data.draw(st.integers(0, len(problem) - 1))
        moved = list(right)
        moved[row] += data.draw(st.integers(-12, 12))
        assert (guard.fault(moved) is None) == holds(problem, moved), (moved, guard.fault(moved))
        sizes = data.draw(st.lists(st.integers(0, 12), min_size=len(problem), max_size=len(problem)))
        if problem.pins is None:
            other = replace(problem, sizes=sizes)
            assert (guard.fault(right, sizes) is None) == holds(other, right)
            assert guard.fault(np.array(right), np.array(sizes)) == guard.fault(right, sizes)


def packed(n: int, longest: int, unit: int = 1) -> tuple[Problem, list[int]]:
    draw = random.Random(n)
    starts = [draw.randrange(n) for _ in range(n)]
    ends = [start + draw.randrange(1, longest) for start in starts]
    problem = Problem(sizes=[draw.randrange(1, 50) * unit for _ in range(n)], starts=starts, ends=ends)
    return problem, list(solve(problem, solver="first_fit").offsets)


@pytest.mark.parametrize(
    ("n", "longest", "unit"), [(400, 60, 1), (400, 60, 1 << 70), (900, 500, 1), (900, 500, 1 << 60)]
)
def test_every_single_overlap_is_seen_whatever_the_size(n: int, longest: int, unit: int) -> None:
    """Some hundred pairs are compared; 200,000 are swept; beyond 61 bits Python's integers are."""
    problem, offsets = packed(n, longest, unit)
    guard = Guard(problem)
    assert guard.fault(offsets) is None
    starts, ends = np.array(problem.starts), np.array(problem.ends)
    lows, sizes = np.array(offsets) // unit, np.array(problem.sizes) // unit
    for row in range(0, n, 7):
        for by in (-1, 1):
            moved = lows.copy()
            moved[row] += by
            meet = (starts < ends[row]) & (starts[row] < ends) & (moved < moved[row] + sizes[row])
            hit = meet & (moved[row] < moved + sizes)
            hit[row] = False
            fault = guard.fault([int(low) * unit for low in moved])
            assert (fault is None) == (not hit.any() and moved[row] >= 0)


def test_faults_are_told_with_names_and_numbers() -> None:
    problem = Problem(
        ids=["a", "b", "c"], sizes=[4, 4, 2], starts=[0, 1, 5], ends=[3, 4, 6], alignments=2, aliases={"c": ("a", 2)}
    )
    guard = Guard(problem)
    assert guard.fault([0, 4, 2]) is None
    assert guard.fault([0, 4]) == "2 offsets for 3 buffers"
    assert guard.fault([0, -2, 2]) == "buffer b has a negative offset -2"
    assert guard.fault([0, 5, 2]) == "buffer b at 5 is not aligned to 2"
    assert guard.fault([0, 4, 4]) == "buffer c lies at 4, not 2 bytes into buffer a"
    assert guard.fault([4, 2, 6]) == "buffers a and b are live together from 1 and overlap: [4, 8) and [2, 6)"
    pinned = Guard(Problem(sizes=[4, 4], starts=[0, 0], ends=[2, 2], pins=[None, 8]))
    assert pinned.fault([0, 4]) == "buffer 1 is pinned at 8 and lies at 4"
    assert Guard(Problem(sizes=[], starts=[], ends=[])).fault([]) is None


FAULTY: dict[str, Callable[[Blocks], list[int]]] = {
    "all_at_zero": lambda blocks: [0] * len(blocks),
    "too_few": lambda blocks: [0] * (len(blocks) - 1),
    "below_zero": lambda blocks: [offset - 8 for offset in solve(blocks.problem).offsets],
    "askew": lambda blocks: [offset + 1 for offset in solve(blocks.problem).offsets],
}


def layered() -> Problem:
    draw = random.Random(5)
    starts = sorted(draw.randrange(60) for _ in range(90))
    ends = [start + draw.randrange(1, 9) for start in starts]
    return Problem(sizes=[8 * draw.randrange(1, 30) for _ in starts], starts=starts, ends=ends, alignments=8)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("fault", FAULTY)
def test_a_faulty_solver_is_dropped_logged_and_the_next_one_asked(
    solver: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    for package, needed in (("pulp", "ilp"), ("ortools", "cpsat")):
        if solver == needed:
            pytest.importorskip(package)
    problem = layered() if solver not in ("ilp", "cpsat") else replace(layered(), sizes=[8] * 90)
    with caplog.at_level(logging.WARNING):
        solution = solve(problem, solver=solver, node_limit=300, placers={"mine": FAULTY[fault]})
    assert validate(problem, solution) == []
    assert solution.solver in SOLVERS
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["dropped an answer of the solver mine"]
    assert solution == solve(problem, solver=solver, node_limit=300)


def test_a_solver_of_ones_own_that_is_right_is_used(caplog: pytest.LogCaptureFixture) -> None:
    problem = layered()
    best = solve(problem)
    assert best.optimal
    solution = solve(problem, placers={"mine": lambda blocks: list(best.offsets), "never": FAULTY["too_few"]})
    assert (solution.solver, solution.offsets) == ("mine", best.offsets)


def test_an_answer_is_kept_if_it_holds_and_is_better(caplog: pytest.LogCaptureFixture) -> None:
    problem = Problem(sizes=[4, 4, 4], starts=[0, 1, 2], ends=[2, 3, 4])
    best = Incumbent(blocks_of(problem), None)
    assert not best.offer([0, 0, 0], "wrong") and best.offsets is None
    assert best.offer([0, 8, 4], "high") and best.peak == 12
    assert not best.offer([4, 8, 0], "as_high") and best.offsets == [0, 8, 4]
    assert not best.offer([0, 4, 3], "wrong") and not best.done
    assert best.offer([0, 4, 0], "low") and best.done
    assert [record.args[0] for record in caplog.records if record.args] == ["wrong", "wrong"]
    solution = best.solution()
    assert (solution.solver, solution.peak_bytes, solution.optimal) == ("low", 8, True)


def test_a_bound_above_a_checked_answer_is_dropped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    problem = Problem(sizes=[4, 4, 4], starts=[0, 1, 2], ends=[2, 3, 4])
    best = Incumbent(blocks_of(problem), None)
    best.refute(9, 4, "early")
    assert best.bound == 12
    best = Incumbent(blocks_of(problem), None)
    best.offer([0, 8, 4], "high")
    best.refute(12, 4, "liar")
    assert best.bound == 8 and not best.done
    assert "liar" in caplog.text and "16 bytes" in caplog.text
    best.refute(9, 4, "true")
    assert best.bound == 12 and best.done


def test_bound_and_peak_of_no_blocks_are_those_of_the_pins() -> None:
    problem = Problem(sizes=[0], starts=[0], ends=[1], pins=[24])
    assert solve(problem).peak_bytes == lower_bound(problem) == 24


def test_a_replayed_order_that_does_not_hold_is_dropped_and_the_solver_asked(caplog: pytest.LogCaptureFixture) -> None:
    point = Space(template(0), CARD).at(dims(300))
    config = next(Exact(point).configs())
    expected = placement.place(point, config)
    variant = point.space.variant(config)
    assert "replayed" in expected[2] and variant.orders
    assert list(placement.replayed(point, config))  # finds the orders at all sizes
    for key, (order, guard, _) in variant.orders.items():
        variant.orders[key] = (
            replace(order, below=((),) * len(order.below)),
            guard,
            "stackless",
        )  # everything at offset 0
    offsets, peak, solver = placement.place(point, config)
    assert "stackless" not in solver and peak == expected[1]
    assert caplog.text.count("dropped a replayed order of the solver stackless") == len(placement.REFERENCES) + 1
    problem = placement.problem_of(variant, list(point.root_sizes(config)))
    assert Guard(problem).fault(offsets) is None


@pytest.mark.parametrize(
    ("sizes", "offsets"), [((2**63 - 8, 16), (8, 0)), ((16, 16), (2**63 - 8, 2**63 - 16))], ids=["size", "offset"]
)
def test_sums_beyond_64_bits_do_not_wrap(sizes: tuple[int, int], offsets: tuple[int, int]) -> None:
    """Bytes that end beyond 2^63 overlap as any others do."""
    problem = Problem(ids=(0, 1), sizes=sizes, starts=(0, 0), ends=(1, 1))
    assert problem.alignment(0) == 1
    assert Guard(problem).fault(list(offsets)) is not None
    apart = (offsets[0], offsets[0] + sizes[0]) if sizes[0] == 16 else (16, 0)
    assert Guard(problem).fault(list(apart)) is None
