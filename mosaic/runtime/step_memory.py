"""The memory that steps share: as much as any step has needed. It goes back where it is needed elsewhere, or on `trim`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from mosaic.errors import DoesNotFit, RuntimeMemoryError
from mosaic.runtime.spans import Spans
from mosaic.runtime.state_rows import RowTable
from mosaic.runtime.workspace import HOST, Workspace

if TYPE_CHECKING:
    from mosaic.planner.plan import Plan

WORKSPACE: Final = "workspace"
ALTERNATING: Final = 8
"""Plans that may take turns, such as the graphs of one step, with nothing to be committed."""
_log = logging.getLogger(__name__)


class StepMemory:
    """What steps need of a workspace, beside weights: its pools `workspace`, `host` and those of states and carries.

    Parameters
    ----------
    workspace
        Whose pools they are.
    tables
        Who owns rows of the states; more tables may be added later.
    before_shrinking
        Called before the pool `workspace` loses memory: nobody may look at it any more.
    give_way
        Gives back what others hold of the budget as long as no plan needs it. They go before memory of earlier steps does.
    """

    def __init__(
        self,
        workspace: Workspace,
        tables: Collection[RowTable],
        before_shrinking: Callable[[], None],
        give_way: Callable[[], object] = lambda: None,
    ) -> None:
        self._workspace, self._tables, self._before_shrinking = workspace, tables, before_shrinking
        self._give_way = give_way
        self.row_bytes: dict[str, int] = {}
        """By pool, the bytes of a row of each state that plans have had; the same in all plans of a model."""
        self._served: deque[tuple[object, ...]] = deque(maxlen=ALTERNATING)  # what commits were for, and what they left

    def commit(self, plan: Plan) -> None:
        """Commit a plan's memory beside what earlier plans needed. Where there is no room for both, pages of states go back in
        which nobody has a row; then what `give_way` has; then all but the plan's own.

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
        for make_room in (self.give_idle_back, self._give_way, partial(self._leave, sizes)):
            try:
                grow()
                break
            except (DoesNotFit, RuntimeMemoryError) as refused:
                _log.debug("memory that this step does not need is given back: %s", refused)
                make_room()
        else:
            grow()
        self._served.append(self._now(plan))

    def _leave(self, sizes: Mapping[str, int]) -> None:
        """Give back all but these bytes."""
        committed = self._workspace.committed_bytes()
        if sizes[WORKSPACE] < committed.get(WORKSPACE, 0):
            self._before_shrinking()
        unused = {name: 0 for name in committed if name == HOST or name.startswith("carry/")}
        self._workspace.trim_all({**unused, **sizes}, holes=self._holes())

    def give_idle_back(self) -> None:
        """Give back the pages of states in which nobody has a row."""
        self._workspace.trim_all(self._owned(), holes=self._holes())

    def trim(self, plan: Plan) -> None:
        """Give back what a plan, the last step's, and the owners of rows do not need."""
        sizes = {name: plan.pools.get(name, 0) for name in self._workspace.committed_bytes() if name != "weights"}
        self._workspace.trim_all(sizes | self._owned(), holes=self._holes())

    def _owned(self) -> dict[str, int]:
        """Bytes of each state that has memory, up to the last row that somebody has."""
        sizes = {table.pool: table.rows * self.row_bytes.get(table.pool, 0) for table in self._tables}
        return {name: sizes[name] for name in self._workspace.committed_bytes() if name in sizes}

    def _now(self, plan: Plan) -> tuple[object, ...]:
        """What a commit depends on: the plan, who has which rows, and what is committed.

        Its `id` comes first, as other plans would be compared whole; the plan itself keeps the `id` its own.
        """
        return id(plan), plan, *(table.changes for table in self._tables), self._workspace.changes()

    def _learn(self, plan: Plan, pools: Mapping[str, int]) -> None:
        """Note the bytes of a row of each state that a plan has; they are the model's, the same in all plans."""
        for table in self._tables:
            if table.pool in pools and table.pool not in self.row_bytes:
                self.row_bytes[table.pool] = next(
                    b.row_bytes for b in plan.records.buffers if b.kind == "state" and b.name == table.name
                )

    def _holes(self) -> dict[str, Spans]:
        """Bytes of each state that nobody owns, before the last that somebody does."""
        found: dict[str, Spans] = {}
        for table in self._tables:
            size = self.row_bytes.get(table.pool, 0)
            found[table.pool] = [(start * size, end * size) for start, end in table.free]
        return found
