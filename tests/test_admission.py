"""Admission: what is said to fit without a plan, against plans, over random questions."""

from __future__ import annotations

import random
from typing import Any

import pytest
from test_decoding import CONFIGS

from mosaic import models
from mosaic.decoding import GenerationConfig
from mosaic.decoding.algorithms import largest_steps, shared_sizes
from mosaic.decoding.config import resolve
from mosaic.models.state import State
from mosaic.models.step import StepSize
from mosaic.planner.planner import Planner
from mosaic.runtime.step_plans import StepPlans

WAYS: dict[str, list[dict[str, Any]]] = {
    "llada": [{}, {"cfg_scale": 1.0}, {"cache": "dual"}, {"algorithm": "fast-dllm", "cache": "prefix"}],
    "sdar": [{}, {"temperature": 0.8}],
}
PAGE = 4096


def asked(family: str, rng: random.Random) -> list[tuple[StepSize, dict[State, int]]]:
    """The largest steps of some random requests, and rows of states once they are live."""
    arch, found = models.load(CONFIGS[family]).architecture, []
    for number in range(rng.choice((1, 1, 2, 5))):
        chosen = GenerationConfig(gen_length=rng.choice((8, 64, 128)), **rng.choice(WAYS[family]))
        found.append(largest_steps(resolve(chosen, arch), arch, rng.randrange(1, 300), number))
    taken = rng.randrange(3) * rng.randrange(800)
    return [(size, {state: rows + taken for state, rows in size.states.items()}) for size in shared_sizes(found)]


def planned(plans: StepPlans, size: StepSize) -> bool:
    """Whether there is a plan for a step, with the weights where they are or elsewhere, of its rounded size or its own."""
    return any(
        planner.plan(one, limit=False).fits
        for one in (size.rounded(), size)
        for planner in (plans.planner, plans.asked)
    )


SOAKED = [pytest.param(family, streams, 11, marks=pytest.mark.soak) for family in WAYS for streams in (False, True)]


@pytest.mark.parametrize(("family", "streams", "rounds"), [("llada", False, 3), ("sdar", True, 3), *SOAKED])
def test_what_fits_without_a_plan_is_what_fits_by_plan(family: str, streams: bool, rounds: int) -> None:
    """Also where it was asked before, of smaller and larger steps, beside other rows."""
    rng, answers = random.Random(f"{family} {streams}"), []
    roomy = Planner(models.load(CONFIGS[family]), device="cpu", host_budget="1GiB" if streams else 0)
    for _ in range(rounds):
        middle, states = rng.choice(asked(family, rng))
        needed = roomy.needed(middle.beside(states))
        plans = StepPlans(roomy.with_budgets(budget=needed + rng.randrange(-2, 4) * PAGE), None)
        if rng.random() < 0.7:
            plans.settle_on(roomy.plan(StepSize(windows=(1,), rows=1), limit=False))
        beside_more = {state: rows + rng.randrange(1, 400) for state, rows in states.items()}
        near = [(middle, states), *asked(family, rng), (middle, beside_more), (middle, middle.states)]
        for size, beside in [*near, *rng.sample(near, 2)]:
            answers.append(planned(plans, size.beside(beside)))
            assert plans.fits([size], beside) == answers[-1], size
    assert 0.1 < sum(answers) / len(answers) < 0.9
