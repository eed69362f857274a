"""Unroll a plan into segments of bound calls: launches, and the records and waits that order its streams.

An innermost loop is one segment whatever its count (two if later iterations wait for earlier ones); all other ops are
straight runs. Equal loops of layers and groups of heads share their tables, so binding is cheap: a LLaDA-8B step over
1,048,576 tokens in chunks of 2,048, 2 heads at a time, all streamed, is 7.4 million calls and binds in 1.3 s. Without
streams (on the CPU) short loops are straight runs too, and a kernel with a `bind` is bound once instead of launched
each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from mosaic.errors import PlanFormatError, UnknownName
from mosaic.kernels.binding import check, kernel_of, launcher_of
from mosaic.planner.plan_records import PlanOp, PlanRecords
from mosaic.registrar.operator import Implementation, Operator
from mosaic.registrar.operators import find
from mosaic.runtime.opening import refuse_other_cards
from mosaic.runtime.ordering import Body, Signal, bodies_of
from mosaic.runtime.poison import Fill, Poison, Times
from mosaic.runtime.regions import Chunks, Region, Regions
from mosaic.runtime.streams import MAIN, CudaStreams
from mosaic.runtime.views import Column, Loop, SliceOf, Views

Arguments: TypeAlias = Mapping[str, Any]
_NOTHING: Final[Arguments] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call: `function` with its constant arguments; `call` is both, on its stream."""

    op: int
    name: str
    stream: str
    function: Callable[..., object]
    arguments: Arguments
    call: Callable[..., object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Steps that run once per row; `tables` has a column of varying arguments for each; rows [first, last) are used."""

    steps: Sequence[Step]
    tables: Sequence[Sequence[Arguments]]
    first: int
    last: int


@dataclass(slots=True)
class _Lines:
    """The steps of an unfinished segment and their columns; `blank` is a column without varying arguments."""

    num_rows: int = 1
    steps: list[Step] = field(default_factory=list)
    tables: list[Sequence[Arguments]] = field(default_factory=list)
    blank: Sequence[Arguments] = ()

    def __post_init__(self) -> None:
        self.blank = (_NOTHING,) * self.num_rows

    def segment(self, first: int, last: int, *, skip: int = 0) -> Segment:
        return Segment(steps=tuple(self.steps[skip:]), tables=tuple(self.tables[skip:]), first=first, last=last)


_Columns: TypeAlias = Mapping[str, Column]
_NO_SIGNALS: Final = Body()
_ONCE: Final = range(1)
_FEW: Final = 16
"""Iterations of a CPU loop up to which each one is bound by itself, which saves each launch its checks and views."""


class _Bound(NamedTuple):
    """The part of an op's binding that is the same in all places."""

    launch: Callable[..., object]
    bind: Callable[..., Callable[[], object]] | None
    slices: Mapping[str, tuple[SliceOf, ...]]
    operator: Operator
    way: Implementation


class Unroller:
    """Binds a plan.

    Parameters
    ----------
    operators
        Operators of the plan's ops that Mosaic does not ship, by name.
    streams
        The streams of the launches; None runs everything in program order.
    poison
        The fills of a poisoned step.

    Raises
    ------
    PlanFormatError
        If an op's operator was not given and Mosaic does not ship it, or if its implementation cannot run here.
    """

    def __init__(
        self,
        records: PlanRecords,
        operators: Mapping[str, Operator],
        regions: Regions,
        views: Views,
        streams: CudaStreams | None,
        poison: Poison | None,
    ) -> None:
        self._operators = operators
        self._ops = records.ops
        self._backend = records.backend
        self._implementations = records.implementations
        self._regions, self._views, self._streams, self._poison = regions, views, streams, poison
        self._bodies = bodies_of(records, regions, streams.event) if streams is not None else {}
        self._buffers = records.buffers
        self._checked: set[int] = set()
        self._alike: set[Hashable] = set()
        self._bound: dict[int, _Bound] = {}
        self._tables: dict[Hashable, Sequence[Arguments]] = {}
        self._starts: dict[Hashable, Column] = {}
        self._lines = _Lines()
        self._done: list[Segment] = []

    def segments(self) -> tuple[Segment, ...]:
        """Unroll the step."""
        for fill in self._poison.everything() if self._poison is not None else ():
            self._add_fill(fill, 0)
        self._pass(None, {}, None, Times())
        self._leave(self._body(None), len(self._ops))
        self._close(0)
        return tuple(self._done)

    # --- bodies ---------------------------------------------------------------------------------------------------

    def _body(self, region: str | None) -> Body:
        return self._bodies.get(region, _NO_SIGNALS)

    def _pass(self, name: str | None, chunks: Chunks, loop: Loop | None, inherited: Times) -> None:
        """Unroll one pass over a body (None: the step); `loop` is bound for all its iterations at once."""
        start, end = (0, len(self._ops)) if name is None else (self._regions[name].start, self._regions[name].end)
        body, children = self._body(name), self._regions.children(name)
        due = (self._poison.times(name) if self._poison is not None else Times()).merged(inherited)
        index = start
        while index < end:
            child = children.get(index)
            # Fills run on main: after the waits for streams that may use the bytes, before main lets the others go on.
            self._wait(body, index, of_main=True)
            self._fill(due.ends.get(index, ()) if index > start else (), "end", index - 1)
            self._fill(due.starts.get(index, ()), "start", index)
            if name is None and index == start:
                self._enter(body, index)
            self._record(body, index, of_main=True)
            self._wait(body, index, of_main=False)
            if child is None:
                self._launch(self._ops[index], chunks, loop)
            else:
                self._loop(child, chunks, due.inside(child))
            index = child.end if child is not None else index + 1
            self._record(body, index, of_main=False)
        self._fill(due.ends.get(end, ()), "end", end - 1)

    def _loop(self, region: Region, chunks: Chunks, inherited: Times) -> None:
        body, iterations = self._body(region.name), self._regions.iterations(region, chunks)
        self._enter(body, region.start)
        if self._regions.children(region.name) or (self._streams is None and len(iterations) <= _FEW):
            for number, chunk in enumerate(iterations):
                if number >= body.distance:
                    self._turn(body, range(number, number + 1), region.start)
                self._pass(region.name, {**chunks, region.name: chunk}, None, inherited)
                self._finish(body, range(number, number + 1), region.end - 1)
        else:
            self._close(0)
            numbers = range(len(iterations))
            self._lines = _Lines(len(iterations))
            self._turn(body, numbers, region.start)
            turns = len(self._lines.steps)
            self._pass(region.name, chunks, Loop(region, iterations), inherited)
            self._finish(body, numbers, region.end - 1)
            self._close(turns, body.distance)
        self._leave(body, region.end)

    def _close(self, turns: int, distance: int = 0) -> None:
        """End the unfinished segment; its first `turns` steps are skipped in the first `distance` rows."""
        lines, self._lines = self._lines, _Lines()
        early = min(distance, lines.num_rows) if turns else 0
        for first, last, skip in ((0, early, turns), (early, lines.num_rows, 0)):
            if first < last and lines.steps:
                self._done.append(lines.segment(first, last, skip=skip))

    # --- signals --------------------------------------------------------------------------------------------------

    def _record(self, body: Body, index: int, *, of_main: bool) -> None:
        for signal in body.records.get(index, ()):
            if (signal.stream == MAIN) is of_main:
                self._add_record([signal], index - 1)

    def _wait(self, body: Body, index: int, *, of_main: bool) -> None:
        for stream, signal in body.waits.get(index, ()):
            if (stream == MAIN) is of_main:
                self._add_wait(stream, [signal], index)

    def _enter(self, body: Body, index: int) -> None:
        """Let side streams begin a body after main's work so far."""
        if body.entry is not None:
            self._add_record([body.entry], index)
            for stream in body.entering:
                self._add_wait(stream, [body.entry], index)

    def _leave(self, body: Body, index: int) -> None:
        """Let main go on from a body after the side streams' work."""
        for signal in body.exits:
            self._add_record([signal], index - 1)
            self._add_wait(MAIN, [signal], index - 1)

    def _turn(self, body: Body, numbers: range, index: int) -> None:
        """Let iterations begin after the ends of earlier ones."""
        for stream, on in body.turns:
            self._add_wait(stream, body.ends[on], index, numbers)

    def _finish(self, body: Body, numbers: range, index: int) -> None:
        """Record the ends of iterations."""
        for slots in body.ends.values():
            self._add_record(slots, index, numbers)

    def _add_record(self, slots: Sequence[Signal], op: int, numbers: range = _ONCE) -> None:
        assert self._streams is not None
        stream = slots[0].stream
        self._add_order(self._streams.record, f"record {stream}", stream, slots, op, numbers)

    def _add_wait(self, stream: str, slots: Sequence[Signal], op: int, numbers: range = _ONCE) -> None:
        assert self._streams is not None
        self._add_order(self._streams.wait, f"{stream} waits for {slots[0].stream}", stream, slots, op, numbers)

    def _add_order(
        self, function: Callable[..., object], name: str, stream: str, slots: Sequence[Signal], op: int, numbers: range
    ) -> None:
        """Add a call on events: iteration i takes slot i mod their number."""
        arguments: dict[str, Any] = {"stream": stream}
        table = None
        if len(slots) > 1 and len(numbers) > 1:
            table = self._turns(slots, numbers)
        else:
            arguments["event"] = slots[numbers.start % len(slots)].event
        self._add(op, name, stream, function, arguments, partial(function, **arguments), table)

    def _turns(self, slots: Sequence[Signal], numbers: range) -> Sequence[Arguments]:
        key = "event", *map(id, slots), numbers
        if key not in self._tables:
            events = [{"event": signal.event} for signal in slots]
            self._tables[key] = [events[number % len(slots)] for number in numbers]
        return self._tables[key]

    # --- launches -------------------------------------------------------------------------------------------------

    def _fill(self, roots: Sequence[int], when: str, op: int) -> None:
        if self._poison is not None:
            for root in roots:
                self._add_fill(self._poison.fill(root, when), op)

    def _add_fill(self, fill: Fill, op: int) -> None:
        self._add_launch(op, fill.name, MAIN, fill.view.fill_, {"value": fill.value}, {})

    def _launch(self, op: PlanOp, chunks: Chunks, loop: Loop | None) -> None:
        """Add one launch; its arguments by row go into its column."""
        bound = self._bind(op)
        on_host = bound.way.on_host
        arguments: dict[str, Any] = dict(op.attrs)
        columns: dict[str, Column] = {}
        for name, buffer in op.operands.items():
            on_device = self._backend == "cuda" and name not in on_host
            view = self._views.operand(buffer, bound.slices.get(name, ()), chunks, loop, on_device=on_device)
            if isinstance(view, Column):
                columns[name] = view
            else:
                arguments[name] = view
        if bound.way.row_origin is not None:
            rows = [entry for entry in bound.slices.get(bound.way.row_origin, ()) if entry.axis == 0]
            start = sum(entry.factor * chunks[entry.region].start for entry in rows if entry.region in chunks)
            factors = [entry.factor for entry in rows if entry.region not in chunks]
            if loop is not None and factors:
                columns["row_start"] = self._row_starts(loop, start, sum(factors))
            else:
                arguments["row_start"] = start
        self._check(op, bound, arguments, columns)
        place = op.index, op.name, op.stream
        if bound.bind is not None and self._streams is None and not columns:
            self._add(*place, bound.launch, arguments, bound.bind(**arguments), None)
        else:
            self._add_launch(*place, bound.launch, arguments, columns)

    def _check(self, op: PlanOp, bound: _Bound, arguments: Arguments, columns: _Columns) -> None:
        """Compare an op's operands with the operator's record, once for all layers and iterations of the same form."""
        if op.index in self._checked:
            return
        self._checked.add(op.index)
        sizes = ((name, tuple(self._buffers[b].shape), self._buffers[b].dtype) for name, b in op.operands.items())
        alike = op.kernel, *sizes
        if alike not in self._alike:
            self._alike.add(alike)
            first = {name: column.values[0] for name, column in columns.items()}
            check(bound.operator, bound.way, {**arguments, **first})

    def _bind(self, op: PlanOp) -> _Bound:
        found = self._bound.get(op.index)
        if found is None:
            operator, way = self._implementation(op)
            refuse_other_cards(operator, way)
            kernel = kernel_of(way)
            slices: dict[str, tuple[SliceOf, ...]] = {}
            # outer loops first: a chunk of a loop inside counts from the start of the outer one's
            for operand, *entry in sorted(op.slices, key=lambda entry: len(self._regions.chain(entry[2]))):
                slices[operand] = (*slices.get(operand, ()), SliceOf(*entry))
            found = self._bound[op.index] = _Bound(
                launcher_of(kernel), getattr(kernel, "bind", None), slices, operator, way
            )
        return found

    def _implementation(self, op: PlanOp) -> tuple[Operator, Implementation]:
        """Find the operator of an op among the given and the shipped ones; nothing is imported by a name in a file."""
        kernel = op.kernel
        operator = find(kernel, self._operators)
        if operator is None:
            raise PlanFormatError(
                f"op {op.index} ({op.name}) is of the operator '{kernel}', which Mosaic does not ship; give its "
                f"record: Executor(plan, workspace, operators={{'{kernel}': …}})."
            )
        try:
            return operator, operator.implementation(self._backend, self._implementations.get(kernel))
        except UnknownName as error:
            raise PlanFormatError(f"op {op.index} ({op.name}) cannot run: {error}") from None

    def _row_starts(self, loop: Loop, start: int, factor: int) -> Column:
        key = start, factor, id(loop.chunks)
        if key not in self._starts:
            self._starts[key] = Column(key, [start + factor * chunk.start for chunk in loop.chunks])
        return self._starts[key]

    def _table(self, columns: _Columns) -> Sequence[Arguments] | None:
        """Lay columns side by side, one row per pass; equal rows are the same object."""
        if not columns:
            return None
        key = tuple((name, column.key) for name, column in columns.items())
        if key not in self._tables:
            rows = zip(*(column.values for column in columns.values()), strict=True)
            self._tables[key] = [dict(zip(columns, row, strict=True)) for row in rows]
        return self._tables[key]

    def _add_launch(
        self, op: int, name: str, stream: str, function: Callable[..., object], arguments: Arguments, columns: _Columns
    ) -> None:
        run = function if self._streams is None else self._streams.launcher(function, stream)
        self._add(op, name, stream, function, arguments, partial(run, **arguments), self._table(columns))

    def _add(
        self, op: int, name: str, stream: str, function: Callable[..., object], arguments: Arguments,
        call: Callable[..., object], table: Sequence[Arguments] | None,
    ) -> None:  # fmt: skip
        lines = self._lines
        lines.steps.append(Step(op=op, name=name, stream=stream, function=function, arguments=arguments, call=call))
        lines.tables.append(table if table is not None else lines.blank)
