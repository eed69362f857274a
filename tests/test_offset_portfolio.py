"""Which solver runs, for how long, and how its answer is used: with scripted solvers.

Every problem here is one block as large as the bound and one that lies alone in time, at any offset: an answer of every
peak can be had.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from test_offset_definitions import any_problem

from mosaic.errors import MosaicError, UnknownName
from mosaic.planner.offsets import Blocks, Problem, Solution, blocks_of, compiled, cpsat, ilp, portfolio, solve
from mosaic.planner.offsets.exact import FAILED, LANES, RUNNING, SOLVED
from mosaic.planner.offsets.greedy import greedy_by_area, greedy_by_conflicts, greedy_by_size
from mosaic.planner.offsets.incumbent import Incumbent, Outcome, OutOfTime
from mosaic.planner.offsets.online import best_fit, first_fit
from mosaic.planner.offsets.periodic import Folded

CHEAP = (
    "greedy_by_size",
    "best_fit",
    "greedy_by_area",
    "skyline TWA",
    "skyline TAW",
    "skyline ATW",
    "skyline WAT",
    "first_fit",
)
BOUND, PEAK = 1_000, 2_000


def problem_of(step: int = 1, *, capacity: int | None = None, count: int = 2, alignments: int = 1) -> Problem:
    """Return a problem of a bound of 1,000 bytes whose sizes are multiples of `step`."""
    sizes = [BOUND, step, *[step] * (count - 2)]
    return Problem(sizes=sizes, starts=range(count), ends=range(1, count + 1), capacity=capacity, alignments=alignments)


def placed(blocks: Blocks, peak: int) -> list[int]:
    """Return an answer of that peak; above it lies nothing."""
    return [0, peak - blocks.sizes[1], *[0] * (len(blocks) - 2)]


@dataclass
class Rig:
    """The solvers' answers and their calls."""

    peaks: dict[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    turns: list[tuple[int, int, int, bool]] = field(default_factory=list)  # capacity, lane, placements, compiled
    shares: list[tuple[int, list[int]]] = field(default_factory=list)  # capacity, placements by lane
    optimum: int = PEAK
    effort: float = float("inf")  # placements after which a search is done
    moves: list[tuple[int, int, int]] = field(default_factory=list)  # moves, goal, seed
    local_peaks: Iterator[int] = field(default_factory=lambda: itertools.repeat(PEAK))
    folds: list[Folded] = field(default_factory=list)
    squeezed: list[int | None] = field(default_factory=list)

    def cheap(self, name: str) -> Callable[..., list[int]]:
        def place(blocks: Blocks, *rest: Any, **named: Any) -> list[int]:
            keys = rest[0] if rest and isinstance(rest[0], str) else named.get("keys", "TWA")
            said = f"{name} {keys}" if name == "skyline" else name
            self.asked.append(said)
            return placed(blocks, self.peaks.get(said, PEAK))

        return place

    def folded(self, blocks: Blocks) -> Iterator[Folded]:
        self.asked.append("fold")
        yield from self.folds

    def squeeze(self, blocks: Blocks, best: Incumbent, steps: int | None) -> None:
        self.asked.append("squeeze")
        self.squeezed.append(steps)

    def pool(self, workers: int) -> Pool:
        return Pool(self, workers)

    def rounds(self) -> list[list[tuple[int, int]]]:
        """Return capacity and placements of each turn, by round; both lanes get the same."""
        found: list[list[tuple[int, int]]] = []
        for capacity, spent in self.shares:
            assert len(spent) == LANES and len(set(spent)) == 1
            if not found or capacity <= found[-1][-1][0]:
                found.append([])
            found[-1].append((capacity, spent[0]))
        return found

    def forget(self) -> None:
        for said in (self.asked, self.turns, self.shares, self.moves, self.squeezed):
            said.clear()


class Pool:
    """Runs the lanes of a turn one after the other, and writes down what each of them was given."""

    def __init__(self, rig: Rig, workers: int) -> None:
        self.rig, self.workers = rig, workers

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, run: Callable[[Any], int], lanes: list[Any]) -> list[int]:
        assert self.workers == (LANES if lanes[0].fast else 1)
        assert [lane.lane for lane in lanes] == list(range(LANES))
        before = [lane.nodes for lane in lanes]
        found = [run(lane) for lane in lanes]
        spent = [lane.nodes - was for lane, was in zip(lanes, before, strict=True)]
        self.rig.shares.append((lanes[0].capacity, spent))
        return found


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    rig = Rig()

    class Search:
        def __init__(self, layout: object, capacity: int, *, fast: bool, lane: int = 0) -> None:
            self.capacity, self.lane, self.fast, self.nodes, self.status = capacity, lane, fast, 0, RUNNING

        def advance(self, nodes: int) -> int:
            self.nodes += nodes
            rig.turns.append((self.capacity, self.lane, nodes, self.fast))
            if self.nodes >= rig.effort:
                self.status = SOLVED if self.capacity >= rig.optimum else FAILED
            return self.status

        def offsets(self, blocks: Blocks) -> list[int]:
            assert self.status == SOLVED
            return placed(blocks, rig.optimum)

    class LocalSearch:
        def __init__(self, blocks: Blocks, layout: object, offsets: list[int], *, seed: int, fast: bool) -> None:
            self.blocks, self.seed, self.peak = blocks, seed, blocks.peak(offsets)

        def advance(self, steps: int, goal: int) -> int:
            rig.moves.append((steps, goal, self.seed))
            self.peak = min(self.peak, next(rig.local_peaks))
            return self.peak

        def offsets(self) -> list[int]:
            return placed(self.blocks, self.peak)

    for name in ("greedy_by_size", "best_fit", "skyline", "first_fit", "greedy_by_area"):
        monkeypatch.setattr(portfolio, name, rig.cheap(name))
    monkeypatch.setattr(portfolio, "ThreadPoolExecutor", rig.pool)
    monkeypatch.setattr(portfolio, "fold", rig.folded)
    monkeypatch.setattr(portfolio, "squeeze", rig.squeeze)
    monkeypatch.setattr(portfolio, "layout_of", lambda blocks: "layout")
    monkeypatch.setattr(portfolio, "Search", Search)
    monkeypatch.setattr(portfolio, "LocalSearch", LocalSearch)
    monkeypatch.setattr(compiled, "available", lambda: True)
    monkeypatch.setattr(compiled, "compiled", lambda source: rig.asked.append(f"compile {source.__name__}"))
    return rig


