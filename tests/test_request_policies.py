"""Requests of a table with policies: each gets what a generator on the host, alone, gets, whoever shares its steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from test_request_table import CONFIGS, Asked, Caller, asked_for, check_tokens, come_and_go, drawn, finish, prompt_of, start

import mosaic
from mosaic.decoding import GenerationConfig
from mosaic.decoding.algorithms import table_row
from mosaic.decoding.config import resolve
from mosaic.models import load
from mosaic.runtime.compiled import CompiledModel

DEEP = {family: {**CONFIGS[family], "num_hidden_layers": 3} for family in ("sdar", "llada2")}
TABLED = (
    "mage:k=4", "mage:k=8:page=2:exact_layers=0:exact_last=1", "mage:k=6:every=3", "sparsed:k=4", "mage:k=4:exact_steps=1.0",
    "mage:k=4:carried=true", "mage:k=4:ratio=0.3", "mage:k=40:mass=0.7", "mage:k=4:per=query_head:rows=3",
    "mage:k=4:voters=answer:statistic=worst", "exact-ends:k=4", "flashblock", "flashblock:reuse_steps=2", "mage+flashblock:k=4",
    "mage+flashblock:k=4:reuse_steps=3:every=2", "sparsed+flashblock:k=4:reuse_steps=2",
)  # fmt: skip
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


def with_policies(rng: random.Random, family: str, longest: int) -> GenerationConfig:
    """Random options; most requests have a policy, some of which are generators."""
    config: dict[str, Any] = drawn(rng, family, longest)
    config = {name: value for name, value in config.items() if name not in ("ahead", "block_cache", "algorithm")}
    if family == "sdar":
        config.setdefault("remasking", "low_confidence_dynamic")
    return GenerationConfig(**config | rng.choice([{"attention": rng.choice(TABLED)}] * 5 + [
        {}, {"attention": rng.choice(GENERATORS)}, {"eviction": "focus"},
    ]))  # fmt: skip


@pytest.mark.parametrize(("family", "seed", "count", "longest"), [
    pytest.param(family, seed, 40, 256 if seed % 4 else 1024, marks=pytest.mark.soak)
    for family in DEEP
    for seed in range(12)
])  # fmt: skip
def test_random_requests_with_policies_get_what_they_get_alone(
    models: dict[str, CompiledModel], family: str, seed: int, count: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{family} {seed}")
    asked = [
        Asked(prompt_of(round((longest // 2) ** rng.random()), number), with_policies(rng, family, longest // 2), number)
        for number in range(count)
    ]
    caller = Caller(models[family], asked, monkeypatch)
    steps, shared = come_and_go(caller, rng, most=8)
    for place in range(count):
        caller.check(place)
    assert len(caller.cancelled) < count // 2 and shared > steps // 16
