"""The numbers of blocks that steps of a table have room for: so few that their plans are soon there."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from mosaic.models.step import bucket

__all__ = ["COARSE", "SHARES", "below", "most_of", "rung", "rungs"]

SHARES: Final = 8
"""Rungs between a number of blocks and twice as many."""
COARSE: Final = 2
"""The same where a step can do with less than it is asked for: prompts beside blocks."""


@lru_cache(maxsize=4096)
def rung(blocks: int) -> int:
    """Return the rung of at least so many blocks.

    >>> [rung(blocks) for blocks in (3, 16, 17, 121)]
    [3, 16, 18, 128]
    """
    return bucket(blocks, share=SHARES)


def below(blocks: int, share: int = SHARES) -> int:
    """Return the next lower rung.

    >>> [below(blocks) for blocks in (2, 16, 18, 128)], below(128, share=COARSE)
    ([1, 15, 16, 120], 96)
    """
    step = 1 << max((blocks - 1).bit_length() - share.bit_length(), 0)
    return (blocks - 1) // step * step


def rungs(least: int, most: int) -> list[int]:
    """Return coarse rungs from one number of blocks to another, and these, ascending.

    >>> rungs(15, 40)
    [15, 16, 24, 32, 40]
    """
    found = [most]
    while found[-1] > least:
        found.append(max(below(found[-1], COARSE), least))
    return found[::-1]


def most_of(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `most` that fits, if all smaller ones do; 0 if none."""
    return bisect_left(range(1, most + 1), True, key=lambda count: not fits(count))
