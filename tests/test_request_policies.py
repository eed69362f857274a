"""Requests of a table with policies: each gets what a generator on the host, alone, gets, whoever shares its steps."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from test_request_table import (
    CONFIGS,
    Asked,
    Caller,
    check_tokens,
    come_and_go,
    drawn,
    prompt_of,
    start,
)

import mosaic
from mosaic.decoding import GenerationConfig
from mosaic.decoding.algorithms import table_row
from mosaic.decoding.config import resolve
from mosaic.models import load
from mosaic.models.parts import KEPT
from mosaic.runtime.compiled import CompiledModel

DEEP = {family: {**CONFIGS[family], "num_hidden_layers": 3} for family in ("sdar", "llada2")}
TABLED = (
    "mage:k=4", "mage:k=8:page=2:exact_layers=0:exact_last=1", "mage:k=6:every=3", "sparsed:k=4", "mage:k=4:exact_steps=1.0",
    "mage:k=4:carried=true", "mage:k=4:ratio=0.3", "mage:k=40:mass=0.7", "mage:k=4:per=query_head:rows=3",
    "mage:k=4:voters=answer:statistic=worst", "exact-ends:k=4", "flashblock", "flashblock:reuse_steps=2", "mage+flashblock:k=4",
    "mage+flashblock:k=4:reuse_steps=3:every=2", "sparsed+flashblock:k=4:reuse_steps=2",
)  # fmt: skip
OPTIONS = ("gen_length", "seed", "stop_at_eos", "temperature", "steps", "threshold", "top_p", "top_k", "remasking")
GENERATORS = ("oracle:k=4", "quest:k=32", "flashblock:reuse_change=0.1", "mage+flashblock:k=4:reuse_change=0.1")


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, CompiledModel]]:
    """One model of each family for all tests, which reads no row that nobody has written; none may keep any."""
    made = {name: mosaic.compile(config, seed=3, host_budget=0, debug="poison") for name, config in DEEP.items()}
    yield made
    for model in made.values():
        assert model.state_rows == {}
        model.close()
        assert not any(model.workspace.committed_bytes().values())


def with_policies(rng: random.Random, family: str, longest: int, kinds: Sequence[str]) -> GenerationConfig:
    """Random options; most requests have a policy, some of them as generators."""
    config = {name: value for name, value in drawn(rng, family, longest).items() if name in OPTIONS}
    policy: dict[str, Any] = rng.choice(
        [{"attention": rng.choice(kinds)}] * 5 + [{}, {"attention": rng.choice(GENERATORS)}]
    )
    evicts = config.get("remasking") != "sequential" and "flashblock" not in policy.get("attention", "")
    return GenerationConfig(**config, **policy, eviction="focus" if evicts and rng.random() < 0.3 else None)


@pytest.mark.parametrize(("family", "seed", "count", "longest"), [
    pytest.param(family, seed, 30, 256 if seed % 4 else 1024, marks=pytest.mark.soak)
    for family in DEEP
    for seed in range(8)
])  # fmt: skip
def test_random_requests_with_policies_get_what_they_get_alone(
    models: dict[str, CompiledModel], family: str, seed: int, count: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{family} {seed}")
    half, kinds = longest // 2, rng.sample(TABLED, 4)
    asked = [
        Asked(prompt_of(round(half ** rng.random()), number), with_policies(rng, family, half, kinds), number)
        for number in range(count)
    ]
    caller = Caller(models[family], asked, monkeypatch)
    steps, shared = come_and_go(caller, rng, most=8)
    for place in range(count):
        caller.check(place)
    assert shared > steps // 16


def test_a_step_serves_requests_that_select_and_others_that_do_not(
    models: dict[str, CompiledModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One comes while the other is in the middle of a block; a third one attends exactly."""
    asked = [
        Asked(prompt_of(11, number), GenerationConfig(gen_length=9, stop_at_eos=False, **policy), number)
        for number, policy in enumerate([{"attention": "mage:k=4"}, {}, {"attention": "mage:k=4"}])
    ]
    caller = Caller(models["sdar"], asked, monkeypatch)
    with caller.model.session() as session:
        start(caller, session, 0, 1)
        session.advance(4)
        start(caller, session, 2)
        together = 0
        while session.live:
            together += len(session.advance()) == 3
    check_tokens(caller, 0, 1, 2)
    assert together > 3


def test_one_step_serves_requests_that_attend_exactly_select_and_evict(
    models: dict[str, CompiledModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that does both; one that reuses outputs over its prefix has turns of its own."""
    policies: list[dict[str, Any]] = [
        {}, {"attention": "mage:k=4"}, {"eviction": "focus:requests=64"},
        {"attention": "mage:k=4", "eviction": "focus:requests=64"}, {"attention": "flashblock"},
    ]  # fmt: skip
    asked = [
        Asked(prompt_of(11 + number, number), GenerationConfig(gen_length=20, stop_at_eos=False, **policy), number)
        for number, policy in enumerate(policies)
    ]
    caller = Caller(models["sdar"], asked, monkeypatch)
    served = set[frozenset[int]]()
    with caller.model.session() as session:
        start(caller, session, *range(5))
        while session.live:
            served.add(frozenset(step.request for step in session.advance() if step.phase == "denoise"))
    check_tokens(caller, *range(5))
    assert frozenset(range(4)) in served and not any(4 in group and {1, 2, 3} & group for group in served)


def test_whose_sets_would_hold_all_keys_selects_none() -> None:
    """Such a request attends to all keys in the steps of those who asked for that; with bounds of another kind it selects."""
    arch = load("llada2-mini").architecture
    for options, length in (("k=160", 161), ("k=160", 160), ("k=512:mass=0.9", 160), ("k=512:ratio=0.5", 160)):
        config = resolve(GenerationConfig(attention=f"mage:{options}", gen_length=length - 100), arch)
        row = table_row(config, arch, 100, 0)
        assert row is not None and row.length == -(-length // 32) * 32
        exact = not config.attention.mass and not config.attention.ratio and row.length <= config.attention.k
        assert (row.cache == KEPT and not row.marks) is exact, (options, length)


@pytest.mark.parametrize("attention", [*TABLED, *GENERATORS])
def test_which_steps_of_a_block_a_table_marks(attention: str) -> None:
    """Those that select, or of reuse alone those that refresh; unmarked steps refresh as well if one of them has to."""
    arch = load("llada2-mini").architecture
    config = resolve(GenerationConfig(attention=attention, gen_length=40), arch)
    row, options = table_row(config, arch, 100, 0), config.attention
    if attention in GENERATORS:
        assert row is None
        return
    assert row is not None and options is not None
    selects, reuse = getattr(options, "selects_in", None), getattr(options, "reuse", options)
    refreshed = [step for step in range(32) if reuse is not None and reuse.refreshes_in(step)]
    marked = [step for step in range(32) if selects(step, 32)] if selects else refreshed
    assert [step for step in range(63) if row.marks >> step & 1] == marked
    if selects:
        assert row.cache.selects is False and row.cache.refreshes == (not set(refreshed) <= set(marked))
