"""Signals held back: by any handler of Python's, nested, let through for a user's code, and raised once all is on record."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from mosaic.runtime.interrupts import interrupts_held, interrupts_let_through

HELD = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1]


class Struck(BaseException):
    """The exception of the handlers."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Every signal's handler raises, and is there again afterwards."""

    def raising(number: int, frame: FrameType | None) -> None:
        raise Struck(number)

    before = {number: signal.signal(number, raising) for number in HELD}
    yield
    assert all(signal.getsignal(number) is raising for number in HELD)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", HELD)
def test_a_handler_that_raises_waits_until_the_block_is_left(number: int) -> None:
    done = []
    with pytest.raises(Struck), interrupts_held():
        signal.raise_signal(number)
        signal.raise_signal(number)
        done.append(number)
    assert done == [number]


def test_every_signal_that_struck_is_heard_though_the_first_one_raises() -> None:
    with pytest.raises(Struck) as last, interrupts_held():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert {last.value.args, last.value.__context__.args} == {(signal.SIGTERM,), (signal.SIGINT,)}  # type: ignore[union-attr]


def test_within_a_block_another_one_raises_nothing() -> None:
    done = []
    with pytest.raises(Struck), interrupts_held():
        with interrupts_held() as raise_pending:
            signal.raise_signal(signal.SIGTERM)
            raise_pending()
        done.append("outer")
    assert done == ["outer"]


def test_what_is_held_is_raised_where_everything_is_on_record() -> None:
    with interrupts_held() as raise_pending:
        raise_pending()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Struck):
            raise_pending()
        raise_pending()


def test_a_users_code_within_is_interrupted_at_once_and_what_it_holds_is_not() -> None:
    done = []
    with interrupts_held():
        with pytest.raises(Struck), interrupts_let_through():
            signal.raise_signal(signal.SIGINT)
            done.append("never")
        with pytest.raises(Struck), interrupts_let_through():
            with interrupts_held():
                signal.raise_signal(signal.SIGTERM)
                done.append("held again")
            done.append("never")
    assert done == ["held again"]
    with interrupts_let_through(), pytest.raises(Struck):  # within nothing that holds
        signal.raise_signal(signal.SIGINT)


def test_other_threads_and_handlers_of_the_system_are_left_alone() -> None:
    seen: list[object] = []
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def hold() -> None:
        with interrupts_held() as raise_pending, interrupts_let_through():
            raise_pending()
            seen.append(signal.getsignal(signal.SIGINT))

    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    with interrupts_held():
        seen.append(signal.getsignal(signal.SIGUSR2))
        signal.raise_signal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)
    assert seen == [handler, signal.SIG_IGN]


@pytest.mark.parametrize("number", HELD)
def test_a_signal_between_two_handlers_leaves_all_of_them_as_they_were(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = signal.signal
    for strikes in range(2 * len(HELD)):
        left = [strikes]

        def counted(which: int, handler: object, left: list[int] = left) -> object:
            found = exchange(which, handler)  # type: ignore[arg-type]
            left[0] -= 1
            if left[0] == -1:
                signal.raise_signal(number)
            return found

        with monkeypatch.context() as patch, pytest.raises(Struck):
            patch.setattr("mosaic.runtime.interrupts.exchange", counted)
            with interrupts_held():
                pass
        assert len({signal.getsignal(one) for one in HELD}) == 1


def test_a_handler_that_is_set_within_stays(handlers: None) -> None:
    heard: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    with interrupts_held(), interrupts_let_through():
        signal.signal(signal.SIGTERM, lambda number, frame: heard.append("mine"))
    signal.raise_signal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)
    assert heard == ["mine"]


def test_what_stood_in_for_a_handler_calls_it_afterwards() -> None:
    """A callback keeps what `signal.signal` gave it, and puts it back when all is over."""
    with interrupts_held(), interrupts_let_through():
        kept = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    before = signal.getsignal(signal.SIGTERM)
    assert before is signal.SIG_IGN
    signal.signal(signal.SIGTERM, kept)
    with pytest.raises(Struck):
        signal.raise_signal(signal.SIGTERM)
    raising = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGTERM, raising)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_the_thread_that_forked_holds_in_the_child() -> None:
    """It is the child's main thread, which handlers interrupt."""
    statuses: list[int] = []

    def fork() -> None:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, lambda number, frame: os._exit(1))
            with interrupts_held():
                signal.raise_signal(signal.SIGTERM)
                os._exit(0)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    assert statuses == [0]
