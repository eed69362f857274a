"""Parallel streams: a body as a short program over one clock per stream.

A side op starts when its fork's op has ended and its stream is free; a wait holds the main stream until the named op
has ended. A loop with side ops starts and ends all its streams together; inside, iteration i waits only for the end of
iteration i - slots. Repeated layers and iterations are simulated until all clocks advance equally. Pure arithmetic on
the seconds from `cost`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from math import isclose
from typing import Final, NamedTuple, TypeAlias

from mosaic.planner.body import Body

_MAIN: Final = 0
_LONGEST_PERIOD: Final = 64
"""The most steps of a layer that is recognised as repeated; longer ones are simulated in full."""
_KEPT: Final = 4096
"""Results of loops that are cached."""


class Row(NamedTuple):
    """A sum of launches: (cost class, how many ops of it).

    Inside a loop with side ops: over one of its iterations, with all other enclosing and enclosed loops included.
    Outside: over all iterations.
    """

    in_loop: bool
    counts: tuple[tuple[int, int], ...]


class _Run(NamedTuple):
    """A stream does the launches of a row."""

    stream: int
    row: int


class _Mark(NamedTuple):
    """Record a stream's clock."""

    stream: int


class _Join(NamedTuple):
    """A stream waits for another: for its clock now (`back` 0), or for its `back`-th mark from the end."""

    stream: int
    other: int
    back: int


class _Pass(NamedTuple):
    """All iterations of a loop with side ops, whose streams start and end together."""

    loop: int
    streams: tuple[int, ...]


_Step: TypeAlias = _Run | _Mark | _Join | _Pass


class _Block(NamedTuple):
    """Repeated steps, their streams, and the streams marked in them."""

    steps: tuple[_Step, ...]
    streams: tuple[int, ...]
    marked: tuple[int, ...]


class _Loop(NamedTuple):
    """A kind of loop with side ops: its iteration, the number of slots, and the rows in it."""

    number: int
    knob: str
    slots: int
    once: _Block
    around: _Block
    rows: tuple[int, ...]


class _Piece(NamedTuple):
    """Ops [start, end) that the clocks treat as one, and their streams, main first."""

    start: int
    end: int
    streams: tuple[int, ...]


class _Wait(NamedTuple):
    """Before the op at `at`, `stream` waits until `other` has ended the op `source`."""

    at: int
    stream: int
    other: int
    source: int


def overlapping_loops(body: Body) -> list[int | None]:
    """Return, for every op, the outermost region around it that has side ops of its own: its iterations overlap."""
    own = {op.region for op in body.ops if op.stream != "main"}
    outermost: dict[int | None, int | None] = {None: None}
    for index, region in enumerate(body.regions):  # a region is registered before those inside it
        around = outermost[region.parent]
        outermost[index] = around if around is not None else (index if index in own else None)
    return [outermost[op.region] for op in body.ops]


