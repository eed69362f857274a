"""Callers of a session: threads, callbacks and streamers that do what they should not get away with."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from threading import Barrier, Event, Thread
from typing import Any

import pytest
import torch
from own_algorithms import as_generator
from test_decoding import CONFIGS
from torch import Tensor

import mosaic
from mosaic.decoding import GenerationConfig, LiveRequest, Session, Step, shapes
from mosaic.errors import DoesNotFit, UsageError
from mosaic.runtime.compiled import CompiledModel

WAY: dict[str, Any] = {"gen_length": 16, "threshold": 1.0, "stop_at_eos": False}


@pytest.fixture(scope="module")
def model() -> Iterator[CompiledModel]:
    with mosaic.compile(CONFIGS["sdar"], device="cpu", host_budget=0) as compiled:
        yield compiled


def test_requests_of_threads_draw_tokens_of_their_own(model: CompiledModel) -> None:
    """Submitted at once, while somebody else has the model: each draws what its place among all of them says."""
    prompt, way = torch.arange(3), {**WAY, "temperature": 1.5}
    with model.session() as session:
        found, ready = list[LiveRequest](), Barrier(5)

        def submit() -> None:
            ready.wait()
            found.append(session.submit(prompt, **way))

        threads = [Thread(target=submit) for _ in range(4)]
        with model.exclusive():
            for thread in threads:
                thread.start()
            ready.wait()
            for thread in threads:
                thread.join(0.02)
        for thread in threads:
            thread.join()
        while session.live:
            session.advance()
        for request in found:
            with model.session() as alone:
                expected = alone.submit(prompt, request_id=request.number, **way)
                while alone.live:
                    alone.advance()
            assert request.generation is not None and expected.generation is not None
            assert torch.equal(request.generation.token_ids, expected.generation.token_ids)
    assert sorted(request.number for request in found) == [0, 1, 2, 3]


@pytest.mark.parametrize("tabled", [True, False])
def test_a_callback_cannot_advance_its_session(model: CompiledModel, tabled: bool) -> None:
    """Others of its step have not got their outcomes by then; it may advance another session, and everybody goes on."""
    prompts, refused, config = [torch.arange(5), torch.arange(1, 6)], 0, GenerationConfig(**WAY)
    config = config if tabled else as_generator(config, model.architecture)
    with model.session() as session, model.session() as other:
        beside = other.submit(prompts[0], config)

        def advance(_: Step) -> None:
            nonlocal refused
            other.advance()
            refused += 1
            session.advance()

        requests = [session.submit(prompt, config, on_step=advance) for prompt in prompts]
        while session.live:
            with pytest.raises(UsageError, match="a callback cannot advance its session"):
                session.advance()
        assert refused == sum(request.steps for request in requests)
    expected = model.generate(prompts, config)
    for request, one in zip([*requests, beside], [*expected, expected[0]], strict=True):
        assert request.generation is not None and torch.equal(request.generation.token_ids, one.token_ids)


class Failing:
    """A streamer that raises at the end."""

    def put(self, _: Tensor) -> None: ...

    def end(self) -> None:
        raise OSError("gone")


def test_a_session_is_closed_whatever_streamers_raise(model: CompiledModel) -> None:
    """Every request ends, and all rows are free."""
    session = Session(model)
    requests = [session.submit(torch.arange(5), streamer=Failing(), **WAY) for _ in range(3)]
    session.advance(2)
    with pytest.raises(OSError, match="gone"):
        session.close()
    assert session.live == () and model.state_rows == {}
    assert {one.generation.finish for one in requests if one.generation is not None} == {"cancelled"}
    with pytest.raises(UsageError, match="the session is closed"):
        session.submit(torch.arange(5), **WAY)
    session.close()


def test_a_request_is_cancelled_by_its_own_session_alone(model: CompiledModel) -> None:
    """Both number their requests from 0: mixing them up raises, and all requests go on, whichever have ended."""
    prompts = [torch.arange(5), torch.arange(1, 6)]
    expected = model.generate(prompts, **WAY)
    with model.session() as first, model.session() as second:
        mine, other = ([session.submit(prompt, **WAY) for prompt in prompts] for session in (first, second))
        second.cancel(other[1])
        rows = model.state_rows
        for session, requests in ((first, other), (second, mine)):
            for request in requests:
                with pytest.raises(UsageError, match=f"cancel: request {request.number} is of another session"):
                    session.cancel(request)
        assert (first.live, second.live, model.state_rows) == (tuple(mine), (other[0],), rows)
        while first.live or second.live:
            first.advance()
            second.advance()
    assert model.state_rows == {} and other[1].generation is not None and other[1].generation.finish == "cancelled"
    for request, one in zip([*mine, other[0]], [*expected, expected[0]], strict=True):
        assert request.generation is not None and torch.equal(request.generation.token_ids, one.token_ids)


def test_requests_go_by_what_they_are_not_by_their_number(model: CompiledModel) -> None:
    """A number that a user writes over is one for reports, and nothing else."""
    with model.session() as session:
        requests = [session.submit(torch.arange(5), **WAY) for _ in range(3)]
        for request in requests:
            request.number = 7
        session.cancel(requests[1])
        assert session.live == (requests[0], requests[2])
        while session.live:
            session.advance()
    finishes = [request.generation.finish for request in requests if request.generation is not None]
    assert finishes == ["length", "cancelled", "length"] and model.state_rows == {}


def test_who_waits_for_another_thread_hears_signals(model: CompiledModel) -> None:
    """Though a session holds them: a generation of another thread may take minutes."""
    began, done = Event(), Event()

    def take() -> None:
        with model.exclusive():
            began.set()
            done.wait(10)

    def strike(number: int, frame: object) -> None:
        raise InterruptedError

    thread = Thread(target=take)
    with model.session() as session:
        thread.start()
        began.wait()
        before = signal.signal(signal.SIGALRM, strike)
        try:
            for call in (lambda: session.submit(torch.arange(5), **WAY), session.advance, session.close):
                signal.setitimer(signal.ITIMER_REAL, 0.02)
                with pytest.raises(InterruptedError):
                    call()
                assert not done.is_set()
        finally:
            signal.signal(signal.SIGALRM, before)
            done.set()
            thread.join()
        assert session.submit(torch.arange(5), **WAY) in session.live


def test_a_step_of_nobody_is_refused(model: CompiledModel) -> None:
    with pytest.raises(UsageError, match="a step needs at least one request"):
        model.step([])


def test_what_one_session_admits_leaves_room_for_the_steps_of_another(model: CompiledModel) -> None:
    """Rows of the second stand beside the first one's steps, which are larger than its own."""
    asked = GenerationConfig(**WAY)
    budget = model.check(shapes(asked, [9, 9], model.architecture)).total_bytes
    with mosaic.compile(CONFIGS["sdar"], device="cpu", host_budget=0, budget=budget) as tight:
        with tight.session() as first, tight.session() as second:
            for _ in range(2):
                first.submit(torch.arange(9), asked)
            refused = 0
            for length in range(40, 0, -1):
                try:
                    second.submit(torch.arange(length), asked)
                except DoesNotFit:
                    refused += 1
            while first.live or second.live:
                first.advance()
                second.advance()
        assert refused and tight.state_rows == {}
