"""Rows or tokens in the order of their scores, the highest first, ties to the lower index, sorted in the plan's memory.

Element i of score s becomes the integer -rank(s) * 2^32 + i, where rank orders the float32 numbers as their bits do. All
integers differ, so NumPy's sort in place gives the one order, and a binary search counts the scores above a threshold.
Shared by transfer and row_nucleus.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int64]
_INDEX_BITS: Final = 32
_INDICES: Final = np.arange(4096)


def fill_order(order: Order, ranks: NDArray[np.int32], scores: NDArray[np.float32]) -> None:
    """Fill `order` [M] with what sorts as the scores [M] do; `ranks` [M] is written too. No score is NaN or -0.0."""
    bits = scores.view(np.int32)
    # negative numbers have larger bits the lower they are: flip all but the sign
    np.right_shift(bits, 31, out=ranks)
    np.bitwise_and(ranks, 0x7FFFFFFF, out=ranks)
    np.bitwise_xor(ranks, bits, out=ranks)
    np.copyto(order, ranks)
    np.negative(order, out=order)
    np.left_shift(order, _INDEX_BITS, out=order)
    for start in range(0, len(order), len(_INDICES)):
        part = order[start : start + len(_INDICES)]
        np.add(part, start, out=part)
        np.add(part, _INDICES[: len(part)], out=part)


def indices_of(order: Order) -> Order:
    """Turn what was sorted into the indices, in place."""
    np.bitwise_and(order, 2**_INDEX_BITS - 1, out=order)
    return order


def above(order: Order, score: float) -> int:
    """Count the scores above a float32, in a sorted order."""
    return int(np.searchsorted(order, -_rank(score) << _INDEX_BITS))


def at_least(order: Order, score: float) -> int:
    """Count the scores that are at least a float32, in a sorted order."""
    return int(np.searchsorted(order, 1 - _rank(score) << _INDEX_BITS))


def _rank(score: float) -> int:
    bits = int(np.float32(score + 0.0).view(np.int32))
    return bits if bits >= 0 else bits ^ 0x7FFFFFFF
