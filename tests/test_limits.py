"""Limits of small random programs, verified by evaluating every configuration of the grid at L and L + 1."""

from __future__ import annotations

import random
from functools import cache

import pytest

from mosaic.planner.limits import is_feasible, max_context, smallest_host, smallest_total
from mosaic.planner.space import Point
from tests.small_programs import PAGE, Exact, dims, space

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
        for config in at(seed, tokens).grid(PLENTY):
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
                ways = [c for c in at(seed, tokens).grid(PLENTY) if c.choices[1] == stream]
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
    grid = list(at(0, found).smallest(0))
    assert any(at(0, found).total_bytes(config) <= budget for config in grid)
    assert all(at(0, found + 1).total_bytes(config) > budget for config in at(0, found + 1).smallest(0))
