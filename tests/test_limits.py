"""Limits of small random programs, verified by evaluating every configuration of the grid at L and L + 1."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache, partial
from itertools import islice, product
from types import SimpleNamespace
from typing import cast

import pytest

from mosaic.planner import limits, placement
from mosaic.planner.limits import holds, is_feasible, max_context, search_and_place, smallest_host, smallest_total
from mosaic.planner.offsets import solve
from mosaic.planner.placement import Placement, place
from mosaic.planner.search import smallest, whole_grid
from mosaic.planner.space import Config, Point, Space
from mosaic.planner.template import compile_template
from mosaic.registrar.graph import Graph
from tests.grid_tables import Tables, Tabulated
from tests.small_programs import CARD, FRAGMENTED, PAGE, Exact, dims, fragmented, pages, space

PLENTY = 1 << 40


@cache
def exact(seed: int, tokens: int) -> Exact:
    return Exact(space(seed).at(dims(tokens)))


def at(seed: int, tokens: int) -> Point:
    return space(seed).at(dims(tokens))


def held(seed: int, tokens: int, budget: int, host: int) -> bool:
    """Whether any configuration of the whole grid fits, each at its smallest chunks or without them."""
    found = exact(seed, tokens)
    for choices in found.combinations():
        for config in whole_grid(at(seed, tokens), PLENTY):
            if config.choices == choices and found.fits(config, budget, host):
                return True
    return False


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("host", [0, 24_576, PLENTY])
def test_the_largest_context_fits_and_one_token_more_does_not(seed: int, host: int) -> None:
    rng = random.Random(f"{seed} {host}")
    least = smallest_total(at(seed, 1), host)[0]
    for tokens in (rng.randrange(2, 60), rng.randrange(60, 400)):
        budget = smallest_total(at(seed, tokens), host)[0] + rng.randrange(PAGE)
        found = max_context(space(seed), dims, budget, limit=10**6, host_budget_bytes=host)
        assert found >= tokens
        assert held(seed, found, budget, host) and not held(seed, found + 1, budget, host)
        assert max_context(space(seed), dims, budget, limit=tokens // 2, host_budget_bytes=host) == tokens // 2
    assert max_context(space(seed), dims, least - 1, limit=10**6, host_budget_bytes=host) == 0
    assert max_context(space(seed), dims, least, limit=10**6, host_budget_bytes=host) >= 1


@pytest.mark.parametrize("seed", range(3))
def test_a_pinned_choice_is_kept(seed: int) -> None:
    budget = smallest_total(at(seed, 200), PLENTY)[0]
    free = max_context(space(seed), dims, budget, limit=10**6, host_budget_bytes=PLENTY)
    for stream in ("none", "half", "all"):
        pinned = {"stream": stream}
        found = max_context(space(seed), dims, budget, limit=10**6, host_budget_bytes=PLENTY, pinned=pinned)
        assert found <= free
        for tokens, fits in ((found, True), (found + 1, False)):
            if tokens:
                grid = exact(seed, tokens)
                ways = [c for c in whole_grid(at(seed, tokens), PLENTY) if c.choices[1] == stream]
                assert any(grid.fits(c, budget, PLENTY) for c in ways) == fits


@pytest.mark.parametrize("seed", range(4))
def test_the_smallest_budgets_are_those_of_the_whole_grid(seed: int) -> None:
    for tokens in (40, 150):
        grid, point = exact(seed, tokens), at(seed, tokens)
        needs = {config: grid.bytes(config) for config in grid.configs()}
        hosts = sorted({host for _, host in needs.values()})
        for host in (0, hosts[-1] // 2, hosts[-1]):
            total, config = smallest_total(point, host)
            assert total == needs[config][0] == min(device for device, pinned in needs.values() if pinned <= host)
            assert needs[config][1] <= host
            assert is_feasible(point, total, host) and not is_feasible(point, total - 1, host)
            for budget in (total - PAGE, total, total + PAGE, max(device for device, _ in needs.values())):
                enough = [pinned for device, pinned in needs.values() if device <= budget and pinned <= host]
                assert smallest_host(point, budget, host) == min(enough, default=None)


def test_contexts_far_beyond_the_probes_are_solved_exactly() -> None:
    """Lines from two evaluations, not a search token by token: a budget for millions."""
    budget = smallest_total(at(0, 40_000_000), 0)[0]
    found = max_context(space(0), dims, budget, limit=2**31 - 1)
    assert found >= 40_000_000
    grid = list(smallest(at(0, found), 0))
    assert any(at(0, found).total_bytes(config) <= budget for config in grid)
    assert all(at(0, found + 1).total_bytes(config) > budget for config in smallest(at(0, found + 1), 0))


# -- packings above the lower bound -----------------------------------------------------------------------------------


def broken(seed: int) -> Space:
    """A program whose packings miss their bounds."""
    return Space(compile_template(partial(_fragmented, seed)), CARD)


def _fragmented(seed: int, choices: Mapping[str, str] | None) -> Graph:
    g = Graph("fragmented", backend="cpu", choices=choices)
    fragmented(seed, g)
    return g


def tokens_alone(tokens: int) -> dict[str, int]:
    return {"tokens": tokens}


def planned(point: Point, budget: int, solver: str) -> bool:
    """Whether the plan fits, by its own addresses."""
    result, (offsets, _, _) = search_and_place(point, budget, solver=solver)
    sizes = point.root_sizes(result.config).tolist()
    peak = max(int(offset) + size for offset, size in zip(offsets, sizes, strict=True))
    fits = Exact(point).bytes(result.config)[0] - pages(point.lower_bound(result.config)) + pages(peak) <= budget
    assert result.fits is fits
    return fits


def test_a_configuration_is_held_from_the_bytes_of_its_best_known_order_on() -> None:
    """If it may be taken; its bound alone says more than is true."""
    whole, missed = broken(FRAGMENTED[1]), 0
    for tokens in (77,):
        point = whole.at(tokens_alone(tokens), pinned={"width": "narrow"})
        for config in islice(whole_grid(whole.at(tokens_alone(tokens))), 1, None, 3):
            if config.choices != ("narrow",):
                assert not holds(point, config, PLENTY)
                continue
            sizes = point.root_sizes(config).tolist()
            tops = [
                max(int(offset) + size for offset, size in zip(offsets, sizes, strict=True))
                for offsets, _, _ in placement.replayed(point, config)
            ]
            needed = Exact(point).bytes(config)[0] - pages(point.lower_bound(config)) + pages(min(tops))
            assert holds(point, config, needed) and not holds(point, config, needed - PAGE)
            missed += point.fits(config, needed - PAGE)
    assert missed


@pytest.mark.some
@pytest.mark.parametrize("solver", ["first_fit", "greedy_by_size", "auto"])
@pytest.mark.parametrize("seed", FRAGMENTED)
def test_what_is_promised_holds_as_packed(seed: int, solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under solvers that miss their bounds, and a portfolio that has but one of them and replays its orders."""
    if solver == "auto":
        monkeypatch.setattr(placement, "solve", lambda problem, **_: solve(problem, solver="first_fit"))
    rng, space, missed = random.Random(seed), broken(seed), 0
    for tokens in (rng.randrange(64, 256), rng.randrange(1000, 4000)):
        point = space.at(tokens_alone(tokens))
        needed, config = smallest_total(point, solver=solver)
        missed += needed > min(map(point.total_bytes, smallest(point)))
        for budget in (needed, needed + rng.randrange(PAGE), needed + rng.randrange(100 * PAGE), 2 * needed):
            assert planned(point, budget, solver) and is_feasible(point, budget, solver=solver)
        for budget in (needed - 1, needed - PAGE):
            assert not planned(point, budget, solver) and not is_feasible(point, budget, solver=solver)
        assert point.total_bytes(config, place(point, config, solver=solver).peak_bytes) == needed
        budget = needed + rng.randrange(PAGE)
        longest = max_context(space, tokens_alone, budget, limit=10**6, solver=solver)
        assert planned(space.at(tokens_alone(longest)), budget, solver)
        assert not planned(space.at(tokens_alone(longest + 1)), budget, solver)
        assert max_context(space, tokens_alone, budget, limit=longest, solver=solver) == longest
    assert missed


