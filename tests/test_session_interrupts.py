"""Signals whose handlers raise, anywhere in a session's calls: it goes on, every request ends, and all rows are free.

The sweep strikes where the interpreter looks for signals: when a function of the library begins, or one of C's has returned to it.
The soak strikes by a timer.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from types import FrameType
from typing import Any

import pytest
import torch
from own_algorithms import as_generator
from test_decoding import CONFIGS
from test_session_turns import Runner, Shown, token

import mosaic
from mosaic.decoding import GenerationConfig, LiveRequest, Session, Step
from mosaic.runtime.compiled import CompiledModel

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # as generators are dropped
LIBRARY = mosaic.__file__.removesuffix("__init__.py")


class Struck(BaseException):
    """The exception of the handlers."""


@contextmanager
def handled(number: int) -> Iterator[None]:
    """A handler that raises."""

    def raising(number: int, frame: FrameType | None) -> None:
        raise Struck

    before = signal.signal(number, raising)
    try:
        yield
    finally:
        assert signal.getsignal(number) is raising
        signal.signal(number, before)


class Striking:
    """Raises a signal at the event numbered `at` of library code, or of one file of it; counts them."""

    def __init__(self, number: int, at: int, file: str = "") -> None:
        self.number, self.at, self.file, self.seen = number, at, file, 0

    def __enter__(self) -> Striking:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event in ("call", "c_return") and name.startswith(LIBRARY) and name.endswith(self.file):
            self.seen += 1
            if self.seen == self.at:
                sys.setprofile(None)
                signal.raise_signal(self.number)


class Told:
    """The results of a driver of two sessions of one model."""

    def __init__(self, runner: Any, way: dict[str, Any]) -> None:
        self.runner, self.way = runner, way
        self.sessions = [Session(runner), Session(runner)]
        self.requests: list[dict[LiveRequest, None]] = [{}, {}]
        self.steps: list[list[Sequence[Step]]] = [[], []]
        self.shown: list[Shown] = []

    def submit(self, place: int) -> None:
        shown = Shown()
        self.shown.append(shown)
        with suppress(Struck):
            self.requests[place][self.sessions[place].submit(torch.tensor([1]), streamer=shown, **self.way)] = None
        self.requests[place] |= dict.fromkeys(self.sessions[place].live)

    def advance(self, place: int) -> None:
        """Keep the result as it is: iterating over it runs code of the library, where a signal would lose what was returned."""
        with suppress(Struck):
            self.steps[place].append(self.sessions[place].advance())

    def cancel(self, place: int) -> None:
        with suppress(Struck):
            for request in self.sessions[place].live[:1]:
                self.sessions[place].cancel(request)

    def run(self) -> None:
        """Requests that come, go on and are cancelled; then all that is left to its end, but what closing cancels."""
        for place in (0, 1):
            self.submit(place)
            self.submit(place)
            self.advance(place)
        self.cancel(0)
        self.submit(0)
        for _ in range(2):
            self.advance(0)
            self.advance(1)
        with suppress(Struck):
            self.sessions[1].close()

    def finish(self) -> None:
        """`run` without further signals."""
        for _ in range(200):
            self.advance(0)
        assert not self.sessions[0].live
        for session in self.sessions:
            session.close()

    def check(self, expected: Callable[[int], list[int]]) -> None:
        """Each request has ended once; every token and step of requests that were not cancelled exists."""
        for requests, steps in zip(self.requests, self.steps, strict=True):
            for request in requests:
                found = request.generation
                assert found is not None and request.pending is None
                answer = found.token_ids.tolist()
                assert answer == expected(len(answer))
                assert found.finish == "cancelled" or len(answer) == self.way["gen_length"]
                mine = [step.step for step in chain(*steps) if step.request == request.number]
                assert mine == [*range(1, len(mine) + 1)] and (
                    found.finish == "cancelled" or len(mine) == request.steps
                )
        assert [shown.ended for shown in self.shown if shown.put_] == [1 for shown in self.shown if shown.put_]


def struck(runner: Any, way: dict[str, Any], number: int, at: int, file: str = "") -> tuple[Told, int]:
    """A driver's results after one signal, and the number of events before it; 0: no signal."""
    told = Told(runner, way)
    with handled(number), suppress(Struck), Striking(number, at, file) as strikes:
        told.run()
    told.finish()
    return told, strikes.seen


WAY: dict[str, Any] = {"gen_length": 6, "block_length": 3, "steps": 4, "stop_at_eos": False}


