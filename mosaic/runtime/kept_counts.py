"""How many rows earlier steps kept: the size of a step's second graph is guessed from it."""

from __future__ import annotations

from collections.abc import Hashable
from math import ceil

RATE = 0.125
"""The weight of the latest step in the running averages."""
SPREAD = 2.0
"""Mean deviations above the mean that a guess leaves room for."""


class KeptCounts:
    """Running shares of rows kept, by kind of step.

    Examples
    --------
    >>> counts = KeptCounts()
    >>> counts.expected("focus", 64) is None
    True
    >>> for kept in (16, 16, 18, 16):
    ...     counts.note("focus", kept, 64)
    >>> counts.expected("focus", 64), counts.expected("focus", 128)
    (17, 34)
    """

    def __init__(self) -> None:
        self._shares: dict[Hashable, tuple[float, float]] = {}  # mean, and mean deviation from it

    def note(self, kind: Hashable, kept: int, tokens: int) -> None:
        """Note a step that kept `kept` of `tokens` rows."""
        share = kept / tokens
        mean, deviation = self._shares.get(kind, (share, 0.0))
        away = share - mean
        self._shares[kind] = mean + RATE * away, deviation + RATE * (abs(away) - deviation)

    def expected(self, kind: Hashable, tokens: int) -> int | None:
        """Return a likely upper bound of the rows that a step of `tokens` rows keeps; None if no step was noted."""
        if kind not in self._shares:
            return None
        mean, deviation = self._shares[kind]
        return min(ceil((mean + SPREAD * deviation) * tokens - 1e-6), tokens)
