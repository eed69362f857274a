"""Two crews of a session's requests in turn: a step of one is launched before the outcome of the other's is waited for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_ahead import Fault, Faulty, Telling, a_prompt, same
from test_session import FAMILIES

import mosaic
import mosaic.decoding.crews as crews
from mosaic.decoding import GenerationConfig, Session
from mosaic.runtime.compiled import CompiledModel


@pytest.fixture(scope="module", params=["sdar", "llada2"])
def model(request: pytest.FixtureRequest) -> Iterator[CompiledModel]:
    config = {**FAMILIES[request.param], "num_hidden_layers": 3}
    with mosaic.compile(config, device="cpu", host_budget=0, debug="poison") as compiled:
        assert not compiled.asynchronous
        yield compiled


@pytest.fixture(autouse=True)
def _few_tokens_are_worth_a_crew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crews, "CREW_TOKENS", 12)
    monkeypatch.setattr(crews, "EXPERTS", 1)


def drawn(rng: random.Random) -> dict[str, Any]:
    way = {
        "ahead": False, "gen_length": rng.randint(4, 16), "threshold": rng.choice([0.05, 0.1, 0.5]), "steps": rng.randint(1, 2),
        "temperature": rng.choice([0.0, 0.7]), "seed": rng.randrange(99), "stop_at_eos": rng.random() < 0.3,
    }  # fmt: skip
    return way | rng.choice([{}, {}, {"block_cache": "dc+"}, {"eviction": "focus"}])


class Beside(Telling):
    """A model that is taken for one on a device. What it is asked for is never asked for before it has an outcome."""

    asynchronous = True

    def overlapped(self) -> int:
        """The number of launches before the previous outcome was read; never two in a row."""
        found, under_way = 0, set[int]()
        for what, number in self.told:
            if what == "wait":
                under_way.discard(number)
                continue
            busy = [one for other in under_way for one in self.asked[other]]
            assert not any(one is two for one in busy for two in self.asked[number])
            found += bool(under_way)
            under_way.add(number)
            assert len(under_way) <= 2
        return found


def test_crews_get_the_tokens_of_requests_alone(model: CompiledModel) -> None:
    rng, overlapped, shared = random.Random(0), 0, 0
    for count in (5, 7):
        ways = [drawn(rng) for _ in range(2)]
        asked = [(a_prompt(rng), rng.choice(ways)) for _ in range(count)]
        beside, kept = Beside(model), []
        with Session(beside) as session:
            for number, (prompt, way) in enumerate(asked):
                kept.append(session.submit(prompt, GenerationConfig(**way), request_id=number))
                if rng.random() < 0.3:
                    gone = session.submit(prompt, GenerationConfig(**way))
                    session.advance(rng.randint(0, 3))
                    session.cancel(gone)
                session.advance(rng.randint(0, 2))
            while session.live:
                session.advance()
        overlapped += beside.overlapped()
        shared += sum(len(step) > 1 for step in beside.asked)
        for number, (live, (prompt, way)) in enumerate(zip(kept, asked, strict=True)):
            with Session(model) as alone:
                waited = alone.submit(prompt, GenerationConfig(**way), request_id=number)
                while alone.live:
                    alone.advance()
            assert live.generation is not None and waited.generation is not None
            same(live.generation, waited.generation)
    assert overlapped > 4 and shared > 4 and model.state_rows == {}


def test_crews_are_halves_and_few_tokens_wait_for_each_other(
    model: CompiledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = Beside(model)
    with Session(beside) as session:
        prompt, options = torch.arange(8) % 5, {"ahead": False, "gen_length": 12, "threshold": 0.99}
        for _ in range(9):
            session.submit(prompt, GenerationConfig(**options), stop_at_eos=False)
        session.advance()  # prefills
        rows = [len(step) for step in beside.asked]
        assert rows == [5, 4]
        while session.live:
            session.advance()
        rows = [len(step) for step in beside.asked]
        assert {*rows[:-4]} == {4, 5}
        beside.asked.clear(), beside.told.clear()
        monkeypatch.setattr(crews, "CREW_TOKENS", 100)
        for _ in range(2):
            session.submit(prompt, GenerationConfig(**options), stop_at_eos=False)
        while session.live:
            session.advance()
        assert {len(step) for step in beside.asked} == {2} and beside.overlapped() == 0


def test_experts_are_read_once_more_for_many_tokens_only(model: CompiledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crews, "EXPERTS", 1000)
    beside = Beside(model)
    with Session(beside) as session:
        for _ in range(9):
            session.submit(torch.arange(8) % 5, GenerationConfig(ahead=False, gen_length=12))
        session.advance()
    assert [len(step) for step in beside.asked] == ([9] if model.architecture.feed_forward.experts else [5, 4])


def test_crews_are_alike(model: CompiledModel) -> None:
    """Requests at different places of their blocks are dealt to both, so that steps have few sizes."""
    beside = Beside(model)
    with Session(beside) as session:
        for length in (8, 8, 16, 16, 24, 32, 40, 48, 56, 64):
            session.submit(torch.arange(length) % 5, GenerationConfig(ahead=False, gen_length=8))
        session.advance()
        one, other = (sum(request.token_ids.numel() for request in step) for step in beside.asked)
    assert abs(one - other) <= 32 < one + other


def test_what_goes_wrong_under_way_loses_nothing(model: CompiledModel) -> None:
    rng, faults = random.Random(1), 0
    for _ in range(2):
        way = drawn(rng) | {"temperature": 0.0}
        prompts = [a_prompt(rng) for _ in range(7)]
        faulty = Faulty(model, rng)
        faulty.asynchronous = True
        with Session(faulty) as session:
            kept = [session.submit(prompt, GenerationConfig(**way), on_step=faulty.shown) for prompt in prompts]
            while session.live:
                try:
                    session.advance()
                except Fault:
                    faults += 1
        for live, prompt in zip(kept, prompts, strict=True):
            (waited,) = model.generate([prompt], GenerationConfig(**way))
            assert live.generation is not None
            same(live.generation, waited)
    assert faults > 5