@pytest.mark.parametrize("every", [61, pytest.param(1, marks=pytest.mark.soak)])
def test_a_signal_anywhere_leaves_every_request_to_its_end(every: int) -> None:
    _, events = struck(Runner(), WAY, signal.SIGINT, 0)
    for at in range(1, events, every):
        runner = Runner()
        told, _ = struck(runner, WAY, (signal.SIGINT, signal.SIGTERM)[at % 2], at)
        told.check(lambda count: [token(1 + place) for place in range(count)])
        assert runner.held == 0
    assert events > 1000


def other_threads_have_turns(model: CompiledModel) -> bool:
    """Whether another thread gets the model."""
    got = threading.Event()

    def take() -> None:
        with model.exclusive():
            got.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return got.wait(10)


@pytest.fixture(scope="module")
def model() -> Iterator[CompiledModel]:
    with mosaic.compile(CONFIGS["sdar"], device="cpu", host_budget=0) as compiled:
        yield compiled


@pytest.mark.parametrize("tabled", [True, False])
@pytest.mark.parametrize("strikes", [6, pytest.param(500, marks=pytest.mark.soak)])
def test_a_signal_anywhere_leaves_a_model_as_it_was(model: CompiledModel, tabled: bool, strikes: int) -> None:
    config = GenerationConfig(gen_length=10, stop_at_eos=False)
    way = {"config": config if tabled else as_generator(config, model.architecture)}
    (answer,) = model.generate([[1]], **way)
    expected, rng = answer.token_ids.tolist(), random.Random(strikes)
    _, events = struck(model, way, signal.SIGTERM, 0)
    for _ in range(strikes):
        told, _ = struck(model, way, signal.SIGTERM, rng.randrange(1, events))
        for request in told.requests[0]:
            assert request.generation is not None
            found = request.generation.token_ids.tolist()
            assert found == expected[: len(found)] and (len(found) == 10 or request.generation.finish == "cancelled")
        assert all(one.generation is not None for requests in told.requests for one in requests)
        assert model.state_rows == {} and other_threads_have_turns(model)


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.soak)])
def test_a_signal_where_turns_begin_and_end_keeps_no_other_thread_out(model: CompiledModel, every: int) -> None:
    way = {"config": as_generator(GenerationConfig(gen_length=4), model.architecture)}
    _, events = struck(model, way, signal.SIGTERM, 0, "turns.py")
    for at in range(1, events, every):
        struck(model, way, signal.SIGTERM, at, "turns.py")
        assert model.state_rows == {} and other_threads_have_turns(model)
    assert events > 100


@pytest.mark.soak
def test_a_timer_that_strikes_at_random_leaves_a_model_as_it_was(model: CompiledModel) -> None:
    way = {"gen_length": 10, "stop_at_eos": False}
    (answer,) = model.generate([[1]], **way)
    rng, expected = random.Random(1), answer.token_ids.tolist()
    for _ in range(150):
        told = Told(model, way)
        with handled(signal.SIGALRM), suppress(Struck):  # also one that strikes while the timer is stopped
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 0.08))
            told.run()
            signal.setitimer(signal.ITIMER_REAL, 0)
        told.finish()
        for requests in told.requests:
            for request in requests:
                assert request.generation is not None
                found = request.generation.token_ids.tolist()
                assert found == expected[: len(found)] and (
                    len(found) == 10 or request.generation.finish == "cancelled"
                )
        assert model.state_rows == {} and other_threads_have_turns(model)


def test_a_generation_that_is_interrupted_keeps_nothing(model: CompiledModel) -> None:
    rng = random.Random(0)
    for _ in range(6):
        with handled(signal.SIGTERM), suppress(Struck), Striking(signal.SIGTERM, rng.randrange(1, 2500)):
            model.generate([[1], [2, 3]], GenerationConfig(gen_length=10))
        assert model.state_rows == {} and other_threads_have_turns(model)


def test_a_callback_is_interrupted_at_once() -> None:
    """The request may never end by itself."""
    told = []

    def wait(step: Step) -> None:
        told.append(step)
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("the signal was held")

    with handled(signal.SIGTERM), Session(Runner()) as session:  # type: ignore[arg-type]
        request = session.submit(torch.tensor([1]), on_step=wait, **WAY)
        while session.live:
            with pytest.raises(Struck):
                session.advance()
        assert request.generation is not None and len(told) == request.steps
