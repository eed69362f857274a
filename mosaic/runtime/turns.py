"""Turns: one thread at a time has a model, and what the last one launched is done before the next one's work begins."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import torch

__all__ = ["Turns"]


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
        self._lock, self._depth = threading.RLock(), 0
        self._device = device if device is not None and device.type == "cuda" else None
        self._last: torch.cuda.Stream | None = None

    def __enter__(self) -> Self:
        self._lock.acquire()
        self._depth += 1
        if self._last is not None:
            current = torch.cuda.current_stream(self._device)
            if current != self._last:
                current.wait_stream(self._last)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._device is not None:  # where it raised, too: a step may be on its way
                self._last = torch.cuda.current_stream(self._device)
        finally:
            self._depth -= 1
            self._lock.release()

    @property
    def is_alone(self) -> bool:
        """Whether no other thread can have a turn before the caller asks for the next: there is none, or this turn is
        within another one of the same thread."""
        return self._depth > 1 or threading.active_count() == 1
