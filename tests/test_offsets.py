"""Offset assignment: every solver's answers pass an independent check, and certificates mean what they say."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mosaic.errors import UnknownName, UsageError
from mosaic.planner.offsets import SOLVERS, Problem, Solution, blocks_of, lower_bound, read_csv, solve, validate
from mosaic.planner.offsets.exact import FAILED, SOLVED, Search, layout_of
from mosaic.planner.offsets.periodic import fold
from mosaic.planner.offsets.skyline import PREORDERS, skyline

INSTANCES = Path(__file__).parents[1] / "benchmarks" / "instances"
HEURISTICS = ("first_fit", "best_fit", "greedy_by_size", "greedy_by_area", "greedy_by_conflicts", "skyline", "periodic")
SEARCHES = ("local_search", "exact", "auto")

relaxed = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def problems(draw: st.DrawFn, largest: int = 9, plain: bool = False) -> Problem:
    """Small problems with everything a problem may have."""
    n = draw(st.integers(1, largest))
    starts = draw(st.lists(st.integers(0, 12), min_size=n, max_size=n))
    lengths = draw(st.lists(st.integers(1, 8), min_size=n, max_size=n))
    sizes = draw(st.lists(st.integers(0 if not plain else 1, 12), min_size=n, max_size=n))
    ends = [a + b for a, b in zip(starts, lengths, strict=True)]
    if plain:
        return Problem(sizes=sizes, starts=starts, ends=ends)
    alignments = draw(st.sampled_from([1, 4, [draw(st.sampled_from([1, 2, 3, 8])) for _ in range(n)]]))
    gaps = [()] * n
    for row in range(n):
        if lengths[row] > 3 and draw(st.booleans()):
            gaps[row] = ((starts[row] + 1, starts[row] + 2),)  # type: ignore[call-overload]
    aliases = {}
    for row in range(1, n):
        if draw(st.integers(0, 4)) == 0:
            aliases[row] = (draw(st.integers(0, row - 1)), 24 * draw(st.integers(0, 1)))
    problem = Problem(sizes=sizes, starts=starts, ends=ends, gaps=gaps, alignments=alignments, aliases=aliases)
    if draw(st.booleans()):  # pins that are known to go together: those of a valid answer, moved up
        placed = solve(problem, solver="first_fit").offsets
        shift = 24 * draw(st.integers(0, 2))
        pins = [o + shift if draw(st.integers(0, 3)) == 0 else None for o in placed]
        problem = replace(problem, pins=pins)
    return problem


def brute_force(problem: Problem) -> int:
    """Return the least peak by trying every order of drops; a handful of plain buffers only."""
    best = sum(problem.sizes)
    n = len(problem)
    for order in itertools.permutations(range(n)):
        tops: dict[int, int] = {}
        for row in order:
            under = [
                tops[o] for o in tops if problem.starts[o] < problem.ends[row] and problem.starts[row] < problem.ends[o]
            ]
            tops[row] = max(under, default=0) + problem.sizes[row]
        best = min(best, max(tops.values()))
    return best


@pytest.mark.parametrize("solver", HEURISTICS)
@given(problem=problems())
@relaxed
def test_heuristics_answer_validly(solver: str, problem: Problem) -> None:
    solution = solve(problem, solver=solver)
    assert validate(problem, solution) == []
    assert solution.peak_bytes >= lower_bound(problem)
    assert solution == solve(problem, solver=solver)


@pytest.mark.parametrize("solver", SEARCHES)
@given(problem=problems(largest=14))
@settings(relaxed, max_examples=30)
def test_searches_answer_validly(solver: str, problem: Problem) -> None:
    solution = solve(problem, solver=solver, node_limit=300)
    assert validate(problem, solution) == []
    assert solution == solve(problem, solver=solver, node_limit=300)


@given(problem=problems(largest=6, plain=True))
@settings(relaxed, max_examples=40)
def test_exact_equals_brute_force(problem: Problem) -> None:
    solution = solve(problem, solver="exact", node_limit=20_000)
    assert solution.optimal
    assert solution.peak_bytes == brute_force(problem)


@given(problem=problems(largest=8))
@settings(relaxed, max_examples=30)
def test_no_lane_refutes_what_another_one_finds(problem: Problem) -> None:
    blocks = blocks_of(problem)
    capacity = solve(problem, node_limit=5_000).peak_bytes
    for lane in range(9):
        assert Search(layout_of(blocks), capacity, fast=False, lane=lane).advance(50_000) == SOLVED


@pytest.mark.parametrize("solver", ["cpsat", "ilp"])
@given(problem=problems(largest=7))
@settings(relaxed, max_examples=8)
def test_models_agree_with_exact_search(solver: str, problem: Problem) -> None:
    pytest.importorskip("ortools" if solver == "cpsat" else "pulp")
    modelled = solve(problem, solver=solver)
    searched = solve(problem, solver="exact", node_limit=50_000)
    assert validate(problem, modelled) == []
    assert searched.optimal
    assert modelled.peak_bytes >= searched.peak_bytes
    if modelled.optimal:
        assert modelled.peak_bytes == searched.peak_bytes


def test_compiled_and_plain_search_take_the_same_steps() -> None:
    pytest.importorskip("numba")
    blocks = blocks_of(read_csv(INSTANCES / "C.1048576.csv"))
    layout = layout_of(blocks)
    plain, fast = (Search(layout, blocks.lower_bound, fast=fast) for fast in (False, True))
    assert plain.advance(100) == fast.advance(100)  # stopped and resumed
    assert plain.advance(4_900) == fast.advance(4_900) == SOLVED
    assert plain.nodes == fast.nodes
    assert plain.offsets(blocks) == fast.offsets(blocks)


@pytest.mark.parametrize("name", [*(f"{letter}.1048576" for letter in "ACEFGH"), "iop_B_max", "iopddl_G_1"])
def test_public_instances_reach_the_lower_bound(name: str) -> None:
    pytest.importorskip("numba")
    problem = read_csv(INSTANCES / f"{name}.csv")
    solution = solve(problem, node_limit=100_000)
    assert validate(problem, solution) == []
    assert solution.peak_bytes == solution.lower_bound_bytes
    assert solution.optimal and solution.capacity_reached and not solution.infeasible


@pytest.mark.soak  # `test_offsets_large` has others
def test_large_instance_is_near_the_bound() -> None:
    problem = read_csv(INSTANCES / "iop_L_max.csv.gz")
    solution = solve(problem, solver="greedy_by_size")
    assert validate(problem, solution) == []
    assert solution.peak_bytes * 1000 <= solution.lower_bound_bytes * 1001


def mobilenet() -> Problem:
    """MobileNet v1's first blocks (float32, 224): the widest pair is 112 x 112 x (32 + 64) x 4 bytes."""
    channels = [(112, 32), (112, 32), (112, 64), (56, 64), (56, 128), (56, 128), (56, 128), (28, 128), (28, 256)]
    sizes = [side * side * width * 4 for side, width in channels]
    return Problem(sizes=sizes, starts=range(len(sizes)), ends=range(2, len(sizes) + 2))


