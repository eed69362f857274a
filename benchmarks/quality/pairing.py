"""Differences between two runs over the same items: exact McNemar for right and wrong, paired bootstrap for the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["RESAMPLES", "difference", "mcnemar", "ratio"]

RESAMPLES: Final = 2_000
LEVEL: Final = 0.95


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided probability of a split at least as uneven, if either way were equally likely (McNemar, exact).

    Examples
    --------
    >>> mcnemar(0, 0), mcnemar(0, 6)
    (1.0, 0.03125)
    """
    count = gained + lost
    tail = sum(math.comb(count, n) for n in range(min(gained, lost) + 1))
    return min(1.0, float(Fraction(2 * tail, 2**count)))  # exact integers: floats end at 2**1024


def difference(values: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """Return the mean of value - baseline over pairs, and its bootstrap interval of 95 %."""
    pairs = np.asarray(values, np.float64) - np.asarray(baseline, np.float64)
    low, high = _interval(pairs[_resampled(len(pairs))].mean(1))
    return {"difference": float(pairs.mean()), "low": low, "high": high}


def ratio(values: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """Return the sum of values over that of the baseline, and its bootstrap interval of 95 %, pairs kept together."""
    top, bottom = np.asarray(values, np.float64), np.asarray(baseline, np.float64)
    drawn = _resampled(len(top))
    low, high = _interval(top[drawn].sum(1) / bottom[drawn].sum(1))
    return {"ratio": float(top.sum() / bottom.sum()), "low": low, "high": high}


def _resampled(count: int) -> npt.NDArray[np.int64]:
    """Indices [`RESAMPLES`, count], the same for the same count."""
    return np.random.default_rng(count).integers(0, count, (RESAMPLES, count))


def _interval(found: Any) -> tuple[float, float]:
    low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
