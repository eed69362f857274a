"""The memory that steps share: as much as any step has needed. It goes back where a step needs it elsewhere, or on `trim`."""

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

__all__ = ["StepMemory"]

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
        Gives back what others hold of the budget as long as no plan needs it, and says whether that was anything. They go before
        memory of earlier steps does.
    """

    def __init__(
        self,
        workspace: Workspace,
        tables: Collection[RowTable],
        before_shrinking: Callable[[], None],
        give_way: Callable[[], bool] = lambda: False,
    ) -> None:
        self._workspace, self._tables, self._before_shrinking = workspace, tables, before_shrinking
        self._give_way = give_way
        self.row_bytes: dict[str, int] = {}
        """By pool, the bytes of a row of each state that plans have had; the same in all plans of a model."""
        self.exact = True
        """Whether the next commit gives back all that its plan does not need."""
        self._served: deque[tuple[object, ...]] = deque(maxlen=ALTERNATING)  # what commits were for, and what they left

    def commit(self, plan: Plan) -> None:
        """Commit a plan's memory beside what earlier plans needed; where there is no room for both, the plan's alone.

        Raises
        ------
        DoesNotFit
            If the plan needs more than the budget.
        RuntimeMemoryError
            If the device, or the machine, refuses.
        """
        if not self.exact and self._now(plan) in self._served:
            return
        sizes = {name: size for name, size in plan.pools.items() if name != "weights" and (size or name != HOST)}
        self._learn(plan, sizes)
        if not self.exact:
            try:
                self._with_room(partial(self._workspace.commit_all, sizes, holes=self._holes()))
                self._served.append(self._now(plan))
                return
            except (DoesNotFit, RuntimeMemoryError) as refused:
                _log.debug("memory of earlier steps is given back: %s", refused)
        committed = self._workspace.committed_bytes()
        if sizes[WORKSPACE] < committed.get(WORKSPACE, 0):
            self._before_shrinking()
        unused = {name: 0 for name in committed if name == HOST or name.startswith("carry/")}
        self._with_room(partial(self._workspace.resize_all, {**unused, **sizes}, holes=self._holes()))
        self.exact = False
        self._served.append(self._now(plan))

    def _with_room(self, commit: Callable[[], None]) -> None:
        """Commit, once more if others give way."""
        try:
            commit()
        except (DoesNotFit, RuntimeMemoryError):
            if not self._give_way():
                raise
            commit()

    def trim(self, plan: Plan, *, states_alone: bool = False) -> None:
        """Give back what a plan and the owners of rows do not need.

        Parameters
        ----------
        plan
            The last step's.
        states_alone
            Leave the other pools to the next commit: somebody may still look at outputs.
        """
        committed = self._workspace.committed_bytes()
        sizes = {} if states_alone else {name: plan.pools.get(name, 0) for name in committed if name != "weights"}
        sizes |= {table.pool: table.rows * self.row_bytes.get(table.pool, 0) for table in self._tables}
        self._workspace.trim_all({name: sizes[name] for name in sizes if name in committed}, holes=self._holes())
        self.exact = states_alone

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
