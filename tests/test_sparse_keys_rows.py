"""Requests with sparse keys as rows of a table: each gets what a generator on the host, alone, gets, whoever shares its steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from test_request_table import CONFIGS, Asked, Caller, check_tokens, come_and_go, prompt_of, start
from test_warm import come_and_go as come_and_go_warm
from test_warm import counted

import mosaic
from mosaic.decoding import GenerationConfig, Submission
from mosaic.decoding.algorithms import table_row
from mosaic.decoding.config import resolve
from mosaic.errors import DoesNotFit
from mosaic.models import load
from mosaic.models.parts import CANVAS, HELD_EXTENTS, REQUESTS
from mosaic.models.policies.sparse_keys import PACKED
from mosaic.models.step import StepSize
from mosaic.planner import Planner
from mosaic.runtime.compiled import CompiledModel

DEEP = {
    "llada": {**CONFIGS["llada"], "n_layers": 2, "torch_dtype": "float64"},
    "dream": {**CONFIGS["dream"], "num_hidden_layers": 2, "torch_dtype": "float64"},
}
"""In float64, but for scores: otherwise who shares a step would change which of two keys scores more."""
WAYS = ("", ":selection=uniform", ":selection=uniform-published:pool=5", ":group=mean:pool=1")
FAST: dict[str, Any] = {"algorithm": "fast-dllm", "block_length": 4, "threshold": 1.0, "stop_at_eos": False}


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, CompiledModel]]:
    """One model of each family for all tests, which reads no row that nobody has written; none may keep any."""
    made = {name: mosaic.compile(config, seed=3, host_budget=0, debug="poison") for name, config in DEEP.items()}
    yield made
    for model in made.values():
        assert model.state_rows == {}
        model.close()
        assert not any(model.workspace.committed_bytes().values())


def drawn(rng: random.Random, longest: int, way: str) -> GenerationConfig:
    """Random options; most requests have sparse keys of one kind, whatever they keep and how often."""
    block = rng.choice([2, 4, 8])
    length = max(round(longest ** rng.random() / block), 1) * block
    options = f":retention={rng.choice([0.05, 0.3, 0.5, 1.0])}:interval={rng.randint(1, 3)}:delay={rng.randrange(2)}"
    rule: dict[str, Any] = {"steps": length, "algorithm": "llada"}
    if rng.random() < 0.7:
        limit = {"factor": 1.5} if rng.random() < 0.1 else {"threshold": rng.choice([0.02, 0.03, 0.5])}
        rule = {"algorithm": "fast-dllm", **limit}
    return GenerationConfig(
        gen_length=length, block_length=block, cache=rng.choice([f"sparse{options}{way}"] * 6 + ["dual", None]),
        temperature=rng.choice([0, 0, 0.7]), seed=rng.randrange(5), stop_at_eos=rng.random() < 0.5, **rule,
    )  # fmt: skip


SOAKED = [
    pytest.param(family, seed, 30, 256, marks=pytest.mark.soak)
    for family, seeds in (("llada", (1, 2, 3, 5, 6, 7)), ("dream", (1, 2, 3)))
    for seed in seeds
]
"""Those in which no two scores of a step are alike but for the last bits: these change with who shares the step."""


@pytest.mark.parametrize(("family", "seed", "count", "longest"), [("dream", 0, 4, 24), *SOAKED])
def test_random_requests_get_what_they_get_alone(
    models: dict[str, CompiledModel], family: str, seed: int, count: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{family} {seed}")
    asked = [
        Asked(
            prompt_of(round((longest // 2) ** rng.random()), number), drawn(rng, longest // 2, WAYS[seed % 4]), number
        )
        for number in range(count)
    ]
    caller = Caller(models[family], asked, monkeypatch)
    steps, shared = come_and_go(caller, rng, most=8)
    for place in range(count):
        caller.check(place)
    assert shared > steps // 10


def test_a_step_serves_a_refresh_beside_reuse(
    models: dict[str, CompiledModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that came one step apart share all of them, whatever they keep and how often; only some refresh at a time."""
    asked = [
        Asked(prompt_of(length), GenerationConfig(**FAST, gen_length=12, cache=f"sparse:retention={options}"), length)
        for length, options in ((9, "0.5"), (14, "0.2:interval=2"), (5, "1.0"))
    ]
    caller, phases = Caller(models["llada"], asked, monkeypatch), list[str]()
    with caller.model.session() as session:
        start(caller, session, 0, 1)
        session.advance()
        start(caller, session, 2)
        while session.live:
            count, steps = len(session.live), session.advance()
            assert len(steps) == count
            phases.append(steps[0].plan.document["phase"])
    check_tokens(caller, 0, 1, 2)
    assert phases == [*["refresh", "reuse", "reuse", "refresh"] * 2, "refresh", "reuse", "reuse", "reuse"]


