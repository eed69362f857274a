"""Addresses of small random programs: nothing alive at once overlaps, and what was planned before changes nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest

from mosaic.planner import placement
from mosaic.planner.offsets import Order, Problem, Solution, solve
from mosaic.planner.placement import NODE_LIMIT, REFERENCES, place, problem_of, replayed
from mosaic.planner.space import Config, Point, Space
from tests.small_programs import CARD, Exact, dims, drawn, template

CASES = [(seed, tokens) for seed in range(4) for tokens in (40, 300)]


def fresh(seed: int, tokens: int) -> Point:
    return Space(template(seed), CARD).at(dims(tokens))


def alive(point: Point, config: Config) -> list[set[int]]:
    """The ops at which each root of the workspace is alive."""
    variant = point.space.variant(config)
    life, num_ops = variant.life, len(variant.body.ops)
    return [
        {
            t for t in range(num_ops)
            if life.starts[b] <= t < life.ends[b] and not any(low <= t < high for low, high in life.gaps[b])
        }
        for b in variant.formula.roots.tolist()
    ]  # fmt: skip


def verify(point: Point, config: Config, offsets: Sequence[int], peak: int) -> None:
    sizes = point.root_sizes(config).tolist()
    assert len(offsets) == len(sizes) and all(offset >= 0 and offset % 512 == 0 for offset in offsets)
    assert peak == max(offset + size for offset, size in zip(offsets, sizes, strict=True))
    assert peak >= max(Exact(point).live(config))
    lives = alive(point, config)
    for i, j in combinations(range(len(sizes)), 2):
        if lives[i] & lives[j]:
            assert offsets[i] + sizes[i] <= offsets[j] or offsets[j] + sizes[j] <= offsets[i]


@pytest.mark.parametrize(("seed", "tokens"), CASES)
def test_every_way_to_place_is_valid_and_says_how(seed: int, tokens: int) -> None:
    point = fresh(seed, tokens)
    for config in random.Random(seed).sample(list(Exact(point).configs()), 6):
        offsets, peak, used = place(point, config)
        verify(point, config, offsets, peak)
        for solver in ("first_fit", "greedy_by_size"):
            named, high, by = place(point, config, solver=solver)
            verify(point, config, named, high)
            assert by == solver and peak <= high
        if peak == point.lower_bound(config):
            assert used.endswith(", replayed") == (peak in [replay.peak_bytes for replay in replayed(point, config)])


@pytest.mark.parametrize("seed", range(3))
def test_orders_come_from_the_reference_sizes_alone(seed: int) -> None:
    """Whatever was placed before, the same request gets the same addresses."""
    rng, asked = random.Random(seed), [40, 150, 300, 1000]
    config = rng.choice(list(Exact(fresh(seed, 150)).configs()))
    expected = {tokens: place(fresh(seed, tokens), config) for tokens in asked}
    space = Space(template(seed), CARD)
    rng.shuffle(asked)
    for tokens in asked:
        offsets, peak, used = place(space.at(dims(tokens)), config)
        assert (list(offsets), peak, used) == (list(expected[tokens][0]), *expected[tokens][1:])
    variant = space.variant(config)
    for (extent, rows), (order, _, by) in zip(REFERENCES, variant.orders.values(), strict=False):
        parts = 4  # a fixed dim, and the most rows of its loop
        values = [extent, parts, extent, min(rows, parts), rows, rows]
        assert variant.body.variables == ("tokens", "parts", "masked", "parts_rows", "body_rows", "head_rows")
        sizes = variant.formula.root_sizes(variant.body.monomials(values))
        problem = problem_of(variant, sizes.tolist())
        solution = solve(problem, node_limit=NODE_LIMIT)
        again = Order.of(problem, solution)
        assert by == solution.solver and list(order.replay(sizes)[0]) == list(again.replay(sizes)[0])


@pytest.mark.parametrize("seed", range(12))
def test_the_problem_is_the_variants_lifetimes_and_gaps(seed: int) -> None:
    point = drawn(seed) if seed else fresh(0, 150)
    configs = list(Exact(point).configs())
    for config in random.Random(seed).sample(configs, min(6, len(configs))):
        variant, sizes = point.space.variant(config), point.root_sizes(config).tolist()
        problem = problem_of(variant, sizes)
        assert list(problem.sizes) == sizes and problem.alignments == 512
        assert (problem.gaps is None) == (not any(variant.life.gaps[b] for b in variant.formula.roots.tolist()))
        for i, (b, live) in enumerate(zip(variant.formula.roots.tolist(), alive(point, config), strict=True)):
            gaps = problem.gaps[i] if problem.gaps is not None else ()
            span = set(range(problem.starts[i], problem.ends[i]))
            assert span - {t for low, high in gaps for t in range(low, high)} == live
            assert (problem.starts[i], problem.ends[i]) == (variant.life.starts[b], variant.life.ends[b])
        verify(point, config, *place(point, config, solver="first_fit")[:2])


def test_what_fixes_every_plan() -> None:
    """Other numbers give other addresses for the same request."""
    assert (NODE_LIMIT, REFERENCES) == (50_000, ((4096, 256), (262144, 2048)))


@pytest.mark.parametrize("seed", range(8))
def test_the_lowest_of_replays_and_solution_is_taken_the_first_of_equals(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a portfolio that misses bounds: what is replayed, and when the solver is asked, with how many nodes; once for sizes
    that come again at once."""
    rng = random.Random(seed)
    asked: list[tuple[Problem, str]] = []

    def poor(problem: Problem, *, solver: str = "auto", node_limit: int = 0) -> Solution:
        assert node_limit == NODE_LIMIT
        asked.append((problem, solver))
        answer = solve(problem, solver=rng.choice(("first_fit", "greedy_by_size", "best_fit")))
        answers[tuple(problem.sizes), tuple(problem.starts)] = answer
        return answer

    answers: dict[tuple[tuple[int, ...], tuple[int, ...]], Solution] = {}
    monkeypatch.setattr(placement, "solve", poor)
    point = drawn(seed) if seed % 2 else fresh(seed, rng.randrange(20, 400))
    configs = list(Exact(point).configs())
    for config in rng.sample(configs, min(12, len(configs))):
        found, times = place(point, config), len(asked)
        again = place(point, config)
        assert (list(again.offsets), *again[1:]) == (list(found.offsets), *found[1:]) and len(asked) == times
        replays = list(replayed(point, config))
        assert len(replays) == len(REFERENCES) + 1 and {solver for _, solver in asked} == {"auto"}
        expected = next((each for each in replays if each.peak_bytes == point.lower_bound(config)), None)
        if expected is None:
            problem = placement.problem_of(point.space.variant(config), point.root_sizes(config).tolist())
            answer = answers[tuple(problem.sizes), tuple(problem.starts)]
            solved = placement.Placement(answer.offsets, answer.peak_bytes, answer.solver)
            expected = min((*replays, solved), key=lambda each: each.peak_bytes)
        assert (list(found.offsets), *found[1:]) == (list(expected.offsets), *expected[1:])


def test_an_order_that_does_not_hold_is_dropped_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    point = fresh(0, 150)
    config = next(Exact(point).configs())
    expected, variant = place(point, config), point.space.variant(config)
    assert list(replayed(point, config))  # finds the orders at all sizes
    for key, (order, guard, _) in variant.orders.items():
        variant.orders[key] = replace(order, below=((),) * len(order.below)), guard, "flat"
    found = place(point, config)
    verify(point, config, *found[:2])
    assert found.peak_bytes == expected.peak_bytes and found.solver != "flat, replayed"
    assert caplog.text.count("dropped a replayed order of the solver flat") == len(REFERENCES) + 1
