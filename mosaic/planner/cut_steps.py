"""Whether cutting a step saves time: two graphs, the second over the kept rows, compared with the whole step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PAYS: Final = 0.98
"""The largest share of a whole step's time at which a cut step is taken: predictions are not more precise."""


def pays_up_to(whole_ms: float, prefix_ms: float, suffix_ms: Mapping[int, float]) -> int:
    """Return the most rows that a cut step may keep and still be faster than the whole step; 0: it never is.

    Parameters
    ----------
    whole_ms, prefix_ms
        Milliseconds of the step whole, and of the first graph.
    suffix_ms
        By number of kept rows, milliseconds of the second graph.

    Examples
    --------
    >>> pays_up_to(5.0, 0.4, {64: 4.0, 128: 4.4, 256: 5.2})
    128
    >>> pays_up_to(5.0, 0.4, {64: 4.6})
    0
    """
    return max((kept for kept, ms in suffix_ms.items() if prefix_ms + ms <= PAYS * whole_ms), default=0)