def test_steps_that_are_launched_ahead_are_of_the_kind_that_is_asked_for(
    models: dict[str, CompiledModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device: the host knows the table a step late, and foresees which requests refresh."""
    monkeypatch.setattr(CompiledModel, "asynchronous", property(lambda _: True))
    options = {**FAST, "gen_length": 24, "block_length": 2, "cache": "sparse:interval=4:delay=1"}
    asked = [Asked(prompt_of(length), GenerationConfig(**options), length) for length in (9, 14)]
    caller = Caller(models["dream"], asked, monkeypatch)
    with caller.model.session() as session, counted(monkeypatch) as made:
        start(caller, session, 0, 1)
        steps = [session.advance() for _ in range(24)]
        assert [len(found) for found in steps] == [2] * 24 and not session.live
    assert made["runs"] <= 25
    assert [found[0].plan.document["phase"] for found in steps] == [*["refresh"] * 2, *["reuse"] * 6] * 3
    assert [[step.phase for step in found] for found in steps] == [
        [name] * 2 for name in ["full_step", "refresh", *["reuse"] * 6] * 3
    ]
    check_tokens(caller, 0, 1)


def test_rows_of_packed_keys_are_those_that_a_request_says(models: dict[str, CompiledModel]) -> None:
    """Also where blocks that share a Refresh are more than the answer has; whoever is cancelled leaves none."""
    model = models["dream"]
    with model.session() as session:
        for length, options in ((12, ""), (6, ":retention=0.3:interval=9")):
            session.submit(prompt_of(length), **FAST, gen_length=8, cache=f"sparse{options}")
        for _ in range(3):
            session.advance()
        rows = {"packed": 8 + 4 + 1 + 8, "canvas": 20 + 14, "held_extents": 2}  # floor(0.5 x 16), floor(0.3 x 6)
        assert {name: count for name, count in model.state_rows.items() if name != "requests"} == rows
        for request in session.live:
            session.cancel(request)
        assert model.state_rows == {}


def test_which_requests_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of long canvases take heads in turn, and where weights are streamed a request's steps go together."""
    llada, dream = (load(name).architecture for name in ("llada-8b", "dream-7b"))
    for arch, length, given, tabled in (
        (llada, 8192, {}, True), (llada, 8193, {}, False),
        (llada, 300, {"cache": "sparse:sample=0.5"}, False), (dream, 8192, {"threshold": 0.9}, True),
        (dream, 300, {"steps": 128, "algorithm": "llada"}, False), (llada, 300, {"steps": 128, "algorithm": "llada"}, True),
    ):  # fmt: skip
        config = resolve(
            GenerationConfig(**{"algorithm": "fast-dllm", "cache": "sparse", "gen_length": 256, **given}), arch
        )
        assert (table_row(config, arch, length - 256, 0) is not None) is tabled, (length, given)
    given: dict[str, Any] = {"host_budget": "64MiB", "config": {"stream": "all"}}
    with mosaic.compile(DEEP["llada"], seed=3, **given) as model, model.session() as session:
        request = session.submit(prompt_of(9), **FAST, gen_length=8, cache="sparse")
        assert all("requests_rows" not in step.plan.dims for step in session.advance(2))
        session.cancel(request)


@pytest.mark.parametrize("count", [12, pytest.param(300, marks=pytest.mark.soak)])
def test_a_warm_session_plans_nothing_and_maps_nothing(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = GenerationConfig(gen_length=8, block_length=8, stop_at_eos=False, cache="sparse")
    with mosaic.compile(DEEP["llada"], seed=3) as model, model.session(max_num_batched_tokens=64) as session:
        assert session.warm(config, requests=4, tokens=32) == 4
        pages = model.workspace.changes()
        with counted(monkeypatch) as made:
            come_and_go_warm(session, random.Random(1), count, most=4, tokens=32, configs=[config])
        assert made.pop("runs") and made == {"plans": 0, "fits": 0, "executors": 0}
        assert model.workspace.changes() == pages


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_plans_of_their_steps_are_proved(device: str) -> None:
    planner = Planner(load({**DEEP["dream"], "torch_dtype": "bfloat16"}), device=device)
    arch, states = planner.model.architecture, {PACKED: 200, CANVAS: 300, HELD_EXTENTS: 3, REQUESTS: 16}
    config = resolve(GenerationConfig(**FAST, gen_length=8, cache="sparse"), arch)
    row = table_row(config, arch, 40, 0)
    assert row is not None
    for phase in (row.phase, replace(row.phase, cache=row.cache.covering)):
        size = StepSize(phase=phase, windows=(48,) * 3, keys=(64,) * 3, rows=12, extents=3, states=states)
        plan = planner.plan(size)
        assert plan.check() == () and "keep_requests" in {one["kernel"] for one in plan.document["ops"]}


def test_what_does_not_fit_an_idle_session_never_will_though_it_is_a_generator() -> None:
    drifting = GenerationConfig(**FAST, gen_length=16, cache="sparse:drift=0.2")
    with mosaic.compile(DEEP["dream"], seed=3, host_budget=0, budget="3MiB") as model, model.session() as session:
        one = Submission(prompt=prompt_of(5000), config=drifting)
        assert session.forecast(one).fits == "never"
        with pytest.raises(DoesNotFit, match="the budget is") as refused:
            session.submit_all([one])
        assert refused.value.never
        session.submit(prompt_of(5), drifting)
        assert session.live and session.forecast(Submission(prompt=prompt_of(5), config=drifting)).fits == "now"
