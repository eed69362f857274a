"""What a request of a table wants of its next step: shared by kernels on the CPU and by the host, which plans steps by it.

Arrays are int64, a value for each request. Legend: S requests, C columns.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mosaic.registrar.request_table import FIRST_ALONE, FIRST_ONES, FROM_BLOCK, MARKED_STEPS, RUNNING, Column

__all__ = ["Wanted", "bits", "closes", "floats", "mixed", "quotas", "wanted"]

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


def closes(table_SC: Ints) -> NDArray[np.bool_]:
    """Return whether the next step of each request's block writes what precedes it, and decides its first position alone, [S]."""
    return (table_SC[:, Column.SHIFTED] != 0) & (table_SC[:, Column.BEFORE] > 0)


def wanted(table_SC: Ints) -> Wanted:
    """Return what the requests of a table ask for."""
    column = table_SC.T
    fills, closing, wide = column[Column.WRITTEN] < column[Column.PREFIX], closes(table_SC), column[Column.WIDE] != 0
    start, length, opened = column[Column.START], column[Column.LENGTH], column[Column.OPEN]
    span = start - start % np.maximum(column[Column.SPAN], 1)  # rows of nobody have none
    span_end = np.minimum(span + column[Column.SPAN], length)
    to_end = wide | (column[Column.WINDOW] == FROM_BLOCK)
    decides, first = column[Column.DECIDES], column[Column.NUMBER] == 0
    rows = np.where(decides == FIRST_ONES, np.minimum(quotas(table_SC), opened), opened)
    return Wanted(
        running=column[Column.STATE] == RUNNING,
        fills=fills,
        begin=np.where(fills, column[Column.WRITTEN], np.where(wide, span, start) - column[Column.BEFORE]),
        end=np.where(
            fills,
            column[Column.PREFIX],
            np.where(closing, start, np.where(to_end, span_end, start + column[Column.BLOCK])),
        ),
        seen=np.where(fills, 0, np.where(closing, start, span_end)),
        rows=np.where(fills, 0, np.where(closing | (first & (decides == FIRST_ALONE)), 1, rows)),
        group=np.where(fills, 0, column[Column.GROUP]),
        marked=~fills & (column[Column.MARKS] >> np.minimum(column[Column.NUMBER], MARKED_STEPS) & 1 != 0),
    )
