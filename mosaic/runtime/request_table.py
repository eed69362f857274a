"""The requests of one session as rows of a table on the device, and the steps over them, which the host launches and reads.

The device decides who is served and how requests go on (`mosaic.registrar.request_table`). The host writes a row when a request
enters and when it leaves, and keeps a copy of table and canvases from what steps report: on a device it is a step late.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray

from mosaic.models.parts import CANVAS, HELD_EXTENTS, KV, REQUESTS, TABLED
from mosaic.models.state import State
from mosaic.models.step import StepSize, rounded_states
from mosaic.registrar.operators.read_canvas import OPEN
from mosaic.registrar.request_table import COLUMNS, RUNNING, Column, Reported
from mosaic.runtime.host_copy import HostCopy
from mosaic.runtime.host_inputs import Numbers
from mosaic.runtime.interrupts import interrupts_held
from mosaic.runtime.packing import PackedStep
from mosaic.runtime.prefix_files import SavedPrefixes
from mosaic.runtime.prefixes import Prefixes
from mosaic.runtime.recent import Recent
from mosaic.runtime.room import SEEN

if TYPE_CHECKING:
    from mosaic.planner.plan import Plan
    from mosaic.runtime.engine import Engine, Ran
    from mosaic.runtime.executor import Executor
    from mosaic.runtime.host_copy import Arriving
    from mosaic.runtime.room import Room, Shape
    from mosaic.runtime.state_rows import OwnedRows

__all__ = ["MOST_ROWS", "ROWS", "Launched", "RequestTable", "Served"]

ROWS: Final = 16
"""Rows that a table begins with; it doubles when all are taken."""
MOST_ROWS: Final = 1024
"""Requests that one table serves; others wait for a row."""
KEPT_STEPS: Final = 512
"""Steps that are kept for launching them again: the ladder of a session."""
NO_ROWS: Final[Mapping[State, int]] = MappingProxyType({})
_FROZEN: Final = WeakSet["RequestTable"]()
_OUTPUTS: Final = ("report", "decided_rows", "chosen", "committed", "score")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a step did: arrays of the host that nobody writes again. B requests were served, M rows were to decide.

    Parameters
    ----------
    report
        int64 [B, 16], by the columns of `Reported`; row numbers count from the session's first.
    steps, canvas_rows
        int64 [B], how many steps have served each request so far, and its first row of the canvas.
    decided_rows, chosen, committed, score
        Of each row to decide, its row of the canvas, the token, whether it was committed, and its score.
    plan, seconds
        As for `StepResult`.
    """

    report: NDArray[np.int64]
    steps: NDArray[np.int64]
    canvas_rows: NDArray[np.int64]
    decided_rows: NDArray[np.int64]
    chosen: NDArray[np.int64]
    committed: NDArray[np.bool_]
    score: NDArray[np.float32]
    plan: Plan
    seconds: float

    @property
    def decided(self) -> NDArray[np.int64]:
        """How many rows of each request were to decide, [B]; 0 of those that read a part of their prompt."""
        found = self.report[:, Reported.ROWS].copy()
        found[1:] -= self.report[:-1, Reported.ROWS]
        return found


class Launched(NamedTuple):
    """A step that was launched and not read: its results on their way, its room, whom it serves, what ran, when it began, and
    whether newcomers waited."""

    arriving: Arriving
    room: Room
    groups: int
    marked: bool
    ran: Ran
    started: float
    holds: bool


@dataclass(frozen=True, kw_only=True)
class _TableStep(PackedStep):
    """A step whose requests are on the device already: the host writes what has entered and left since the last one."""

    table: RequestTable

    def write(self, executor: Executor) -> None:
        """Write rows of states, and which rows of the table are looked at."""
        self.table.send()
        PackedStep.write(self, executor)


