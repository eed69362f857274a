"""Admission: what is said to fit without a plan, against plans, over random questions."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from test_decoding import CONFIGS, prompt_of

import mosaic
from mosaic import decoding, models
from mosaic.decoding import GenerationConfig
from mosaic.decoding.algorithms import largest_steps, shared_sizes
from mosaic.decoding.config import resolve
from mosaic.errors import DoesNotFit
from mosaic.models.parts import EACH, SAMPLE, STATISTICS
from mosaic.models.phase import Phase
from mosaic.models.state import State
from mosaic.models.step import StepSize
from mosaic.planner.planner import Planner, Settings
from mosaic.runtime.sharing import SharedSizes
from mosaic.runtime.step_plans import StepPlans

WAYS: dict[str, list[dict[str, Any]]] = {
    "llada": [{}, {"cfg_scale": 1.0}, {"cache": "dual"}, {"algorithm": "fast-dllm", "cache": "prefix"}],
    "sdar": [{}, {"temperature": 0.8}],
}
SHARED = {**WAYS, "fast-dllm-v2": [{}, {"temperature": 0.8}, {"small_block_length": 8}]}
"""With a family whose requests have several largest steps of one phase, of which none is the largest in all that counts."""
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
    config = None if plans.config is None else plans.asked.space(size.kind).known(plans.config)
    return any(
        planner.plan(one, config=config, limit=False).fits
        for one in (size.rounded(), size)
        for planner in (plans.planner, *((plans.asked,) if config is None else ()))
    )


@contextmanager
def making_no_plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Planning inside the block raises."""
    with monkeypatch.context() as patch:
        patch.setattr(Planner, "plan", lambda *_, **__: pytest.fail("a plan was made"))
        yield


def refusal_of(plans: StepPlans, size: StepSize, states: Mapping[State, int]) -> DoesNotFit | None:
    try:
        plans.require([size], states)
    except DoesNotFit as refused:
        return refused
    return None


def planned_bytes(planner: Planner, size: StepSize, config: Settings) -> int:
    known = planner.space(size.kind).known(config)
    return planner.plan(size, config=known, limit=False).total_bytes


SOAKED = [pytest.param(family, streams, 11, marks=pytest.mark.soak) for family in WAYS for streams in (False, True)]


