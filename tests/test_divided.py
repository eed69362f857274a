"""Long steps of generators in parts: others run in between, and everybody gets the tokens that they get alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from test_request_table import CONFIGS, Asked, Caller, come_and_go, prompt_of
from test_sparse_keys_rows import DEEP, drawn
from test_warm import counted

import mosaic
from mosaic.decoding import GenerationConfig, Session
from mosaic.decoding.live import Generation, LiveRequest
from mosaic.models.step import StepSize
from mosaic.planner import Planner
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.executor import Executor
from mosaic.runtime.step_plans import StepPlans

CACHES = ("sparse:retention=0.3:sample=0.25", "sparse:retention=0.5:drift=0.2", "sparse:retention=0.2:sample=0.5")
"""Of requests that are generators."""
CONFIG: dict[str, Any] = {
    "algorithm": "fast-dllm", "block_length": 4, "threshold": 1.0, "gen_length": 8, "stop_at_eos": False,
}  # fmt: skip
LONG = GenerationConfig(**CONFIG, cache=CACHES[0])
BESIDE = GenerationConfig(**{**CONFIG, "gen_length": 400}, cache="dual")
"""Of a row of the table that outlives them."""


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, CompiledModel]]:
    """One model of each family for all tests, which reads no row that nobody has written; none may keep any."""
    made = {name: mosaic.compile(config, seed=3, host_budget=0, debug="poison") for name, config in DEEP.items()}
    yield made
    for model in made.values():
        assert model.state_rows == {}
        model.close()
        assert not any(model.workspace.committed_bytes().values())


def beside_rows(rng: random.Random, longest: int) -> GenerationConfig:
    """Options of a row of the table, or of a generator."""
    config = drawn(rng, longest, "")
    return replace(config, cache=rng.choice(CACHES)) if rng.random() < 0.5 else config


def parts_until_first_outcome(session: Session, request: LiveRequest) -> int:
    """How often others got an outcome before a request's first one."""
    others = 0
    while not request.steps:
        steps = session.advance()
        assert steps
        others += all(step.request != request.number for step in steps)
    return others


def check_answer(session: Session, request: LiveRequest, alone: Generation) -> None:
    """Run a session to its end: the request gets the tokens that it gets alone."""
    while session.live:
        session.advance()
    assert request.generation is not None
    assert request.generation.token_ids.tolist() == alone.token_ids.tolist()


