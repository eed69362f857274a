"""Turns: one thread at a time has a model, and what the last one launched is done before the next one's work begins."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Final, Self

import torch

from mosaic.runtime.interrupts import hear_interrupts

__all__ = ["Turns"]

HEARD_S: Final = 0.05
"""How often whoever waits for a turn hears of signals that are held."""


class Turns:
    """A re-entrant lock. On a CUDA device, each turn's stream waits for the work of the turn before, whatever its stream.

    Parameters
    ----------
    device
        Whose streams order the work of turns, whatever device is the current one; a CPU's needs no order.

    Examples
    --------
    >>> turns = Turns()
    >>> with turns, turns:
    ...     turns.is_alone
    True
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._lock, self._owner, self._depth = threading.Lock(), 0, 0
        self._device = device if device is not None and device.type == "cuda" else None
        self._last: torch.cuda.Stream | None = None

    def __enter__(self) -> Self:
        if self._owner != threading.get_ident():
            while not self._lock.acquire(timeout=HEARD_S):
                hear_interrupts()
            self._owner = threading.get_ident()
        self._depth += 1
        if self._last is not None:
            current = torch.cuda.current_stream(self._device)
            if current != self._last:
                current.wait_stream(self._last)
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if self._device is not None:  # where it raised, too: a step may be on its way
                self._last = torch.cuda.current_stream(self._device)
        finally:
            self._depth -= 1
            if not self._depth:
                self._owner = 0
                self._lock.release()

    def whole(self) -> AbstractContextManager[object]:
        """Return a turn that ends with the block, though a signal has kept turns within it from ending.

        It is itself out of their reach where signals are held when it begins and when it ends.
        """
        return _Whole(self)

    @property
    def is_alone(self) -> bool:
        """Whether no other thread can have a turn before the caller asks for the next: there is none, or this turn is
        within another one of the same thread."""
        return self._depth > 1 or threading.active_count() == 1


class _Whole:
    """A turn that knows how many were around it."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __enter__(self) -> None:
        self._turns.__enter__()
        self._depth = self._turns._depth

    def __exit__(self, *error: object) -> None:
        self._turns._depth = self._depth
        self._turns.__exit__(*error)
