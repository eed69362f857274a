"""The scheduler of a session's table: limits of steps, whose turn it is, priorities and deadlines, by what callers see.

A step is a turn. Models are tiny, so a few thousand steps are a clock.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, TypeAlias

import pytest
from test_request_table import CONFIGS, prompt_of
from test_session_turns import Shown
from torch import Tensor

import mosaic
from mosaic.decoding import GenerationConfig, LiveRequest, Session, Step, Submission
from mosaic.decoding.newcomers import STEPS
from mosaic.devices import Device
from mosaic.errors import UsageError
from mosaic.registrar.operators.pack_requests import PATIENCE, TOGETHER
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.request_table import RequestTable
from mosaic.runtime.room import Room, Shape

WAY: dict[str, Any] = {"stop_at_eos": False, "seed": 3}


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, CompiledModel]]:
    """One model of each family for all tests; none may keep rows."""
    made = {name: mosaic.compile(config, seed=3, host_budget=0) for name, config in CONFIGS.items()}
    yield made
    for model in made.values():
        assert model.state_rows == {}
        model.close()


def tokens_of(steps: list[Step]) -> int:
    """The size of a step."""
    return steps[0].plan.dims["tokens"]


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [16, 24, 33, 100, 8192])
def test_a_step_beyond_the_limit_serves_one_request_that_needs_it(models: dict[str, CompiledModel], most: int) -> None:
    """Canvases of 40, 72 and 128 tokens, whose first step of each block computes all of them, and others a block of 8."""
    with models["llada"].session(max_num_batched_tokens=most) as session:
        requests = [
            session.submit(prompt_of(length), gen_length=32, block_length=8, steps=8, cache="dual", **WAY)
            for length in (8, 40, 96)
        ]
        blocks, sizes = dict[int, int](), list[int]()
        while session.live:
            steps = list(session.advance())
            asked = [
                8 if blocks.get(one.request) == one.block else 40 + 32 * one.request + 24 * (one.request > 1)
                for one in steps
            ]
            blocks |= {one.request: one.block for one in steps}
            sizes.append(tokens_of(steps))
            assert sum(asked) <= sizes[-1] <= most or (len(steps) == 1 and sizes[-1] <= asked[0] * 9 / 8)
        assert min(sizes) <= 24
    assert all(request.steps == 8 for request in requests)


BLOCKS = {"sdar": 4, "llada2": 8, "llada": 8, "fast-dllm-v2": 8}


def drawn(rng: random.Random, family: str) -> dict[str, Any]:
    """Random options of requests that share their steps."""
    gen_length = rng.randrange(1, 33)
    found = {"gen_length": gen_length, "temperature": rng.choice([0, 0.8]), "stop_at_eos": rng.random() < 0.5}
    if family == "llada":
        gen_length = -(-gen_length // 8) * 8
        return found | {
            "gen_length": gen_length,
            "block_length": 8,
            "cache": "dual",
            "steps": gen_length // rng.choice([2, 4]),
        }
    if family == "fast-dllm-v2":
        return found | {"threshold": rng.choice([0.02, 0.5])}
    return found | {"steps": rng.randint(1, 4), "threshold": rng.choice([0.02, 0.5])}


def test_a_request_beyond_the_limit_keeps_nobody_waiting(models: dict[str, CompiledModel]) -> None:
    """One of 128 tokens between two of 40, for which there is room."""
    way = {**WAY, "gen_length": 32, "block_length": 8, "steps": 8, "cache": "dual"}
    with models["llada"].session(max_num_batched_tokens=88) as session:
        for length in (8, 96, 8):
            session.submit(prompt_of(length), **way)
        served = [{step.request for step in session.advance()} for _ in range(5)]
    assert served == [{0, 2}, {1}, {0, 1, 2}, {0, 2}, {1}]


Decided: TypeAlias = tuple[list[int], list[int], list[float]]


def decided_by(step: Step) -> Decided:
    """What a step committed: positions, tokens, scores."""
    return step.positions.tolist(), step.token_ids.tolist(), step.confidence.tolist()


def tied(some: list[Decided], others: list[Decided]) -> bool:
    """Whether two decodings part in a step whose scores are equal: which of two rows comes first is then a matter of rounding,
    which on a CPU depends on how many rows are multiplied at once."""
    steps = zip([one for one in some if one[0]], [one for one in others if one[0]], strict=False)
    mine, its = next((mine, its) for mine, its in steps if mine[:2] != its[:2])
    return mine[2] == pytest.approx(its[2], rel=1e-6)


class Traffic:
    """Random requests that come to a session and are cancelled now and then; who waits, and for how long.

    Attributes
    ----------
    requests
        By number, what was submitted.
    cancelled
        Numbers of those that were.
    decided
        By number, what each step committed: positions, tokens and scores.
    """

    def __init__(self, session: Session, family: str, rng: random.Random) -> None:
        self._session, self._family, self._rng = session, family, rng
        self.requests: dict[int, tuple[Submission, LiveRequest]] = {}
        self.cancelled = set[int]()
        self.decided: dict[int, list[Decided]] = {}
        self._waits: dict[int, list[int]] = {}  # of live requests, steps that they have waited, and may wait

    def come(self) -> None:
        """Submit a request. Before it are the prompts of all that are live, whole blocks, and a turn of each."""
        asked = Submission(
            prompt=prompt_of(round(200 ** self._rng.random())), config=GenerationConfig(**drawn(self._rng, self._family)),
            request_id=len(self.requests),
        )  # fmt: skip
        (request,) = self._session.submit_all([asked])
        self.requests[request.number] = asked, request
        lengths = [len(self.requests[one.number][0].prompt) for one in self._session.live]
        blocks = 0 if self._family == "llada" else sum(length // BLOCKS[self._family] for length in lengths)
        self._waits[request.number] = [0, len(lengths) + PATIENCE + blocks]

    def step(self) -> list[Step]:
        """Run a step."""
        live = self._session.live
        if live and self._rng.random() < 0.03:
            gone = self._rng.choice(live)
            self.cancelled.add(gone.number)
            self._session.cancel(gone)
        steps = list(self._session.advance())
        assert steps or not self._session.live
        for step in steps:
            self.decided.setdefault(step.request, []).append(decided_by(step))
            if step.phase == "denoise":  # then the others are before it
                self._waits[step.request] = [-1, len(live)]
        for number in {one.number for one in self._session.live}:
            self._waits[number][0] += 1
            assert self._waits[number][0] <= self._waits[number][1]
        return steps


@pytest.mark.parametrize(("family", "seed"), [
    ("sdar", 0), *(pytest.param(family, seed, marks=pytest.mark.soak) for family in BLOCKS for seed in range(1, 25)),
])  # fmt: skip
def test_steps_keep_to_the_limit_and_nobody_starves_or_is_lost(
    models: dict[str, CompiledModel], family: str, seed: int
) -> None:
    """Requests come faster than they are served. Beyond the limit a step serves one that needs it; each gets its tokens."""
    rng, model = random.Random(f"{family} {seed}"), models[family]
    most, coming = (68, 24) if seed == 0 else (rng.choice([40, 68, 100, 136, 260]), 60)
    with model.session(max_num_batched_tokens=most) as session:
        traffic = Traffic(session, family, rng)
        while session.live or len(traffic.requests) < coming:
            while len(traffic.requests) < coming and rng.random() < 0.6:
                traffic.come()
            steps = traffic.step()
            if steps and tokens_of(steps) > most:
                (alone,) = steps
                asked, request = traffic.requests[alone.request]
                assert most < tokens_of(steps) <= (len(asked.prompt) + request.config.gen_length + 8) * 9 / 8
    assert model.state_rows == {}
    for number in rng.sample([*traffic.requests], 4 if seed == 0 else 12):
        (asked, request), is_cancelled = traffic.requests[number], number in traffic.cancelled
        alone = list[Decided]()
        (expected,) = model.generate(
            [asked.prompt],
            asked.config,
            request_ids=[number],
            on_step=lambda step, to=alone: to.append(decided_by(step)),
        )
        found = request.generation
        assert found is not None and found.finish == ("cancelled" if is_cancelled else expected.finish)
        tokens = found.token_ids.tolist()
        same = tokens == expected.token_ids.tolist()[: len(tokens) if is_cancelled else None]
        assert same or tied(traffic.decided[number], alone)


# --- priorities -------------------------------------------------------------------------------------------------------


def decisions(session: Session, requests: list[LiveRequest]) -> list[list[int]]:
    """Advance to the end; return the steps in which each request decides."""
    found: list[list[int]] = [[] for _ in requests]
    at = 0
    while session.live:
        at += 1
        for step in session.advance():
            if len(step.positions):
                found[step.request - requests[0].number].append(at)
    return found


def asked_with(priorities: list[int], length: int, **options: Any) -> list[Submission]:
    config = GenerationConfig(**(WAY | options))
    return [Submission(prompt=prompt_of(length), config=config, priority=priority) for priority in priorities]


def test_prompts_of_priority_are_read_first(models: dict[str, CompiledModel]) -> None:
    """Steps have room for a part of one prompt; within a priority they come in order."""
    with models["sdar"].session(max_num_batched_tokens=8) as session:
        found = decisions(
            session, session.submit_all(asked_with([0, 5, 1000, 0, -1000, 1000], 33, gen_length=4, steps=1))
        )
    assert sorted(range(6), key=lambda number: found[number]) == [2, 5, 1, 0, 3, 4]


@pytest.mark.some
@pytest.mark.parametrize("priority", [0, 2, 5, 1000])
def test_nobody_waits_for_a_priority_longer_than_it_says(models: dict[str, CompiledModel], priority: int) -> None:
    """Two of three requests have a priority, and a step serves one: beside its turn the third one waits for the priority."""
    with models["sdar"].session(max_num_batched_tokens=4) as session:
        asked = asked_with([priority, 0, priority], 3, gen_length=41, steps=4, remasking="low_confidence_static")
        first, second, third = decisions(session, session.submit_all(asked))
    waits = [later - earlier for earlier, later in pairwise([0, *second])]
    assert (len(second) == 41 and priority <= max(waits) <= priority + 3) or second[0] > max(first[-1], third[-1])


def test_generators_of_priority_go_first(models: dict[str, CompiledModel]) -> None:
    """Two, whose phases no step serves together."""
    with models["sdar"].session() as session:
        ways: list[dict[str, Any]] = [
            {"attention": "oracle:k=4:exact_layers=0"},
            {"attention": "quest:k=32:exact_layers=0"},
        ]
        for priorities in ([0, 1000], [1000, 0], [0, 0]):
            asked = [asked_with([one], 9, gen_length=8, **way)[0] for one, way in zip(priorities, ways, strict=True)]
            first, second = decisions(session, session.submit_all(asked))
            assert [first[-1] < second[0], second[-1] < first[0]] == [one == 1000 for one in priorities]


def test_those_of_priority_get_a_row_of_the_table_first(
    models: dict[str, CompiledModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    for most in ("ROWS", "MOST_ROWS"):
        monkeypatch.setattr(f"mosaic.runtime.request_table.{most}", 1)
    with models["sdar"].session() as session:
        found = decisions(session, session.submit_all(asked_with([0, 0, 9, 3], 3, gen_length=4)))
    assert sorted(range(4), key=lambda number: found[number]) == [0, 2, 3, 1]


# --- deadlines --------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which stands still unless a test moves it on."""
    now = [100.0]
    monkeypatch.setattr("mosaic.decoding.deadlines.monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("tabled", [True, False])
def test_a_request_ends_at_its_deadline_with_what_is_final(
    models: dict[str, CompiledModel], tabled: bool, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are free before the next step; others go on, also one whose deadline comes later."""
    model, way = models["sdar"], {**WAY, "gen_length": 24, "steps": 2, "remasking": "low_confidence_static"}
    (alone,) = model.generate([prompt_of(9)], **way)
    if not tabled:
        monkeypatch.setattr("mosaic.decoding.described.table_row", lambda *_: None)
    shown = Shown()
    with model.session() as session:
        late, other, later = (
            session.submit(prompt_of(9), **way, deadline_s=deadline_s, streamer=streamer, request_id=0)
            for deadline_s, streamer in ((2.0, shown), (None, None), (3.5, None))
        )
        session.advance(6)
        clock[0] += 1.99
        assert len(session.advance()) == 3
        clock[0] += 0.01
        assert {step.request for step in session.advance()} == {1, 2}
        assert session.live == (other, later)
        clock[0] += 2.0
        session.advance(100)
    expected = alone.token_ids.tolist()
    for request, finish in ((late, "expired"), (other, "length"), (later, "expired")):
        found = request.generation
        assert found is not None and found.finish == finish
        tokens = found.token_ids.tolist()
        assert tokens == expected[: len(tokens)] and (0 < len(tokens) < 24 or finish == "length")
    assert late.generation is not None and shown.ended == 1
    assert [token for part in shown.put_[1:] for token in part] == late.generation.token_ids.tolist()


def test_a_deadline_ends_who_has_had_no_step(models: dict[str, CompiledModel], clock: list[float]) -> None:
    """All of several, though a streamer raises; one that has ended before stays as it is."""

    class Raises(Shown):
        def end(self) -> None:
            super().end()
            raise ValueError("no")

    with models["sdar"].session() as session:
        ended = session.submit(prompt_of(5), gen_length=4, deadline_s=1.0, **WAY)
        session.advance(100)
        asked = [
            Submission(prompt=prompt_of(5), deadline_s=1.0, streamer=streamer)
            for streamer in (Shown(), Raises(), Shown())
        ]
        requests = session.submit_all(asked)
        clock[0] += 1.0
        with pytest.raises(ValueError, match="no"):
            session.advance()
        assert session.live == () and session.advance() == [] and models["sdar"].state_rows == {}
        found = [one.generation for one in (ended, *requests)]
        assert [(one.finish, one.steps > 0) for one in found if one] == [("length", True)] + 3 * [("expired", False)]


@pytest.mark.parametrize(("given", "message"), [
    ({"priority": 1.0}, "priority: expected a number of steps, from -1,073,741,824 to 1,073,741,824, got 1.0"),
    ({"priority": True}, "priority: .* got True"),
    ({"priority": 1 << 31}, "priority: .* got 2147483648"),
    ({"deadline_s": 0}, "deadline_s: expected seconds, above 0 and at most 1e\\+09, got 0"),
    ({"deadline_s": 10**400}, "deadline_s: .* got 1000"),
    ({"deadline_s": float("nan")}, "deadline_s: .* got nan"),
    ({"deadline_s": "5s"}, "deadline_s: .* got '5s'"),
])  # fmt: skip
def test_a_priority_or_deadline_that_cannot_be_is_refused(
    models: dict[str, CompiledModel], given: dict[str, Any], message: str
) -> None:
    with models["sdar"].session() as session, pytest.raises(UsageError, match=message):
        session.submit(prompt_of(5), **given)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Shape, float]]:
    """Steps that are launched from now on, with the milliseconds that their plans say."""
    found, launch = list[tuple[Shape, float]](), RequestTable.launch

    def noted(table: RequestTable, shape: Shape, **more: Any) -> None:
        found.append((shape, table.predicted_ms(shape.room)))
        launch(table, shape, **more)

    monkeypatch.setattr(RequestTable, "launch", noted)
    return found


def test_prompts_keep_a_pace_beside_blocks_unless_many_tokens_wait(
    models: dict[str, CompiledModel], launched: list[tuple[Shape, float]]
) -> None:
    """One prompt lengthens steps of eight blocks by half, and eight prompts by more."""
    longest = {}
    for prompts in (1, 8):
        with models["sdar"].session(max_delay_ms=math.inf) as session:
            for length in range(4, 12):
                session.submit(prompt_of(length), gen_length=400, steps=4, **WAY)
            for _ in range(6):
                session.advance()
            alone_ms = 1.05 * launched[-1][1]  # one prompt more: the next rung
            for _ in range(prompts):
                session.submit(prompt_of(1500), gen_length=4, **WAY)
            launched.clear()
            for _ in range(4):
                session.advance()
            longest[prompts] = max(ms for _, ms in launched) / alone_ms
    assert longest[1] <= 1.5 < longest[8]


@pytest.mark.parametrize(("delay_ms", "most"), [(math.inf, 8.0), (0.0, 1.3)])
def test_prompts_have_as_many_tokens_as_cost_a_card_little(
    models: dict[str, CompiledModel], launched: list[tuple[Shape, float]], monkeypatch: pytest.MonkeyPatch, delay_ms: float,
    most: float,
) -> None:  # fmt: skip
    """A step that reads weights for few rows has them, however little longer that is to take; beyond the delay it has none."""
    monkeypatch.setattr(Device, "balanced_rows", property(lambda _: 200))
    monkeypatch.setattr(
        "mosaic.decoding.scheduler.PACE", 1.0
    )  # or the whole prompt would cost a model so small next to nothing
    monkeypatch.setattr("mosaic.decoding.scheduler.BACKLOG", 10**9)
    with models["sdar"].session(max_delay_ms=delay_ms) as session:
        for length in range(4, 12):
            session.submit(prompt_of(length), gen_length=400, steps=4, **WAY)
        for _ in range(6):
            session.advance()
        alone = launched[-1][0].room.tokens
        session.submit(prompt_of(1500), gen_length=4, **WAY)
        launched.clear()
        session.advance(4)
    tokens = max(shape.room.tokens for shape, _ in launched)
    assert most / 2 <= tokens / alone <= most


@pytest.mark.parametrize(("name", "way"), [("sdar", WAY), ("llada", {"block_length": 4, "cache": "sparse"})])
def test_a_block_takes_no_longer_in_a_session_that_is_warm_for_many(
    models: dict[str, CompiledModel], launched: list[tuple[Shape, float]], name: str, way: dict[str, Any]
) -> None:
    """What is planned for it counts the keys of one request, not of all."""
    for requests in (1, 32):
        with models[name].session() as session:
            session.warm(GenerationConfig(**way), requests=requests, tokens=256)
            session.submit(prompt_of(8), gen_length=8, steps=4, **way)
            session.advance(2)
    alone, beside = launched[1], launched[-1]
    assert alone[0].room.windows == beside[0].room.windows == 1 and beside[1] < 1.1 * alone[1]


@pytest.mark.parametrize(("lengths", "running", "lots", "together"), [
    ([40] * 12, 0, 1, True), ([40] * 12, 5, 1, True), ([40] * 12, 5, 2, True), ([40] * 12, 14, 1, False),
    ([600] * 3, 0, 1, False), ([40] * 60, 0, 1, False), ([40] * 8, 5, 1, False),
])  # fmt: skip
def test_requests_that_come_together_begin_together(
    models: dict[str, CompiledModel], lengths: list[int], running: int, lots: int, together: bool
) -> None:
    """Where their prompts are short, more than two steps and few write them all, and they are more than those who run, who go on
    meanwhile; even if they do not come between the same two steps."""
    with models["sdar"].session(max_num_batched_tokens=160) as session:
        for length in range(running):
            session.submit(prompt_of(4 + length), gen_length=400, steps=4, **WAY)
        session.advance(12)
        prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths, 1)]
        came = list[Any]()
        began = dict[Any, int]()
        for step in range(1000):
            lot = prompts[step::lots] if step < lots else ()
            came += [session.submit(prompt, gen_length=8, steps=4, **WAY).number for prompt in lot]
            decided = {one.request for one in session.advance() if len(one.positions)}
            assert len(decided - {*came}) == running
            began = dict.fromkeys(decided & {*came}, step) | began
            if len(began) == len(prompts):
                break
    assert len(began) == len(prompts) and (len({*began.values()}) == 1) == together


def test_prompts_for_which_others_wait_fill_steps(models: dict[str, CompiledModel]) -> None:
    """The last of sixteen, too, beside five who run: the fifteen would wait for steps that are short for the five."""
    with models["sdar"].session(max_num_batched_tokens=1600, max_delay_ms=math.inf) as session:
        for length in range(5):
            session.submit(prompt_of(4 + length), gen_length=400, steps=4, **WAY)
        session.advance(12)
        came = {session.submit(prompt_of(400, seed), gen_length=8, steps=4, **WAY).number for seed in range(16)}
        began = [{one.request for one in session.advance() if len(one.positions)} & came for _ in range(6)]
    assert not set().union(*began[:4]) and set().union(*began) == came


def test_nobody_waits_where_two_steps_have_room_for_the_prompts_of_all(models: dict[str, CompiledModel]) -> None:
    """One comes in each step, and few steps make an answer: those who have not begun would be most of all, again and again."""
    with models["sdar"].session() as session:
        came = {session.submit(prompt_of(40, 0), gen_length=8, steps=2, **WAY).number: 0}
        began = dict[int, int]()
        for step in range(1, 60):
            began = {one.request: step for one in session.advance() if len(one.positions)} | began
            came[session.submit(prompt_of(40, step), gen_length=8, steps=2, **WAY).number] = step
    assert max(began.get(number, 60) - at for number, at in came.items() if at < 50) <= 3


def test_a_wait_for_prompts_ends_where_blocks_leave_them_little(models: dict[str, CompiledModel]) -> None:
    """With no delay for those who run, prompts of 480 tokens have only what is kept for them: a few a step."""
    with models["sdar"].session(max_num_batched_tokens=160, max_delay_ms=0) as session:
        for length in range(5):
            session.submit(prompt_of(4 + length), gen_length=1600, steps=4, **WAY)
        session.advance(12)
        came = {session.submit(prompt_of(40, seed), gen_length=8, steps=4, **WAY).number for seed in range(1, 13)}
        wrote, began = dict[int, int](), dict[int, int]()
        for step in range(1000):
            for one in session.advance():
                (began.setdefault if len(one.positions) else wrote.__setitem__)(one.request, step)
            if came <= began.keys():
                break
    assert max(wrote.values()) - min(wrote.values()) > 40
    assert max(began[number] - wrote[number] for number in came) <= TOGETHER + STEPS + 2


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_prompts_have_their_time_however_long_blocks_take(
    models: dict[str, CompiledModel], launched: list[tuple[Shape, float]], share: float
) -> None:
    """A bound on the whole step would leave prompts nothing beside blocks that take as long."""
    alone_ms = 0.0
    for _ in range(2):  # the first session tells how long blocks take
        with models["sdar"].session(max_delay_ms=share * alone_ms) as session:
            running = [session.submit(prompt_of(length), gen_length=400, steps=4, **WAY) for length in range(4, 36)]
            while any(request.steps < 3 for request in running):
                session.advance()
            alone_ms = launched[-1][1]
            launched.clear()
            session.submit(prompt_of(3000), gen_length=4, **WAY)
            session.advance(4)
    assert (1 + share / 3) * alone_ms < max(ms for _, ms in launched) < (1 + 1.5 * share) * alone_ms


def test_prompts_delay_blocks_of_other_groups_no_longer_than_their_own(
    models: dict[str, CompiledModel], launched: list[tuple[Shape, float]]
) -> None:
    """Steps that write prompts are as short beside requests that reuse prefixes, which they do not serve."""
    longest = {}
    for attention in (None, "flashblock"):
        with models["sdar"].session(max_delay_ms=0) as session:
            session.submit(prompt_of(4), gen_length=400, steps=4, attention=attention, **WAY)
            session.advance(4)
            launched.clear()
            session.submit(prompt_of(1500), gen_length=4, **WAY)
            session.advance(24)
            longest[attention] = max(shape.room.tokens for shape, _ in launched if shape.groups & 1)
    assert longest["flashblock"] <= longest[None] < 100


def test_admission_counts_who_is_live_whoever_has_come_and_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for the same steps as in a session to which the live requests alone have come."""
    rng, rooms, compared = random.Random(4), list[Room](), 0
    live: dict[LiveRequest, tuple[Tensor, dict[str, Any]]] = {}
    admits = RequestTable.admits
    monkeypatch.setattr(
        RequestTable,
        "admits",
        lambda table, asked, *rest, **how: admits(table, [*map(noted(rooms), asked)], *rest, **how),
    )
    config = {**CONFIGS["sdar"], "num_hidden_layers": 3}
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"attention": "flashblock"}, {"eviction": "focus"}]
    ways.append({"attention": mosaic.SparseAttention(k=4, exact_layers=1)})
    with mosaic.compile(config, seed=3) as first, mosaic.compile(config, seed=3) as second, first.session() as session:
        for _ in range(40):
            if live and rng.random() < 0.4:
                session.cancel(gone := rng.choice([*live]))
                del live[gone]
            else:
                one = prompt_of(rng.randint(1, 40)), {"gen_length": 8 * rng.randint(1, 4), **rng.choice(ways)}
                live[session.submit(one[0], **one[1])] = one
            asked = Submission(prompt=prompt_of(9), config=GenerationConfig(gen_length=8, **rng.choice(ways)))
            with second.session() as fresh:
                for prompt, options in live.values():
                    fresh.submit(prompt, **options)
                found = []
                for which in (session, fresh):
                    rooms.clear()
                    assert which.admits(asked)
                    found.append(Counter(rooms))
                assert found[0] == found[1] and rooms
                compared += len(live) > 3
    assert compared > 10


def noted(rooms: list[Room]) -> Callable[[Room], Room]:
    """A function that writes a room down, and returns it."""

    def note(room: Room) -> Room:
        rooms.append(room)
        return room

    return note
