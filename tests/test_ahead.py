"""Steps that are launched before the outcome of the last one is read: the tokens are those without, whatever comes between."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_session import FAMILIES
from torch import Tensor

import mosaic
from mosaic.decoding import Generation, GenerationConfig, Submission
from mosaic.decoding.algorithms import largest_steps
from mosaic.decoding.config import resolve
from mosaic.decoding.crews import DOUBT
from mosaic.decoding.llada import schedule
from mosaic.decoding.session import Session
from mosaic.errors import UsageError
from mosaic.models.parts import CANVAS, ENTERED, GUIDED, KEPT, KV, STAYING, Commit
from mosaic.models.parts.windows import OPEN
from mosaic.models.phase import Phase
from mosaic.models.policies.mage_options import SparseAttention
from mosaic.models.state import State
from mosaic.models.step import StepSize
from mosaic.planner.plan import Plan
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.launched import Launched
from mosaic.runtime.sharing import SharedSizes
from mosaic.runtime.steps import StepRequest, StepResult


class Told(Launched):
    """A launched step that says when somebody waits for it."""

    def __init__(self, inner: Launched, number: int, told: list[tuple[str, int]]) -> None:
        self.requests, self._inner, self._number, self._told = inner.requests, inner, number, told

    def results(self) -> list[StepResult]:
        self._told.append(("wait", self._number))
        return self._inner.results()

    def proceed(self) -> None:
        """For every other step, its event has not arrived."""
        if self._number % 2:
            self._inner.proceed()

    def settle(self) -> None:
        self._inner.settle()


class Telling:
    """A model that says what it is asked for, in order: `("launch", number)` and `("wait", number)`."""

    asynchronous = False

    def __init__(self, model: CompiledModel) -> None:
        self._model, self.told, self.architecture = model, list[tuple[str, int]](), model.architecture
        self.asked: list[tuple[StepRequest, ...]] = []
        self.prepared: list[tuple[StepRequest, ...]] = []

    def launch(self, requests: Sequence[StepRequest]) -> Launched:
        self.told.append(("launch", len(self.asked)))
        self.asked.append(tuple(requests))
        return Told(self._model.launch(requests), len(self.asked) - 1, self.told)

    def prepare(self, requests: Sequence[StepRequest]) -> None:
        self.prepared.append(tuple(requests))
        self._model.prepare(requests)

    def step(self, requests: Sequence[StepRequest]) -> list[StepResult]:
        return self.launch(requests).results()

    def open_rows(self, state: State, /) -> Any:
        return self._model.open_rows(state)

    def sharing(self) -> SharedSizes:
        return self._model.sharing()

    def exclusive(self) -> AbstractContextManager[object]:
        return self._model.exclusive()

    def check(self, sizes: Sequence[StepSize], *, more: Mapping[State, int] | None = None) -> Plan:
        return self._model.check(sizes, more=more)

    def admits(self, sizes: Sequence[StepSize], *, more: Mapping[State, int] | None = None) -> bool:
        return self._model.admits(sizes, more=more)

    @property
    def early(self) -> int:
        """Steps that were launched before the outcome of the one before was waited for."""
        return sum(self.is_early(number) for number in range(1, len(self.asked)))

    def is_early(self, number: int) -> bool:
        """Whether a step was."""
        before = ("wait", number - 1)
        return before in self.told and self.told.index(("launch", number)) < self.told.index(before)


@pytest.fixture(scope="module", params=["sdar", pytest.param("llada2", marks=pytest.mark.soak)])
def model(request: pytest.FixtureRequest) -> Iterator[CompiledModel]:
    """A vocabulary so small that the mask token is often the most likely one."""
    config = {**FAMILIES[request.param], "vocab_size": 12, "mask_token_id": 11, "eos_token_id": 10, "pad_token_id": 9}
    with mosaic.compile(config, device="cpu", host_budget=0, debug="poison") as compiled:
        yield compiled


def drawn(rng: random.Random) -> dict[str, Any]:
    return {
        "ahead": rng.choice([None, True]),
        "gen_length": rng.randint(1, 40), "threshold": rng.choice([0.09, 0.1, 0.12, 0.5]), "steps": rng.randint(1, 8),
        "temperature": rng.choice([0.0, 0.7]), "seed": rng.randrange(99), "stop_at_eos": rng.random() < 0.5,
    }  # fmt: skip


def a_prompt(rng: random.Random) -> Tensor:
    return torch.tensor(rng.choices(range(9), k=rng.randint(1, 30)))


def same(found: Generation, expected: Generation) -> None:
    assert torch.equal(found.token_ids, expected.token_ids) and found.finish == expected.finish
    torch.testing.assert_close(found.confidence, expected.confidence)
    assert found.steps == expected.steps


def test_answers_are_those_of_steps_that_wait(model: CompiledModel) -> None:
    """Requests of random options come one after another while others are under way, and some are cancelled."""
    rng, early, vain, masks = random.Random(0), 0, 0, 0
    for _ in range(7):
        ways = [drawn(rng) for _ in range(rng.randint(1, 3))]
        prompts = [a_prompt(rng) for _ in ways]
        telling, kept = Telling(model), []
        with Session(telling) as session:
            for number, (prompt, way) in enumerate(zip(prompts, ways, strict=True)):
                kept.append(session.submit(prompt, GenerationConfig(**way), request_id=number))
                if rng.random() < 0.3:
                    gone = session.submit(prompt, GenerationConfig(**ways[0]))
                    session.advance(rng.randint(0, 4))
                    session.cancel(gone)
                session.advance(rng.randint(0, 6))
            while session.live:
                session.advance()
            vain += session.launched_in_vain
        early += telling.early
        for number, (live, prompt, way) in enumerate(zip(kept, prompts, ways, strict=True)):
            with Session(model) as alone:
                waited = alone.submit(prompt, GenerationConfig(**way), ahead=False, request_id=number)
                while alone.live:
                    alone.advance()
            assert live.generation is not None and waited.generation is not None
            same(live.generation, waited.generation)
            masks += int((live.generation.token_ids == 11).sum())
    assert early > 30 and vain > 0 and masks > 5
    assert model.state_rows == {}


def test_a_step_is_launched_before_the_last_one_is_waited_for(model: CompiledModel) -> None:
    """A schedule says how many tokens each step commits, so nothing is launched in vain; steps alike are packed once."""
    way = {"gen_length": 24, "steps": 4, "stop_at_eos": False, "threshold": 1.0}
    telling = Telling(model)
    with Session(telling) as session:
        live = session.submit(torch.arange(8), GenerationConfig(**way), ahead=True)
        while session.live:
            session.advance()
        assert session.launched_in_vain == 0
    assert live.steps == len(telling.asked) == 13  # a prefill, and four steps of each block
    assert telling.early == 11  # all but the first denoising step, which follows the prefill
    blocks = [telling.asked[1 + 4 * block : 5 + 4 * block] for block in range(3)]
    for first, *later in blocks:
        assert first[0].phase.tokens == ENTERED and all(one[0] is later[0][0] for one in later)
        assert later[0][0].phase.tokens == STAYING


def test_what_may_follow_is_prepared_while_a_step_runs(model: CompiledModel) -> None:
    """Every step of one request but the first two is launched ahead, and few of them in vain."""
    rng, prepared = random.Random(4), 0
    for _ in range(4):
        prompt, way = a_prompt(rng), drawn(rng) | {"stop_at_eos": False, "ahead": None}
        telling = Telling(model)
        with Session(telling) as session:
            session.submit(prompt, GenerationConfig(**way))
            while session.live:
                session.advance()
            assert session.launched_in_vain == 0 or len(telling.asked) > 1 / DOUBT - 1
        ready = {id(one) for (one,) in telling.prepared}
        early = {n for n in range(1, len(telling.asked)) if telling.is_early(n)}
        first = len(prompt) >= 8
        late = [one for n, (one,) in enumerate(telling.asked) if n > first and n not in early]
        assert {id(one) for one in late} <= ready
        prepared += len(late)
    assert prepared > 10


def test_a_step_that_is_hardly_in_vain_is_launched(model: CompiledModel) -> None:
    """Each step decides one token: after 16 of them a block with more masks left is taken to go on."""
    telling = Telling(model)
    with Session(telling) as session:
        live = session.submit(torch.arange(8), gen_length=32, threshold=1.0, steps=8, stop_at_eos=False)
        while session.live:
            session.advance()
        assert session.launched_in_vain == 0
    assert live.steps == 33  # a prefill, and eight steps of each block
    early = [number for number in range(33) if telling.is_early(number)]
    assert early == [9, 17, *range(18, 33)]  # the first steps of blocks follow steps that leave nothing
    assert pytest.approx(1 / 17) == DOUBT


def test_doubt_is_the_share_of_steps_that_speak_against_what_is_likely(model: CompiledModel) -> None:
    """Beside what is counted from outcomes alone, of requests whose steps decide one token or several."""
    rng, counted = random.Random(8), Counter[tuple[bool, bool]]()
    for _ in range(12):
        prompt, steps = a_prompt(rng), rng.choice((4, 8))
        options = GenerationConfig(gen_length=40, steps=steps, threshold=rng.uniform(0.093, 0.1), stop_at_eos=False)
        with Session(Telling(model)) as session:
            live, decided, history, within = session.submit(prompt, options), set[int](), list[int](), 0
            while session.live:
                start = next(at for at in range(len(prompt), 1 << 9) if at not in decided) // 8 * 8
                left = len({*range(max(start, len(prompt)), start + 8)} - decided)
                found, quota = live.following(), schedule(8, steps)[min(within, steps - 1)]
                if found.requests:  # of a prefill nothing is known
                    likely = max(quota, sum(history) // max(len(history), 1))
                    against = sum((n >= left) == (left > likely) for n in history)
                    assert found.doubt == (0 if left <= quota else pytest.approx((1 + against) / (1 + len(history))))
                    assert len(found.requests) == 1 + (left > quota)
                    first = found.requests[0]
                    goes_on = first is not None and not (first.values["entered"] == OPEN).any()
                    assert goes_on == (left > likely)
                    counted[left > likely, against > 0] += left > quota
                for step in session.advance():
                    decided.update(step.positions.tolist())
                    if found.requests:
                        history.append(len(step.positions))
                        within = within + 1 if {*range(max(start, len(prompt)), start + 8)} - decided else 0
    assert min(counted[True, False], counted[True, True], counted[False, False] + counted[False, True]) > 0


def test_few_doubtful_requests_do_not_keep_many_waiting(model: CompiledModel) -> None:
    """Some of 24 requests end their blocks sooner than predicted, some later: the next step serves them too."""
    rng, telling = random.Random(2), Telling(model)
    config = GenerationConfig(gen_length=40, steps=8, threshold=0.1, stop_at_eos=False)
    prompts = [a_prompt(rng) for _ in range(24)]
    with Session(telling) as session:
        lives = session.submit_all([Submission(prompt=prompt, config=config) for prompt in prompts])
        session.advance(8)
        before, last, gaps = len(telling.asked), dict[int, int](), set[int]()
        while session.live:
            for step in session.advance():
                gaps.add(len(telling.asked) - last.get(step.request, len(telling.asked)))
                last[step.request] = len(telling.asked)
    early = [telling.is_early(number) for number in range(before, len(telling.asked))]
    vain = sum(len(asked) for asked in telling.asked) - sum(live.steps for live in lives)
    assert gaps == {0, 1, 2}  # a step in vain, and the next one serves the request
    assert sum(early) > 0.5 * len(early) > 4 and 0 < vain < DOUBT * sum(live.steps for live in lives)
    for live, waited in zip(lives, model.generate(prompts, config, ahead=False), strict=True):
        assert live.generation is not None
        same(live.generation, waited)


def test_the_largest_steps_are_those_that_are_taken(model: CompiledModel) -> None:
    """For each phase the longest window, and no more rows to decide, for answers of one block and of several."""
    rng, lengths = random.Random(5), set()
    ways = (SparseAttention(k=4, exact_layers=1, exact_steps=0.5), SparseAttention(k=4, exact_layers=1, every=5))
    for chosen in (None, *ways):
        for gen_length in (3, 8, 21):
            prompt = a_prompt(rng)
            config = GenerationConfig(
                gen_length=gen_length, threshold=1.0, steps=8, stop_at_eos=False, attention=chosen
            )
            telling = Telling(model)
            with Session(telling) as session:
                session.submit(prompt, config)
                while session.live:
                    session.advance()
            taken, predicted = dict[Phase, tuple[int, int]](), dict[Phase, tuple[int, int]]()
            for (one,) in telling.asked:
                window, rows = taken.get(one.phase, (0, 0))
                taken[one.phase] = max(window, len(one.token_ids)), max(rows, len(one.rows))
            for size in largest_steps(resolve(config, model.architecture), model.architecture, len(prompt), 0):
                window, rows = predicted.get(size.phase, (0, 0))
                predicted[size.phase] = max(window, *size.windows), max(rows, size.rows)
            for kind, (window, rows) in taken.items():  # short answers end before the last kind of step
                assert window == predicted[kind][0] and rows <= predicted[kind][1]
            lengths.add(len(predicted) - len(taken))
    assert lengths == {0, 1}


def test_requests_at_different_steps_of_their_blocks_share_a_forward(model: CompiledModel) -> None:
    """The needs of a request at the start of a block serve requests within a block."""
    telling, mixed = Telling(model), 0
    with Session(telling) as session:
        lives = [
            session.submit(
                torch.arange(n), GenerationConfig(gen_length=20, threshold=1.0, stop_at_eos=False), request_id=n
            )
            for n in (1, 4, 6)
        ]
        while session.live:
            session.advance()
    # an answer may end before its block does: the step that was launched for the rest of it is in vain
    assert 0 <= len(telling.asked) - max(live.steps for live in lives) <= 1
    for asked in telling.asked:
        assert len({one.phase for one in asked}) == 1
        starts = {bool((one.values["entered"] == OPEN).any()) for one in asked}
        mixed += starts == {True, False}
    assert mixed >= 4
    for live, n in zip(lives, (1, 4, 6), strict=True):
        (waited,) = model.generate([torch.arange(n)], gen_length=20, threshold=1.0, stop_at_eos=False, ahead=False)
        assert live.generation is not None
        same(live.generation, waited)


def test_what_cannot_be_launched_ahead_is_refused() -> None:
    with (
        mosaic.compile(FAMILIES["sdar"], device="cpu", host_budget=0) as model,
        pytest.raises(UsageError, match="ahead: 'sequential' decides rows by where masks are"),
    ):
        model.generate(torch.arange(3), ahead=True, remasking="sequential")
    with (
        mosaic.compile(FAMILIES["llada"], device="cpu", host_budget=0) as model,
        pytest.raises(UsageError, match="ahead means nothing to the algorithm 'llada'"),
    ):
        model.generate(torch.arange(3), ahead=True)
    for wrong in ({"cache": KEPT}, {"commit": Commit(score="confidence", rule="top"), "guidance": GUIDED}):
        with pytest.raises(UsageError, match="a canvas on the device is for phases that commit, without guidance"):
            Phase(tokens=STAYING, **wrong)


def test_the_largest_steps_are_reached(model: CompiledModel) -> None:
    """By rows and windows; and what is admitted is what the requests take."""
    for length, gen in ((3, 5), (8, 30), (20, 16)):
        asked = GenerationConfig(gen_length=gen, ahead=True, stop_at_eos=False)
        largest = mosaic.decoding.shapes(asked, [length], model.architecture)
        seen: dict[Any, tuple[int, int]] = {}
        telling = Telling(model)
        with Session(telling) as session:
            live = session.submit(torch.zeros(length, dtype=torch.int64), asked)
            rows = {state.name: count for state, count in live.largest[-1].states.items()}
            assert model.state_rows == rows
            while session.live:
                session.advance()
        for (one,) in telling.asked:
            window, count = seen.get(one.phase, (0, 0))
            seen[one.phase] = max(window, one.token_ids.numel()), max(count, one.rows.numel())
        assert {size.phase: (size.windows[0], size.rows) for size in largest} == seen


class Fault(Exception):
    """An error that is raised once."""


class Faulty(Telling):
    """A model whose launches are refused now and then, and whose waits are interrupted."""

    def __init__(self, model: CompiledModel, rng: random.Random) -> None:
        super().__init__(model)
        self.rng = rng

    def fail(self) -> None:
        if self.rng.random() < 0.2:
            raise Fault

    def launch(self, requests: Sequence[StepRequest]) -> Launched:
        self.fail()
        launched, fail = self._model.launch(requests), self.fail

        class Interrupted(Told):
            def results(self) -> list[StepResult]:
                fail()
                return launched.results()

        return Interrupted(launched, 0, self.told)

    def shown(self, _: object) -> None:
        self.fail()


def test_what_goes_wrong_on_the_host_loses_no_decision(model: CompiledModel) -> None:
    """The device has decided by then: a resumed request gets its decisions, and nothing is decided twice."""
    rng, faults = random.Random(1), 0
    for _ in range(6):
        ways: list[dict[str, Any]] = [{**drawn(rng), "temperature": 0.0} for _ in range(rng.randint(1, 3))]
        prompts = [a_prompt(rng) for _ in ways]
        faulty = Faulty(model, rng)
        with Session(faulty) as session:
            kept = [
                session.submit(prompt, GenerationConfig(**way), request_id=number, on_step=faulty.shown)
                for number, (prompt, way) in enumerate(zip(prompts, ways, strict=True))
            ]
            while session.live:
                try:
                    session.advance()
                except Fault:
                    faults += 1
        for number, (live, prompt, way) in enumerate(zip(kept, prompts, ways, strict=True)):
            (waited,) = model.generate([prompt], GenerationConfig(**way), ahead=False)
            assert live.generation is not None, number
            same(live.generation, waited)
    assert faults > 20 and model.state_rows == {}


def test_a_step_whose_outcome_is_lost_has_decided_all_the_same(model: CompiledModel) -> None:
    """An interrupt after the launch: the step that is asked for again finds what stands in the canvas, and goes on from there."""
    rng, lost = random.Random(3), 0

    class Losing(Telling):
        def launch(self, requests: Sequence[StepRequest]) -> Launched:
            launched = self._model.launch(requests)
            if rng.random() < 0.3:
                raise KeyboardInterrupt
            return launched

    for _ in range(4):
        way: dict[str, Any] = {**drawn(rng), "temperature": 0.0, "steps": 8}  # a token a step at least, in every step
        prompt = a_prompt(rng)
        with Session(Losing(model)) as session:
            live = session.submit(prompt, GenerationConfig(**way))
            while session.live:
                try:
                    session.advance()
                except KeyboardInterrupt:
                    lost += 1
        (waited,) = model.generate([prompt], GenerationConfig(**way), ahead=False)
        assert live.generation is not None and torch.equal(live.generation.token_ids, waited.token_ids)
    assert lost > 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"states": {}}, "tokens on the device needs rows of the state 'canvas'"),
        ({"values": {}}, "'entered': a token for each of the 8 tokens of the window"),
        ({"values": {"entered": torch.tensor([3])}}, "'entered': a token for each of the 8 tokens of the window"),
        ({"start": 16}, "positions 16 to 24 of a sequence that has rows for 16"),
    ],
)
def test_requests_without_a_canvas_are_refused(model: CompiledModel, change: dict[str, Any], message: str) -> None:
    with model.open_rows(KV) as keys, model.open_rows(CANVAS) as canvas:
        keys.reserve(24)
        canvas.reserve(16)
        phase = Phase(tokens=ENTERED, cache=KEPT, commit=Commit(score="confidence", rule="top"))
        usual: dict[str, Any] = {
            "phase": phase, "token_ids": torch.zeros(8, dtype=torch.int64), "start": 8, "sequence": keys, "key_len": 24,
            "rows": torch.arange(8), "current": torch.zeros(8, dtype=torch.int64), "quota": 1, "states": {CANVAS: canvas},
            "values": {"entered": torch.full((8,), -1)},
        }  # fmt: skip
        model.step([StepRequest(**usual)])
        with pytest.raises(UsageError, match=message):
            model.step([StepRequest(**usual | change)])


def test_rows_of_the_window_alone_are_listed(model: CompiledModel) -> None:
    """Whatever the length of the canvas: the host makes them in every step that draws."""

    class Listed:
        def slots(self, start: int, end: int) -> torch.Tensor:
            return torch.arange(start, end)

    places = torch.tensor([1, 6])
    request: Any = SimpleNamespace(start=1 << 39, rows=places, states={CANVAS: Listed()})
    (rows,) = (entry for entry in STAYING.inputs(model.architecture) if entry.name == "decided_rows")
    assert torch.equal(rows.of(request), places + (1 << 39))
