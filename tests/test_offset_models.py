"""The integer and the constraint program find what trying every order finds, in the units and limits that they are given."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from test_offset_portfolio import Clock
from test_offsets_exact import least_peak, random_problem, valid

from mosaic.errors import MissingExtra
from mosaic.planner.offsets import Blocks, Problem, blocks_of
from mosaic.planner.offsets.cpsat import solve_cpsat
from mosaic.planner.offsets.ilp import solve_ilp
from mosaic.planner.offsets.incumbent import Incumbent, Outcome

pytest.importorskip("pulp")
pytest.importorskip("ortools")


def incumbent(blocks: Blocks, timeout_s: float | None = None) -> Incumbent:
    """Return an answer to start from: blocks one above the other, around what is pinned."""
    best, high = Incumbent(blocks, timeout_s), 0
    offsets = []
    for row, size in enumerate(blocks.sizes):
        pin = blocks.pins[row] if blocks.pins is not None else None
        while pin is None and blocks.lift(row, high) != high:
            high = blocks.lift(row, high)
        offsets.append(high if pin is None else pin)
        high += size if pin is None else 0
    assert best.offer(offsets, "stack")
    return best


def check(problem: Problem, blocks: Blocks, outcome: Outcome, least: int) -> None:
    assert outcome.exhausted and outcome.offsets is not None
    assert valid(problem, blocks.expand(outcome.offsets))
    assert blocks.peak(outcome.offsets) == least
    assert blocks.lower_bound <= outcome.bound <= least


@pytest.mark.parametrize("seed", [1, 2, 3, 5, 6, *range(8, 16)])
def test_models_find_what_every_order_finds(seed: int) -> None:
    problem = random_problem(seed, count=5)
    blocks = blocks_of(problem)
    least = least_peak(problem)
    for above in (0, 9):
        check(problem, blocks, solve_ilp(blocks, least + above, timeout_s=30), least)
    best = incumbent(blocks)
    outcome = solve_cpsat(blocks, best, timeout_s=None, seed=seed)
    check(problem, blocks, outcome, least)
    assert outcome.bound == least
    tight = Incumbent(blocks, None)
    assert outcome.offsets is not None and tight.offer(outcome.offsets, "cpsat")
    check(problem, blocks, solve_cpsat(blocks, tight, timeout_s=9.0, seed=seed, workers=1), least)
    if least > blocks.lower_bound:
        assert solve_ilp(blocks, least - 1, timeout_s=30) == Outcome(
            offsets=None, bound=blocks.lower_bound, exhausted=False
        )


ALIGNED = Problem(
    sizes=[24, 40, 8], starts=[0, 0, 0], ends=[1, 1, 1], alignments=[16, 32, 8], pins=[None, None, 8], capacity=200
)


def test_the_integer_program_is_small_and_in_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is a multiple of 8 bytes: the block of 24 bytes lies at a multiple of 2 units, that of 40 at one of 4."""
    import pulp

    models: list[Any] = []
    solver: dict[str, Any] = {}
    solve, command = pulp.LpProblem.solve, pulp.PULP_CBC_CMD

    def watched(**options: Any) -> Any:
        solver.update(options)
        return command(**options)

    monkeypatch.setattr(pulp.LpProblem, "solve", lambda self, way: models.append(self) or solve(self, way))
    monkeypatch.setattr(pulp, "PULP_CBC_CMD", watched)
    blocks = blocks_of(ALIGNED)
    outcome = solve_ilp(blocks, 112, timeout_s=None)
    assert outcome in [Outcome(offsets=found, bound=72, exhausted=True) for found in ([16, 64, 8], [80, 32, 8])]
    assert solver == {"msg": False, "timeLimit": 30}
    ranges = {v.name: (v.lowBound, v.upBound, v.cat) for v in models[0].variables()}
    assert ranges.pop("peak") == (9, 14, "Integer")
    assert ranges.pop("step_0") == (0, 7, "Integer") and ranges.pop("step_1") == (0, 3, "Integer")
    assert ranges == {f"below_{pair}": (0, 1, "Integer") for pair in ("0_1", "0_2", "1_2")}
    free = Problem(sizes=[24, 8], starts=[0, 0], ends=[1, 1])
    assert solve_ilp(blocks_of(free), 40, timeout_s=7.0).exhausted
    assert solver["timeLimit"] == 7.0
    ranges = {v.name: (v.lowBound, v.upBound) for v in models[1].variables()}
    assert ranges == {"peak": (4, 5), "place_0": (0, 2), "place_1": (0, 4), "below_0_1": (0, 1)}