def test_mobilenet_by_hand() -> None:
    solution = solve(mobilenet())
    assert solution.lower_bound_bytes == 112 * 112 * (32 + 64) * 4 == 4_816_896
    assert solution.peak_bytes == 4_816_896 and solution.optimal


def test_a_gap_lets_another_buffer_in() -> None:
    problem = Problem(sizes=[10, 10], starts=[0, 3], ends=[10, 5], gaps=[[(3, 5)], []])
    assert solve(problem).peak_bytes == 10
    assert solve(replace(problem, gaps=None)).peak_bytes == 20


def test_an_alias_group_is_one_block() -> None:
    problem = Problem(
        ids=["x", "q", "k"],
        sizes=[64, 16, 32],
        starts=[0, 4, 2],
        ends=[3, 6, 5],
        aliases={"q": ("x", 16), "k": ("q", 16)},
    )
    solution = solve(problem)
    x, q, k = solution.offsets
    assert (q, k) == (x + 16, x + 32)
    assert validate(problem, solution) == []
    moved = replace(solution, offsets=(x, q + 1, k))
    assert any("into buffer x" in violation for violation in validate(problem, moved))


def test_pins_stay_and_others_go_around() -> None:
    problem = Problem(sizes=[8, 8, 8], starts=[0, 0, 0], ends=[2, 2, 2], pins=[None, 4, None])
    solution = solve(problem)
    assert solution.offsets[1] == 4 and validate(problem, solution) == []
    assert solution.peak_bytes == 28 and solution.optimal  # the 4 bytes below are of no use


def test_validator_sees_an_overlap_at_one_point() -> None:
    problem = Problem(sizes=[4, 4, 4], starts=[0, 1, 2], ends=[2, 3, 4])
    good = solve(problem)
    bad = replace(good, offsets=(0, 4, 5), peak_bytes=9, optimal=False)
    assert validate(problem, bad) == ["buffers 1 and 2 are live together from 2 and overlap: [4, 8) and [5, 9)"]
    assert validate(problem, replace(good, offsets=(0, 4))) == ["2 offsets for 3 buffers"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"sizes": [1, -3]}, "-3 bytes"),
        ({"ends": [1, 1]}, r"empty lifetime \[1, 1\)"),
        ({"ids": ["a", "a"]}, "'a' occurs more than once"),
        ({"sizes": [1.5, 2]}, "1.5"),
        ({"starts": [0]}, "starts has 1 rows, sizes has 2"),
        ({"pins": [3, None], "alignments": 2}, "pinned at 3"),
        ({"pins": [0, 3], "sizes": [4, 4]}, "overlap"),
        ({"gaps": [[(0, 9)], []]}, "gaps"),
        ({"alignments": 0}, "at least 1 byte"),
        ({"aliases": {0: (1, 0), 1: (0, 0)}}, "leads back to itself"),
        ({"aliases": {0: (7, 0)}}, "no buffer 7"),
        ({"aliases": {0: (1, 3)}, "alignments": 2}, "3 bytes into 1"),
        ({"capacity": -1}, "capacity is -1"),
    ],
)
def test_bad_problems_are_refused_with_the_numbers(columns: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"sizes": [4, 4], "starts": [0, 1], "ends": [3, 4]}
    with pytest.raises(UsageError, match=message):
        Problem(**{**good, **columns})  # type: ignore[arg-type]


