"""Where a step's streams wait for each other: the plan's edges and the rules of loops, as signals in bodies.

A body is a loop's, or the step itself. At its entry its side streams wait for main, at its exit main waits for them. An
edge within it orders two of its items (ops, or loops, which run on main) in one iteration. Iteration i waits, on every
stream, for the end of iteration i - r on all streams: r is the least `rotate` of the buffers that have their home in
the loop and are touched by its side ops. An edge between bodies needs no signal if an entry or exit implies it.

A wait is left out if another implies it: a stream that begins behind another one inherits its waits, and a stream that
ends before another one needs no wait at the exit. Vector clocks over the items find the implied waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from mosaic.planner.plan_records import PlanOp, PlanRecords
from mosaic.runtime.regions import Regions
from mosaic.runtime.streams import MAIN, Event

NewEvent: TypeAlias = Callable[[], Event]


@dataclass(frozen=True, slots=True, eq=False)
class Signal:
    """An event and the stream that it is recorded on."""

    event: Event
    stream: str


@dataclass(slots=True, kw_only=True)
class Body:
    """The signals of one body, by the index of the op before or after.

    Attributes
    ----------
    records
        By op index: signals to record after the item that ends there.
    waits
        By op index: the (stream, signal) waits before the item that starts there.
    entry
        Main's position at the entry; the streams in `entering` wait for it.
    exits
        Signals that main waits for at the exit.
    distance
        Iteration i waits for the end of iteration i - `distance`.
    ends
        Signals of an iteration's end, one per slot and stream: iteration i records slot i mod `distance`.
    turns
        Waits before iteration i >= `distance`: which stream waits for slot i mod `distance` of which `ends`.
    """

    records: dict[int, list[Signal]] = field(default_factory=dict)
    waits: dict[int, list[tuple[str, Signal]]] = field(default_factory=dict)
    entry: Signal | None = None
    entering: Sequence[str] = ()
    exits: Sequence[Signal] = ()
    distance: int = 1
    ends: Mapping[str, Sequence[Signal]] = field(default_factory=dict)
    turns: Sequence[tuple[str, str]] = ()


@dataclass(slots=True)
class _Item:
    """An op, or a whole loop, directly in a body; its rank on its stream; the items that its edges make it wait for."""

    start: int
    end: int
    stream: str
    rank: int
    after: list[_Item] = field(default_factory=list)
    clock: dict[str, int] = field(default_factory=dict)


def bodies_of(records: PlanRecords, regions: Regions, event: NewEvent) -> dict[str | None, Body]:
    """Derive the signals of every body that holds side ops.

    Parameters
    ----------
    event
        Makes the event of a signal.
    """
    ops = records.ops
    bodies = {}
    for region in dict.fromkeys(op.region for op in ops if op.stream != MAIN):
        items = _items(ops, regions, region)
        _add_edges(records, regions, region, items)
        body = bodies[region] = Body()
        sources, sinks = _run_clocks(items, body, event)
        body.entering = [stream for stream in sources if stream != MAIN]
        body.entry = Signal(event(), MAIN) if body.entering else None
        body.exits = [Signal(event(), stream) for stream in sinks if stream != MAIN]
        if region is not None:
            body.distance = _distance(records, region)
            body.turns = [(waits, on) for waits in sources for on in sinks if waits != on]
            if regions[region].count > body.distance and body.turns:
                body.ends = {on: [Signal(event(), on) for _ in range(body.distance)] for on in sinks}
            else:
                body.turns = ()
    return bodies


def _items(ops: Sequence[PlanOp], regions: Regions, region: str | None) -> dict[int, _Item]:
    """List the items directly in a body, by first op."""
    index, end = (0, len(ops)) if region is None else (regions[region].start, regions[region].end)
    children = regions.children(region)
    items: dict[int, _Item] = {}
    ranks: dict[str, int] = {}
    while index < end:
        child = children.get(index)
        stream = ops[index].stream if child is None else MAIN
        ranks[stream] = ranks.get(stream, 0) + 1
        items[index] = _Item(index, index + 1 if child is None else child.end, stream, ranks[stream])
        index = items[index].end
    return items


def _add_edges(records: PlanRecords, regions: Regions, region: str | None, items: Mapping[int, _Item]) -> None:
    """Give each item the items of its body that the plan's edges make it wait for."""
    ops = records.ops
    for edge in records.edges:
        a, b = ops[edge.source], ops[edge.target]
        if regions.common(a.region, b.region) != region:
            continue
        # a side op of a loop further inside begins after that loop's entry and is joined by its exit
        if any(op.stream != MAIN and op.region != region for op in (a, b)):
            continue
        source, _ = regions.item(region, a.index, a.region)
        target, _ = regions.item(region, b.index, b.region)
        items[target].after.append(items[source])


def _run_clocks(items: Mapping[int, _Item], body: Body, event: NewEvent) -> tuple[list[str], list[str]]:
    """Add a signal for each edge that nothing implies; find the streams that wait at the entry and at the exit.

    An item's clock holds, by stream, the rank of the last item there that is known to run before it, or is the item.
    """
    last: dict[str, _Item] = {}
    sources: list[str] = []
    signals: dict[int, Signal] = {}
    for item in items.values():
        item.clock = dict(last[item.stream].clock) if item.stream in last else {}
        for source in sorted(item.after, key=lambda other: -other.start):
            if item.clock.get(source.stream, 0) >= source.rank:
                continue
            for stream, rank in source.clock.items():
                item.clock[stream] = max(item.clock.get(stream, 0), rank)
            if source.start not in signals:
                signals[source.start] = Signal(event(), source.stream)
                body.records.setdefault(source.end, []).append(signals[source.start])
            body.waits.setdefault(item.start, []).append((item.stream, signals[source.start]))
        if item.stream not in last and not item.clock:
            sources.append(item.stream)
        item.clock[item.stream] = item.rank
        last[item.stream] = item
    sinks = [
        stream
        for stream, mine in last.items()
        if not any(other.clock.get(stream, 0) >= mine.rank for other in last.values() if other is not mine)
    ]
    return sources, sinks


def _distance(records: PlanRecords, region: str) -> int:
    """Give the `distance` of a loop's iterations (see `Body`)."""
    touched = {
        buffer for op in records.ops if op.stream != MAIN and op.region == region for buffer in op.operands.values()
    }
    return min((b.rotate for b in records.buffers if b.id in touched and b.region == region), default=1)
