"""The memory that steps share: the most that any step has needed, until it is needed elsewhere or `trim` frees it.

What states and carries in it hold from one graph to the next is noted beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from mosaic.errors import DoesNotFit, RuntimeMemoryError, UsageError
from mosaic.models.step import MAX_TOKENS
from mosaic.runtime.poison import POISON
from mosaic.runtime.recent import Recent
from mosaic.runtime.spans import Span, Spans, joined, without
from mosaic.runtime.state_rows import RowTable
from mosaic.runtime.workspace import HOST, Workspace

if TYPE_CHECKING:
    from mosaic.planner.plan import Plan
    from mosaic.planner.plan_records import PlanRecords
    from mosaic.runtime.range_pool import Range

WORKSPACE: Final = "workspace"
APART: Final = "apart"
"""The range of a step that is launched in parts, in place of `workspace`."""
ALTERNATING: Final = 512
"""Plans that alternate without a new commit, such as the steps of a session."""
_log = logging.getLogger(__name__)


class StepMemory:
    """The memory of steps beside weights: the pools `workspace`, `host` and those of states and carries.

    Parameters
    ----------
    workspace
        The workspace with these pools.
    tables
        The owners of the states' rows; tables may be added later.
    before_shrinking
        Called before the pool `workspace` loses memory, to empty views of it.
    finish
        Called before the range `APART` loses memory, to finish the step that has it.
    """

    def __init__(
        self,
        workspace: Workspace,
        tables: Collection[RowTable],
        before_shrinking: Callable[[], None],
        finish: Callable[[], None],
    ) -> None:
        self._workspace, self._tables = workspace, tables
        self._before_shrinking, self._finish = before_shrinking, finish
        self.row_bytes: dict[str, int] = {}
        """By pool, the bytes of one row of each state that plans have had; the same in all plans of a model."""
        self._served: Recent[tuple[int, ...], Plan] = Recent(ALTERNATING)
        """Commits that need not be repeated, by `_now`; the plan is kept alive, so its `id` is unique."""

    def commit(self, plan: Plan) -> None:
        """Commit a plan's memory beside that of earlier plans. If both do not fit, memory is given back in this order:
        pages of states without owned rows, all but the plan's own.

        Raises
        ------
        DoesNotFit
            If the plan needs more than the budget.
        RuntimeMemoryError
            If the device, or the machine, refuses.
        """
        if self._now(plan) in self._served:
            return
        sizes = {name: size for name, size in plan.pools.items() if name != "weights" and (size or name != HOST)}
        self._learn(plan, sizes)
        grow = partial(self._workspace.commit_all, sizes, holes=self._holes())
        for make_room in (partial(self.give_idle_back, plan), partial(self._leave, sizes)):
            try:
                grow()
                break
            except (DoesNotFit, RuntimeMemoryError) as refused:
                _log.debug("memory that this step does not need is given back: %s", refused)
                make_room()
        else:
            grow()
        self._served.find(self._now(plan), lambda: plan)

    def commit_rows(self, table: RowTable, row_bytes: int) -> None:
        """Commit the rows of a state. If there is no room, all other memory of steps is given back.

        Raises
        ------
        DoesNotFit
            If the rows do not fit even so.
        """
        self.row_bytes.setdefault(table.pool, row_bytes)
        sizes = self._owned() | {table.pool: table.rows * row_bytes}
        try:
            self._workspace.commit_all(sizes, holes=self._holes())
        except (DoesNotFit, RuntimeMemoryError):
            self._leave({WORKSPACE: 0, **sizes})
            self._workspace.commit_all(sizes, holes=self._holes())

    def commit_apart(self, plan: Plan) -> bool:
        """Commit a plan's memory with the range `APART` for its workspace; return whether there is so much beside all others'."""
        sizes = {APART if name == WORKSPACE else name: size for name, size in plan.pools.items() if name != "weights"}
        self._learn(plan, sizes)
        try:
            self._workspace.commit_all({name: size for name, size in sizes.items() if size}, holes=self._holes())
        except (DoesNotFit, RuntimeMemoryError):
            self._workspace.trim_all({APART: 0})
            return False
        return True

    def _leave(self, sizes: Mapping[str, int]) -> None:
        """Give back all memory beyond these bytes."""
        committed = self._workspace.committed_bytes()
        if sizes[WORKSPACE] < committed.get(WORKSPACE, 0):
            self._before_shrinking()
        if APART in committed:
            self._finish()
        unused = {name: 0 for name in committed if name in (HOST, APART) or name.startswith("carry/")}
        self._trim({**unused, **sizes})

    def give_idle_back(self, plan: Plan | None = None) -> None:
        """Give back the pages of states without owned rows, but those that a plan needs."""
        needed = {} if plan is None else plan.pools
        sizes = {name: max(size, needed.get(name, 0)) for name, size in self._owned().items()}
        self._trim(sizes)

    def trim(self, plan: Plan) -> None:
        """Give back memory that neither the plan of the last step nor the owners of rows need."""
        self._finish()
        sizes = {name: plan.pools.get(name, 0) for name in self._workspace.committed_bytes() if name != "weights"}
        self._trim(sizes | self._owned())

    def _trim(self, sizes: Mapping[str, int]) -> None:
        """Give back memory beyond these bytes, and that of free rows; idle extents that lose some are lost."""
        self._workspace.trim_all(sizes, holes=self._holes())
        for table in self._tables:
            if table.has_idle:
                there, size = self._workspace.range(table.pool), self.row_bytes.get(table.pool, 0)
                table.lose(partial(_is_lost, there, size))

    def zero_new_rows(self, records: PlanRecords, held: Mapping[str, int]) -> None:
        """Zero the rows that a program's states gain by a plan. Owners write the rows of a model's states."""
        for pool, size in records.held_states.items():
            if new := size - held[pool]:
                self._workspace.view(pool, held[pool], (new,), "uint8").zero_()

    def poison(self, table: RowTable, fresh: list[Span]) -> None:
        """Fill these rows of a state with NaN, as far as somebody owns them still, if plans have had the state; forget them."""
        if (size := self.row_bytes.get(table.pool)) is None:
            return
        for start, end in without(joined(fresh), [*table.free, (table.rows, MAX_TOKENS)]):
            self._workspace.view(table.pool, start * size, ((end - start) * size,), "uint8").fill_(POISON)
        fresh.clear()

    def _owned(self) -> dict[str, int]:
        """Bytes of each state that has memory, up to its last owned row."""
        sizes = {table.pool: table.rows * self.row_bytes.get(table.pool, 0) for table in self._tables}
        return {name: sizes[name] for name in self._workspace.committed_bytes() if name in sizes}

    def _now(self, plan: Plan) -> tuple[int, ...]:
        """The key of a commit: the plan, and how often memory grew or shrank and rows of each state changed hands."""
        return id(plan), self._workspace.changes(), *[table.changes for table in self._tables]

    def _learn(self, plan: Plan, pools: Mapping[str, int]) -> None:
        """Note the bytes of one row of each state in a plan; they are the same in all plans of a model."""
        for table in self._tables:
            if table.pool in pools and table.pool not in self.row_bytes:
                self.row_bytes[table.pool] = next(
                    b.row_bytes for b in plan.records.buffers if b.kind == "state" and b.name == table.name
                )

    def _holes(self) -> dict[str, Spans]:
        """Free bytes of each state that plans have had, before its last owned row."""
        sizes = self.row_bytes
        return {
            table.pool: [
                (max(start, 1) * sizes[table.pool], end * sizes[table.pool]) for start, end in table.free if end > 1
            ]
            for table in self._tables
            if table.pool in sizes
        }


def _is_lost(there: Range, row_bytes: int, extent: Span) -> bool:
    """Whether some of an extent's rows are not memory."""
    return not there.holds(extent[0] * row_bytes, extent[1] * row_bytes)