class Timeline:
    """The program of one body.

    Parameters
    ----------
    class_of
        The cost class of every op.
    loop_of
        `overlapping_loops` of the body.

    Attributes
    ----------
    rows
        The sums; `seconds` takes their seconds in this order.
    knobs
        Those of the loops with side ops.
    """

    def __init__(self, body: Body, class_of: Sequence[int], loop_of: Sequence[int | None]) -> None:
        self.rows: list[Row] = []
        self._row_of: dict[tuple[bool, tuple[int, ...]], int] = {}
        self._loops: list[_Loop] = []
        self._loop_number: dict[Hashable, int] = {}
        self._known: dict[tuple[float, ...], float] = {}
        self._body, self._class_of, self._loop_of = body, class_of, loop_of
        number = {name: i for i, name in enumerate(dict.fromkeys(["main", *(op.stream for op in body.ops)]))}
        self._stream_of, self._num_streams = [number[op.stream] for op in body.ops], len(number)
        waits, self._inside = self._waits()
        steps = self._steps(list(self._pieces()), waits)
        self.blocks = [(_block(part), times) for part, times in _repetitions(steps)]
        self._depths = _depths([*steps, *(step for loop in self._loops for step in loop.once.steps)], len(number) + 1)
        self.knobs = sorted({loop.knob for loop in self._loops})

    # -- once per body --------------------------------------------------------------------------------------------

    def _pieces(self) -> Iterator[_Piece]:
        """Ops one by one, a loop with side ops as a whole."""
        start = 0
        while start < len(self._body.ops):
            loop = self._loop_of[start]
            if loop is None:
                yield _Piece(start, start + 1, (self._stream_of[start],))
                start += 1
            else:
                end = self._body.regions[loop].end
                yield _Piece(start, end, tuple(sorted({_MAIN, *self._stream_of[start:end]})))
                start = end

    def _waits(self) -> tuple[list[_Wait], Mapping[int, list[_Wait]]]:
        """The orderings between streams: outside loops with side ops, and by the loop's start inside each."""
        found: list[_Wait] = []
        inside = defaultdict[int, list[_Wait]](list)
        for _, source, target in self._body.edges:
            left, entered = self._loop_of[source], self._loop_of[target]
            stream, other = self._stream_of[target], self._stream_of[source]
            at = target
            if left is not None and left == entered:
                inside[self._body.regions[left].start].append(_Wait(at, stream, other, source))
                continue
            if left is not None:
                if other != _MAIN:
                    continue  # the end of a loop has joined its side streams
                source = self._body.regions[left].end - 1
            if entered is not None:
                at, stream = self._body.regions[entered].start, _MAIN
            if stream != other:
                found.append(_Wait(at, stream, other, source))
        return found, inside

    def _steps(self, pieces: Sequence[_Piece], waits: Sequence[_Wait], *, in_loop: bool = False) -> list[_Step]:
        """The program of some pieces. Equal layers have equal steps, because sums refer to classes, and marks are
        counted from the end."""
        marks = self._marks(pieces, waits)
        due = defaultdict[int, list[_Wait]](list)
        for wait in waits:
            due[wait.at].append(wait)
        steps: list[_Step] = []
        pending: dict[int, list[int]] = {}

        def flush(*streams: int) -> None:
            steps.extend(_Run(s, self._row(pending.pop(s), in_loop)) for s in streams if s in pending)

        for start, end, streams in pieces:
            for w in due[start]:
                noted = marks[w.other]
                back = bisect_left(noted, w.at) - bisect_left(noted, w.source) if w.source in noted else 0
                flush(w.stream, *([] if back else [w.other]))
                steps.append(_Join(w.stream, w.other, back))
            if in_loop or self._loop_of[start] is None:
                pending.setdefault(streams[0], []).append(self._class_of[start])
            else:
                flush(*streams)
                steps.append(_Pass(self._loop(start, end, streams), streams))
            for stream in streams:
                if end - 1 in marks[stream]:
                    flush(stream)
                    steps.append(_Mark(stream))
        flush(*list(pending))
        return steps

    def _marks(self, pieces: Sequence[_Piece], waits: Sequence[_Wait]) -> list[list[int]]:
        """By stream, the last ops of pieces that are waited for after their stream has gone on, ascending."""
        ends: list[list[int]] = [[] for _ in range(self._num_streams)]
        for piece in pieces:
            for stream in piece.streams:
                ends[stream].append(piece.end - 1)
        passed = [w for w in waits if ends[w.other][bisect_left(ends[w.other], w.at) - 1] != w.source]
        return [sorted({w.source for w in passed if w.other == stream}) for stream in range(self._num_streams)]

    def _row(self, classes: Sequence[int], in_loop: bool) -> int:
        key = in_loop, tuple(classes)
        if key not in self._row_of:
            self._row_of[key] = len(self.rows)
            self.rows.append(Row(in_loop, tuple(sorted(Counter(classes).items()))))
        return self._row_of[key]

    def _loop(self, start: int, end: int, streams: tuple[int, ...]) -> int:
        """The number of a loop's kind; loops of different layers mostly share it."""
        region = self._loop_of[start]
        assert region is not None
        knob, slots, waits = self._body.regions[region].knob, self._slots(start, end), self._inside[start]
        lanes = self._stream_of[start:end]
        orders = [(w.at - start, w.source - start) for w in waits]
        key = knob, tuple(self._class_of[start:end]), tuple(lanes), tuple(orders), slots
        if key not in self._loop_number:
            number = self._loop_number[key] = len(self._loops)
            finish = self._num_streams  # a clock of its own: the end of the whole iteration
            steps: list[_Step] = [_Join(stream, finish, slots) for stream in streams]
            steps += self._steps(
                [_Piece(op, op + 1, (self._stream_of[op],)) for op in range(start, end)], waits, in_loop=True
            )
            steps += [_Join(finish, stream, 0) for stream in streams] + [_Mark(finish)]
            rows = tuple(step.row for step in steps if isinstance(step, _Run))
            self._loops.append(_Loop(number, knob, slots, _block(steps), _block(steps * slots), rows))
        return self._loop_number[key]

    def _slots(self, start: int, end: int) -> int:
        """How many iterations of a loop may overlap: the slots of the buffers in it that side ops touch."""
        region = self._loop_of[start]
        buffers = self._body.buffers
        return min(
            (
                buffers[b].rotate
                for op in self._body.ops[start:end]
                if op.stream != "main"
                for b in (*op.reads, *op.writes)
                if buffers[b].home == region
            ),
            default=1,
        )

    # -- once per evaluation --------------------------------------------------------------------------------------

    def seconds(self, amounts: Sequence[Sequence[float]], iterations: Mapping[str, int]) -> float:
        """Return the time at which the last stream ends.

        Parameters
        ----------
        amounts
            Seconds of every one of `rows`, twice: for a loop's full iterations and for its last one, which may be
            shorter; outside loops the same.
        iterations
            How often the loops of every one of `knobs` run.
        """
        taken = [self._loop_seconds(loop, amounts, iterations[loop.knob]) for loop in self._loops]
        clocks = self._clocks()
        for block, times in self.blocks:
            clocks.repeat(block, times, amounts[0], taken)
        return max(clocks.now)

    def _loop_seconds(self, loop: _Loop, amounts: Sequence[Sequence[float]], iterations: int) -> float:
        """Simulate a loop; results are cached, because most changes of a search leave a loop as it is.

        Its clocks may repeat only after as many iterations as there are slots.
        """
        full, last = amounts
        key = (loop.number, iterations, *[full[row] for row in loop.rows], *[last[row] for row in loop.rows])
        if key not in self._known:
            together, apart = divmod(iterations - 1, loop.slots)
            clocks = self._clocks()
            clocks.repeat(loop.around, together, full)
            clocks.repeat(loop.once, apart, full)
            clocks.repeat(loop.once, 1, last)
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[key] = clocks.now[self._num_streams]
        return self._known[key]

    def _clocks(self) -> _Clocks:
        return _Clocks([0.0] * len(self._depths), [[0.0] * depth for depth in self._depths])


