"""How long steps take, and how many tokens of prompts they have time for beside running blocks.

A plan counts all keys that there are, whoever owns them, and does not know those that a prompt's chunk sees. So its times serve
until steps have been timed; then they say how much longer more blocks take than those that were timed.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
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
LEAST: Final = 0.25
MOST: Final = 2.0
"""What a token of prompts costs, in times of what it is planned to. Blocks that were timed when they were few may take longer or
shorter, once they are many, than the plan makes of that, and what they take more is counted as the prompts'."""
TINY: Final = 1e-9


class Pace:
    """The times of steps, with prompts and without.

    Examples
    --------
    >>> pace = Pace()
    >>> pace.note(1, 0, 10.0, planned_ms=5.0)
    >>> pace.note(1, 400, 28.0, planned_ms=10.0)  # twice the blocks, beside a prompt
    >>> pace.alone_ms(1), pace.slower(1), pace.token_ms(1)
    (10.0, 2.0, 0.02)
    """

    def __init__(self) -> None:
        times = partial[deque[tuple[float, float]]](deque, maxlen=KEPT)
        # by groups: milliseconds, and how many times the planned ones they are
        self._alone = defaultdict[int, deque[tuple[float, float]]](times)
        # of prompts beside blocks, and alone: large products cost less a token
        self._prompts = deque[tuple[float, int]](maxlen=CHUNKS), deque[tuple[float, int]](maxlen=CHUNKS)
        self._arrived = 0.0

    def take(
        self, step: Launched, served: Served, prefix: NDArray[np.int64], planned_ms: Callable[[int], float], *, counts: bool
    ) -> None:  # fmt: skip
        """Take note of a step that has arrived; `prefix`, [B], are the requests' tokens that are no block's, and `planned_ms` says
        how long such a step takes with so many tokens of blocks alone. Its time `counts` if it ran alone.
        """
        began, self._arrived = max(self._arrived, step.started), perf_counter()
        if counts:
            blocks = (served.decided > 0) | (served.report[:, Reported.BEGIN] >= prefix)
            own = int(np.add.reduce(served.report[blocks, Reported.TOKENS]))
            prompts = 0 if np.logical_and.reduce(blocks) else step.room.tokens - own
            planned = planned_ms(own if prompts else step.room.tokens)
            groups = step.groups if own or not prompts else 0
            self.note(groups, prompts, 1e3 * (self._arrived - began), own, planned_ms=planned)

    def note(self, groups: int, tokens: int, ms: float, blocks: int = 0, *, planned_ms: float) -> None:
        """Take note of a step that served blocks of some groups, a bit each, with room for so many tokens of prompts beside those
        of blocks, which alone were planned to take `planned_ms`. A few tokens are as good as none."""
        if groups and tokens <= blocks // FEW:
            self._alone[groups].append((ms, ms / max(planned_ms, TINY)))
        elif self._alone or not groups:
            slower = self.slower(groups) or (min(map(_median, self._alone.values()))[1] if groups else 1.0)
            self._prompts[not groups].append((max(ms - slower * planned_ms, 0.0) / tokens, tokens))

    def alone_ms(self, groups: int) -> float | None:
        """How long the longest of the steps without prompts takes that serve only some of these groups."""
        return max((ms for ms, _ in self._of(groups)), default=None)

    def slower(self, groups: int) -> float | None:
        """How many times as long as planned such steps take."""
        return max((times for _, times in self._of(groups)), default=None)

    def _of(self, groups: int) -> list[tuple[float, float]]:
        return [_median(times) for served, times in self._alone.items() if served & groups == served]

    def time_for(
        self, groups: int, running: int, planned_ms: float, token_ms: float, few: int, pace: float, delay_ms: float
    ) -> float:
        """Return for how many tokens of prompts a step has time beside blocks.

        Parameters
        ----------
        groups, planned_ms, token_ms
            Of the step: whom it serves, what it is planned to take without prompts, and for each token of prompts.
        running
            The groups that have blocks: none is delayed longer than by the longest of its own steps. If the step serves none of
            these, its prompts are alone.
        few
            Tokens that there is time for, unless the delay is too long.
        pace, delay_ms
            How many times as long as without prompts the step may take, and how much longer, whatever a plan says.
        """
        groups = groups if groups & running else 0
        slower = self.slower(groups) or 1.0
        own_ms = planned_ms * slower
        spare_ms = max((self.alone_ms(running & ~groups) or 0.0) - own_ms, 0.0)
        cost = usual = max(token_ms, TINY)
        if (found := self.token_ms(groups)) is not None:
            cost = max(found, LEAST * slower * token_ms, TINY)
            usual = min(cost, MOST * slower * token_ms or cost)
        more = max((pace - 1) * (own_ms + spare_ms) / usual, few)
        return min((spare_ms + delay_ms) / cost, spare_ms / usual + more)

    def token_ms(self, groups: int) -> float | None:
        """How much longer a step with blocks of some groups, or none, takes for each token of prompts: the median of steps, or of
        tokens where that is more."""
        beside, alone = self._prompts
        if not (timed := beside if groups else alone or beside):
            return None
        of_steps, (rates, tokens) = [rate for rate, _ in timed][-KEPT:], np.array(sorted(timed)).T
        until = tokens.cumsum()
        return max(statistics.median_low(of_steps), float(rates[until.searchsorted(until[-1] / 2)]))


def _median(times: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The lower median of each."""
    ms, slower = zip(*times, strict=True)
    return statistics.median_low(ms), statistics.median_low(slower)
