"""What a request of a table wants of its next step: shared by kernels on the CPU and by the host, which plans steps by it.

Arrays are int64, a value for each request. Legend: S requests, C columns.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mosaic.registrar.request_table import BY_BLOCKS, FROM_BLOCK, MARKED_STEPS, RUNNING, Column

__all__ = ["Wanted", "bits", "floats", "marked", "mixed", "quotas", "wanted"]

Ints: TypeAlias = NDArray[np.int64]
Words: TypeAlias = NDArray[np.uint64]
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Wanted(NamedTuple):
    """Windows [begin, end) that requests ask for, the keys that they see, rows to decide, and who asks for tokens of its prompt.

    `running` says who asks at all: of others the rest says nothing. `group` is the one whose steps it asks for, `marked` whether it
    has to be a marked step.
    """

    running: NDArray[np.bool_]
    fills: NDArray[np.bool_]
    begin: Ints
    end: Ints
    seen: Ints
    rows: Ints
    group: Ints
    marked: NDArray[np.bool_]


def mixed(words: Words) -> Words:
    """Return the finaliser of splitmix64 (Steele, Lea, Flood 2014) of each word, of which random keys are made."""
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))


def bits(value: float) -> int:
    """Return a number as a table has it: the bits of a float32."""
    return int(np.float32(value).view(np.int32))


def floats(column: Any) -> np.float32:
    """Return the number that `bits` was given."""
    return np.int32(column).view(np.float32)


def quotas(table_SC: Ints) -> Ints:
    """Return how many tokens the next step of each request's block commits at least, [S]."""
    return table_SC[:, Column.QUOTA] + (table_SC[:, Column.NUMBER] < table_SC[:, Column.MORE])


def marked(table_SC: Ints) -> NDArray[np.bool_]:
    """Return whether the next step of each request's block has its bit in MARKS, [S]."""
    found: NDArray[np.bool_] = (
        table_SC[:, Column.MARKS] >> np.minimum(table_SC[:, Column.NUMBER], MARKED_STEPS) & 1 != 0
    )
    return found


def wanted(table_SC: Ints) -> Wanted:
    """Return what the requests of a table ask for."""
    column = table_SC.T
    fills = column[Column.WRITTEN] < column[Column.PREFIX]
    start, length, window = column[Column.START], column[Column.LENGTH], column[Column.WINDOW]
    first, blocks = column[Column.NUMBER] == 0, window == BY_BLOCKS
    whole = (first & ~blocks) | (window == FROM_BLOCK)
    begin = np.where(first, np.where(blocks, start - column[Column.BEFORE], 0), start)
    end = np.where(whole, length, start + column[Column.BLOCK])
    rows = np.where(
        column[Column.IN_ORDER] != 0, np.minimum(quotas(table_SC), column[Column.OPEN]), column[Column.OPEN]
    )
    return Wanted(
        running=column[Column.STATE] == RUNNING,
        fills=fills,
        begin=np.where(fills, column[Column.WRITTEN], begin),
        end=np.where(fills, column[Column.PREFIX], end),
        seen=np.where(fills, 0, np.where(blocks, end, length)),
        rows=np.where(fills, 0, rows),
        group=np.where(fills, 0, column[Column.GROUP]),
        marked=~fills & marked(table_SC),
    )
