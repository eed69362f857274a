"""A device of streams that only writes down what it is given, what its log may do out of order, and what it must not.

`StreamLog` speaks the executor's protocol. `races` finds pairs of launches that touch common bytes in no order, by
vector clocks over the log alone. `execute` runs the log's launches in any order that streams and events allow.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

CALLER = "caller"


@dataclass(eq=False)
class Launch:
    """A function given to a stream; what it reads and writes, once `annotate` knows."""

    stream: str
    function: Callable[..., object]
    arguments: Mapping[str, Any]
    name: str = ""
    reads: list[Touch] = field(default_factory=list)
    writes: list[Touch] = field(default_factory=list)


@dataclass(eq=False)
class Record:
    stream: str
    event: object


@dataclass(eq=False)
class Wait:
    stream: str
    event: object


Entry = Launch | Record | Wait


class StreamLog:
    """Streams that write their log; launches run at once too, unless `held`."""

    def __init__(self, *, held: bool = False) -> None:
        self.entries: list[Entry] = []
        self.held = held
        self.drained = 0
        self._entered, self._left = self.of_step = self.event(), self.event()

    def event(self) -> object:
        return object()

    def record(self, event: object, stream: str) -> None:
        self.entries.append(Record(stream, event))

    def wait(self, event: object, stream: str) -> None:
        self.entries.append(Wait(stream, event))

    def launcher(self, function: Callable[..., object], stream: str) -> Callable[..., object]:
        def launch(**arguments: Any) -> None:
            self.launch(stream, function, arguments)

        return launch

    def launch(self, stream: str, function: Callable[..., object], arguments: Mapping[str, Any]) -> None:
        self.entries.append(Launch(stream, function, arguments))
        if not self.held:
            function(**arguments)

    def replay(self, captured: Any) -> None:
        with self.step():
            captured.replay()

    @contextmanager
    def step(self) -> Iterator[None]:
        self.record(self._entered, CALLER)
        self.wait(self._entered, "main")
        try:
            yield
        except BaseException:
            self.drained += 1
            raise
        self.record(self._left, "main")
        self.wait(self._left, CALLER)

    def capture(self, step: Callable[[], None]) -> Any:
        raise RuntimeError("a log cannot be captured")

    @property
    def launches(self) -> list[Launch]:
        return [entry for entry in self.entries if isinstance(entry, Launch)]


# --- what launches touch ----------------------------------------------------------------------------------------------

UNIT = 4  # bytes per bit: what is smaller is aligned to much more in plans


@dataclass(frozen=True, slots=True)
class Touch:
    """Bytes of one range of memory: a bit per unit from `first` on; `end` is the unit after the last."""

    part: str
    first: int
    end: int
    bits: int

    def meets(self, other: Touch) -> bool:
        if self.part != other.part or self.end <= other.first or other.end <= self.first:
            return False
        shift = other.first - self.first
        return bool(self.bits & other.bits << shift if shift >= 0 else self.bits << -shift & other.bits)


class Where:
    """Tells what tensors touch, by the ranges of memory that they lie in."""

    def __init__(self, ranges: Mapping[str, tuple[int, int]]) -> None:
        self._ranges = ranges

    def __call__(self, tensor: Tensor) -> Touch:
        for part, (address, size) in self._ranges.items():
            if address <= tensor.data_ptr() < address + size:
                bits = _bits(tensor)
                first = (tensor.data_ptr() - address) // UNIT
                return Touch(part, first, first + bits.bit_length(), bits)
        raise AssertionError(f"a launch touches memory at {tensor.data_ptr():#x}, which no pool has")


def _bits(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    if tensor.is_contiguous():
        return (1 << -(-tensor.numel() * tensor.element_size() // UNIT)) - 1
    step, row = tensor.stride(0) * tensor.element_size() // UNIT, _bits(tensor[0])
    bits = 0
    for index in range(tensor.shape[0]):
        bits |= row << index * step
    return bits


def annotate(log: StreamLog, executor: Any, steps: int = 1) -> None:
    """Note what the launches of `run` touch, by the ops of the document; fills and copies by the caller are writes."""
    workspace = executor.workspace
    used = {record["pool"] for record in executor.document["buffers"]} - {"external"}
    parts = [workspace.range(pool) for pool in used]
    where = Where({part.name: (part.address, part.committed_bytes) for part in parts if part.committed_bytes})
    known: dict[int, Touch] = {}
    ops = executor.document["ops"]
    calls = [call for call in executor.calls if call.function not in (log.record, log.wait)]
    mine = [launch for launch in log.launches if launch.stream != CALLER]
    assert len(mine) == steps * len(calls)
    for launch, call in zip(mine, calls * steps, strict=True):
        assert (launch.stream, launch.function) == (call.stream, call.function)
        assert launch.arguments.keys() == call.arguments.keys()
        launch.name = f"{call.name}@{call.op}"
        if call.name.startswith("poison"):
            launch.writes.append(where(call.function.__self__))
            continue
        op = ops[call.op]
        for operand, buffer in op["operands"].items():
            view = launch.arguments[operand]
            assert view is call.arguments[operand]
            touched = known.get(id(view)) or known.setdefault(id(view), where(view))
            if buffer in op["reads"]:
                launch.reads.append(touched)
            if buffer in op["writes"]:
                launch.writes.append(touched)
    for launch in log.launches:
        if launch.stream == CALLER:
            launch.name = "caller"
            launch.writes.append(where(launch.arguments["out"]))


# --- order ------------------------------------------------------------------------------------------------------------


def races(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """Pairs of launches on two streams that touch common bytes, one of them writing, in no order."""
    clocks: dict[str, dict[str, int]] = {}
    events: dict[object, dict[str, int]] = {}
    seen: list[tuple[Launch, int]] = []
    found = []
    for entry in entries:
        clock = clocks.setdefault(entry.stream, {})
        if isinstance(entry, Record):
            events[entry.event] = dict(clock)
        elif isinstance(entry, Wait):
            for stream, time in events.get(entry.event, {}).items():
                clock[stream] = max(clock.get(stream, 0), time)
        else:
            for other, time in seen:
                ordered = other.stream == entry.stream or clock.get(other.stream, 0) >= time
                if not ordered and _conflict(other, entry):
                    found.append((f"{other.stream}:{other.name}", f"{entry.stream}:{entry.name}"))
            clock[entry.stream] = clock.get(entry.stream, 0) + 1
            seen.append((entry, clock[entry.stream]))
    return found


def _conflict(a: Launch, b: Launch) -> bool:
    pairs = ((a.writes, b.writes), (a.writes, b.reads), (a.reads, b.writes))
    return any(mine.meets(other) for x, y in pairs for mine in x for other in y)


Policy = Literal["program", "sides first", "sides last", "random"]


def execute(entries: Sequence[Entry], policy: Policy, seed: int = 0) -> list[Launch]:
    """Run the launches in an order that a device might; gives that order.

    A stream runs in order. A wait holds its stream until what was recorded last, when the wait was given, is reached.
    """
    queues: dict[str, deque[tuple[Entry, int | None]]] = {}
    latest: dict[object, int] = {}
    for index, entry in enumerate(entries):
        needs = latest.get(entry.event) if isinstance(entry, Wait) else index
        queues.setdefault(entry.stream, deque()).append((entry, needs))
        if isinstance(entry, Record):
            latest[entry.event] = index
    reached: set[int] = set()
    order: list[Launch] = []
    choose = random.Random(seed)

    def ready(stream: str) -> bool:
        if not queues[stream]:
            return False
        entry, needs = queues[stream][0]
        return not isinstance(entry, Wait) or needs is None or needs in reached

    while any(queues.values()):
        able = [stream for stream in queues if ready(stream)]
        assert able, "every stream waits for another"
        sides = [stream for stream in able if stream not in ("main", CALLER)]
        rest = [stream for stream in able if stream in ("main", CALLER)]
        first = {"sides first": sides or rest, "sides last": rest or sides}.get(policy, able)
        stream = min(first, key=lambda s: queues[s][0][1] or 0) if policy == "program" else choose.choice(first)
        entry, needs = queues[stream].popleft()
        if isinstance(entry, Record):
            assert needs is not None
            reached.add(needs)
        elif isinstance(entry, Launch):
            entry.function(**entry.arguments)
            order.append(entry)
    return order
