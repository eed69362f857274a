"""How far a job is, on stderr: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self, TextIO

from mosaic.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from mosaic.decoding.stream import Stream

__all__ = ["Progress"]

_BAR_S: Final = 0.2
_LINE_S: Final = 5.0
_BAR: Final = 20


class Progress:
    """Says after a step of a stream how far it is, if it is time: answers, tokens a second, forwards, memory, time left.

    Parameters
    ----------
    memory
        Gives a model's `MemoryReport`.
    share
        Gives the part of the job that is done, 0 to 1.
    file, clock
        Where it is said, and what tells the time in seconds.

    Attributes
    ----------
    answers
        Counted up by whoever has an answer.
    """

    def __init__(
        self, memory: Callable[[], Any], share: Callable[[], float], *, file: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._memory, self._share, self._file, self._clock = memory, share, file or sys.stderr, clock
        self._drawn, self._every = self._file.isatty(), _BAR_S if self._file.isatty() else _LINE_S
        self._began = self._said = clock()
        self._before, self._width = share(), 0
        self.answers = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._width:
            self._file.write(f"\r{'':{self._width}}\r")
            self._file.flush()

    def __call__(self, stream: Stream) -> None:
        """Say it, if it is time."""
        now = self._clock()
        if now - self._said < self._every:
            return
        self._said = now
        share, text = self._share(), self.line(stream)
        if share > self._before:
            left = (now - self._began) * (1 - share) / (share - self._before)
            text += f", {format_seconds(left)} left"
        if self._drawn:
            full = round(share * _BAR)
            text = f"[{'#' * full}{'.' * (_BAR - full)}] {text}"
            self._file.write(f"\r{text:{self._width}}")
            self._width = len(text)
        else:
            self._file.write(f"mosaic: {text}\n")
        self._file.flush()

    def line(self, stream: Stream) -> str:
        """Return the figures up to now in a line."""
        report = self._memory()
        used = sum(report.resident.values())
        rate = stream.tokens / max(self._clock() - self._began, 1e-9)
        return (
            f"{self.answers:,} answers, {rate:,.1f} tokens/s, {stream.forwards:,} forwards, {format_bytes(used)} of "
            f"{format_bytes(report.budget_bytes)}"
        )