class Clock:
    """Stands still, or goes on by a fixed time whenever it is read."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step = 100.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


# -- the cheap ones first --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHEAP)
def test_the_first_answer_at_the_bound_ends_it(rig: Rig, name: str) -> None:
    rig.peaks[name] = BOUND
    solution = solve(problem_of())
    assert rig.asked == list(CHEAP[: CHEAP.index(name) + 1])
    assert solution.solver == name.split()[0] and solution.optimal and not rig.turns
    assert solution.history == ((0.0, PEAK), (0.0, BOUND))[name == CHEAP[0] :]


def test_then_a_period_is_looked_for_then_searches_take_turns(rig: Rig) -> None:
    solution = solve(problem_of(), node_limit=1_200)
    assert rig.asked == [*CHEAP, "fold", "compile advance"]
    assert (solution.peak_bytes, solution.solver, solution.optimal) == (PEAK, "greedy_by_size", False)
    assert not rig.turns[0][3] and rig.turns[-1][3]  # in plain Python first, then compiled


def test_a_better_answer_is_kept_a_worse_one_not(rig: Rig) -> None:
    rig.peaks = {"best_fit": PEAK - 5, "skyline TAW": PEAK - 4, "first_fit": PEAK - 9}
    solution = solve(problem_of(), node_limit=1)
    assert (solution.solver, solution.peak_bytes) == ("first_fit", PEAK - 9)
    assert [peak for _, peak in solution.history] == [PEAK, PEAK - 5, PEAK - 9]


def test_nothing_is_searched_where_the_bound_is_above_the_capacity(rig: Rig) -> None:
    solution = solve(problem_of(capacity=BOUND - 1))
    assert rig.asked == [CHEAP[0]] and not rig.turns and solution.infeasible
    rig.forget()
    solve(problem_of(capacity=BOUND), node_limit=1)
    assert "fold" in rig.asked and rig.turns


def test_many_blocks_are_asked_for_by_the_quickest_and_ejected(rig: Rig) -> None:
    for count, nodes, steps in ((3_001, None, 100_000 // 20), (3_001, 399, 19)):
        rig.forget()
        solve(problem_of(count=count), node_limit=nodes)
        assert rig.asked == ["best_fit", "greedy_by_size", "first_fit", "fold", "squeeze"]
        assert rig.squeezed.pop() == steps and not rig.turns
    rig.forget()
    solve(problem_of(count=3_000), node_limit=1)
    assert rig.asked == [*CHEAP[:3], "fold", *CHEAP[3:], "fold", "compile advance"] and rig.turns[0][3]


def test_a_stack_of_layers_is_asked_for_by_the_skyline_of_one_before_that_of_all(rig: Rig) -> None:
    rig.folds = [folding(blocks_of(problem_of()), [0] + [1] * 150)] * 2
    rig.peaks["skyline TWA"] = BOUND
    solution = solve(problem_of(count=151), node_limit=1)
    assert rig.asked == [*CHEAP[:3], "fold", "skyline TWA"] and solution.solver == "periodic"
    rig.forget()
    solve(problem_of(count=150), node_limit=1)
    assert rig.asked == [*CHEAP[:4]]


def test_more_than_three_million_pairs_are_not_searched(rig: Rig) -> None:
    for extra, searched in ((2_424, True), (2_425, False)):
        rig.forget()
        ends = [3] * extra + [1] * (2_449 - extra)
        problem = Problem(sizes=[1] * 2_450, starts=[0] * 2_449 + [2], ends=[*ends, 3])
        assert blocks_of(problem).num_pairs == 3_000_000 + extra - 2_424
        solve(problem, solver="exact", node_limit=1, placers={"mine": lambda blocks: range(1, len(blocks) + 1)})
        assert bool(rig.turns) == searched


def test_more_than_nine_million_rows_times_sections_are_not_searched(rig: Rig) -> None:
    for late, searched in ((False, True), (True, False)):
        rig.forget()
        gaps = [[(1, 3_000)], *[[]] * 2_999] if late else None
        problem = Problem(
            sizes=[BOUND, *[1] * 2_999], starts=range(3_000), ends=[3_001 if late else 1, *range(2, 3_001)], gaps=gaps
        )
        assert blocks_of(problem).sections.count == 3_000 + late
        solve(problem, solver="exact", node_limit=1)
        assert bool(rig.turns) == searched


# -- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "searched"), [(0.007, False), (0.009, True)])
def test_an_exact_search_is_laid_out_where_there_is_time_for_it(
    rig: Rig, clock: Clock, seconds: float, searched: bool
) -> None:
    """8 us a pair: 1,000 pairs take 8 ms."""
    starts = [0] * 45 + list(range(2, 1_003))
    ends = [2] * 45 + [start + 1 for start in starts[45:]]
    ends[0] = 12  # 990 pairs, and ten more
    problem = Problem(sizes=[1] * 1_046, starts=starts, ends=ends)
    assert blocks_of(problem).num_pairs == 1_000
    rig.effort = 500
    offsets = [*range(1, 46), *[50] * 1_001]
    solve(problem, solver="exact", timeout_s=seconds, placers={"mine": lambda blocks: offsets})
    assert bool(rig.turns) == searched


def test_a_search_that_is_late_ends_within_a_stride(rig: Rig, clock: Clock) -> None:
    clock.step = 0.001
    solution = solve(problem_of(), timeout_s=0.5)
    assert solution.peak_bytes == PEAK and 0.5 < solution.seconds < 0.6
    assert 100 < len(rig.turns) < 600 and max(count for _, _, count, _ in rig.turns) == 100


def test_no_clock_is_read_without_a_timeout(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", None)
    assert solve(problem_of(), node_limit=2_000).seconds == 0.0


# -- turns -----------------------------------------------------------------------------------------------------------


def steps(turn: int, *, last: int | None = None) -> list[tuple[int, int]]:
    """Return a round of a search between bound and peak: half of it goes to the bound."""
    return [(BOUND, 4 * turn), *((at, turn) for at in (BOUND + 500, BOUND + 750, BOUND + 875, last or PEAK - 1))]


def test_a_search_asks_for_the_bound_first_and_then_for_steps_up_to_the_peak(rig: Rig) -> None:
    solve(problem_of(), node_limit=60_000, solver="exact")
    assert rig.asked == ["skyline TWA", "compile advance"] and not rig.moves
    assert rig.rounds() == [
        [(BOUND, 251)],  # in plain Python
        [(BOUND, 500)],
        steps(1_000),
        steps(2_000),
        steps(688),  # 11,000 are left for 8 shares of both lanes
    ]
    assert [fast for *_, fast in rig.turns[:8]] == [False] * 6 + [True] * 2


def test_turns_grow_up_to_the_longest_and_begin_longer_for_many_blocks(rig: Rig) -> None:
    solve(problem_of(count=700), node_limit=1_000_000, solver="exact")
    turns = [round_[0][1] for round_ in rig.rounds()]
    assert turns == [1_400, 4 * 2_800, 4 * 5_600, *[4 * 8_000] * 6, 4 * 5_926]
    rig.forget()
    solve(problem_of(count=700), solver="exact", node_limit=2_800)
    assert rig.rounds() == [[(BOUND, 1_400)]]
    rig.forget()
    solve(problem_of(count=1_250), solver="exact", node_limit=1_000_000)
    assert rig.rounds()[0] == [(BOUND, 2_500)]


@pytest.mark.parametrize(("count", "plain"), [(60, True), (61, False)])
def test_a_few_blocks_are_searched_in_plain_python_before_numba_is_loaded(rig: Rig, count: int, plain: bool) -> None:
    solve(problem_of(count=count), node_limit=700, solver="exact")
    assert [fast for *_, fast in rig.turns].count(False) == 6 * plain and rig.turns[-1][3]
    assert sum(turn[2] for turn in rig.turns if turn[3]) == 702
    rig.forget()
    solve(problem_of(count=count), node_limit=10, solver="exact")
    assert rig.rounds() == [[(BOUND, 6)]] * (1 + plain)


def test_without_numba_all_is_searched_in_plain_python(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "available", lambda: False)
    solve(problem_of(), node_limit=20_000, seed=4)
    assert "compile advance" not in rig.asked and not any(fast for *_, fast in rig.turns)
    assert rig.rounds() == [[(BOUND, 500)], steps(1_000), steps(188)]
    assert rig.moves[0] == (125, BOUND, 4)


def test_with_no_limit_there_is_one(rig: Rig) -> None:
    solve(problem_of(), solver="exact")
    spent = sum(count for _, _, count, fast in rig.turns if fast)
    assert 100_000 <= spent < 100_016
    solve(problem_of(), solver="local_search")
    assert sum(count for count, *_ in rig.moves) == 25_000  # a move costs four placements


def test_a_given_capacity_is_asked_for_beside_the_bound(rig: Rig) -> None:
    solve(problem_of(8, capacity=1_503), node_limit=20_000, solver="exact")
    assert rig.rounds() == [
        [(BOUND, 126), (1_496, 126)],
        [(BOUND, 500), (1_496, 500)],
        [(BOUND, 1_000), (1_496, 1_000)],
        [(BOUND, 2_000), (1_496, 2_000)],
        [(BOUND, 1_501), (1_496, 1_501)],
    ]
    rig.forget()
    solve(problem_of(8, capacity=BOUND), node_limit=1_000, solver="exact")
    assert rig.rounds()[0] == [(BOUND, 251)]


def test_nothing_goes_on_below_a_capacity_that_is_reached(rig: Rig) -> None:
    """It went on to the lower bound, until the timeout."""
    solution = solve(problem_of(8, capacity=PEAK), node_limit=20_000)
    assert rig.asked == [CHEAP[0]] and not rig.turns and solution.capacity_reached and not solution.optimal
    rig.forget()
    rig.optimum = 1_496  # the search for the capacity ends; the one for the bound would go on
    rig.effort = 700
    solution = solve(problem_of(8, capacity=1_503), node_limit=20_000, solver="exact")
    assert solution.peak_bytes == 1_496 and solution.capacity_reached
    assert sum(nodes for _, _, nodes, _ in rig.turns) < 10_000


def test_the_search_stops_where_a_capacity_is_refuted(rig: Rig) -> None:
    rig.optimum, rig.effort = PEAK, 700
    solution = solve(problem_of(8, capacity=1_503), node_limit=20_000, solver="exact")
    assert solution.infeasible and not solution.optimal and sum(nodes for _, _, nodes, _ in rig.turns) < 10_000


@pytest.mark.parametrize(("alignments", "step"), [(1, 8), (3, 1)])
def test_steps_are_of_the_bytes_that_divide_all_sizes_where_nothing_else_counts(
    rig: Rig, alignments: int, step: int
) -> None:
    rig.peaks = {"skyline TWA": 2_009 + 15 * (alignments == 1)}  # 2,024 - 8 = 2,016; or 2,001 at a multiple of 3
    solution = solve(problem_of(8, alignments=alignments), node_limit=20_000, solver="exact")
    peak = solution.peak_bytes
    room = (peak - BOUND) // step
    assert [at for at, _ in rig.rounds()[2]] == [
        BOUND, *(BOUND + step * (room * part // 8) for part in (4, 6, 7)), peak - step,
    ]  # fmt: skip


def test_an_exact_answer_is_used_and_a_refutation_raises_the_bound(rig: Rig) -> None:
    """The search knows after 2,000 placements: it solves 1,500 and above, and refutes the rest."""
    rig.optimum, rig.effort = 1_496, 2_000
    solution = solve(problem_of(8), solver="exact", node_limit=100_000)
    assert (solution.solver, solution.peak_bytes, solution.optimal) == ("exact", 1_496, True)
    assert solution.proven_bound_bytes == 1_496 and solution.lower_bound_bytes == BOUND
    assert [peak for _, peak in solution.history] == [PEAK, 1_496]


def test_a_search_that_ends_with_the_bound_ends_all(rig: Rig) -> None:
    rig.optimum, rig.effort = BOUND, 100
    solution = solve(problem_of(), node_limit=100_000)
    assert solution.optimal and solution.peak_bytes == BOUND
    assert "compile advance" not in rig.asked  # found in plain Python already
    assert rig.rounds() == [[(BOUND, 100)]]


def test_local_search_has_its_turn_and_its_answers_are_kept(rig: Rig) -> None:
    rig.local_peaks = iter([PEAK, 1_900, 1_900, 1_300, BOUND])
    solution = solve(problem_of(), node_limit=1_000_000, seed=3)
    assert rig.moves == [(125, BOUND, 3), (250, BOUND, 3), (500, BOUND, 3), (1_000, BOUND, 3), (2_000, BOUND, 3)]
    assert (solution.solver, solution.peak_bytes, solution.optimal) == ("local_search", BOUND, True)
    assert [peak for _, peak in solution.history] == [PEAK, 1_900, 1_300, BOUND]
    rounds = rig.rounds()[1:]
    assert [[at for at, _ in round_] for round_ in rounds] == [
        [1_000],
        [1_000, 1_500, 1_750, 1_875, 1_999],
        [1_000, 1_500, 1_750, 1_875],  # goes on, rather than ask much the same
        [1_000, 1_500, 1_750, 1_875],
        [1_000, 1_150, 1_225, 1_262, 1_299],
    ]


def test_capacities_to_ask_for_lie_between_bound_and_peak() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        step = draw.choice((1, 1, 4))
        bound = step * draw.randrange(20)
        peak = bound + step * draw.randrange(1, draw.choice((12, 400)))
        held = [step * draw.randrange(peak // step + 9) for _ in range(draw.randrange(7))]
        capacity = draw.choice((bound, peak, draw.randrange(peak + 9))) if draw.random() < 0.4 else None
        room = (peak - bound) // step
        near = [at for at in range(bound, peak) if at in held]
        eighths = {part: bound + step * int(room * part / 8) for part in (4, 6, 7)}
        if capacity is not None and bound < capacity < peak:
            new = [capacity - capacity % step]
        elif len(near) < 4:
            new = [*eighths.values(), peak - step]
        elif peak - near[-1] > step * (room // 4):
            new = [eighths[7], peak - step]
        else:
            new = []
        asked = portfolio.capacities_to_ask(held, bound, peak, step, capacity)
        assert asked == [bound, *sorted({at for at in (*near, *new) if at > bound}, reverse=True)[3::-1]]


# -- one solver by name ----------------------------------------------------------------------------------------------


def test_skyline_tries_its_preorders_until_one_reaches_the_bound(rig: Rig) -> None:
    assert solve(problem_of(), solver="skyline").peak_bytes == PEAK
    assert rig.asked == list(CHEAP[3:7])
    rig.forget()
    rig.peaks["skyline TAW"] = BOUND
    assert solve(problem_of(), solver="skyline").optimal and rig.asked == list(CHEAP[3:5])


@pytest.mark.parametrize("place", [first_fit, best_fit, greedy_by_size, greedy_by_area, greedy_by_conflicts])
def test_a_heuristic_is_asked_by_its_name(place: Callable[[Blocks], list[int]]) -> None:
    for seed in range(5):
        problem = any_problem(seed, most=30)
        solution, blocks = solve(problem, solver=place.__name__), blocks_of(problem)
        assert (solution.solver, solution.offsets) == (place.__name__, blocks.expand(place(blocks)))


def test_local_search_alone_begins_with_a_skyline_and_ends_at_the_bound(rig: Rig) -> None:
    rig.local_peaks = iter([PEAK, 1_500, 1_500, BOUND])
    solution = solve(problem_of(), solver="local_search", seed=9)
    assert rig.asked == ["skyline TWA"] and rig.moves == [(1_000, BOUND, 9)] * 4
    assert [peak for _, peak in solution.history] == [PEAK, 1_500, BOUND] and solution.solver == "local_search"
    rig.forget()
    rig.local_peaks = itertools.repeat(PEAK)
    solve(problem_of(), solver="local_search", node_limit=8_001)
    assert len(rig.moves) == 3
    rig.forget()
    rig.peaks["skyline TWA"] = BOUND
    assert solve(problem_of(), solver="local_search").optimal and not rig.moves


def test_local_search_in_plain_python_has_short_turns(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "available", lambda: False)
    solve(problem_of(), solver="local_search", node_limit=400)
    assert rig.moves == [(50, BOUND, 0)] * 2


def test_local_search_leaves_many_blocks_alone_and_ends_in_time(rig: Rig, clock: Clock) -> None:
    assert solve(problem_of(count=3_001), solver="local_search").solver == "greedy_by_size"
    assert rig.asked == ["greedy_by_size"] and not rig.moves
    rig.forget()
    solve(problem_of(count=3_000), solver="local_search", node_limit=1)
    assert rig.asked == ["skyline TWA"] and rig.moves
    rig.forget()
    clock.step = 0.01
    solve(problem_of(), solver="local_search", timeout_s=1.0)
    assert 10 < len(rig.moves) < 100


def test_exact_search_alone_is_not_begun_where_the_skyline_is_at_the_bound(rig: Rig) -> None:
    rig.peaks["skyline TWA"] = BOUND
    assert solve(problem_of(), solver="exact").optimal and not rig.turns


def test_ejection_begins_with_a_first_answer_and_leaves_gaps_and_pins_alone(rig: Rig) -> None:
    solve(problem_of(), solver="ejection", node_limit=100)
    assert rig.asked == ["skyline TWA", "squeeze"] and rig.squeezed == [5]
    rig.forget()
    gaps = Problem(sizes=[BOUND, 1], starts=[0, 1], ends=[4, 2], gaps=[[(1, 2)], []])
    pins = Problem(sizes=[BOUND, 1], starts=[0, 1], ends=[1, 2], pins=[0, None])
    rig.peaks["skyline TWA"] = PEAK
    for problem in (gaps, pins):
        assert solve(problem, solver="ejection").peak_bytes == PEAK
    assert "squeeze" not in rig.asked
    rig.peaks["skyline TWA"] = BOUND
    assert solve(problem_of(), solver="ejection").optimal and "squeeze" not in rig.asked


def folding(window: Blocks, classes: list[int]) -> Folded:
    return Folded(window=window, classes=classes, period=1)


def test_a_window_is_solved_by_cheap_ones_and_tiled(rig: Rig) -> None:
    window = blocks_of(problem_of())
    rig.folds = [folding(window, [0, 1, 1, 1]), folding(window, [0, 1, 1, 1])]
    rig.peaks["best_fit"] = 1_500
    solution = solve(problem_of(count=4), solver="periodic", node_limit=300)
    assert rig.asked == ["skyline TWA", "fold", *CHEAP, *CHEAP]
    assert (solution.solver, solution.offsets) == ("periodic", (0, 1_499, 1_499, 1_499))
    assert rig.rounds() == [[(BOUND, 151)]] * 2 and not any(fast for *_, fast in rig.turns)
    rig.forget()
    solve(problem_of(count=4), solver="periodic", timeout_s=1e9)
    assert rig.rounds() == [[(BOUND, 251)]] * 2
    rig.forget()
    rig.peaks = {"first_fit": BOUND}
    solution = solve(problem_of(count=4), solver="periodic")
    assert solution.optimal and not rig.turns and rig.asked.count("first_fit") == 1  # the second is not tried


@pytest.mark.parametrize(("count", "searched"), [(150, True), (151, False)])
def test_a_long_window_is_not_searched(rig: Rig, count: int, searched: bool) -> None:
    rig.folds = [folding(blocks_of(problem_of(count=count)), [0] + [1] * 199)]
    assert solve(problem_of(count=200), solver="periodic").solver == "skyline"
    assert bool(rig.turns) == searched


def test_a_window_that_is_late_ends_the_search(rig: Rig, clock: Clock) -> None:
    clock.step = 0.01
    rig.folds = [folding(blocks_of(problem_of()), [0, 1])] * 100
    solution = solve(problem_of(), solver="periodic", timeout_s=0.5)
    assert solution.peak_bytes == PEAK and 10 < len(rig.asked) < 60


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["ilp", "cpsat"])
def test_a_model_is_asked_with_the_best_cheap_answer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, solver: str
) -> None:
    asked: list[tuple[Any, ...]] = []
    answer: dict[str, Outcome] = {}

    def solve_ilp(blocks: Blocks, upper_bound: int, *, timeout_s: float | None) -> Outcome:
        asked.append(("ilp", len(blocks), upper_bound, timeout_s))
        return answer["now"]

    def solve_cpsat(blocks: Blocks, best: Incumbent, *, timeout_s: float | None, seed: int) -> Outcome:
        assert seed == 6
        asked.append(("cpsat", len(blocks), best.peak, timeout_s))
        return answer["now"]

    monkeypatch.setattr(ilp, "solve_ilp", solve_ilp)
    monkeypatch.setattr(cpsat, "solve_cpsat", solve_cpsat)
    blocks = blocks_of(problem_of())
    rig.peaks["best_fit"] = 1_900

    def ask(offsets: list[int] | None, bound: int, exhausted: bool) -> Solution:
        answer["now"] = Outcome(offsets=offsets, bound=bound, exhausted=exhausted)
        return solve(problem_of(), solver=solver, timeout_s=60.0, seed=6)

    found = ask(placed(blocks, 1_500), 1_200, False)
    assert asked == [(solver, 2, 1_900, 60.0)]
    assert (found.solver, found.peak_bytes, found.proven_bound_bytes, found.optimal) == (solver, 1_500, 1_200, False)
    found = ask(placed(blocks, 1_500), 1_200, True)
    assert (found.peak_bytes, found.proven_bound_bytes, found.optimal) == (1_500, 1_500, True)
    found = ask(None, 1_300, False)
    assert (found.solver, found.peak_bytes, found.proven_bound_bytes) == ("best_fit", 1_900, 1_300)
    found = ask([5, 5, 5], 1_000, True)  # no answer, so no proof
    assert (found.peak_bytes, found.optimal) == (1_900, False)
    assert caplog.messages == [f"dropped an answer of the solver {solver}: 3 offsets for 2 blocks"] * 1
    rig.peaks["first_fit"] = BOUND
    asked.clear()
    assert ask(None, 1_300, False).optimal and not asked


# -- answers that do not hold ----------------------------------------------------------------------------------------


def test_placers_are_asked_first_in_order_and_one_at_the_bound_is_enough(rig: Rig) -> None:
    asked: list[str] = []

    def placer(name: str, peak: int) -> Callable[[Blocks], Sequence[int]]:
        return lambda blocks: asked.append(name) or placed(blocks, peak)  # type: ignore[func-returns-value]

    two = {"one": placer("one", 1_800), "two": placer("two", 1_700)}
    solution = solve(problem_of(), placers=two, node_limit=1)
    assert (solution.solver, solution.peak_bytes) == ("two", 1_700) and asked == ["one", "two"] and rig.asked
    rig.forget()
    solution = solve(problem_of(), placers=two | {"three": placer("three", BOUND)})
    assert solution.solver == "three" and not rig.asked


def test_a_solver_that_fails_is_followed_by_cheap_ones_and_then_said_to_be_a_fault(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("greedy_by_size", "best_fit", "greedy_by_area", "skyline"):
        monkeypatch.setattr(portfolio, name, lambda blocks, *_, **__: [0])
    assert solve(problem_of(), solver="exact", node_limit=1).solver == "first_fit"
    assert rig.asked == ["first_fit", "compile advance"]
    monkeypatch.setattr(portfolio, "first_fit", lambda blocks, *_, **__: [0])
    with pytest.raises(
        MosaicError, match="no solver gave an answer that holds for 2 blocks; this is a fault of Mosaic"
    ):
        solve(problem_of())
    assert caplog.messages[0] == "dropped an answer of the solver skyline: 1 offsets for 2 blocks"


def test_unknown_solvers_and_empty_problems(rig: Rig) -> None:
    with pytest.raises(UnknownName, match="skyline"):
        solve(problem_of(), solver="skylines")
    nothing = Problem(sizes=[], starts=[], ends=[])
    assert solve(nothing).peak_bytes == 0 and solve(nothing).optimal
    assert solve(nothing).solver == "first_fit" and solve(nothing, solver="ilp").solver == "ilp"
    assert not rig.asked


# -- the incumbent ---------------------------------------------------------------------------------------------------


def test_the_clock_of_an_incumbent(clock: Clock) -> None:
    blocks = blocks_of(problem_of())
    best = Incumbent(blocks, 2.0)
    assert (best.seconds, best.seconds_left, best.late) == (0.0, 2.0, False)
    clock.now += 1.5
    assert (best.seconds, best.seconds_left, best.late) == (1.5, 0.5, False)
    best.tick()
    best.offer(placed(blocks, PEAK), "one")
    clock.now += 0.5
    assert best.late and best.seconds_left == 0.0
    with pytest.raises(OutOfTime):
        best.tick()
    best.offer(placed(blocks, 1_500), "two")
    solution = best.solution()
    assert solution.history == ((1.5, PEAK), (2.0, 1_500)) and solution.seconds == 2.0
    free = Incumbent(blocks, None)
    assert (free.seconds, free.seconds_left, free.late) == (0.0, float("inf"), False)
    free.tick()


def test_what_an_incumbent_keeps_and_proves(caplog: pytest.LogCaptureFixture) -> None:
    blocks = blocks_of(problem_of(8, capacity=1_600))
    best = Incumbent(blocks, None)
    assert best.peak == BOUND + 8 + 1 and best.bound == BOUND and not best.done
    assert best.offer(placed(blocks, PEAK), "first") and best.peak == PEAK  # the first, however high
    assert not best.offer(placed(blocks, PEAK), "as_high") and best.offer(placed(blocks, 1_504), "lower")
    best.refute(1_207, 8, "proof")
    assert best.bound == 1_208
    best.refute(1_208, 8, "proof")
    assert best.bound == 1_216
    best.raise_bound(1_100, "late")
    assert best.bound == 1_216 and not caplog.messages
    best.raise_bound(1_505, "liar")
    assert best.bound == 1_216
    assert caplog.messages == ["dropped a bound of the solver liar: 1505 bytes, but a peak of 1504 is reached"]
    solution = best.solution()
    assert (solution.solver, solution.peak_bytes, solution.optimal) == ("lower", 1_504, False)
    assert (solution.lower_bound_bytes, solution.proven_bound_bytes, solution.capacity) == (BOUND, 1_216, 1_600)
    best.raise_bound(1_504, "proof")
    assert best.done and best.solution().optimal and best.solution().proven_bound_bytes == 1_504


def test_no_blocks_need_no_bytes_but_those_of_pins(caplog: pytest.LogCaptureFixture) -> None:
    best = Incumbent(blocks_of(Problem(sizes=[0], starts=[0], ends=[1], pins=[24])), None)
    assert best.peak == 0 and best.offer([], "none") and best.peak == 24 and best.done
    solution = best.solution()
    assert (solution.peak_bytes, solution.offsets, solution.optimal) == (24, (24,), True)
    assert not Incumbent(blocks_of(Problem(sizes=[0], starts=[0], ends=[1])), None).offer([4], "long")
    assert caplog.records[0].levelno == logging.WARNING
