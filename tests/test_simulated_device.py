"""Whom a session serves when, on a device whose steps take what a clock of this file says: callers that ask again one by one."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_decoding import CONFIGS
from torch import Tensor

import mosaic
from mosaic.decoding import GenerationConfig, Stream, Submission
from mosaic.decoding import pace as pace_module
from mosaic.runtime import request_table as table_module
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.host_copy import Arriving
from mosaic.runtime.request_table import RequestTable, Served
from mosaic.runtime.room import Shape

SUBMITS_S, LAUNCHES_S, TELLS_S = 0.0008, 0.0007, 0.004
"""What the host takes to submit a request and to launch a step, and until a caller hears that its answer has ended."""
PROMPT, ANSWER, BLOCK, MOST = 64, 32, 4, 1024


class Clock:
    """Seconds, and when each step ends that was launched: one after the other, `base_s` and `token_s` for each token."""

    def __init__(self, base_s: float, token_s: float) -> None:
        self.now_s, self._free_s, self._ends = 0.0, 0.0, deque[float]()
        self._base_s, self._token_s = base_s, token_s

    def run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let all devices go by this clock."""
        launch, read = RequestTable.launch, RequestTable.read

        def launched(table: RequestTable, shape: Shape, **more: Any) -> None:
            launch(table, shape, **more)
            self.now_s += LAUNCHES_S
            self._free_s = max(self.now_s, self._free_s) + self._base_s + self._token_s * shape.room.tokens
            self._ends.append(self._free_s)

        def waited(table: RequestTable) -> Served:
            self.now_s = max(self.now_s, self._ends.popleft())
            return read(table)

        for module in (pace_module, table_module):
            monkeypatch.setattr(module, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(CompiledModel, "asynchronous", property(lambda _: True))
        monkeypatch.setattr(Arriving, "are_here", property(lambda _: self._ends[0] <= self.now_s))
        monkeypatch.setattr(RequestTable, "launch", launched)
        monkeypatch.setattr(RequestTable, "read", waited)


class Caller:
    """Waits for the first token of an answer."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._puts, self.first_s = clock, 0, 0.0

    def put(self, value: Tensor) -> None:
        self._puts += 1
        if self._puts == 2:  # the first is the prompt
            self.first_s = self._clock.now_s

    def end(self) -> None:
        """It has what it waited for."""


@pytest.fixture(scope="module")
def model() -> Iterator[CompiledModel]:
    with mosaic.compile(CONFIGS["sdar"], seed=3, host_budget=0) as found:
        yield found


def waits_of(model: CompiledModel, clock: Clock, callers: int, requests: int, apart_s: float, seed: int) -> list[float]:
    """The seconds to each first token, ascending: callers ask one after the other, at random times `apart_s` apart, and again when
    their answer has ended."""
    rng, asked, ended, waits = random.Random(seed), list[tuple[float, int]](), 0, dict[int, tuple[float, Caller]]()
    config = GenerationConfig(gen_length=ANSWER, steps=BLOCK // 2, threshold=1.0, stop_at_eos=False)
    front_s = 0.0

    def ask(heard_s: float) -> None:
        nonlocal front_s
        if len(waits) < requests:
            front_s = max(front_s, heard_s) + apart_s * rng.expovariate(1)
            waits[len(waits)] = front_s, Caller(clock)
            heapq.heappush(asked, (front_s, len(waits) - 1))

    with model.session(max_num_batched_tokens=MOST) as session:
        session.warm(config, requests=callers, tokens=PROMPT + ANSWER, progress=lambda line: None)
        stream = Stream(session, most_ahead=requests)
        for _ in range(callers):
            ask(0.0)
        while ended < requests:
            if not session.live:
                clock.now_s = max(clock.now_s, asked[0][0])
            while asked and asked[0][0] <= clock.now_s and stream.wants:
                _, number = heapq.heappop(asked)
                clock.now_s += SUBMITS_S
                prompt = torch.from_numpy(np.random.default_rng(number).integers(8, 40, PROMPT))
                caller = waits[number][1]
                stream.put(number, [Submission(prompt=prompt, config=config, request_id=number, streamer=caller)])
            for outcome in stream.advance(ordered=False):
                assert outcome.error is None
                ended += 1
                ask(clock.now_s + TELLS_S)
    return sorted(caller.first_s - asked_s for asked_s, caller in waits.values())


@pytest.mark.soak
@pytest.mark.parametrize(("base_s", "token_s", "callers", "apart_s", "most_s"), [
    (0.003, 0.0002, 128, 0.004, 3.0), (0.01, 0.000025, 32, 0.003, 0.2),
])  # fmt: skip
def test_nobody_waits_much_longer_for_a_first_token_than_all_prompts_take(
    model: CompiledModel, monkeypatch: pytest.MonkeyPatch, base_s: float, token_s: float, callers: int, apart_s: float,
    most_s: float,
) -> None:  # fmt: skip
    """Those who asked first are running by then; of those who ask last, some would wait for several of their answers."""
    clock = Clock(base_s, token_s)
    clock.run(monkeypatch)
    waits = waits_of(model, clock, callers, 2 * callers, apart_s, seed=1)
    assert waits[-1] < most_s
