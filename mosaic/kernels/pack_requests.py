"""pack_requests: which requests of a table a step serves, and the bounds of their windows.

Outputs overlap no operand. Legend: S requests, C columns, B windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.requests import held, turns, wanted
from mosaic.registrar.operators.pack_requests import KEPT_SHARE, PATIENCE, TOGETHER
from mosaic.registrar.request_table import Column


def bind(
    *, table: Tensor, room: Tensor, row: Tensor, begin: Tensor, seen: Tensor, cu_seqlens: Tensor, cu_rows: Tensor,
    cu_extents: Tensor, sequences: int = 0, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Update SERVED in the table, and write all outputs."""
    table_SC, given, bounds = table.numpy(), room.numpy(), (cu_seqlens, cu_rows, cu_extents)
    of_windows, ends = (row.numpy(), begin.numpy(), seen.numpy()), [each.numpy() for each in bounds]

    def run() -> None:
        first, count, *most = given[0].tolist()
        mine = table_SC[first : first + count]
        for values, nothing in zip(of_windows, (-1, 0, 0), strict=True):
            values.fill(nothing)
        windows = sorted(_served(mine, len(of_windows[0]), *most), key=lambda window: window.seen > 0)
        turn = mine[:, Column.SERVED].max(initial=0) + 1
        for i, window in enumerate(windows):
            if window.rows:
                mine[window.row, Column.SERVED] = turn
            for values, value in zip(of_windows, (first + window.row, window.begin, window.seen), strict=True):
                values[i] = value
        sizes = [(window.tokens, window.rows, window.extents) for window in windows]
        for bound, of_each in zip(ends, np.array(sizes, dtype=np.int64).reshape(-1, 3).T, strict=True):
            bound[0] = 0
            np.cumsum(of_each, out=bound[1 : len(windows) + 1])
            bound[len(windows) + 1 :] = bound[len(windows)]

    return run


launch = launcher(bind)


class _Window(NamedTuple):
    row: int
    begin: int
    seen: int
    tokens: int
    rows: int
    extents: int


