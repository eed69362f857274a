"""A live request that is a row of the session's table, and what a step did for such requests, told when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray

from mosaic.decoding.canvas import NOTHING_BEGUN
from mosaic.decoding.live import LiveRequest
from mosaic.decoding.rows import columns_of, finished
from mosaic.decoding.streaming import Step
from mosaic.models.parts import CANVAS, HELD_EXTENTS
from mosaic.registrar.operators.read_canvas import OPEN
from mosaic.registrar.request_table import ALL_ONES, Column, Reported

if TYPE_CHECKING:
    from mosaic.decoding.canvas import Canvas
    from mosaic.decoding.live import Early, Submission
    from mosaic.decoding.rows import TableRow
    from mosaic.runtime.prefixes import Prefix
    from mosaic.runtime.request_table import RequestTable, Served
    from mosaic.runtime.state_rows import OwnedRows

__all__ = ["ServedSteps", "TabledRequest"]


class TabledRequest(LiveRequest):
    """A request of a table: the device decodes it, and its canvas on the host is brought up to date when somebody looks.

    Attributes
    ----------
    row
        What its algorithm says of it.
    place
        Its row of the table; None while all rows are taken or it follows another, and once it has ended.
    """

    def __init__(
        self, number: int, submission: Submission, canvas: Canvas, row: TableRow, group: int, table: RequestTable,
        decode: Callable[[list[int]], str] | None, prefix: Prefix | None,
    ) -> None:  # fmt: skip
        super().__init__(number, submission, canvas, (), decode)
        self.row, self._group, self._table, self._prefix = row, group, table, prefix
        self.place: int | None = None

    @property
    def steps(self) -> int:
        """Steps that were run for it."""
        return self._steps if self.place is None else int(self._table.steps[self.place])

    @steps.setter
    def steps(self, count: int) -> None:
        self._steps = count

    @property
    def told(self) -> bool:
        """Whether somebody wants to know of each of its steps."""
        return self._submission.on_step is not None or self._submission.streamer is not None

    @property
    def held(self) -> list[OwnedRows]:
        """Its rows of all states."""
        return [cast("OwnedRows", rows) for rows in self._canvas.held]

    def begin(self) -> None:
        """Take the rows of all states, and a row of the table if one is free."""
        prefix, kept = self._prefix, self.row.phase.cache.kept
        try:
            if prefix is not None:
                prefix.extend()
            self._canvas.reserve({kept: prefix.rows} if prefix is not None and kept is not None else NOTHING_BEGUN)
            if kept is not None:
                held, keys = (cast("OwnedRows", self._canvas.rows_of(state)) for state in (HELD_EXTENTS, kept))
                held.drop(len(keys.extents))  # it was admitted for as many as there might have been
            if prefix is not None:
                prefix.promise()
            self.enter()
        except BaseException:
            self.end("failed")
            raise

    @property
    def follows(self) -> bool:
        """Whether another request is to write a part of its prompt first."""
        return self._prefix is not None and self._prefix.waits

    def enter(self) -> None:
        """Take a row of the table, if one is free, and it waits for nobody."""
        if self.follows or self._table.is_full:
            return
        canvas, kept = self._canvas, self.row.phase.cache.kept
        states = (CANVAS,) if kept is None else (CANVAS, HELD_EXTENTS, kept)
        of_states = [cast("OwnedRows", canvas.rows_of(state)) for state in states]
        column, tokens = columns_of(self.row, canvas, self._group, self._submission.priority)
        if self._prefix is not None:
            column[Column.WRITTEN] = self.cached_tokens = self._prefix.lead()
        self.place = self._table.enter(column, tokens, *of_states)

    def wrote(self) -> None:
        """Take note that a step has written a part of its prompt: others may wait for it."""
        if self._prefix is not None and self.place is not None:
            self._prefix.wrote(int(self._table.columns[self.place, Column.WRITTEN]))

    def look(self) -> None:
        """Bring canvas and number of steps up to date."""
        if self.place is None:
            return
        canvas, column = self._canvas, self._table.columns[self.place]
        mine = slice(column[Column.CANVAS], column[Column.CANVAS] + self.row.length)
        tokens = self._table.tokens[mine]
        np.equal(tokens, OPEN, out=canvas.mask_array)
        np.copyto(canvas.token_array, np.where(canvas.mask_array, canvas.architecture.mask_token_id, tokens))
        np.copyto(canvas.confidence_array, self._table.confidence[mine])
        canvas.step, canvas.block = int(column[Column.STEP]), self.row.number_of(int(column[Column.START]))
        if self.row.decides == ALL_ONES:
            canvas.settled = max(int(column[Column.START]), canvas.prompt_len)
        self.steps = int(self._table.steps[self.place])

    def tell(self, step: Step) -> None:
        """Tell the callback and the streamer what a step did."""
        self.look()
        super().tell(step)

    def end(self, early: Early | None = None) -> None:
        """Leave the table, give back all rows and make the generation."""
        self.look()
        if early is None and self.row.decides == ALL_ONES:
            self._canvas.settled = self.row.length
        with ExitStack() as leaving:
            if self._prefix is not None:
                leaving.callback(self._prefix.close)  # when all rows are given back
            if self.place is not None:
                place, self.place = self.place, None
                if self._prefix is not None:
                    written = finished(self._table.columns[place])
                    most = written if self.row.exact else min(written, self.row.prefix)
                    self._prefix.keep(self._canvas.token_array, most)
                self._table.leave(place)
            super().end(early)


class ServedSteps(Sequence[Step]):
    """What a step did for the requests that it served, each told of when somebody asks.

    Parameters
    ----------
    served
        By the session's table.
    places
        int64 [n], which of them are meant.
    requests, told
        Of these, the requests, and who wants to know of each step.
    """

    def __init__(
        self, served: Served, places: NDArray[np.int64], requests: Sequence[TabledRequest], told: NDArray[np.bool_]
    ) -> None:
        self._served, self._places, self.requests, self._told = served, places, requests, told
        self._made: dict[int, Step] = {}

    @property
    def noted(self) -> list[int]:
        """Which of them have ended, or want to know of each of their steps."""
        found: list[int] = (self._told | self.ends).nonzero()[0].tolist()
        return found

    @property
    def ends(self) -> NDArray[np.bool_]:
        """Whether each has ended."""
        found: NDArray[np.bool_] = self._served.report[self._places, Reported.END] != 0
        return found

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, at: int) -> Step: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Step]: ...
    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[place] for place in range(len(self))[at]]
        at = range(len(self))[at]
        if at not in self._made:
            self._made[at] = self._step(int(self._places[at]), self.requests[at])
        return self._made[at]

    def _step(self, place: int, request: TabledRequest) -> Step:
        served, line = self._served, self._served.report[place]
        first = int(served.report[place - 1, Reported.ROWS]) if place else 0
        rows = slice(first, int(line[Reported.ROWS]))
        taken = served.committed[rows]
        row, decides = request.row, rows.stop > rows.start
        return Step(
            request=request.number,
            step=int(served.steps[place]),
            block=row.number_of(int(line[Reported.START])),
            phase=_phase(row, line) if decides else "commit",
            masked=int(line[Reported.MASKED]),
            positions=torch.from_numpy(served.decided_rows[rows][taken] - int(served.canvas_rows[place])),
            token_ids=torch.from_numpy(served.chosen[rows][taken]),
            confidence=torch.from_numpy(served.score[rows][taken]),
            plan=served.plan,
            peak_bytes=served.plan.total_bytes,
            seconds=served.seconds,
        )


def _phase(row: TableRow, line: NDArray[np.int64]) -> str:
    """What a step that decides was for a request, by its line of the report."""
    if row.sparse is None:
        return "denoise"
    if line[Reported.TOKENS] < row.length:
        return "reuse"
    return "refresh" if line[Reported.WRITTEN] > line[Reported.START] else "full_step"