@pytest.mark.parametrize(("family", "streams", "rounds"), [("llada", False, 3), ("sdar", True, 3), *SOAKED])
def test_what_fits_without_a_plan_is_what_fits_by_plan(
    family: str, streams: bool, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it was asked before, of smaller and larger steps, beside other rows, in a configuration that is given.

    What a refusal says is needed is more than there is, and no more than a plan needs.
    """
    rng, answers = random.Random(f"{family} {streams}"), []
    roomy = Planner(models.load(CONFIGS[family]), device="cpu", host_budget="1GiB" if streams else 0)
    for _ in range(rounds):
        middle, states = rng.choice(asked(family, rng))
        needed = roomy.needed(middle.beside(states))
        config = rng.choice((None, None, {"ffn": 128, "logits": 64, "attention": "heads", "heads": 1}))
        plans = StepPlans(roomy.with_budgets(budget=needed + rng.randrange(-2, 4) * PAGE), config)
        if rng.random() < 0.7:
            plans.settle_on(roomy.plan(StepSize(windows=(1,), rows=1), limit=False))
        beside_more = {state: rows + rng.randrange(1, 400) for state, rows in states.items()}
        near = [(middle, states), *asked(family, rng), (middle, beside_more), (middle, middle.states)]
        for size, beside in [*near, *rng.sample(near, 2)]:
            answers.append(planned(plans, size.beside(beside)))
            with making_no_plans(monkeypatch):
                assert plans.fits([size], beside) == answers[-1], size
                refused = refusal_of(plans, size, beside)
            assert (refused is None) == answers[-1]
            if refused is not None:
                least = (
                    roomy.needed(size.beside(beside))
                    if config is None
                    else planned_bytes(roomy, size.beside(beside), config)
                )
                assert plans.asked.budget_bytes == refused.available_bytes < refused.needed_bytes <= least
    assert 0.1 < sum(answers) / len(answers) < 0.9


def headless(phase: Phase) -> Phase:
    """The phase with one head of those that decide by a rule."""
    return phase if phase.commit is None else replace(phase, head=STATISTICS)


def shared(requests: Sequence[Sequence[StepSize]]) -> dict[Any, Any]:
    """The steps that requests share by phases without heads, by definition: each request's maximum of one, joined one by one."""
    found: dict[Any, Any] = {}
    for kind in {headless(size.phase) for largest in requests for size in largest}:
        own = [[size for size in largest if headless(size.phase) == kind] for largest in requests]
        most = [sizes for sizes in own if sizes]
        heads = {size.phase.head for sizes in most for size in sizes}
        head = heads.pop() if len(heads) == 1 else EACH if heads - {STATISTICS, SAMPLE} else SAMPLE
        phase = replace(kind, head=head)
        keys = [max(sum(size.keys) for size in sizes) for sizes in most if sizes[0].keys]
        found[phase] = (
            tuple(max(sum(size.windows) for size in sizes) for sizes in most), tuple(keys),
            tuple(max(sum(size.owned) for size in sizes) for sizes in most if sizes[0].keys),
            sum(max(size.rows for size in sizes) for sizes in most),
            {
                state: sum(max(size.states.get(state, 0) for size in sizes) for sizes in most)
                for sizes in most
                for size in sizes
                for state in size.states
            },
        )  # fmt: skip
    return found


@pytest.mark.parametrize("family", list(SHARED))
def test_what_requests_share_is_the_same_however_they_came(family: str) -> None:
    """Over random requests that come and go, asked about beside others; in the order in which they came."""
    rng, arch, number = random.Random(family), models.load(CONFIGS[family]).architecture, 0
    live, known = dict[int, list[StepSize]](), SharedSizes()

    def one() -> list[StepSize]:
        chosen = GenerationConfig(gen_length=rng.choice((8, 64, 128)), **rng.choice(SHARED[family]))
        found = largest_steps(resolve(chosen, arch), arch, rng.randrange(1, 300), 0)
        return rng.sample(found, len(found))  # none of them has to be the first

    for _ in range(150):
        if live and rng.random() < 0.45:
            gone = rng.choice([*live, number + 1])
            known.remove(gone)
            live.pop(gone, None)
        else:
            number += 1
            live[number] = one()
            known.add(number, live[number])
        more = [one() for _ in range(rng.choice((0, 0, 1, 2)))]
        asked, found = [*live.values(), *more], known.beside(more)
        if len(asked) == 1:
            assert found == asked[0]
            continue
        assert len(found) == len({size.phase for size in found})
        assert shared(asked) == {
            size.phase: (size.windows, size.keys, size.owned, size.rows, dict(size.states)) for size in found
        }


def test_submitting_makes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where a request is admitted, first or beside others, nor where it is refused."""
    options = GenerationConfig(gen_length=8, block_length=4, steps=4)
    with mosaic.compile(CONFIGS["llada"], host_budget=0) as roomy:
        budget = roomy.check(decoding.shapes(options, [9] * 3, roomy.architecture)).total_bytes
    with mosaic.compile(CONFIGS["llada"], budget=budget, host_budget=0) as model, model.session() as session:
        with making_no_plans(monkeypatch):
            requests = [session.submit(prompt_of(9), options) for _ in range(3)]
            for prompt in (prompt_of(400), prompt_of(400), prompt_of(401)):
                with pytest.raises(DoesNotFit, match="fewer or shorter sequences") as refused:
                    session.submit(prompt, options)
                assert refused.value.needed_bytes > refused.value.available_bytes == budget
            for request in requests:
                session.cancel(request)
            with pytest.raises(DoesNotFit, match="Alone, such a request fits with"):
                session.submit(prompt_of(400), options)
        session.submit(prompt_of(9), options)
        while session.live:
            session.advance()
