"""The search and its brute-force baseline against the objective to the letter, on the whole grid of small programs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, fields
from inspect import signature

import pytest

from mosaic.planner.search import TOLERANCE, SearchResult, TraceStep, brute_force, lowest, search
from mosaic.planner.space import Config, Point
from tests.small_programs import Exact, between, dims, space

Key = tuple[int, int, int, float, int]


class Judge:
    """The objective, by the exact bytes of every configuration of the grid."""

    def __init__(self, seed: int, tokens: int) -> None:
        self.point = space(seed).at(dims(tokens))
        self.exact = Exact(self.point)
        self.configs = list(self.exact.configs())
        self.device = [self.exact.bytes(config)[0] for config in self.configs]
        self.host = max(self.exact.bytes(config)[1] for config in self.configs)
        self.combinations = self.exact.combinations()
        self.first = self.combinations[0]

    def rank(self, config: Config) -> Key:
        """Host, total, moves, time, a fixed order."""
        device, host = self.exact.bytes(config)
        moves = sum(rows is not None for rows in config.rows)
        moves += sum(option != first for option, first in zip(config.choices, self.first, strict=True))
        return host, device, moves, self.point.seconds(config), self.combinations.index(config.choices)

    def best(self, feasible: Sequence[Config]) -> Config:
        limit = min(map(self.point.seconds, feasible)) * 1.0025
        return min((c for c in feasible if self.point.seconds(c) <= limit), key=self.rank)

    def feasible(self, budget: int, host: int) -> list[Config]:
        return [config for config in self.configs if self.exact.fits(config, budget, host)]

    def climbed(self, feasible: list[Config]) -> list[Config]:
        """Without what is escalated under a plain choice that does without."""
        content = {config.choices[0] for config in feasible if config.choices[1] == self.first[1]}
        return [c for c in feasible if c.choices[0] not in content or c.choices[1] == self.first[1]]


CASES = [(seed, tokens) for seed in range(5) for tokens in (40, 150, 300)]


@pytest.mark.parametrize(("seed", "tokens"), CASES)
def test_search_and_brute_force_find_the_best_of_the_grid(seed: int, tokens: int) -> None:
    judge = Judge(seed, tokens)
    totals = random.Random(seed).sample(sorted({*judge.device}), 3)
    for budget in (*(between(judge.device, share) for share in (0.0, 0.1, 0.3, 0.6, 1.0)), *totals):
        for host in (0, judge.host // 2, judge.host):
            feasible = judge.feasible(budget, host)
            found, exhaustive = search(judge.point, budget, host), brute_force(judge.point, budget, host)
            assert found.fits == exhaustive.fits == bool(feasible)
            if feasible:
                assert exhaustive.config == judge.best(feasible)
                assert found.config == judge.best(judge.climbed(feasible))
                assert found.seconds == judge.point.seconds(found.config)
                assert exhaustive.seconds == judge.point.seconds(exhaustive.config)
                assert exhaustive.trace == ()
            else:
                allowed = [c for c in judge.configs if judge.exact.bytes(c)[1] <= host]
                floor = min(allowed, key=lambda c: judge.exact.bytes(c)[0])
                for given in (found.config, exhaustive.config, lowest(judge.point, host)):
                    assert judge.exact.bytes(given)[0] == judge.exact.bytes(floor)[0]
                    assert judge.exact.bytes(given)[1] <= host
                assert found.seconds == judge.point.seconds(found.config)


def change(point: Point, before: Config, after: Config) -> list[str]:
    """What differs between two configurations, in the trace's words."""
    names = [knob.name for knob in point.space.template.knobs]
    return [
        f"{name} off" if new is None else f"{name} in chunks of {new:,}"
        for name, old, new in zip(names, before.rows, after.rows, strict=True)
        if old != new
    ]


@pytest.mark.parametrize(("seed", "tokens"), CASES)
def test_the_trace_tells_every_step_as_it_was(seed: int, tokens: int) -> None:
    judge, rng = Judge(seed, tokens), random.Random(seed)
    point = judge.point
    for _ in range(4):
        budget, host = between(judge.device, rng.random()), rng.choice((0, judge.host))
        fresh = space(seed).at(dims(tokens))
        found = search(fresh, budget, host)
        again = search(fresh, budget, host)  # everything is known by now, but for traces
        assert (again.config, again.trace) == (found.config, found.trace)
        exhaustive = brute_force(fresh, budget, host)
        counts = found.evaluations, again.evaluations, exhaustive.evaluations
        assert found.evaluations > 0 and exhaustive.evaluations > 0 and sum(counts) == fresh.evaluations
        check_trace(point, judge, found, budget)


def check_trace(point: Point, judge: Judge, found: SearchResult, budget: int) -> None:
    first = found.trace[0]
    assert first.move == "the fastest configuration"
    options = [point.options(first.config.choices, k) for k in range(len(first.config.rows))]
    for k, rows in enumerate(first.config.rows):
        for other in options[k]:
            slower = Config(first.config.choices, (*first.config.rows[:k], other, *first.config.rows[k + 1 :]))
            assert point.seconds(first.config) <= point.seconds(slower), rows
    if found.fits:
        assert found.trace[-1].config == found.config
    else:
        assert found.trace[-1].total_bytes == judge.exact.bytes(found.config)[0]
    fitted = False
    for before, step in zip((None, *found.trace), found.trace, strict=False):
        live = judge.exact.live(step.config)
        assert (step.peak_bytes, step.total_bytes) == (max(live), judge.exact.bytes(step.config)[0])
        assert live[step.at] == max(live) and step.seconds == point.seconds(step.config)
        if before is not None:
            words, _, note = step.move.partition(" (")
            assert set(change(point, before.config, step.config)) <= set(words.split(", "))
            assert words.split(", ") and step.config.choices == before.config.choices
            if note == "within the tolerance)":
                assert step.peak_bytes <= before.peak_bytes
            elif note:
                assert note == "nothing gained by less)" and step.total_bytes <= before.total_bytes
            elif fitted:
                assert step.seconds < before.seconds and step.total_bytes <= budget
        fitted = fitted or step.total_bytes <= budget


def test_within_the_tolerance_memory_decides() -> None:
    assert TOLERANCE == 0.0025


def test_results_are_frozen_keyword_only_and_slotted() -> None:
    for kind in (TraceStep, SearchResult):
        assert all(p.kind is p.KEYWORD_ONLY for p in signature(kind).parameters.values())
        assert kind.__slots__ == tuple(field.name for field in fields(kind))
    result = search(space(0).at(dims(40)), 1 << 30)
    with pytest.raises(FrozenInstanceError):
        result.fits = False  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        result.trace[0].move = ""  # type: ignore[misc]
