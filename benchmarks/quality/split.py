"""The split into training and evaluation items: a fixed hash of an item's key decides, independent of seeds.

The training stream draws a key again where `held_out` says so, and evaluation where it does not: no item can be in
both, and whether a stream keeps to it is checked by the same rule.
"""

from __future__ import annotations

import zlib
from typing import Final

__all__ = ["HELD_OUT_SHARE", "held_out"]

HELD_OUT_SHARE: Final = 1 / 16


def held_out(*key: str | int) -> bool:
    """Return whether an item is kept for evaluation.

    Parameters
    ----------
    key
        The parts that identify the item: ("code", "Anna", "4821"), ("+", 285, 347).

    Examples
    --------
    >>> sum(held_out("+", a, b) for a in range(100) for b in range(100)) / 100**2  # doctest: +ELLIPSIS
    0.06...
    """
    return zlib.crc32("|".join(map(str, key)).encode()) % round(1 / HELD_OUT_SHARE) == 0
