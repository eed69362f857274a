"""How many rows earlier steps kept: the size of a step's second graph is guessed from it."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RATE = 0.125
"""The weight of the latest step in the running averages."""
LONGEST = 4096
"""A bound of what a request keeps of a block."""
SPREAD = 2.0
"""Mean deviations above the mean that a guess leaves room for."""


class KeptShare:
    """The running share of rows kept.

    Examples
    --------
    >>> share = KeptShare()
    >>> share.expected(64) is None
    True
    >>> for kept in (16, 16, 18, 16):
    ...     share.note(kept, 64)
    >>> share.expected(64), share.expected(128)
    (17, 34)
    """

    def __init__(self) -> None:
        self._share: tuple[float, float] | None = None  # mean, and mean deviation from it

    def note(self, kept: int, tokens: int) -> None:
        """Note a step that kept `kept` of `tokens` rows."""
        share = kept / tokens
        mean, deviation = self._share or (share, 0.0)
        away = share - mean
        self._share = mean + RATE * away, deviation + RATE * (abs(away) - deviation)

    def expected(self, tokens: int) -> int | None:
        """Return a likely upper bound of the rows that a step of `tokens` rows keeps; None if no step was noted."""
        if self._share is None:
            return None
        mean, deviation = self._share
        return min(ceil((mean + SPREAD * deviation) * tokens - 1e-6), tokens)


class Keeping(NamedTuple):
    """How many rows a step is expected to keep, and a function to be told how many it has kept."""

    expected: int
    note: Callable[[int], None]


class KeptOfRequests:
    """What steps keep over requests of a table: all that is decided, and of the positions that are open some.

    In the first step of a block a request keeps a share of them, in later ones a number: both are averages of earlier steps.

    Examples
    --------
    >>> kept, later = KeptOfRequests(), np.array([False, False])
    >>> kept.expect(np.array([8, 8]), np.array([5, 6]), later).note(9)
    >>> kept.expect(np.array([8, 8]), np.array([2, 3]), later).expected
    15
    """

    def __init__(self) -> None:
        self._first, self._later = KeptShare(), KeptShare()

    def expect(self, length: NDArray[np.int64], positions: NDArray[np.int64], first: NDArray[np.bool_]) -> Keeping:
        """Return what a step keeps, by tokens and open positions of each window, and whose first step of a block it is."""
        certain, count = int((length - positions).sum()), int((~first).sum())
        begun, going = int(positions[first].sum()), int(positions[~first].sum())
        likely = self._first.expected(begun)
        many = self._later.expected(count * LONGEST)
        kept_first = begun if likely is None else likely
        expected = certain + kept_first + (going if many is None else min(many, going))

        def note(kept: int) -> None:
            if count:
                self._later.note(max(kept - certain - kept_first, 0), count * LONGEST)
            elif begun:
                self._first.note(kept - certain, begun)

        return Keeping(expected, note)
