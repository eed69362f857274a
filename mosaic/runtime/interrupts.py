"""Ctrl-C held back while memory changes hands, so that it never strikes between an answer and our note of it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interrupts_held"]


@contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back; the callable that is given raises it, to be called where everything held is on record.

    Otherwise KeyboardInterrupt may strike between the driver's answer and our note of it, and the memory would leak.
    Python runs signal handlers in the main thread only.
    """
    before = signal.getsignal(signal.SIGINT)
    pending: list[tuple[int, FrameType | None]] = []

    def raise_pending() -> None:
        if pending and callable(before):
            before(*pending.pop())

    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield raise_pending
        return
    signal.signal(signal.SIGINT, lambda number, frame: pending.append((number, frame)))
    try:
        yield raise_pending
    finally:
        signal.signal(signal.SIGINT, before)
        raise_pending()
