"""The largest context that runs, by trying: grow or shrink from a guess, then bisect."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["largest"]


def largest(runs: Callable[[int], bool], *, guess: int, step: int, most: int) -> int:
    """Find the largest multiple of `step`, at most `most`, at which `runs` is true; 0 if there is none.

    Needs that `runs` is true up to some context and false beyond. A good guess saves tries: the bracket starts at an
    eighth of it and doubles.

    Examples
    --------
    >>> largest(lambda tokens: tokens <= 19000, guess=16000, step=256, most=1 << 20)
    18944
    """
    top = most // step
    at = min(max(guess // step, 1), top)
    width = max(at // 8, 1)
    if top < 1:
        return 0
    if runs(at * step):
        low, high = at, at
        while low == high and high < top:
            high = min(high + width, top)
            width *= 2
            if runs(high * step):
                low = high
        if low == high:
            return low * step
    else:
        low, high = at, at
        while low == high and low > 0:
            low = max(low - width, 0)
            width *= 2
            if low and not runs(low * step):
                high = low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle * step) else (low, middle)
    return low * step