def test_unknown_solver_suggests_one() -> None:
    with pytest.raises(UnknownName, match="skyline"):
        solve(mobilenet(), solver="skyliner")


def test_capacity_below_the_live_set_is_proven_infeasible() -> None:
    problem = Problem(sizes=[6, 6], starts=[0, 1], ends=[2, 3], capacity=11)
    solution = solve(problem)
    assert solution.infeasible and not solution.capacity_reached
    assert solution.lower_bound_bytes == 12


def test_exhaustion_is_a_proof_too() -> None:
    """Two buffers of 3 bytes at multiples of 4 need 7, whatever the live set says."""
    solution = solve(Problem(sizes=[3, 3], starts=[0, 0], ends=[1, 1], alignments=4), solver="exact")
    assert solution.optimal and (solution.lower_bound_bytes, solution.peak_bytes) == (6, 7)
    assert solution.proven_bound_bytes == 7


def test_local_search_that_reaches_the_bound_ends_the_search() -> None:
    draw = random.Random(19)
    count = draw.choice((14, 20, 30, 45, 60, 80))
    starts = [draw.randrange(40) for _ in range(count)]
    ends = [start + draw.randrange(1, 18) for start in starts]
    sizes = [draw.randrange(1, 40) for _ in range(count)]
    problem = Problem(sizes=sizes, starts=starts, ends=ends)
    solution = solve(problem, solver="local_search", node_limit=20_000)
    assert validate(problem, solution) == []
    assert (solution.peak_bytes, solution.solver, solution.optimal) == (536, "local_search", True)


def repeated(layers: int) -> Problem:
    """Layers of a window in which first-fit heuristics leave a hole."""
    window = [(3, 0, 2), (5, 1, 4), (2, 1, 3), (4, 3, 6), (6, 4, 6), (3, 2, 5), (2, 5, 7)]
    rows = [(size, 6 * k + a, 6 * k + b) for k in range(layers) for size, a, b in window]
    return Problem(sizes=[r[0] for r in rows], starts=[r[1] for r in rows], ends=[r[2] for r in rows])


def test_a_repeating_program_is_folded_and_tiled() -> None:
    problem = repeated(24)
    folded = next(fold(blocks_of(problem)))
    assert len(folded.window) <= 3 * 7
    solution = solve(problem, solver="periodic", node_limit=20_000)
    assert validate(problem, solution) == []
    assert solution.optimal
    assert len({solution.offsets[7 * k : 7 * k + 7] for k in range(2, 22)}) == 1


def test_search_refutes_a_capacity_below_the_bound() -> None:
    blocks = blocks_of(mobilenet())
    search = Search(layout_of(blocks), blocks.lower_bound - 1, fast=False)
    assert search.advance(1_000) == FAILED


@pytest.mark.parametrize("keys", PREORDERS)
def test_skyline_never_fills_below(keys: str) -> None:
    blocks = blocks_of(read_csv(INSTANCES / "A.1048576.csv"))
    offsets = skyline(blocks, keys)
    for row, others in enumerate(blocks.conflicts):
        under = [offsets[o] + blocks.sizes[o] for o in others if offsets[o] < offsets[row]]
        assert offsets[row] == max(under, default=0)


def test_every_solver_answers_an_empty_problem() -> None:
    nothing = Problem(sizes=[], starts=[], ends=[])
    for solver in SOLVERS:
        solution = solve(nothing, solver=solver)
        assert isinstance(solution, Solution) and solution.peak_bytes == 0 and solution.optimal


def test_import_stays_light() -> None:
    code = (
        "import sys, mosaic.planner.offsets as o; "
        "o.solve(o.Problem(sizes=[4, 4], starts=[0, 1], ends=[2, 3])); "
        "print(sorted({'numba', 'pulp', 'ortools', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_numba_searching_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    from mosaic.planner.offsets import compiled

    monkeypatch.setattr(compiled, "available", lambda: False)
    problem = read_csv(INSTANCES / "C.1048576.csv")
    solution = solve(problem, node_limit=10_000)
    assert validate(problem, solution) == []
    assert solution.peak_bytes == solution.lower_bound_bytes
