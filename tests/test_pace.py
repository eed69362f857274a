"""How many tokens of prompts steps have time for: a device whose steps take what they take, whatever plans say."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mosaic.decoding import pace as module
from mosaic.decoding.pace import Pace
from mosaic.registrar.request_table import Reported


@pytest.mark.parametrize("seed", range(20))
def test_times_of_steps_are_found_among_some_that_waited_for_a_plan(seed: int) -> None:
    """Groups have times of their own; those that nobody is in any more do not count."""
    rng, pace = random.Random(seed), Pace()
    alone = {1: rng.uniform(4, 8), 2: rng.uniform(9, 20), 6: rng.uniform(21, 40)}
    token_ms = rng.uniform(0.01, 0.1)
    assert pace.alone_ms(7) is None and pace.token_ms(1) is None
    for number in range(200):
        waited_ms = 500.0 if number % 12 == 11 else 0.0
        groups = rng.choice([*alone])
        tokens = 0 if number < 60 or rng.random() < 0.5 else rng.randint(1, 4000)
        pace.note(groups, tokens, alone[groups] + token_ms * tokens + waited_ms, planned_ms=alone[groups] / 3)
    assert pace.alone_ms(7) == pytest.approx(alone[6]) and pace.alone_ms(3) == pytest.approx(alone[2])
    assert pace.alone_ms(1) == pytest.approx(alone[1]) and pace.alone_ms(4) is None
    assert pace.token_ms(1) == pytest.approx(token_ms)


def test_blocks_that_always_have_prompts_beside_them_take_longer_when_they_are_more() -> None:
    """Who takes that for the cost of prompts gives them ever less of a step. The plan knows how much longer, if not how long."""
    pace, token_ms = Pace(), 0.02
    pace.note(1, 0, 5.0, 4, planned_ms=2.0)
    for number in range(200):
        own, alone_ms = min(4 * (number + 1), 256), 5.0 + min(number, 64) * 0.2
        tokens = int(pace.time_for(1, 1, 0.4 * alone_ms, 0.4 * token_ms, few=0, pace=1.5, delay_ms=50.0))
        pace.note(1, tokens, alone_ms + token_ms * tokens, own, planned_ms=0.4 * alone_ms)
    assert tokens == pytest.approx(0.5 * alone_ms / token_ms, rel=0.01)


def test_a_plan_that_does_not_know_what_a_step_costs_at_least_keeps_prompts_from_no_step() -> None:
    """Few blocks take nearly as long as many. What that is more than planned is no cost of the few tokens that are beside them."""
    pace, token_ms = Pace(), 0.003
    for _ in range(8):
        pace.note(1, 0, 10.0 + 2048 * token_ms, 2048, planned_ms=2048 * token_ms)
    alone_ms, planned_ms, tokens = 10.0 + 672 * token_ms, 672 * token_ms, 352
    for _ in range(3):
        pace.note(1, tokens, alone_ms + token_ms * tokens, 672, planned_ms=planned_ms)
        tokens = int(pace.time_for(1, 1, planned_ms, token_ms, few=0, pace=3.0, delay_ms=50.0))
    assert tokens > 700


def test_prompts_have_the_time_that_a_pace_and_a_delay_leave_them_and_a_few_tokens_if_only_a_pace_forbids_it() -> None:
    pace = Pace()
    pace.note(1, 0, 10.0, planned_ms=10.0)
    pace.note(1, 1000, 35.0, planned_ms=10.0)
    for times, few, delay_ms, expected_ms in (
        (1.5, 0, 20.0, 5.0), (2.0, 0, 20.0, 10.0), (11.0, 0, 20.0, 20.0), (11.0, 0, 1e9, 100.0), (1.5, 0, np.inf, 5.0),
        (1.5, 400, 20.0, 10.0), (1.5, 4000, 20.0, 20.0), (101.0, 400, 0.0, 0.0),
    ):  # fmt: skip
        tokens = pace.time_for(1, 1, 10.0, 0.025, few=few, pace=times, delay_ms=delay_ms)
        assert 0.025 * tokens == pytest.approx(expected_ms)
    pace.note(2, 0, 40.0, planned_ms=40.0)
    assert pace.time_for(1, 3, 10.0, 0.025, few=0, pace=1.5, delay_ms=20.0) == pytest.approx(50 / 0.025)


def test_each_group_is_as_much_slower_than_planned_as_its_own_steps_were() -> None:
    pace = Pace()
    assert pace.slower(1) is None
    assert pace.time_for(1, 1, 10.0, 0.025, few=0, pace=1.5, delay_ms=50.0) == pytest.approx(5 / 0.025)  # as planned
    pace.note(1, 0, 10.0, planned_ms=5.0)
    pace.note(2, 0, 4.0, planned_ms=1.0)
    pace.note(1, 400, 28.0, planned_ms=10.0)
    assert (pace.slower(1), pace.slower(2), pace.slower(3)) == (2.0, 4.0, 4.0)
    assert pace.token_ms(1) == pytest.approx(0.02)


@pytest.mark.parametrize("plan", [0.5, 3.0, 40.0])
def test_prompts_that_have_steps_of_their_own_go_by_what_these_took(plan: float) -> None:
    """Their group has no blocks that could be timed, and what prompts cost beside blocks of others says nothing of them."""
    pace, base_ms, token_ms, whole = Pace(), 4.0, 0.003, list[int]()
    pace.note(2, 0, 10.0, planned_ms=10.0)
    pace.note(2, 100, 30.0, planned_ms=10.0)
    for _ in range(12):
        planned_ms = 2 * base_ms
        tokens = min(8192, int(pace.time_for(1, 2, planned_ms, plan * token_ms, few=0, pace=6.0, delay_ms=150.0)))
        pace.note(0, tokens, base_ms + token_ms * tokens, planned_ms=planned_ms)
        whole.append(tokens)
    assert pace.token_ms(2) == pytest.approx(0.2)
    assert whole[-1] == 8192 if plan < 10.0 else whole[-1] > 4 * whole[0]
    for _ in range(16):  # others count soon
        pace.note(0, 512, 8.0 + 0.0005 * 512, planned_ms=8.0)
    assert pace.token_ms(0) == pytest.approx(0.0005)


@pytest.mark.parametrize("plan", [0.1, 0.4, 2.0, 8.0])
def test_prompts_delay_nobody_longer_though_a_plan_is_far_off_for_them(plan: float) -> None:
    """Attention to many keys costs what no plan says of a prompt's chunk."""
    pace, token_ms = Pace(), 0.2
    pace.note(1, 0, 10.0, 128, planned_ms=10.0)
    delays = []
    for _ in range(40):
        tokens = min(8192, int(pace.time_for(1, 1, 10.0, plan * token_ms, few=0, pace=9.0, delay_ms=20.0)))
        pace.note(1, tokens, 10.0 + token_ms * tokens, 128, planned_ms=10.0)
        delays.append(token_ms * tokens)
    assert max(delays[1:]) < 20.5 and delays[-1] > 2.0


