"""The packer of a table of requests as a scheduler, on a simulated clock: nobody starves, nothing is lost, room is never exceeded.

The kernels of the CPU run over random tables with random room and random commits, without a model. Requests come at random, into
rows that others have left.
"""

from __future__ import annotations

import random
from math import ceil
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mosaic import kernels
from mosaic.registrar.operators.advance_requests import WIDTH
from mosaic.registrar.operators.pack_requests import KEPT_SHARE, PATIENCE
from mosaic.registrar.operators.read_canvas import OPEN
from mosaic.registrar.request_table import (
    BY_BLOCKS,
    CANVAS_LONG,
    COLUMNS,
    EOS,
    FROM_BLOCK,
    LENGTH,
    REFRESHED,
    RUNNING,
    Column,
    Reported,
)

ROWS, LONGEST, STOP = 24, 160, 7
I32 = torch.int32


class Window(NamedTuple):
    """A window of a step: whose, where, and how many rows it decides."""

    request: int
    begin: int
    tokens: int
    rows: int


class Request(NamedTuple):
    """What a simulated request asks for."""

    number: int
    columns: list[int]
    came: int
    ahead: int
    """Turns that the prompts before it and its own take, at most, once it is old."""


class Clock:
    """A table whose requests come at random, and its turns.

    Parameters
    ----------
    window
        What requests compute; those by blocks have prompts.
    blocks
        The smallest block, and the largest.
    spare
        Whether the room holds what is kept for prompts beside the largest window.
    holds
        Whether newcomers wait for prompts.
    """

    def __init__(self, seed: int, window: int, blocks: tuple[int, int], *, spare: bool, holds: bool) -> None:
        rng = self.rng = random.Random(f"{seed} {window}")
        self.table = torch.zeros(ROWS + 2, COLUMNS, dtype=torch.int64)
        self.canvas = torch.zeros(ROWS * LONGEST, dtype=torch.int64)
        self.extents = torch.zeros(ROWS * 3, 4, dtype=torch.int64)
        self._window, self._blocks, self.holds = window, blocks, holds
        largest = 2 * blocks[1] if window == BY_BLOCKS else LONGEST
        room = largest * rng.choice([1, 1, 2, 5])
        room += max(blocks[1], room // (KEPT_SHARE - 1)) if spare else 0
        self.tokens = -(-room // blocks[0]) * blocks[0]
        self.rows = rng.choice([blocks[1], 2 * blocks[1], self.tokens])
        self.sequences, self.most_extents = self.tokens // blocks[0], 3 * ROWS
        self.kept = max(self.tokens // KEPT_SHARE, blocks[1])
        self.live: dict[int, Request] = {}  # by row of the table
        self.ended: dict[int, int] = {}
        self.left: list[int] = []  # rows whose requests have ended in the last step, which the host does not know yet
        self.came, self.turn = 0, 0

    def enter(self) -> None:
        """A request comes, if a row is free."""
        rng = self.rng
        free = [row for row in range(ROWS) if row not in self.live and row not in self.left]
        if not free:
            return
        row, block = rng.choice(free), rng.choice(self._blocks)
        prompt = rng.choice([rng.randint(1, block), rng.randint(1, LONGEST // 2)])
        start = prompt // block * block if self._window == BY_BLOCKS else prompt
        length = start + block * rng.randint(1, 4)
        end = rng.randint(max(prompt, length - block) + 1, length) if self._window == BY_BLOCKS else length
        column, tokens = [0] * COLUMNS, [1] * prompt + [OPEN] * (length - prompt)
        given: dict[Column, int] = {
            Column.STATE: RUNNING, Column.CANVAS: row * LONGEST, Column.EXTENT: 3 * row, Column.EXTENTS: rng.randint(1, 3),
            Column.PROMPT: prompt, Column.END: end, Column.LENGTH: length, Column.BLOCK: block, Column.WINDOW: self._window,
            Column.PREFIX: start if self._window == BY_BLOCKS else 0, Column.QUOTA: rng.randint(1, block),
            Column.MORE: rng.randrange(3), Column.DECIDES: rng.randrange(2), Column.START: start, Column.WIDE: 1,
            Column.SPAN: block if self._window == BY_BLOCKS else CANVAS_LONG,
            Column.OPEN: sum(token == OPEN for token in tokens[start : start + block]), Column.SERVED: self.latest + 1,
        }  # fmt: skip
        for name, value in given.items():
            column[name] = value
        column[Column.STOP : Column.STOP + 4] = [STOP if rng.random() < 0.3 else -1, -1, -1, -1]
        self.table[row] = torch.tensor(column)
        self.canvas[row * LONGEST : row * LONGEST + length] = torch.tensor(tokens)
        waiting = [self.table[other].tolist() for other in self.live if self.fills(other)] + [column]
        share = [
            max(self.tokens // KEPT_SHARE, one[Column.BLOCK]) // one[Column.BLOCK] * one[Column.BLOCK]
            for one in waiting
        ]
        ahead = sum(
            -(-(one[Column.PREFIX] - one[Column.WRITTEN]) // part) for one, part in zip(waiting, share, strict=True)
        )
        self.live[row] = Request(self.came, column, self.turn, ahead)
        self.came += 1

    @property
    def latest(self) -> int:
        """The last turn in which somebody decided."""
        return int(self.table[:, Column.SERVED].max())

    def fills(self, row: int) -> bool:
        return bool(self.table[row, Column.WRITTEN] < self.table[row, Column.PREFIX])

    def wants(self, row: int) -> int:
        """Tokens of the window of a request that decides, written from the definition of windows."""
        own = self.table[row].tolist()
        first = own[Column.NUMBER] == 0
        if own[Column.WINDOW] == BY_BLOCKS:
            return int(own[Column.BLOCK] + (own[Column.BEFORE] if first else 0))
        if first:
            return int(own[Column.LENGTH])
        return int(own[Column.LENGTH] - own[Column.START] if own[Column.WINDOW] == FROM_BLOCK else own[Column.BLOCK])

    def step(self) -> list[Window]:
        """Take a turn; return the windows that were served, in order."""
        limits = [0, ROWS, self.tokens, self.rows, self.most_extents, 1, 0, int(self.holds)]
        packed = {"row": torch.empty(self.sequences, dtype=torch.int64)}
        packed |= {name: torch.empty(self.sequences, dtype=I32) for name in ("begin", "seen")}
        bounds = {f"cu_{name}": torch.empty(self.sequences + 1, dtype=I32) for name in ("seqlens", "rows", "extents")}
        kernels.load("pack_requests").launch(
            table=self.table, room=torch.tensor([limits]), **packed, **bounds, sequences=self.sequences, scratch=None
        )
        tokens, rows = (bounds[name].diff().tolist() for name in ("cu_seqlens", "cu_rows"))
        found = zip(packed["row"].tolist(), packed["begin"].tolist(), tokens, rows, strict=True)
        windows = [Window(self.live[row].number, *more) for row, *more in found if row >= 0]
        placed = self._place(packed, bounds)
        self._decide(packed, bounds, placed["decided_rows"])
        self.turn += 1
        return windows

    def _place(self, packed: dict[str, Tensor], bounds: dict[str, Tensor]) -> dict[str, Tensor]:
        outputs: dict[str, Any] = {
            "positions": torch.empty(self.tokens, dtype=I32), "token_rows": torch.empty(self.tokens, dtype=torch.int64),
            "rows": torch.empty(self.rows, dtype=torch.int64), "decided_rows": torch.empty(self.rows, dtype=torch.int64),
            "extents": torch.empty(self.most_extents, 4, dtype=torch.int64), "quota": torch.empty(self.sequences, dtype=I32),
            "threshold": torch.empty(self.sequences), "edit_threshold": torch.empty(self.sequences),
        }  # fmt: skip
        kernels.load("place_requests").launch(
            table=self.table, canvas=self.canvas, held_extents=self.extents, row=packed["row"], begin=packed["begin"],
            **bounds, **outputs, tokens=self.tokens, most=self.rows, count=self.most_extents, scratch=None,
        )  # fmt: skip
        return outputs

    def _decide(self, packed: dict[str, Tensor], bounds: dict[str, Tensor], decided: Tensor) -> None:
        """Commit at least one row of each window that decides, and let what has ended leave, a step late."""
        committed = torch.zeros(self.rows, dtype=torch.uint8)
        for start, end in zip(bounds["cu_rows"].tolist(), bounds["cu_rows"][1:].tolist(), strict=False):
            if end > start:
                committed[self.rng.sample(range(start, end), self.rng.randint(1, end - start))] = 1
        taken = decided[committed.bool()]
        assert (self.canvas[taken] == OPEN).all()
        self.canvas[taken] = torch.tensor([self.rng.choice([STOP, 1, 1, 1]) for _ in taken], dtype=torch.int64)
        self.table[self.left, : Column.SERVED] = 0
        self.left.clear()
        report = torch.empty(self.sequences, WIDTH, dtype=torch.int64)
        kernels.load("advance_requests").launch(
            table=self.table, canvas=self.canvas, row=packed["row"], begin=packed["begin"],
            cu_seqlens=bounds["cu_seqlens"], cu_rows=bounds["cu_rows"], report=report, mask_id=1, scratch=None,
        )  # fmt: skip
        for line in report.tolist():
            if line[Reported.ROW] >= 0 and line[Reported.END]:
                row = line[Reported.ROW]
                self._check_end(row, line)
                self.ended[self.live.pop(row).number] = line[Reported.END]
                self.left.append(row)

    def _check_end(self, row: int, line: list[int]) -> None:
        """The text is final up to its end, and there is no earlier end in it."""
        own = self.live[row].columns
        answer = self.canvas[row * LONGEST + own[Column.PROMPT] : row * LONGEST + line[Reported.FINAL]].tolist()
        stops = own[Column.STOP] == STOP and STOP in answer
        assert OPEN not in answer and (answer.index(STOP) == len(answer) - 1 if stops else True)
        assert line[Reported.END] == (EOS if stops else LENGTH)
        assert stops or line[Reported.FINAL] == own[Column.END]


CASES = [(BY_BLOCKS, (4, 4)), (BY_BLOCKS, (4, 8)), (REFRESHED, (4, 8)), (FROM_BLOCK, (8, 8))]


@pytest.mark.some
@pytest.mark.parametrize(("spare", "holds"), [(True, False), (False, False), (True, True), (False, True)])
@pytest.mark.parametrize(("window", "blocks"), CASES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 40))])
def test_every_request_is_served_in_time_and_ends(
    seed: int, window: int, blocks: tuple[int, int], spare: bool, holds: bool
) -> None:
    """Who decides is served within as many turns as there are requests, as each turn serves the first of those who decide. Two
    turns serve more tokens, or decide more rows, than there is room for: so it also takes at most twice all that is asked for by
    the room, and one turn. A prompt is written within `PATIENCE` turns, and those that it and all before it take of what is kept.

    Without room for what is kept beside the largest window, prompts that are old may go before it. Those who wait for prompts do so
    from their first turn on, and are counted from their first decision on.
    """
    clock = Clock(seed, window, blocks, spare=spare, holds=holds)
    waited: dict[int, list[int]] = {}  # of those who decide: turns, and the most that these may be
    chunks: dict[int, int] = {}
    for at in range(3_000):
        while at < 50 and clock.rng.random() < (0.9 if at % 20 < 12 else 0.2):
            clock.enter()
        if not clock.live and at >= 50:
            break
        if not clock.live:
            continue
        deciding = {row for row in clock.live if not clock.fills(row)}
        prompts = sorted((row for row in clock.live if clock.fills(row)), key=lambda row: clock.live[row].came)
        before = {one.number: clock.table[row].tolist() for row, one in clock.live.items()}
        by_number = {one.number: row for row, one in clock.live.items()}
        room = clock.tokens - clock.kept * (window == BY_BLOCKS)
        asked = sum(map(clock.wants, clock.live)) / room, sum(own[Column.BLOCK] for own in before.values()) / clock.rows
        old = [row for row in prompts if clock.latest + 1 - clock.table[row, Column.SERVED] >= PATIENCE]
        for row in (row for row in deciding if clock.table[row, Column.STEP] or not holds):
            waited.setdefault(clock.live[row].number, [0, min(len(clock.live), 2 * sum(map(ceil, asked)) + 1)])
        requests, in_order = (
            {one.number: one for one in clock.live.values()},
            [clock.live[row].number for row in prompts],
        )
        served = clock.step()
        assert len({window.request for window in served}) == len(served)
        assert sum(window.tokens for window in served) <= clock.tokens
        assert sum(window.rows for window in served) <= clock.rows
        assert sum(before[window.request][Column.EXTENTS] for window in served) <= clock.most_extents
        assert served, "no request was served"
        filled = [one for one in served if not one.rows]
        for one in served:
            own = before[one.request]
            if one.rows:
                assert one.tokens <= clock.tokens and by_number[one.request] in deciding
                waited.pop(one.request, None)
            else:  # whole blocks, from where the last chunk ended
                assert one.tokens % own[Column.BLOCK] == 0 and one.begin == own[Column.WRITTEN]
                chunks[one.request] = chunks.get(one.request, 0) + one.tokens
                if chunks[one.request] == own[Column.PREFIX]:
                    mine = requests[one.request]
                    assert clock.turn - mine.came <= PATIENCE + mine.ahead + 1
        cut = [one for one in filled if one.begin + one.tokens < before[one.request][Column.PREFIX]]
        assert cut in ([], filled[-1:])
        assert [one.request for one in filled] == in_order[: len(filled)]
        if spare or not old:
            for one in waited.values():
                one[0] += 1
                assert one[0] <= one[1]
    assert not clock.live and len(clock.ended) == clock.came > 10
