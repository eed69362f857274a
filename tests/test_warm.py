"""Warm sessions: what was planned and bound before requests came serves them all, and no page moves."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from test_request_table import CONFIGS, prompt_of

import mosaic
from mosaic.decoding import GenerationConfig, Session, Submission
from mosaic.errors import DoesNotFit, UsageError
from mosaic.planner.planner import Planner
from mosaic.runtime.executor import Executor
from mosaic.runtime.graph_memory import GraphMemory

GREEDY = GenerationConfig(gen_length=8, stop_at_eos=False)
DRAWN = GenerationConfig(gen_length=8, stop_at_eos=False, temperature=0.8, top_p=0.9)
SPARSE = GenerationConfig(gen_length=8, block_length=8, stop_at_eos=False, cache="sparse")


def deep(layers: int) -> dict[str, Any]:
    """A model of so many layers."""
    return {**CONFIGS["sdar"], "num_hidden_layers": layers}


@contextmanager
def counted(patch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How many plans are made, sizes compared with the budget, executors bound, and runs of these, inside the block."""
    found = {"plans": 0, "fits": 0, "executors": 0, "runs": 0}
    plan, fit, bind, run = Planner.plan, Planner.fits, Executor.__init__, Executor.run

    def planning(*args: Any, **options: Any) -> Any:
        found["plans"] += 1
        return plan(*args, **options)

    def fitting(*args: Any, **options: Any) -> Any:
        found["fits"] += 1
        return fit(*args, **options)

    def binding(*args: Any, **options: Any) -> None:
        found["executors"] += 1
        bind(*args, **options)

    def running(executor: Executor) -> None:
        found["runs"] += 1
        run(executor)

    with patch.context() as inner:
        inner.setattr(Planner, "plan", planning)
        inner.setattr(Planner, "fits", fitting)
        inner.setattr(Executor, "__init__", binding)
        inner.setattr(Executor, "run", running)
        yield found


def come_and_go(
    session: Session,
    rng: random.Random,
    count: int,
    most: int,
    tokens: int,
    configs: Sequence[GenerationConfig] = (GREEDY, DRAWN),
) -> None:
    """Random requests of at most so many positions, some of which are cancelled."""
    while count or session.live:
        while count and len(session.live) < most and rng.random() < 0.6:
            config = rng.choice(configs)
            length = rng.randrange(1, tokens - config.gen_length)
            session.submit(prompt_of(length), config, steps=rng.randint(1, 4))
            count -= 1
        if session.live and rng.random() < 0.1:
            session.cancel(rng.choice(session.live))
        session.advance()


