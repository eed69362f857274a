"""The table of requests as it will be when steps that are in flight have ended, as far as the host can say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from mosaic.decoding.rows import ALL
from mosaic.kernels.shared.requests import bits, closes, held, packed_until, quotas, turns, wanted, widens
from mosaic.registrar.request_table import ALL_ONES, CANVAS_LONG, ENDED, OPEN_ONES, PACKED, WHOLE, Column

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mosaic.runtime.request_table import Launched

__all__ = ["counted", "go_on", "left"]

_NEVER: Final = bits(ALL)
"""The column of a threshold that no score passes."""


def counted(columns: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether steps of each request commit just their quota: there is no threshold, or they look at no other rows."""
    decides, threshold = columns[:, Column.DECIDES], columns[:, Column.THRESHOLD]
    found: NDArray[np.bool_] = (threshold == _NEVER) | ((decides != OPEN_ONES) & (decides != ALL_ONES))
    return found


def left(row: NDArray[np.int64]) -> tuple[int, int]:
    """Return the steps that a request takes at most from its prompt on, and the spans of that whose keys are not written."""
    column = [int(value) for value in row]
    of_block = (column[Column.BLOCK] - column[Column.MORE]) // column[Column.QUOTA] + 2 * column[Column.SHIFTED]
    of_block = column[Column.SCHEDULE] or of_block + column[Column.POST_STEPS]
    blocks = -(-(column[Column.END] - column[Column.START]) // column[Column.BLOCK])
    return blocks * of_block, -(-max(column[Column.PREFIX] - column[Column.WRITTEN], 0) // column[Column.SPAN])


def go_on(columns: NDArray[np.int64], step: Launched, usual: int) -> None:
    """Move a table on by a step, as far as the host can say: requests decide as many tokens as they have to, or as is usual."""
    asked, column = wanted(columns), columns.T
    asks, length = asked.of_step(step.groups, marked=step.marked, tokens=step.room.tokens), asked.length
    if step.holds:
        asks = asks & ~held(columns, asked)
    order = turns(columns).argsort(kind="stable")
    decides = order[(asks & ~asked.fills)[order]]
    tokens = length[decides].cumsum()
    fit = (tokens <= step.room.tokens) & (asked.rows[decides].cumsum() <= step.room.rows)
    served, used = decides[fit], int(tokens[fit][-1]) if np.logical_or.reduce(fit) else 0
    fills = order[(asks & asked.fills)[order]]
    before = length[fills].cumsum() - length[fills]
    given = np.minimum(np.maximum(step.room.tokens - used - before, 0), length[fills])
    column[Column.WRITTEN, fills] += given // column[Column.SPAN, fills] * column[Column.SPAN, fills]
    least, exactly = quotas(columns[served]), counted(columns[served])
    column[Column.SERVED, served] = column[Column.SERVED].max(initial=0) + 1
    column[Column.OPEN, served] -= np.minimum(np.where(exactly, least, np.maximum(least, usual)), asked.rows[served])
    column[Column.WRITTEN, served] = packed_until(columns[served])
    column[Column.NUMBER, served] += ~closes(columns[served])
    column[Column.BEFORE, served] = 0
    done = served[column[Column.OPEN, served] <= 0]
    column[Column.START, done] += column[Column.BLOCK, done]
    column[Column.OPEN, done], span = column[Column.BLOCK, done], column[Column.SPAN, done]
    column[Column.BEFORE, done] = np.where(column[Column.START, done] % span, 0, span)
    column[Column.NUMBER, done[(column[Column.BEFORE, done] > 0) | (span == CANVAS_LONG)]] = 0
    window, first = column[Column.WINDOW, served], column[Column.NUMBER, served] == 0
    column[Column.WIDE, served] = np.where(window == PACKED, widens(columns[served]), (window == WHOLE) | first)
    column[Column.STATE, done[column[Column.START, done] >= column[Column.END, done]]] = ENDED