# -- packings drawn from a table --------------------------------------------------------------------------------------


class Packings:
    """Bytes that the packings of each configuration miss its bound by, of each solver; the portfolio is never the worst."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng, self.known = random.Random(seed), dict[Config, list[int]]()
        self.misses = (0,) if seed % 4 == 0 else (0, 0, 1, 4, 9, 30)
        monkeypatch.setattr(limits, "place", self.place)
        monkeypatch.setattr(limits, "replayed", self.replayed)

    def missed(self, config: Config) -> list[int]:
        """The placements of the portfolio, the quick solver, two replays, and one that is worse than all."""
        if config not in self.known:
            others = [self.rng.choice(self.misses) for _ in range(4)]
            self.known[config] = [min(others), *others[1:], max(others) + self.rng.choice(self.misses)]
        return self.known[config]

    def place(self, point: Point, config: Config, *, solver: str = "auto") -> Placement:
        at = {"auto": 0, limits.QUICK: 1, "worse": 4}[solver]
        return Placement((), point.lower_bound(config) + self.missed(config)[at], solver)

    def replayed(self, point: Point, config: Config) -> list[Placement]:
        return [Placement((), point.lower_bound(config) + miss, "replayed") for miss in self.missed(config)[2:4]]

    def total(self, point: Point, config: Config, solver: str) -> int:
        return point.total_bytes(config, self.place(point, config, solver=solver).peak_bytes)


SOLVERS = ("auto", limits.QUICK, "worse")


@pytest.mark.some
@pytest.mark.parametrize("seed", range(18))
def test_limits_of_tables_are_kept_as_packed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tables, rng, packings = Tables(seed, apart=True), random.Random(seed), Packings(seed, monkeypatch)
    point, solver = Tabulated(tables), SOLVERS[seed % 3]
    totals = sorted({packings.total(point, c, solver) for c in tables.configs()})
    hosts = sorted({tables.host_bytes(choices) for choices in tables.combinations()})
    for host in (0, rng.choice(hosts), rng.choice(hosts) - 1, hosts[-1]):
        needed, config = smallest_total(point, host, solver=solver)
        allowed = [c for c in tables.configs() if tables.host_bytes(c.choices) <= host]
        packed = [packings.total(point, c, solver) for c in allowed]
        assert needed == packings.total(point, config, solver)
        assert needed <= min(packings.total(point, c, solver) for c in smallest(point, host))
        assert not allowed or (config in allowed and needed >= min(packed))
        for budget in {needed - 1, needed, needed + 1, *rng.sample(totals, min(2, len(totals)))}:
            result, placement = search_and_place(point, budget, host, solver=solver)
            total = point.total_bytes(result.config, placement.peak_bytes)
            assert placement == packings.place(point, result.config, solver=solver)
            assert result.seconds == point.seconds(result.config)
            if allowed:
                assert result.fits == (total <= budget) == is_feasible(point, budget, host, solver=solver)
                assert result.fits or (budget < needed and total >= needed)
                assert result.fits >= (budget >= needed) and (budget != needed - 1 or not result.fits)
                assert result.config in allowed
            assert result.trace[-1].config == result.config


@pytest.mark.parametrize("seed", range(20))
def test_the_least_host_memory_of_tables(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tables, packings = Tables(seed, apart=True), Packings(seed, monkeypatch)
    point = Tabulated(tables)
    needs = [
        (packings.total(point, point.lowest(choices), "auto"), tables.host_bytes(choices))
        for choices in tables.combinations()
    ]
    for device in sorted({device for device, _ in needs}):
        for budget, host in product((device - 1, device), sorted({host for _, host in needs})):
            found = [pinned for total, pinned in needs if total <= budget and pinned <= host]
            assert smallest_host(point, budget, host) == min(found, default=None)


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_context_of_tables(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, from one token on; with packings that miss, at the context found and at the next."""
    tables, rng, packings = Tables(seed, apart=True), random.Random(seed), Packings(seed, monkeypatch)
    points = cache(lambda tokens: Tabulated(tables.at(tokens)))
    space = cast(Space, SimpleNamespace(at=lambda tokens, pinned: points(tokens)))
    solver, limit = SOLVERS[seed % 3], rng.randrange(12, 30)

    def fits(tokens: int, budget: int, host: int) -> bool:
        return is_feasible(points(tokens), budget, host, solver=solver)

    for _ in range(4):
        tokens = rng.randrange(1, limit + 2)
        hosts = sorted({tables.at(tokens).host_bytes(choices) for choices in tables.combinations()})
        host = rng.choice((0, *hosts)) - rng.choice((0, 0, 1))
        budget = smallest_total(points(tokens), host, solver=solver)[0] - rng.choice((0, 0, 1))
        given = {"limit": limit, "host_budget_bytes": host, "solver": solver}
        found = max_context(space, lambda tokens: tokens, budget, **given)
        assert not found or fits(found, budget, host)
        assert found == limit or not fits(found + 1, budget, host)
        if not any(packings.misses):
            assert found == sum(fits(tokens, budget, host) for tokens in range(1, limit + 1))