@pytest.mark.parametrize("token_ms", [0.003, 0.02])
def test_blocks_that_were_timed_when_they_were_few_cost_prompts_no_bound(token_ms: float) -> None:
    """A plan that does not know what a step costs at least takes many for far slower than they are."""
    pace, own_ms = Pace(), 10.0 + 2048 * 0.003
    for _ in range(8):
        pace.note(1, 0, 10.0 + 128 * 0.003, 128, planned_ms=128 * 0.003)
    for _ in range(40):
        tokens = min(8192, int(pace.time_for(1, 1, 2048 * 0.003, token_ms, few=0, pace=9.0, delay_ms=20.0)))
        pace.note(1, tokens, own_ms + token_ms * tokens, 2048, planned_ms=2048 * 0.003)
        assert token_ms * tokens < 30.0


@pytest.mark.parametrize("seed", range(20))
def test_the_end_of_a_prompt_says_nothing_of_the_next_ones_beginning(seed: int) -> None:
    """The last chunks of a prompt are short, and cost next to nothing; whoever takes that for the rate delays blocks too long."""
    rng, pace = random.Random(seed), Pace()
    alone_ms, token_ms = rng.uniform(4, 10), rng.uniform(0.02, 0.05)

    def took(tokens: int) -> float:
        return max(alone_ms, token_ms * tokens) + (0.2 * alone_ms if 0 < tokens * token_ms < alone_ms else 0.0)

    pace.note(1, 0, alone_ms, 4, planned_ms=alone_ms)
    delays = []
    for _ in range(4):
        left = rng.randint(4_000, 16_000)
        while left:
            room = max(min(50.0, alone_ms * max(1 + left / 512, 1.5)) - alone_ms, 0.0)
            tokens = min(left, max(int(room / (pace.token_ms(1) or token_ms)), 1))
            pace.note(1, tokens, took(tokens), 4, planned_ms=alone_ms)
            delays.append(took(tokens))
            left -= tokens
    assert 40.0 < max(delays) < 55.0


@pytest.mark.parametrize("seed", range(10))
def test_what_has_arrived_says_which_tokens_were_of_prompts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one group that overlap: each takes from the arrival of the one before it. Who decides, or is past the prompt, is in
    a block; the room that is left was there for prompts."""
    rng, pace, clock = np.random.default_rng(seed), Pace(), SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "perf_counter", lambda: clock.now)
    alone_ms, token_ms = rng.uniform(4, 10), rng.uniform(0.02, 0.05)

    def arrive(windows: int, prompts: int, room: int, ms: float, *, counts: bool = True) -> None:
        report = np.zeros((windows + prompts, max(Reported) + 1), dtype=np.int64)
        report[:, Reported.TOKENS] = 4
        prefix = rng.integers(1, 9, windows + prompts) * 4
        decided = np.zeros(windows + prompts, dtype=np.int64)
        decided[: windows // 2] = 2
        report[:windows, Reported.BEGIN] = prefix[:windows]
        report[windows:, Reported.BEGIN] = prefix[windows:] - 4
        started, clock.now = clock.now - rng.uniform(0.0, 0.003), clock.now + ms / 1e3
        step: Any = SimpleNamespace(started=started, groups=1, room=SimpleNamespace(tokens=room))
        served: Any = SimpleNamespace(decided=decided, report=report)
        pace.take(
            step, served, prefix, {0: 0.0, 32: alone_ms / 2, room: room / 40 * alone_ms / 2}.__getitem__, counts=counts
        )

    arrive(8, 0, 40, 999.0)  # the first has nothing before it
    for _ in range(30):
        arrive(8, 0, 40, alone_ms)
        arrive(8, 0, 40, 500.0, counts=False)
        room = int(rng.integers(64, 2048))
        arrive(8, int(rng.integers(1, 5)), room, alone_ms + token_ms * (room - 32))
    for _ in range(16):  # large products cost less a token
        arrive(0, 2, 8192, token_ms * 4096)
    assert pace.alone_ms(1) == pytest.approx(alone_ms) and pace.token_ms(1) == pytest.approx(token_ms)
    assert pace.token_ms(0) == pytest.approx(token_ms / 2)
    for _ in range(4):  # half of those that count
        arrive(8, 0, 40, 500.0)
    assert pace.alone_ms(1) == pytest.approx(alone_ms)
    for _ in range(8):  # other times count soon
        arrive(8, 0, 40, 3 * alone_ms)
    assert pace.alone_ms(1) == pytest.approx(3 * alone_ms)
