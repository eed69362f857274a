"""The best answer so far, the best bound so far, and the clock, if there is one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from .blocks import Blocks
from .problem import Problem, Solution

__all__ = ["Incumbent", "Outcome"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an outside solver says: offsets (None if none), a proven bound in bytes, whether nothing better exists."""

    offsets: list[int] | None
    bound: int
    exhausted: bool


class Incumbent:
    """Collects answers and refutations for one problem.

    The clock is read only if a timeout is given.
    """

    def __init__(self, blocks: Blocks, timeout_s: float | None) -> None:
        self._blocks = blocks
        self._timeout_s = timeout_s
        self._began = time.perf_counter() if timeout_s is not None else 0.0
        self._history: list[tuple[float, int]] = []
        self._solver = ""
        self.offsets: list[int] | None = None
        self.peak = sum(blocks.sizes) + 1 if blocks.sizes else 0
        self.bound = blocks.lower_bound
        """No peak is below this."""

    @property
    def seconds(self) -> float:
        """Seconds since the start, or 0.0 without a timeout."""
        return time.perf_counter() - self._began if self._timeout_s is not None else 0.0

    @property
    def late(self) -> bool:
        """True once the timeout has passed."""
        return self._timeout_s is not None and self.seconds >= self._timeout_s

    @property
    def done(self) -> bool:
        """True if nothing better can exist."""
        return self.offsets is not None and self.peak <= self.bound

    def offer(self, offsets: Sequence[int], solver: str) -> None:
        """Keep an answer if it is the first or better."""
        peak = max(self._blocks.peak(offsets), self._blocks.lower_bound if not self._blocks.sizes else 0)
        if self.offsets is None or peak < self.peak:
            self.offsets, self.peak, self._solver = list(offsets), peak, solver
            self._history.append((self.seconds, peak))

    def refute(self, capacity: int, step: int) -> None:
        """Note that nothing fits a capacity; peaks are multiples of `step`."""
        self.bound = max(self.bound, (capacity // step + 1) * step)

    def solution(self, problem: Problem) -> Solution:
        """Return the answer as it stands."""
        assert self.offsets is not None
        offsets = self._blocks.expand(self.offsets)
        peak = max((o + s for o, s in zip(offsets, problem.sizes, strict=True)), default=0)
        return Solution(
            offsets=offsets,
            peak_bytes=peak,
            lower_bound_bytes=self._blocks.lower_bound,
            optimal=self.peak <= self.bound,
            solver=self._solver,
            seconds=self.seconds,
            capacity=problem.capacity,
            proven_bound_bytes=min(self.bound, peak),
            history=tuple(self._history),
        )
