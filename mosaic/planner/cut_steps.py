"""Whether it pays to cut a step: two graphs, the second over the rows that are kept, beside the step whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PAYS: Final = 0.98
"""The share of a whole step's time that a cut one may take to be worth it: predictions are not closer."""


def pays_up_to(whole_ms: float, prefix_ms: float, suffix_ms: Mapping[int, float]) -> int:
    """Return how many rows a cut step may keep and still take less time than a whole one; 0: it never does.

    Parameters
    ----------
    whole_ms, prefix_ms
        Milliseconds of the step whole, and of the first graph.
    suffix_ms
        By the rows that are kept, milliseconds of the second graph.

    Examples
    --------
    >>> pays_up_to(5.0, 0.4, {64: 4.0, 128: 4.4, 256: 5.2})
    128
    >>> pays_up_to(5.0, 0.4, {64: 4.6})
    0
    """
    return max((kept for kept, ms in suffix_ms.items() if prefix_ms + ms <= PAYS * whole_ms), default=0)