class HeldValues(Mapping[str, int]):
    """Bytes that hold a value, by pool of a state or carry.

    A carry holds its value until a graph runs that does not declare it, or declares fewer bytes of it.
    """

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    def __getitem__(self, pool: str) -> int:
        return self._bytes[pool]

    def __iter__(self) -> Iterator[str]:
        return iter(self._bytes)

    def __len__(self) -> int:
        return len(self._bytes)

    def require(self, step: str, records: PlanRecords) -> None:
        """Make sure that the carries that a graph reads hold a value.

        Raises
        ------
        UsageError
            Naming a carry that does not.
        """
        for name, size in records.taken.items():
            if (left := self._bytes.get(f"carry/{name}", 0)) < size:
                raise UsageError(
                    f"the step '{step}' reads {size:,} bytes of the carry '{name}', of which the steps before have left "
                    f"{left:,}: run the step that writes it first."
                )

    def begin(self, records: PlanRecords) -> None:
        """Note that a graph starts. If it fails, no carry holds a value, and a state has the rows that it had both
        before the graph and in it."""
        self._bytes = {pool: min(size, self._bytes.get(pool, 0)) for pool, size in records.held_states.items()}

    def done(self, records: PlanRecords) -> None:
        """Note that the graph has run."""
        self._bytes = dict(records.held)
