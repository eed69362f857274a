"""Hold signals back while ownership changes hands, so that no handler raises between a call and its record.

Python runs signal handlers in the main thread, between any two bytecodes. The handler of Ctrl-C raises, and a user's
own may: a server's for SIGTERM, a test's for SIGALRM. Other threads are never interrupted, and hold nothing back.
"""

from __future__ import annotations

import os
import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]
from _signal import signal as exchange
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, Self

SIGNALS: Final = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGVTALRM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
"""Signals that ask a process to end, ring a timer, or are free for users. Every step asks for the handlers of all of them, so
`getsignal` and `exchange` are those in C: those in `signal` make an enum of each answer, in five calls."""
_main: int | None = threading.main_thread().ident


def _forked() -> None:
    global _main
    _main = threading.get_ident()  # whichever thread forked is the child's main one


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class _Hold:
    """The replaced handlers, and the signals that struck meanwhile; `open` while handlers may run."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._pending: dict[int, FrameType | None] = {}
        self._ended = False
        self.open = False

    def begin(self) -> None:
        """Replace all handlers that are Python functions."""
        try:
            for number in SIGNALS:
                handler = getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    exchange(number, self._strike)
        except BaseException:  # a handler raised between two replacements
            self.end()
            raise

    def end(self) -> None:
        """Put the handlers back."""
        try:
            self._put_back()
        except BaseException:  # a handler raised between two replacements
            self._put_back()
            raise

    def _put_back(self) -> None:
        for number, handler in self._handlers.items():
            if getsignal(number) == self._strike:  # else a callback installed its own handler
                exchange(number, handler)
        self._ended = True

    def _strike(self, number: int, frame: FrameType | None) -> None:
        if self.open or self._ended:  # a callback may have saved this handler and put it back later
            self._handlers[number](number, frame)
        else:
            self._pending[number] = frame

    def raise_pending(self) -> None:
        """Call the handler of each signal that struck once, even if one of them raises."""
        while self._pending:
            number, frame = self._pending.popitem()
            try:
                self._handlers[number](number, frame)
            finally:
                self.raise_pending()


_hold: _Hold | None = None
"""The main thread's outermost block; blocks within it open and close it."""


class interrupts_held:
    """Hold signals back in a `with` block: handlers run when it is left, or when the function that it yields is called.

    Call that function when everything so far is recorded. In a nested block neither runs handlers.

    Examples
    --------
    >>> before = signal.signal(signal.SIGTERM, lambda number, frame: print("struck"))
    >>> with interrupts_held() as raise_pending:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     print("on record")
    on record
    struck
    >>> _ = signal.signal(signal.SIGTERM, before)
    """

    def __enter__(self) -> Self:
        global _hold
        self._mine = threading.get_ident() == _main
        if not self._mine:
            return self
        self._outermost, self._open = _hold is None, True
        if _hold is None:
            hold = _Hold()
            hold.begin()
            _hold = hold
        else:
            self._open = _hold.open
            _hold.open = False
        return self

    def __call__(self) -> None:
        """Call the handlers of the signals that struck."""
        if self._mine and self._open and _hold is not None:
            _hold.raise_pending()

    def __exit__(self, *error: object) -> None:
        global _hold
        if not self._mine or _hold is None:
            return
        hold = _hold
        try:
            if self._outermost:
                _hold = None
                hold.end()
            else:
                hold.open = self._open
        finally:
            if self._open:
                hold.raise_pending()


def hear_interrupts() -> None:
    """Call the handlers of signals that struck, within a block that holds them: for waits, which hand nothing over."""
    if _hold is not None and threading.get_ident() == _main:
        _hold.raise_pending()


class interrupts_let_through:
    """Let signals strike within a block that holds them: for a user's code, or a whole step.

    Signals that struck before stay held.
    """

    def __enter__(self) -> None:
        self._hold = _hold if threading.get_ident() == _main else None
        if self._hold is not None:
            self._open, self._hold.open = self._hold.open, True

    def __exit__(self, *error: object) -> None:
        if self._hold is not None:
            self._hold.open = self._open