class RequestTable:
    """The requests of a session; whoever calls it holds the engine's turn.

    Parameters
    ----------
    engine
        Of the model.

    Attributes
    ----------
    columns
        int64 [S, COLUMNS], the table as the host knows it.
    tokens, confidence
        By rows of the canvas: int64 tokens, `OPEN` where nothing is decided, and float32 scores.
    steps
        int64 [S], steps that have served each request.
    planned
        Rows of each state that steps are planned for: those that there are, or were (`cover`). So sizes stay the same while
        requests come and go.
    longest
        Keys of the longest request that is expected; 0: nobody knows. No step's plan counts more for a window.
    ready
        Steps that ran with these; `is_ready` says whether one still is ready.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        for state in TABLED.states:
            engine.table(state)  # which may hold rows for steps alone: memory of those goes back when it is needed
        self._own, self._keys = engine.table(REQUESTS).open("a session"), engine.table(KV)
        block = 0 if engine.planner.architecture is None else engine.planner.architecture.block
        self._prefixes = Prefixes(self._keys, block) if block else None
        self.columns, self.steps = np.zeros((ROWS, COLUMNS), dtype=np.int64), np.zeros(ROWS, dtype=np.int64)
        self.planned: frozenset[tuple[State, int]] = frozenset()
        self.longest = 0
        self.ready: dict[Shape, _TableStep] = {}
        self._held, self._roomy = dict(self.planned), False
        self._covered: Hashable = None  # for which rows of states, by their count of changes, and which step
        self.tokens, self.confidence = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        self._free: list[int] = [*range(ROWS - 1, -1, -1)]  # the last is the next one
        self._leaving: deque[tuple[int, int]] = deque()  # rows, and the step before which they are not free
        self._whole = False  # whether all rows of the table are unsent
        self._unsent: dict[int, list[tuple[State, int, NDArray[np.int64]]]] = {}  # by row of the table: rows of others
        self._sides = [HostCopy(), HostCopy()]
        self.launched: deque[Launched] = deque()
        """Steps that were launched and not read, in order."""
        self._steps: Recent[Hashable, _TableStep] = Recent(KEPT_STEPS)
        self._predicted: Recent[Hashable, float] = Recent(8 * KEPT_STEPS)
        self._fitting: Recent[Hashable, bool] = Recent(8 * KEPT_STEPS)
        self._count = self._read = self._entered = 0
        self.is_sure = True
        """Whether every step that was begun was also recorded: one that was interrupted may have moved the table on."""

    @property
    def first(self) -> int:
        """The session's first row."""
        return self._own.runs()[0][0]

    @property
    def is_open(self) -> bool:
        """Whether the session has rows."""
        return self._own.length > 0

    @property
    def streams_weights(self) -> bool:
        """Whether some weights are in host memory, whatever a step asks for."""
        return self._engine.current.config.get("stream", "none") != "none"

    @property
    def engine(self) -> Engine:
        """The engine of the model."""
        return self._engine

    @property
    def holes(self) -> int:
        """Runs of rows of keys that nobody owns: a request's keys come to lie in one extent more, at most."""
        return len(self._keys.free)

    @property
    def rows_to_open(self) -> int:
        """The rows that the first request to enter takes for the table."""
        return 0 if self.is_open else len(self.columns)

    @property
    def prefixes(self) -> Prefixes | None:
        """What requests share; None if attention sees both ways, or the caller may write into the model's weights: kept keys might
        be those of other weights."""
        weights = self._engine.weights
        return None if weights.shown or weights.adopted else self._prefixes

    @property
    def saved_prefixes(self) -> SavedPrefixes | None:
        """The same, for keeping and saving some."""
        return None if self.prefixes is None else SavedPrefixes(self._engine, self.prefixes)

    def _open(self) -> None:
        """Take the session's rows; nobody's, until requests enter."""
        if not self.is_open:
            self._own.reserve(len(self.columns))
            self._whole = True

    @property
    def is_full(self) -> bool:
        """Whether no request can enter before one leaves, or the table grows."""
        return not self._free

    def grow(self) -> bool:
        """Double the table, if it has no more than half of `MOST_ROWS`, every step has been read, and there is memory."""
        rows = len(self.columns)
        if self.launched or 2 * rows > MOST_ROWS:
            return False
        self._own.close()
        self.columns = np.concatenate([self.columns, np.zeros_like(self.columns)])
        self.steps = np.concatenate([self.steps, np.zeros_like(self.steps)])
        self._free = [*range(2 * rows - 1, rows - 1, -1), *self._free]
        self._open()
        return True

    def enter(
        self, row: NDArray[np.int64], tokens: NDArray[np.int64], canvas: OwnedRows, extents: OwnedRows | None = None,
        keys: OwnedRows | None = None,
    ) -> int | None:  # fmt: skip
        """Let a request run from the next step on; return its row, or None if all are taken.

        Parameters
        ----------
        row
            [COLUMNS], but for where canvas and extents are.
        tokens
            [N], of its canvas, `OPEN` where nothing is decided.
        canvas, extents, keys
            Its rows of these states: N, and one for each extent that its keys have; None if it keeps no keys.
        """
        if not self._free:
            return None
        self._open()
        number = self._free.pop()
        at = canvas.runs()[0][0]
        row[Column.STATE], row[Column.CANVAS] = RUNNING, at
        self._unsent[number] = [(CANVAS, at, tokens)]
        if extents is not None and keys is not None:
            held = extents.runs()[0][0]
            row[Column.EXTENT], row[Column.EXTENTS] = held, len(keys.extents)
            self._unsent[number].append((HELD_EXTENTS, held, np.array(keys.extents)))
        row[Column.SERVED] = self.columns[:, Column.SERVED].max() + int(self._entered < self._count)
        self._entered = self._count  # those who come between the same steps come in one turn
        self.columns[number], self.steps[number] = row, 0
        if len(self.tokens) < at + len(tokens):
            more = 2 * (at + len(tokens)) - len(self.tokens)
            self.tokens = np.concatenate([self.tokens, np.full(more, OPEN)])
            self.confidence = np.concatenate([self.confidence, np.zeros(more, dtype=np.float32)])
        self.tokens[at : at + len(tokens)] = tokens
        self.confidence[at : at + len(tokens)] = tokens != OPEN
        return number

    def leave(self, number: int) -> None:
        """Let no further step serve a request; its row is free when the steps that were launched have been read."""
        self.columns[number, : Column.SERVED] = 0  # turns are counted on: nobody who comes later goes before who waits
        self._unsent[number] = []  # others may have its rows of other states
        self._leaving.append((number, self._count))
        self._free_rows()

    def close(self) -> None:
        """Give the session's rows back."""
        self.launched.clear()
        self._unsent.clear()
        self._own.close()
        if self._prefixes is not None:
            self._prefixes.close()
        if self in _FROZEN:
            _FROZEN.remove(self)
            if not _FROZEN:
                gc.unfreeze()

    def _free_rows(self) -> None:
        while self._leaving and self._leaving[0][1] <= self._read:
            self._free.append(self._leaving.popleft()[0])
        self.rest()

    def rest(self) -> None:
        """Give the session's rows back if nobody has any."""
        if len(self._free) == len(self.columns) and self.is_open:  # an idle session holds nothing
            self._unsent.clear()
            self._own.close()

    def freeze(self) -> None:
        """Leave all objects that there are out of Python's garbage collection until the last such table closes: looking through
        those of hundreds of steps takes it seconds, in the middle of one."""
        if _FROZEN or not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            _FROZEN.add(self)

    # --- steps --------------------------------------------------------------------------------------------------------

    def size(self, room: Room, states: Iterable[tuple[State, int]]) -> StepSize:
        """Return the size of a step with this room, beside rows of states."""
        return room.size(states, self.longest)

    def beside(self, more: Mapping[State, int]) -> frozenset[tuple[State, int]]:
        """Return the rows of each state once `more` are taken."""
        return frozenset(self._states(more).items())

    def _states(self, more: Mapping[State, int], gone: Collection[OwnedRows] = ()) -> dict[State, int]:
        """Return the rows of each state once owners have `gone` and `more` are taken, and the keys that are seen, if more."""
        states = self._engine.states_with(more, gone)
        seen = states.pop(SEEN) if SEEN in more else more.get(KV, 0)
        seen += self._keys.positions - sum([owned.length for owned in gone if owned.is_of(self._keys)])
        if seen > states.get(KV, 0):
            states[SEEN] = seen
        return states

    def fits(self, room: Room, states: frozenset[tuple[State, int]] | None = None) -> bool:
        """Return whether such a step fits the budget beside rows of states, by default those that are planned for; found once."""
        asked, planner = (room, self.planned if states is None else states), self._engine.plans.planner
        return self._fitting.find(
            (asked, self.longest, planner), lambda: all(map(self._engine.plans.fits_exactly, self.size(*asked).graphs))
        )

    def admits(
        self,
        rooms: Iterable[Room],
        more: Mapping[State, int],
        gone: Collection[OwnedRows] = (),
        *,
        planned: bool = False,
    ) -> bool:
        """Return whether such steps fit the budget once owners of rows have `gone` and `more` rows of states are taken; whether
        these are `planned` for, too."""
        states, left = self._states(more, gone), list(rooms)
        if within := _within(states, self._held):
            left = [room for room in left if not self.fits(room)]
        elif planned:
            return False
        self._roomy = within and not left
        for rounded in _roundings(states) if left else ():
            left = [room for room in left if not self.fits(room, rounded)]
            if not left:
                break
        return not left

    def keep_idle(self, *, alone: bool) -> None:
        """Let those who were admitted take new rows of keys rather than idle extents, if they fit beside what steps are planned
        for, and there are no others' steps."""
        self._keys.most = self._held.get(KV, 0) if alone and self._roomy else 0

    def cover(self, least: Room, wanted: Room, more: Mapping[State, int] = NO_ROWS) -> None:
        """Plan steps from now on for the rows of states that there are once `more` are taken, and for as many as there were.

        If the `wanted` step does not fit beside them, steps go without what is not taken; if it does not fit even so, the `least`
        one has to.
        """
        asked = self._engine.changes, self._engine.plans.planner, least, wanted
        if asked == self._covered and not more:
            return
        states, before = self._states(more), self._held
        if not (_within(states, before) and self.fits(wanted)):
            most = {state: max(count, states.get(state, 0)) for state, count in {**states, **before}.items()}
            tried = [*_roundings(most), *_roundings(states)]
            fitting = filter(lambda one: self.fits(*one), product((wanted, least), tried))
            if (found := next(fitting, (least, tried[-1]))[1]) != self.planned:
                self.ready.clear()
                self.planned, self._held = found, dict(found)
        self._covered = asked  # at last: what is interrupted is done again

    def expect(self, longest: int) -> None:
        """Plan steps from now on for requests of so many keys at most."""
        if longest > self.longest:
            self.longest = longest
            self.ready.clear()

    def rehearse(self, shape: Shape, kept: int | None) -> None:
        """Plan, compile and capture a step, which serves nobody; of one that is cut, with this size of its second graph."""
        self.predicted_ms(shape.room)
        self._engine.rehearse(step := self._step(0, 0, shape), kept)
        self.ready[shape] = step

    def is_ready(self, shape: Shape) -> bool:
        """Return whether such a step can be launched without being planned, bound or captured."""
        step = self.ready.get(shape)
        return step is not None and self._engine.is_ready(step)

    def kept(self, room: Room) -> Sequence[int | None]:
        """Return the sizes of the second graph of such a step: None alone if it is not cut."""
        return self.size(room, self.planned).buckets or (None,)

    def predicted_ms(self, room: Room) -> float:
        """Return how long the plan of such a step says that it takes; found once, whatever the states hold."""

        def predict() -> float:
            return self._engine.plans.plan(self.size(room, self.planned)).predicted_step_ms

        return self._predicted.find((room, self.longest), predict)

    def launch(self, shape: Shape, *, holds: bool = False) -> None:
        """Launch a step; a marked one also serves those who need it, and whoever decided nothing so far may have to wait for
        prompts (`holds`). After one that was interrupted, every step has been read."""
        started = perf_counter()
        if not self.is_sure:
            self._undo()
        self.is_sure = False
        step = self._step(self.first, len(self.columns), shape, holds=holds)
        ran = self._engine.run(step)
        with interrupts_held():
            arriving = self._sides[0].start([ran.outputs[name] for name in _OUTPUTS])
            self._sides.reverse()
            self.launched.append(Launched(arriving, *shape, ran, started, holds))
            self._count += 1
            self.ready[shape] = step
            self.is_sure = True

    def _undo(self) -> None:
        """Have the next step begin with the table and the canvases that the host knows."""
        self._whole = True
        for number in (self.columns[:, Column.STATE] == RUNNING).nonzero()[0].tolist():
            at, length = self.columns[number, [Column.CANVAS, Column.LENGTH]].tolist()
            self._unsent.setdefault(number, []).append((CANVAS, at, self.tokens[at : at + length]))

    def _step(self, first: int, count: int, shape: Shape, *, holds: bool = False) -> _TableStep:
        """The step that looks at `count` rows of the table; made once."""

        def make() -> _TableStep:
            size = self.size(shape.room, self.planned)
            given = first, count, size.tokens, size.rows, size.extents, shape.groups, int(shape.marked), int(holds)
            return _TableStep(size=size, inputs={"room": Numbers(given, "int64", 8)}, table=self)

        return self._steps.find((first, count, shape, holds, self.longest, self.planned), make)

    def send(self) -> None:
        """Write what has entered and left."""
        rows = [(0, self.columns)] if self._whole else [(row, self.columns[row : row + 1]) for row in self._unsent]
        of_table = [(REQUESTS, self.first + row, values) for row, values in rows]
        for state, row, values in chain(of_table, *self._unsent.values()):
            width = values.shape[1] if values.ndim > 1 else 1
            there = self._engine.workspace.view(f"state/{state.name}", row * width * 8, values.shape, "int64")
            given = torch.from_numpy(values)
            there.copy_(given.pin_memory() if there.is_cuda else given, non_blocking=True)
        self._unsent.clear()
        self._whole = False

    @property
    def has_news(self) -> bool:
        """Whether what the first step reports that was launched and not read has arrived."""
        return bool(self.launched) and self.launched[0].arriving.are_here

    def wait(self) -> None:
        """Wait for the first step that was launched and not read.

        Raises
        ------
        DeviceLost
            If the device stopped meanwhile.
        """
        self.launched[0].arriving.wait()

    def read(self) -> Served:
        """Take what the first step that was launched reports; the caller has waited for it, and holds signals back."""
        step = self.launched.popleft()
        report, *of_rows = [tensor.numpy() for tensor in step.arriving.wait()]
        self._read += 1
        report = report[report[:, Reported.ROW] >= 0].copy()
        report[:, Reported.ROW] -= self.first
        count = int(report[-1, Reported.ROWS]) if len(report) else 0
        decided, chosen, committed, score = [values[:count].copy() for values in of_rows]
        numbers, taken = report[:, Reported.ROW], committed.view(np.bool_)
        self.columns[numbers, Column.WRITTEN :] = report[:, Reported.WRITTEN :]
        self.steps[numbers] += 1
        self.tokens[decided[taken]], self.confidence[decided[taken]] = chosen[taken], score[taken]
        self._free_rows()
        return Served(
            report=report, steps=self.steps[numbers], canvas_rows=self.columns[numbers, Column.CANVAS], decided_rows=decided,
            chosen=chosen, committed=taken, score=score, plan=step.ran.plan, seconds=perf_counter() - step.started,
        )  # fmt: skip


def _within(states: Mapping[State, int], planned: Mapping[State, int]) -> bool:
    return all(count <= planned.get(state, 0) for state, count in states.items())


def _roundings(states: Mapping[State, int]) -> Iterator[frozenset[tuple[State, int]]]:
    """Rows of states, rounded up to a power of two, so that few sizes serve; by less, where memory is short; and as they are."""
    yield from (rounded_states(states, share=share) for share in (1, 8, 64, 512))
    yield frozenset(states.items())
