"""The generators make what they say, and the same for the same seed."""

from __future__ import annotations

from pathlib import Path

import pytest
from offset_instances import jittered, layered, perfect, staggered, unrolled

from mosaic.planner.offsets import Problem, lower_bound, read_csv

RESNET = Path(__file__).parents[1] / "benchmarks" / "instances" / "somas_resnet50.csv"


def area(problem: Problem) -> int:
    return sum(s * (b - a) for s, a, b in zip(problem.sizes, problem.starts, problem.ends, strict=True))


@pytest.mark.parametrize("count", [50, 200, 2_000])
def test_perfect_cuts_leave_no_byte_free_at_any_time(count: int) -> None:
    for seed in range(5 if count < 2_000 else 1):
        problem = perfect(count, seed)
        assert len(problem) == count
        assert lower_bound(problem) == problem.capacity == 1 << 20
        assert area(problem) == max(problem.ends) << 20
        assert problem == perfect(count, seed) != perfect(count, seed + 1)


def test_shaken_copies_differ_a_little() -> None:
    problem = read_csv(RESNET)
    shaken = jittered(problem, 1)
    assert len(shaken) == len(problem) and shaken != jittered(problem, 2)
    assert 0.9 < lower_bound(shaken) / lower_bound(problem) < 1.1
    assert all(0.94 < a / b < 1.06 for a, b in zip(shaken.sizes, problem.sizes, strict=True) if b > 100)


@pytest.mark.parametrize("count", [500, 20_000])
def test_layered_networks_have_about_the_size_asked_for(count: int) -> None:
    for seed in range(8):
        problem = layered(count, seed)
        assert count // 2 < len(problem) <= count
        assert max(problem.ends) > count // 4


def test_copies_of_a_training_step() -> None:
    problem = read_csv(RESNET)
    row, nested = staggered(problem, 18, 3), unrolled(problem, 18, 3)
    assert len(row) == len(nested) == 18 * len(problem)
    assert lower_bound(nested) > 9 * lower_bound(problem) > lower_bound(row) > lower_bound(problem)