def _served(
    mine: np.ndarray, sequences: int, tokens: int, rows: int, extents: int, groups: int, marked: int, holds: int
) -> Iterator[_Window]:
    """The windows of a step: first of those who decide, then of prompts."""
    asked, order = wanted(mine), np.argsort(turns(mine), kind="stable")
    asks, length = asked.of_step(groups, marked=marked != 0, tokens=tokens), asked.length
    if holds:
        asks &= ~held(mine, asked)
    fills = asks & asked.fills
    kept = 0
    if fills.any():
        oldest = order[fills[order]][0]
        if mine[:, Column.SERVED].max() + 1 - turns(mine)[oldest] >= PATIENCE:
            kept = max(tokens // KEPT_SHARE, int(mine[oldest, Column.SPAN]))
    room = np.array([1, tokens - kept, rows, extents]) * [sequences, 1, 1, 1]
    for i in order[(asks & ~asked.fills)[order]]:
        needs = [1, length[i], asked.rows[i], mine[i, Column.EXTENTS]]
        if (room < needs).any():
            break
        room -= needs
        yield _Window(i, asked.begin[i], asked.seen[i], needs[1], needs[2], needs[3])
    room[1] += kept
    for i in order[fills[order]]:
        span = mine[i, Column.SPAN]
        left = length[i]
        count = min(left, room[1]) // span * span
        needs = [1, count, 0, mine[i, Column.EXTENTS]]
        if not count or (room < needs).any():
            break
        room -= needs
        yield _Window(i, asked.begin[i], asked.begin[i] + count, count, 0, needs[3])
        if count < left:
            break


def reference(*, table: Tensor, room: Tensor, sequences: int) -> dict[str, Tensor]:
    """Return the table after the step and all outputs, a request at a time, in plain Python."""
    after, (first, count, tokens, rows, extents, groups, marked, holds) = table.clone(), room[0].tolist()
    requests = [_Asking(number, table[number].tolist()) for number in range(first, first + count)]
    turn = max((one[Column.SERVED] for one in requests), default=0) + 1
    unwritten = [one.turn for one in requests if one[Column.STATE] == 1 and one.fills]
    held_from = min(unwritten, default=math.inf) if holds else math.inf
    asking = [one for one in requests if one.asks(groups, marked, tokens)]
    asking = [one for one in asking if one.fills or one[Column.STEP] or one.turn + TOGETHER < held_from]
    asking.sort(key=lambda one: (one.turn, one.number))
    prompts = [one for one in asking if one.fills]
    kept = 0
    if prompts and turn - prompts[0].turn >= PATIENCE:
        kept = max(tokens // KEPT_SHARE, prompts[0][Column.SPAN])
    taken: list[tuple[int, int, int, int, int, int]] = []

    def fits(length: int, decided: int, held: int, limit: int) -> bool:
        sums = [sum(each) for each in zip(*[window[3:] for window in taken], (length, decided, held), strict=True)]
        return len(taken) < sequences and sums[0] <= limit and sums[1] <= rows and sums[2] <= extents

    for one in asking:
        if not one.fills:
            begin, end, seen = one.window()
            if not fits(end - begin, one.decides(), one[Column.EXTENTS], tokens - kept):
                break
            taken.append((one.number, begin, seen, end - begin, one.decides(), one[Column.EXTENTS]))
    for one in prompts:
        left = one[Column.PREFIX] - one[Column.WRITTEN]
        free = min(left, tokens - sum(window[3] for window in taken))
        length = free - free % one[Column.SPAN]
        if not length or not fits(length, 0, one[Column.EXTENTS], tokens):
            break
        end = one[Column.WRITTEN] + length
        taken.append((one.number, one[Column.WRITTEN], end, length, 0, one[Column.EXTENTS]))
        if length < left:
            break
    taken.sort(key=lambda window: window[2] > 0)
    found: dict[str, Tensor] = {"table": after}
    for place, (name, nothing) in enumerate((("row", -1), ("begin", 0), ("seen", 0))):
        values = [window[place] for window in taken] + [nothing] * (sequences - len(taken))
        found[name] = torch.tensor(values, dtype=torch.int64 if name == "row" else torch.int32)
    for place, name in enumerate(("cu_seqlens", "cu_rows", "cu_extents"), start=3):
        sizes = [window[place] for window in taken] + [0] * (sequences - len(taken))
        found[name] = torch.tensor([0, *sizes]).cumsum(0).int()
    for window in taken:
        if window[4]:
            after[window[0], Column.SERVED] = turn
    return found


class _Asking:
    """One request of a table, in plain Python."""

    def __init__(self, number: int, columns: list[int]) -> None:
        self.number, self._columns = number, columns

    def __getitem__(self, column: Column) -> int:
        return self._columns[column]

    def asks(self, groups: int, marked: int, tokens: int) -> bool:
        if self[Column.STATE] != 1 or self.fills:
            return self[Column.STATE] == 1 and groups == 1
        begin, end, _ = self.window()
        if end - begin > tokens:
            return False
        bit = self[Column.MARKS] >> min(self[Column.NUMBER], 62) & 1
        if self[Column.WINDOW] == 4 and not self[Column.WIDE]:
            bit = 0
        return bool(groups >> self[Column.GROUP] & 1 and (marked or not bit))

    @property
    def turn(self) -> int:
        return self[Column.SERVED] - self[Column.PRIORITY]

    @property
    def fills(self) -> bool:
        return self[Column.WRITTEN] < self[Column.PREFIX]

    @property
    def closes(self) -> bool:
        return self[Column.SHIFTED] == 1 and self[Column.BEFORE] > 0

    def decides(self) -> int:
        in_canvas = self[Column.SPAN] > self[Column.LENGTH] and self[Column.WINDOW] != 3 and self[Column.NUMBER] == 0
        if self.closes or (self[Column.SHIFTED] and in_canvas):
            return 1
        if self[Column.DECIDES] == 4:
            return self[Column.START] + self[Column.BLOCK] - max(self[Column.START], self[Column.PROMPT])
        quota = self[Column.QUOTA] + (1 if self[Column.NUMBER] < self[Column.MORE] else 0)
        return min(quota, self[Column.OPEN]) if self[Column.DECIDES] else self[Column.OPEN]

    def window(self) -> tuple[int, int, int]:
        """Where its window begins and ends, and the keys that it sees."""
        start, length, before = self[Column.START], self[Column.LENGTH], self[Column.BEFORE]
        if self.closes:
            return start - before, start, start
        number = start // self[Column.SPAN]
        first, last = number * self[Column.SPAN], min((number + 1) * self[Column.SPAN], length)
        if self[Column.WINDOW] == 4:
            if self[Column.WIDE]:
                return 0, length, 0
            low = start - (start - self[Column.PROMPT]) % self[Column.RENEWED]
            high = min(low + self[Column.RENEWED], length)
            kept = self[Column.KEPT if high - low == self[Column.RENEWED] else Column.KEPT_LAST]
            leads = self[Column.SHIFTED] == 1 and self[Column.NUMBER] == 0
            return start - leads, start + self[Column.BLOCK], kept + high - low
        if self[Column.WIDE]:
            return first - before, last, last
        return start - before, (last if self[Column.WINDOW] == 2 else start + self[Column.BLOCK]), last