class _Clocks(NamedTuple):
    """Every stream's clock, and its last marks."""

    now: list[float]
    marks: list[list[float]]

    def repeat(self, block: _Block, times: int, amounts: Sequence[float], taken: Sequence[float] = ()) -> None:
        """Run a block `times` times, or until all its clocks advance equally, and the rest at once."""
        lags = self._lags(block)
        for left in range(times - 1, -1, -1):
            began = self.now[_MAIN]
            self._run(block.steps, amounts, taken)
            before, lags = lags, self._lags(block)
            if left and all(map(partial(isclose, rel_tol=1e-9, abs_tol=1e-12), before, lags)):
                gone = left * (self.now[_MAIN] - began)
                for stream in block.streams:
                    self.now[stream] += gone
                for stream in block.marked:
                    self.marks[stream][:] = [mark + gone for mark in self.marks[stream]]
                return

    def _lags(self, block: _Block) -> list[float]:
        """A block's clocks and marks, relative to the main stream."""
        main = self.now[_MAIN]
        return [self.now[s] - main for s in block.streams] + [m - main for s in block.marked for m in self.marks[s]]

    def _run(self, steps: Sequence[_Step], amounts: Sequence[float], taken: Sequence[float]) -> None:
        now, marks = self.now, self.marks
        for step in steps:
            if isinstance(step, _Run):
                now[step.stream] += amounts[step.row]
            elif isinstance(step, _Join):
                other = marks[step.other][-step.back] if step.back else now[step.other]
                now[step.stream] = max(now[step.stream], other)
            elif isinstance(step, _Pass):
                end = max([now[stream] for stream in step.streams]) + taken[step.loop]
                for stream in step.streams:
                    now[stream] = end
            else:
                marks[step.stream][:] = [*marks[step.stream][1:], now[step.stream]]


def _block(steps: Sequence[_Step]) -> _Block:
    streams = {_MAIN}
    for step in steps:
        streams.update(step.streams if isinstance(step, _Pass) else (step.stream,))
    return _Block(
        tuple(steps), tuple(sorted(streams)), tuple(sorted({s.stream for s in steps if isinstance(s, _Mark)}))
    )


def _depths(steps: Sequence[_Step], num_streams: int) -> list[int]:
    """For every stream, the number of marks that waits look back."""
    depths = [0] * num_streams
    for step in steps:
        if isinstance(step, _Join):
            depths[step.other] = max(depths[step.other], step.back)
    return depths


def _repetitions(steps: Sequence[_Step]) -> Iterator[tuple[Sequence[_Step], int]]:
    """Cut a program into parts and how often each is repeated, from the left, the longest repetition there is."""
    begin = at = 0
    while at < len(steps):
        period, times = _repetition(steps, at)
        if times > 1:
            yield steps[begin:at], 1
            yield steps[at : at + period], times
            begin = at + period * times
        at += period * times
    yield steps[begin:], 1


def _repetition(steps: Sequence[_Step], at: int) -> tuple[int, int]:
    """The period with which most of the steps from `at` on repeat, and how often they do; (1, 1) if they do not."""
    best = 1, 1
    for period in range(1, min(_LONGEST_PERIOD, (len(steps) - at) // 2) + 1):
        times = 1
        while steps[at : at + period] == steps[at + times * period : at + (times + 1) * period]:
            times += 1
        if times > 1 and period * times > best[0] * best[1]:
            best = period, times
    return best