@pytest.mark.parametrize(("family", "seed", "count", "longest"), [
    ("llada", 0, 5, 24), *[pytest.param(*case, 20, 200, marks=pytest.mark.soak) for case in (
        ("llada", 1), ("llada", 2), ("dream", 3), ("dream", 4))],
])  # fmt: skip
def test_random_requests_get_what_they_get_alone(
    models: dict[str, CompiledModel], family: str, seed: int, count: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{family} {seed}")
    asked = [
        Asked(prompt_of(8 * rng.randint(1, longest // 8), place), beside_rows(rng, longest // 2), place)
        for place in range(count)
    ]
    caller = Caller(models[family], asked, monkeypatch)
    come_and_go(caller, rng, most=6, max_delay_ms=rng.choice([0.0, 0.001]))
    for place in range(count):
        caller.check(place)


def test_a_row_of_the_table_steps_between_all_launches_of_a_refresh(models: dict[str, CompiledModel]) -> None:
    """A part is one launch where that is longer than the bound."""
    model = models["llada"]
    calls = len(model.plan(80).records.ops)
    with model.session(max_delay_ms=0) as session:
        session.submit(prompt_of(5), BESIDE)
        session.advance()
        assert parts_until_first_outcome(session, session.submit(prompt_of(72), LONG)) > calls // 2


def test_generators_step_between_parts_that_are_as_long_as_the_bound(models: dict[str, CompiledModel]) -> None:
    """Long steps of others wait; short ones do not. Nobody's waits more than once for the same."""
    model = models["llada"]
    config = GenerationConfig(**{**CONFIG, "gen_length": 40}, cache=CACHES[1])
    with model.session() as session:
        beside = session.submit(prompt_of(5), config)
        session.advance()
        assert beside.pending is not None
        short_ms = model.predicted_ms([beside.pending])
        request = session.submit(prompt_of(600), LONG)
        assert request.pending is not None
        long_ms = model.predicted_ms([request.pending])
    with model.session(max_delay_ms=1.2 * short_ms) as session:
        beside = session.submit(prompt_of(5), config)
        session.advance()
        request = session.submit(prompt_of(600), LONG)
        other = session.submit(prompt_of(300), replace(LONG, cache=f"{CACHES[0]}:selection=uniform"))
        assert parts_until_first_outcome(session, request) >= min(long_ms / short_ms / 4, 10) > 2
        assert not other.steps
        parts_until_first_outcome(session, other)


def test_a_prompt_in_parts_of_which_nothing_is_wanted_ends() -> None:
    """Of block diffusion: the step writes keys and decides nothing."""
    config = GenerationConfig(gen_length=8, steps=2, stop_at_eos=False)
    reusing = replace(config, attention="flashblock:reuse_change=0.1")
    with mosaic.compile(CONFIGS["sdar"], seed=3) as model:
        (alone,) = model.generate([prompt_of(72)], reusing)
        with model.session(max_delay_ms=0) as session:
            session.submit(prompt_of(5), replace(config, gen_length=400))
            session.advance()
            request = session.submit(prompt_of(72), reusing, request_id=0)
            assert parts_until_first_outcome(session, request) > 2
            check_answer(session, request, alone)


def test_a_step_within_the_bound_is_launched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not planned for other memory."""
    planned = list[int]()
    for divides in (True, False):
        if not divides:
            monkeypatch.delattr(CompiledModel, "divide")
        with mosaic.compile(DEEP["llada"], seed=3) as model, model.session(max_delay_ms=1000) as session:
            with counted(monkeypatch) as made:
                session.submit(prompt_of(5), GenerationConfig(**CONFIG, cache="dual"))
                session.advance()
                assert parts_until_first_outcome(session, session.submit(prompt_of(72), LONG)) <= 1
                while session.live:
                    session.advance()
            planned.append(made["plans"])
    assert planned[0] == planned[1]


def test_whoever_shares_a_step_with_a_request_that_is_cancelled_begins_again(models: dict[str, CompiledModel]) -> None:
    model = models["llada"]
    (alone,) = model.generate([prompt_of(72)], LONG)
    for number in (0, 3):
        with model.session(max_delay_ms=0) as session:
            session.submit(prompt_of(5), BESIDE)
            session.advance()
            first, second = (session.submit(prompt_of(72), LONG) for _ in range(2))
            for _ in range(2 + 3 * number):
                session.advance()
            assert not first.steps
            session.cancel(first)
            session.cancel(session.live[0])
            check_answer(session, second, alone)
    assert model.state_rows == {}


@pytest.mark.parametrize(
    "how", ["a large step", *[pytest.param(how, marks=pytest.mark.soak) for how in ("trim", "weights move")]]
)
def test_memory_that_a_step_in_parts_has_is_given_to_whoever_needs_it(
    models: dict[str, CompiledModel], how: str
) -> None:
    """Then it is launched to its end. Where there is none for it beside others, it is not divided."""
    alone = models["llada"].generate([prompt_of(300)], LONG)[0].token_ids.tolist()
    needed, divided = models["llada"].plan(600).total_bytes, set[bool]()
    for room in (1.0, 2.0):
        budget = int(room * needed)
        with (
            mosaic.compile(DEEP["llada"], seed=3, host_budget="1MiB", debug="poison", budget=budget) as model,
            model.session(max_delay_ms=0) as session,
        ):
            beside = session.submit(prompt_of(5), GenerationConfig(**{**CONFIG, "gen_length": 12}, cache="dual"))
            session.advance()
            request = session.submit(prompt_of(300), LONG)
            session.advance(5)
            divided.add(not request.steps)
            if request.steps:
                continue
            if how == "trim":
                model.trim()
            elif how == "weights move":
                model([6] * 8, config={"stream": "all"})
            else:
                most = min(model.plan(64).max_ctx_tokens, 4000)
                model([6] * most)
            assert model.memory().committed.get("apart", 0) == 0
            while session.live:
                session.advance()
                assert sum(model.memory().committed.values()) <= budget
            assert request.generation is not None and beside.generation is not None
            assert request.generation.token_ids.tolist() == alone
    assert divided == {False, True}


def failing_once(after: int, error: type[BaseException]) -> Callable[[Executor, float], Iterator[None]]:
    """`Executor.in_parts`, the first time with an error after so many parts."""
    in_parts, left = Executor.in_parts, [after]

    def run(executor: Executor, share: float) -> Iterator[None]:
        for part in in_parts(executor, share):
            yield part
            left[0] -= 1
            if left[0] == 0:
                raise error

    return run


def test_after_an_interrupt_in_a_part_the_step_begins_again(
    models: dict[str, CompiledModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models["llada"]
    (alone,) = model.generate([prompt_of(72)], LONG)
    monkeypatch.setattr(Executor, "in_parts", failing_once(3, KeyboardInterrupt))
    with model.session(max_delay_ms=0) as session:
        beside = session.submit(prompt_of(5), BESIDE)
        session.advance()
        request = session.submit(prompt_of(72), LONG)
        with pytest.raises(KeyboardInterrupt):
            session.advance(6)
        assert parts_until_first_outcome(session, request) > 4
        session.cancel(beside)
        check_answer(session, request, alone)


def test_a_step_that_fails_while_others_wait_for_its_memory_begins_again(
    models: dict[str, CompiledModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever needs the memory hears of the error, and so does the session."""
    model = models["llada"]
    (alone,) = model.generate([prompt_of(72)], LONG)
    monkeypatch.setattr(Executor, "in_parts", failing_once(9, ArithmeticError))
    with model.session(max_delay_ms=0) as session:
        beside = session.submit(prompt_of(5), BESIDE)
        session.advance()
        request = session.submit(prompt_of(72), LONG)
        session.advance(4)
        with pytest.raises(ArithmeticError):
            model.trim()
        with pytest.raises(ArithmeticError):
            session.advance()
        assert parts_until_first_outcome(session, request) > 9
        session.cancel(beside)
        check_answer(session, request, alone)


def test_a_step_in_parts_is_planned_for_what_others_leave() -> None:
    plans, step = (
        StepPlans(Planner("llada-8b", device="h200", budget="22GiB"), None),
        StepSize(windows=(32768,), rows=32),
    )
    whole, apart = plans.plan(step), plans.within(11 << 29, step)
    assert apart is not None and apart.total_bytes <= 33 << 29 < whole.total_bytes
    for more in (8 << 30, 22 << 30, 23 << 30):  # where weights are streamed, steps may have the whole budget
        assert plans.within(more, step) is None
    assert plans.plan(step) == whole