def test_many_pairs_are_not_tried_by_an_integer_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 blocks that meet and one that meets 100 of them make 20,000 pairs."""
    import pulp

    class Asked(Exception):
        pass

    def ask(*_: object) -> None:
        raise Asked

    monkeypatch.setattr(pulp, "LpProblem", ask)
    for extra, tried in ((100, True), (101, False)):
        ends = [3] * extra + [1] * (200 - extra)
        blocks = blocks_of(Problem(sizes=[1] * 201, starts=[0] * 200 + [2], ends=[*ends, 3]))
        assert blocks.num_pairs == 19_900 + extra
        if tried:
            with pytest.raises(Asked):
                solve_ilp(blocks, 300, timeout_s=None)
        else:
            assert solve_ilp(blocks, 300, timeout_s=None) == Outcome(offsets=None, bound=200, exhausted=False)


class Watched:
    """Solves as CP-SAT does, and keeps the model and the parameters."""

    kept: Any = None

    def __init__(self) -> None:
        from ortools.sat.python import cp_model

        self.own = Watched.made()
        self.parameters = self.own.parameters
        self.models = cp_model
        Watched.kept = self

    made: Any = None

    def solve(self, model: Any) -> Any:
        self.model = model.proto if hasattr(model, "proto") else model.Proto()
        return self.own.solve(model)

    def value(self, place: Any) -> int:
        return int(self.own.value(place))

    @property
    def best_objective_bound(self) -> float:
        return float(self.own.best_objective_bound)


def test_the_constraint_program_is_in_units_and_has_hints_and_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ortools.sat.python import cp_model

    monkeypatch.setattr(Watched, "made", cp_model.CpSolver)
    monkeypatch.setattr(cp_model, "CpSolver", Watched)
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    blocks = blocks_of(ALIGNED)
    best = incumbent(blocks)
    assert best.offsets == [16, 64, 8] and best.peak == 104
    outcome = solve_cpsat(blocks, best, timeout_s=None, seed=5)
    assert outcome in [Outcome(offsets=found, bound=104, exhausted=True) for found in ([16, 64, 8], [80, 32, 8])]
    given = Watched.kept.parameters
    assert (given.random_seed, given.num_workers, given.max_deterministic_time) == (5, 1, 20.0)
    assert math.isinf(given.max_time_in_seconds)
    model = Watched.kept.model
    domains = {variable.name: list(variable.domain) for variable in model.variables if variable.name}
    assert domains["peak"] == [9, 13] and domains["place0"] == [0, 10] and domains["place1"] == [0, 8]
    assert domains["step0"] == [0, 5] and domains["step1"] == [0, 2] and "place2" not in domains
    names = [variable.name for variable in model.variables]
    hints = dict(zip([names[i] for i in model.solution_hint.vars], model.solution_hint.values, strict=True))
    assert hints == {"place0": 2, "place1": 8, "peak": 13}
    free = blocks_of(Problem(sizes=[24, 8], starts=[0, 0], ends=[1, 1]))
    assert solve_cpsat(free, incumbent(free), timeout_s=None, seed=5).exhausted
    assert [v.name for v in Watched.kept.model.variables if v.name] == ["peak", "place0", "place1"]
    late = Incumbent(blocks, 10.0)
    late.offer(best.offsets, "hand")
    clock.now += 4
    assert solve_cpsat(blocks, late, timeout_s=10.0, seed=1, workers=2).exhausted
    given = Watched.kept.parameters
    assert (given.max_time_in_seconds, given.num_workers, given.random_seed) == (6.0, 2, 1)
    clock.now += 9
    solve_cpsat(blocks, late, timeout_s=10.0, seed=1)
    assert Watched.kept.parameters.max_time_in_seconds == 0.1
    late.bound = 112  # above what can be reached: nothing is found
    assert solve_cpsat(blocks, late, timeout_s=None, seed=1) == Outcome(offsets=None, bound=112, exhausted=False)


@pytest.mark.parametrize(("module", "solver"), [("pulp", "ilp"), ("ortools.sat.python", "cpsat")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, module: str, solver: str) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    blocks = blocks_of(ALIGNED)
    with pytest.raises(MissingExtra, match=f"the solver '{solver}'") as caught:
        if solver == "ilp":
            solve_ilp(blocks, 200, timeout_s=None)
        else:
            solve_cpsat(blocks, incumbent(blocks), timeout_s=None, seed=0)
    assert module.split(".")[0] in str(caught.value) and "solve" in str(caught.value)
