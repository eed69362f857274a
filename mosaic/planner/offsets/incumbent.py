"""The best answer so far, the best bound so far, and the clock, if there is one. No answer gets past unchecked."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .blocks import Blocks
from .problem import Solution
from .validity import Guard

_log = logging.getLogger(__name__)


class OutOfTime(Exception):
    """The timeout has passed in the middle of a pass; never leaves this package."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """An outside solver's answer: offsets (None if none), a proven bound in bytes, whether nothing better exists."""

    offsets: list[int] | None
    bound: int
    exhausted: bool


class Incumbent:
    """Collects answers and refutations for one problem; the clock is read only if a timeout is given."""

    def __init__(self, blocks: Blocks, timeout_s: float | None) -> None:
        self._blocks = blocks
        self._guard: Guard | None = None
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
        return self.seconds_left <= 0

    @property
    def seconds_left(self) -> float:
        """Seconds until the timeout; infinite without one."""
        return math.inf if self._timeout_s is None else self._timeout_s - self.seconds

    def tick(self) -> None:
        """Raise OutOfTime once the timeout has passed; long passes call it every now and then."""
        if self.late:
            raise OutOfTime

    @property
    def done(self) -> bool:
        """True if nothing better can exist or is asked for: a given capacity is reached, or proven too small."""
        capacity = self._blocks.capacity
        return self.offsets is not None and (self.peak <= self.goal or (capacity is not None and capacity < self.bound))

    @property
    def goal(self) -> int:
        """The peak to reach: the capacity, or the bound where that is higher or none is given."""
        return max(self.bound, self._blocks.capacity or 0)

    def offer(self, offsets: Sequence[int], solver: str) -> bool:
        """Keep an answer, one offset per block, if it holds and is the first or better; return whether it is kept.

        One that does not hold is dropped, and logged with the solver's name.
        """
        peak = self._blocks.peak(offsets) if len(self._blocks) else self._blocks.lower_bound
        if self.offsets is not None and peak >= self.peak:
            return False
        if fault := self._fault(offsets):
            _log.warning("dropped an answer of the solver %s: %s", solver, fault)
            return False
        self.offsets, self.peak, self._solver = list(offsets), peak, solver
        self._history.append((self.seconds, peak))
        return True

    def _fault(self, offsets: Sequence[int]) -> str | None:
        if len(offsets) != len(self._blocks):
            return f"{len(offsets)} offsets for {len(self._blocks)} blocks"
        self._guard = self._guard or Guard(self._blocks.problem)
        return self._guard.fault(self._blocks.expand(offsets))

    def refute(self, capacity: int, step: int, solver: str) -> None:
        """Note that nothing fits a capacity, by a solver's word; peaks are multiples of `step`."""
        self.raise_bound((capacity // step + 1) * step, solver)

    def raise_bound(self, bound: int, solver: str) -> None:
        """Note that no peak is below a bound; dropped, and logged, where a checked answer shows otherwise."""
        if self.offsets is not None and bound > self.peak:
            _log.warning(
                "dropped a bound of the solver %s: %d bytes, but a peak of %d is reached", solver, bound, self.peak
            )
        else:
            self.bound = max(self.bound, bound)

    def solution(self) -> Solution:
        """Return the answer as it stands."""
        assert self.offsets is not None
        problem = self._blocks.problem
        offsets = self._blocks.expand(self.offsets)
        peak = max(map(int.__add__, offsets, problem.sizes), default=0)
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
