"""How long steps take, and how many tokens of prompts they have time for beside running blocks.

A plan counts all keys that there are, whoever owns them, and does not know those that a prompt's chunk sees. So its times serve
until steps have been timed.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Final

import numpy as np

from mosaic.registrar.request_table import Reported

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mosaic.runtime.request_table import Launched, Served

__all__ = ["Pace"]

KEPT: Final = 8
"""Times of which the median counts: one that waited for a plan says nothing."""
CHUNKS: Final = 16
"""Steps with prompts whose median by tokens counts, too: the short ones at a prompt's end take hardly more than blocks alone."""
FEW: Final = 8
"""Tokens of blocks for each token of prompts beside which these are few."""


class Pace:
    """The times of steps, with prompts and without.

    Examples
    --------
    >>> pace = Pace()
    >>> pace.note(1, 0, 10.0)
    >>> pace.note(1, 400, 18.0)
    >>> pace.alone_ms(1), pace.token_ms
    (10.0, 0.02)
    """

    def __init__(self) -> None:
        times = partial[deque[float]](deque, maxlen=KEPT)
        self._alone = defaultdict[int, deque[float]](times)
        self._beside = deque[tuple[float, int]](maxlen=CHUNKS)
        self._arrived = 0.0

    def take(self, step: Launched, served: Served, prefix: NDArray[np.int64], *, counts: bool) -> None:
        """Take note of a step that has arrived; `prefix`, [B], are the requests' tokens that are no block's. Its time `counts` if
        it ran alone, and not if it had prompts and no blocks: large products cost less a token."""
        began, self._arrived = max(self._arrived, step.started), perf_counter()
        if counts:
            blocks = (served.decided > 0) | (served.report[:, Reported.BEGIN] >= prefix)
            own = int(np.add.reduce(served.report[blocks, Reported.TOKENS]))
            prompts = 0 if np.logical_and.reduce(blocks) else step.room.tokens - own
            if own or not prompts:
                self.note(step.groups, prompts, 1e3 * (self._arrived - began), own)

    def note(self, groups: int, tokens: int, ms: float, blocks: int = 0) -> None:
        """Take note of a step that served some groups, a bit each, with room for so many tokens of prompts beside those of blocks.

        A few are as good as none, or blocks that never come without prompts would be timed by the first of them.
        """
        if tokens <= blocks // FEW:
            self._alone[groups].append(ms)
        elif self._alone:
            alone_ms = self.alone_ms(groups) or min(map(statistics.median_low, self._alone.values()))
            self._beside.append((max(ms - alone_ms, 0.0) / tokens, tokens))

    def alone_ms(self, groups: int) -> float | None:
        """How long the longest of the steps without prompts takes that serve only some of these groups."""
        found = [statistics.median_low(times) for served, times in self._alone.items() if served & groups == served]
        return max(found, default=None)

    @property
    def token_ms(self) -> float | None:
        """How much longer a step takes for each token of prompts: the median of steps, or of tokens where that is more."""
        if not self._beside:
            return None
        of_steps, (rates, tokens) = [rate for rate, _ in self._beside][-KEPT:], np.array(sorted(self._beside)).T
        until = tokens.cumsum()
        return max(statistics.median_low(of_steps), float(rates[until.searchsorted(until[-1] / 2)]))
