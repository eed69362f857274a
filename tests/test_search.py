"""The search and its brute-force baseline against the objective to the letter, on the whole grid of small programs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import FrozenInstanceError, fields
from inspect import signature
from itertools import pairwise

import pytest

from mosaic.planner.search import TOLERANCE, SearchResult, TraceStep, brute_force, lowest, search, smallest
from mosaic.planner.space import Config, Point
from tests.grid_tables import Tables, Tabulated
from tests.small_programs import Exact, between, dims, space

Key = tuple[int, int, int, float, int]


class Judge:
    """The objective, by the exact bytes of every configuration of the grid."""

    def __init__(self, point: Point, exact: Exact | Tables) -> None:
        self.point, self.exact = point, exact
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

    def floor(self, host: int) -> int:
        """The least bytes of the device, within what the host gives or with nothing escalated."""
        needs = [(self.exact.bytes(config), config.choices[1:] == self.first[1:]) for config in self.configs]
        return min([device for (device, pinned), _ in needs if pinned <= host] or [n[0] for n, plain in needs if plain])

    def climbed(self, feasible: list[Config]) -> list[Config]:
        """Without what is escalated under a plain choice that does without."""
        content = {config.choices[0] for config in feasible if config.choices[1:] == self.first[1:]}
        return [c for c in feasible if c.choices[0] not in content or c.choices[1:] == self.first[1:]]


def small(seed: int, tokens: int) -> Judge:
    """A small program, by sums over its buffers."""
    point = space(seed).at(dims(tokens))
    return Judge(point, Exact(point))


CASES = [(seed, tokens) for seed in range(5) for tokens in (40, 150, 300)]


@pytest.mark.parametrize(("seed", "tokens"), CASES)
def test_search_and_brute_force_find_the_best_of_the_grid(seed: int, tokens: int) -> None:
    judge = small(seed, tokens)
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


def is_told(point: Point, before: Config, after: Config, words: Sequence[str]) -> bool:
    """Whether the words name what differs between two configurations, and else settings that are as they were."""
    names = [knob.name for knob in point.space.template.knobs]
    told = [
        f"{name} off" if r is None else f"{name} in chunks of {r:,}" for name, r in zip(names, after.rows, strict=True)
    ]
    changed = {word for word, old, new in zip(told, before.rows, after.rows, strict=True) if old != new}
    return bool(changed) and changed <= {*words} <= {*told}


@pytest.mark.parametrize(("seed", "tokens"), CASES)
def test_the_trace_tells_every_step_as_it_was(seed: int, tokens: int) -> None:
    judge, rng = small(seed, tokens), random.Random(seed)
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
        assert found.trace[-1].total_bytes == judge.exact.bytes(found.config)[0]


def check_trace(point: Point, judge: Judge, found: SearchResult, budget: int) -> None:
    first = found.trace[0]
    assert first.move == "the fastest configuration"
    for k, rows in enumerate(first.config.rows):
        assert rows == point.by_time(first.config.choices, k)[0]
        for other in () if point.nested_knobs(first.config.choices) else point.options(first.config.choices, k):
            slower = Config(first.config.choices, (*first.config.rows[:k], other, *first.config.rows[k + 1 :]))
            assert first.seconds <= point.seconds(slower)
    assert not found.fits or found.trace[-1].config == found.config
    fitted = False
    for before, step in zip((None, *found.trace), found.trace, strict=False):
        live = judge.exact.live(step.config)
        assert (step.peak_bytes, step.total_bytes) == (max(live), judge.exact.bytes(step.config)[0])
        assert live[step.at] == max(live) and step.seconds == point.seconds(step.config)
        if before is not None:
            words, _, note = step.move.partition(" (")
            assert step.config.choices == before.config.choices
            assert is_told(point, before.config, step.config, words.split(", "))
            if note == "within the tolerance)":
                assert step.peak_bytes <= before.peak_bytes
            elif note:
                assert note == "nothing gained by less)" and step.total_bytes <= before.total_bytes
            elif fitted:
                assert step.seconds < before.seconds and step.total_bytes <= budget
        fitted = fitted or step.total_bytes <= budget


def budgets(judge: Judge, rng: random.Random) -> Iterator[tuple[int, int]]:
    """Totals of configurations and amounts of host memory, to the byte and one less."""
    hosts = sorted({judge.exact.bytes(config)[1] for config in judge.configs})
    for total in rng.sample(sorted({*judge.device}), 4):
        yield total - rng.choice((0, 0, 1)), rng.choice((0, *hosts)) - rng.choice((0, 0, 1))


@pytest.mark.some
@pytest.mark.parametrize("seed", range(80))
def test_the_best_of_grids_full_of_ties(seed: int) -> None:
    tables, rng = Tables(seed, apart=True), random.Random(seed)
    judge = Judge(Tabulated(tables), tables)
    for budget, host in budgets(judge, rng):
        feasible = judge.feasible(budget, host)
        found, exhaustive = search(judge.point, budget, host), brute_force(judge.point, budget, host)
        assert found.fits == exhaustive.fits == bool(feasible)
        if feasible:
            assert (exhaustive.config, found.config) == (judge.best(feasible), judge.best(judge.climbed(feasible)))
        else:
            least = min(smallest(judge.point, host), key=lambda c: (judge.exact.bytes(c)[0], *judge.rank(c)))
            assert lowest(judge.point, host) == found.config == exhaustive.config == least
            assert judge.exact.bytes(least)[0] == judge.floor(host)


@pytest.mark.some
@pytest.mark.parametrize("seed", range(60))
def test_every_step_is_the_one_that_the_method_takes(seed: int) -> None:
    """Also for tables with fastest chunks of any size, so that moves are undone and nested loops traded."""
    tables, rng = Tables(seed, apart=seed % 3 == 0), random.Random(seed)
    judge = Judge(Tabulated(tables), tables)
    for budget, host in budgets(judge, rng):
        found = search(judge.point, budget, host)
        check_trace(judge.point, judge, found, budget)
        if found.fits:
            assert judge.exact.fits(found.config, budget, host)
            check_moves(judge, found.trace, budget)
        elif tables.apart:
            plain = [c for c in judge.configs if c.choices[1:] == judge.first[1:]]
            held = [c for c in plain if judge.exact.bytes(c)[1] <= host] or plain
            reached = found.trace[-1].total_bytes
            least = min(judge.exact.bytes(c)[0] for c in held)
            # one may fit the device and not the host
            assert reached == least or (held == plain and reached <= budget)


def check_moves(judge: Judge, trace: Sequence[TraceStep], budget: int) -> None:
    """Down by the cheapest moves until it fits, up while anything faster fits, then down within the tolerance."""
    point, settled = judge.point, trace[0]
    for before, step in pairwise(trace):
        if before.total_bytes > budget or step.move.endswith("(within the tolerance)"):
            assert step.config == lowered(judge, before.config)
        if not step.move.endswith(")"):
            settled = step
    faster = [c for c in neighbours(judge, settled.config) if point.seconds(c) < settled.seconds]
    assert all(judge.exact.bytes(c)[0] > budget for c in faster)


def lowered(judge: Judge, config: Config) -> Config:
    """With one knob at fewer rows, which lowers the largest live sets: the fastest, then the first knob, then most rows."""

    def largest(config: Config) -> tuple[int, int]:
        live = judge.exact.live(config)
        return max(live), live.count(max(live))

    moves = []
    for k, rows in enumerate(config.rows):
        for fewer in judge.point.options(config.choices, k):
            moved = Config(config.choices, (*config.rows[:k], fewer, *config.rows[k + 1 :]))
            if fewer is not None and (rows is None or fewer < rows) and largest(moved) < largest(config):
                moves.append((judge.point.by_time(config.choices, k).index(fewer), k, moved))
    first = [next(m for _, j, m in sorted(moves) if j == k) for k in sorted({k for _, k, _ in moves})]
    return min(first, key=judge.point.seconds)


def neighbours(judge: Judge, config: Config) -> Iterator[Config]:
    """Configurations that differ in one knob, or in two whose loops nest."""
    nested = judge.point.nested_knobs(config.choices)
    for other in judge.configs:
        if other.choices == config.choices:
            changed = [k for k, (a, b) in enumerate(zip(config.rows, other.rows, strict=True)) if a != b]
            if len(changed) == 1 or tuple(changed) in nested:
                yield other


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