@pytest.mark.parametrize(("family", "count"), [
    ("sdar", 24), pytest.param("sdar", 400, marks=pytest.mark.soak), pytest.param("llada2", 400, marks=pytest.mark.soak),
])  # fmt: skip
def test_a_warm_session_plans_nothing_and_maps_nothing(
    family: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it was idle in between. Warm again, it runs nothing."""
    rng, said = random.Random(family), list[str]()
    with mosaic.compile(CONFIGS[family], seed=3) as model, model.session(max_num_batched_tokens=64) as session:
        assert session.warm([GREEDY, DRAWN], requests=8, tokens=64, progress=said.append) == 8
        assert said[0].startswith(f"step 1 of {len(said) - 1}: ") and model.state_rows == {}
        assert session.warmed is not None and session.warmed.steps == len(said) - 1 and session.warmed.kernels is None
        assert said[-1].startswith(f"{len(said) - 1} steps for 8 requests, in ")
        with counted(monkeypatch) as made:
            session.warm([GREEDY, DRAWN], requests=8, tokens=64, progress=said.append)
        assert made == {"plans": 0, "fits": 0, "executors": 0, "runs": 0}
        pages = model.workspace.changes()
        with counted(monkeypatch) as made:
            for part in (count // 4, count - count // 4):
                come_and_go(session, rng, part, most=8, tokens=64)
        assert made.pop("runs") and made == {"plans": 0, "fits": 0, "executors": 0}
        assert model.workspace.changes() == pages


@pytest.mark.soak
@pytest.mark.parametrize("most", [16, 128])
def test_a_warm_session_of_few_steps_plans_nothing(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is room for few graphs, few steps serve all; how many rows of an evicting one stay differs."""
    monkeypatch.setattr(GraphMemory, "most", 6)
    evicting = [
        replace(GREEDY, eviction=how) for how in ("focus", "focus:requests=64")
    ]  # plans say whether the last pays
    layered = {**CONFIGS["sdar"], "num_hidden_layers": 3}
    with mosaic.compile(layered, seed=3) as model, model.session(max_num_batched_tokens=4 * most) as session:
        session.warm([GREEDY, *evicting], requests=most, tokens=64)
        with counted(monkeypatch) as made:
            come_and_go(session, random.Random(1), 2 * most, most=most, tokens=64, configs=[GREEDY, *evicting])
        assert made.pop("runs") and made == {"plans": 0, "fits": 0, "executors": 0}


def test_requests_that_all_evict_need_no_steps_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of no policy write their prompts, and decide for nobody: those that serve others as well are not made."""
    steps, evicting = list[int](), replace(GREEDY, eviction="focus")
    for ways in ([evicting], [evicting, GREEDY]):
        with mosaic.compile(deep(3), seed=3) as model, model.session(max_num_batched_tokens=64) as session:
            session.warm(ways, requests=8, tokens=64)
            assert session.warmed is not None
            steps.append(session.warmed.steps)
            with counted(monkeypatch) as made:
                come_and_go(session, random.Random(1), 12, most=8, tokens=64, configs=ways)
            assert made.pop("runs") and made == {"plans": 0, "fits": 0, "executors": 0}
    assert steps[0] < steps[1]


@pytest.mark.parametrize(("config", "ways", "batched", "budget", "requests", "refusals"), [
    (deep(2), (GREEDY, DRAWN), 64, "1.75MiB", 8, 6), (CONFIGS["llada"], (SPARSE,), 2048, "3MiB", 32, 6),
    pytest.param(deep(4), (GREEDY, DRAWN), 64, "2.5MiB", 24, 12, marks=pytest.mark.soak),
    pytest.param(deep(4), (GREEDY, DRAWN), 64, "6MiB", 24, 12, marks=pytest.mark.soak),
])  # fmt: skip
def test_a_warm_session_that_is_full_plans_nothing_and_maps_nothing(
    config: dict[str, Any], ways: Sequence[GenerationConfig], batched: int, budget: str, requests: int, refusals: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Positions are for short requests as for long ones: many more of these are live at once than of the longest."""
    rng, most, refused = random.Random(budget), 0, 0
    with (
        mosaic.compile(config, seed=3, budget=budget) as model,
        model.session(max_num_batched_tokens=batched) as session,
    ):
        count = session.warm(ways, requests=requests, tokens=512)
        assert 1 <= count < requests
        pages = model.workspace.changes()
        with counted(monkeypatch) as made:
            while len(session.live) < 200 and refused < refusals:
                length = min(round(4 * 1.05 ** rng.uniform(0, 99)), 500)
                asked = Submission(prompt=prompt_of(length), config=rng.choice(ways))
                if session.admits(asked):
                    session.submit_all([asked])
                else:
                    refused += 1
                    with pytest.raises(DoesNotFit):
                        session.submit_all([asked])
                    session.advance(rng.randint(1, 8))
                    if session.live and rng.random() < 0.2:
                        session.cancel(rng.choice(session.live))
                most = max(most, len(session.live))
            while session.live:
                session.advance()
        assert made["runs"] and not made["executors"]  # plans are made to say why somebody is refused
        assert model.workspace.changes() == pages and refused == refusals and most > 2 * count


def test_a_warm_session_refuses_who_needs_more_beside_others_and_serves_them_alone() -> None:
    with mosaic.compile(CONFIGS["sdar"], seed=3) as model, model.session() as session:
        assert session.warm(GREEDY, requests=2, tokens=64) == 2
        asked = Submission(prompt=prompt_of(56), config=GREEDY)
        session.submit_all([asked, asked])
        assert not session.admits(asked)
        with pytest.raises(
            DoesNotFit, match=r"too few positions .* are warm for\. If nobody .* room in .* steps"
        ) as refused:
            session.submit_all([asked])
        session.advance(refused.value.steps)
        long = Submission(prompt=prompt_of(700), config=GREEDY)
        assert session.admits(asked, asked) and session.admits(long)
        (request,) = session.submit_all([long])
        assert not session.admits(asked)
        while request.generation is None:
            session.advance()
        assert request.generation.finish == "length" and session.admits(asked, asked)


@pytest.mark.parametrize("length", [696, 703])
def test_who_fits_alone_is_not_told_that_it_never_does(length: int) -> None:
    """Also where the canvas is no whole blocks."""
    config = replace(GREEDY, block_length=8, cache="dual")
    with mosaic.compile(CONFIGS["llada"], seed=3) as model, model.session() as session:
        assert session.warm(config, requests=1, tokens=64) == 1
        session.submit(prompt_of(9), config)
        with pytest.raises(DoesNotFit, match=rf"fits with {length + 8} positions") as refused:
            session.submit(prompt_of(length), config)
        assert refused.value.steps is None and not refused.value.never


def test_a_session_is_warm_for_other_policies_after_the_first() -> None:
    """Those who are foreseen the second time are of none of the groups that the session is warm for."""
    with mosaic.compile(CONFIGS["llada2"], seed=3) as model, model.session() as session:
        for config in (replace(GREEDY, attention="flashblock"), GREEDY):
            assert session.warm(config, requests=2, tokens=24) == 2


@pytest.fixture
def thawed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left out of garbage collection, as in a new process; the tests' own objects stay out, whose collection takes
    seconds."""
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(gc, "unfreeze", frozen.clear)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: len(frozen))


@pytest.mark.parametrize("others", [False, True])
def test_a_warm_session_is_left_out_of_garbage_collection_until_it_closes(others: bool, thawed: None) -> None:
    """Who has frozen objects already knows when to thaw them."""
    with mosaic.compile(CONFIGS["sdar"], seed=3) as model:
        if others:
            gc.freeze()
        before = gc.get_freeze_count()
        with model.session(max_num_batched_tokens=8) as session:
            session.warm(GREEDY, requests=1, tokens=16)
            assert (gc.get_freeze_count() > before) is not others
        assert bool(gc.get_freeze_count()) is others


def test_of_two_warm_sessions_the_last_to_close_thaws(thawed: None) -> None:
    with mosaic.compile(CONFIGS["sdar"], seed=3) as model:
        first, second = (model.session(max_num_batched_tokens=8) for _ in range(2))
        first.warm(GREEDY, requests=1, tokens=16)
        before = gc.get_freeze_count()
        second.warm(GREEDY, requests=1, tokens=16, temperature=0.5)
        assert gc.get_freeze_count() > before
        first.close()
        assert gc.get_freeze_count() > before
        second.close()
        assert not gc.get_freeze_count()


@pytest.mark.parametrize(("given", "message"), [
    ({"requests": 0}, "requests: expected a number from 1 to 1,024, got 0"),
    ({"requests": 10**12}, "requests: .* got 1000000000000"),
    ({"requests": True}, "requests: .* got True"),
    ({"tokens": 8}, "tokens: a request with gen_length 8 takes more than 8 positions"),
    ({"tokens": 10**30}, "tokens: expected a number from 1 to 8,192, got 10000"),
    ({"tokens": "64"}, "tokens: .* got '64'"),
    ({"config": []}, "config: expected GenerationConfig.* got list"),
    ({"config": 3}, "config: expected GenerationConfig.* got int"),
    ({"config": [GREEDY, None]}, "tokens: a request with gen_length 128 takes more than 64 positions"),
    ({"progress": 3}, "progress: expected a function of a line, got int"),
    ({"temperature": 0.5, "algorithm": "dream"}, "algorithm"),
])  # fmt: skip
def test_what_warm_cannot_be_told_is_refused(given: dict[str, Any], message: str) -> None:
    with mosaic.compile(CONFIGS["sdar"], seed=3) as model, model.session() as session:
        with pytest.raises(UsageError, match=message):
            session.warm(**{"config": GREEDY, "requests": 1, "tokens": 64, **given})
        assert model.state_rows == {}


def test_warm_says_what_one_request_that_never_fits_needs() -> None:
    with (
        mosaic.compile(CONFIGS["sdar"], seed=3, host_budget=0, budget="1.5MiB") as model,
        model.session() as session,
        pytest.raises(DoesNotFit, match=r"needs .* MiB, the budget is 1.50 MiB"),
    ):
        session.warm(GREEDY, requests=1, tokens=8192)
