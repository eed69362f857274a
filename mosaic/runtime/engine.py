"""The engine that models and programs run on: memory, streams and executors of a device; one caller at a time."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from mosaic.errors import RuntimeMemoryError
from mosaic.runtime.bound_step import BoundStep, carried_bytes
from mosaic.runtime.executor import Debug, Executor
from mosaic.runtime.handed_out import HandedOut
from mosaic.runtime.opening import Plans, in_use, open_workspace
from mosaic.runtime.outputs import MemoryReport
from mosaic.runtime.recent import Recent
from mosaic.runtime.state_rows import RowTable
from mosaic.runtime.step_memory import StepMemory
from mosaic.runtime.streams import shared_streams
from mosaic.runtime.turns import Turns
from mosaic.runtime.workspace import HOST

if TYPE_CHECKING:
    from mosaic.planner.check import WeightMap
    from mosaic.planner.plan import Plan

__all__ = ["Engine"]

KEPT_STEPS: Final = 16
CAPTURED_MS: Final = 500.0
"""Longest predicted step that is captured into a CUDA graph: launches of longer ones hide behind their kernels."""


class Engine:
    """What plans run on. A step is a plan whose memory is committed and that is bound; the steps of all sizes share it.

    Parameters
    ----------
    planner
        Of the plans: their device, and the budgets that memory is within.
    first
        Any of its plans: what the device's context and libraries take is the same in all.
    what
        What stands on it, for messages.
    tables
        Who owns rows of states; more tables may be added later.
    capture
        Replay short steps from CUDA graphs.
    debug
        As for `Executor`.

    Attributes
    ----------
    workspace
        Its memory.
    turns
        One thread at a time has it: whoever calls a method holds the turn.
    current
        The plan of the last step.
    on_cuda
        Whether it is on a CUDA device.
    debug
        As it was given.
    """

    def __init__(
        self,
        planner: Plans,
        first: Plan,
        what: str,
        *,
        tables: Collection[RowTable] = (),
        capture: bool = True,
        debug: Debug = None,
    ) -> None:
        self.on_cuda = planner.device.backend == "cuda"
        self.debug, self._capture = debug, capture and self.on_cuda
        self._what, self._open = what, True
        self.current, self.turns = first, Turns(on_cuda=self.on_cuda)
        self._handed_out = HandedOut()
        self._bound: Recent[Hashable, BoundStep] = Recent(KEPT_STEPS)
        self._streams = shared_streams(torch.cuda.current_device()) if self.on_cuda else None
        self.workspace = open_workspace(planner)
        self._memory = StepMemory(self.workspace, tables, self._handed_out.empty)
        try:
            for fixed in ("context", "library"):
                self.workspace.ledger.charge(fixed, first.components[fixed])
        except BaseException:
            self.workspace.close()
            raise

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for other threads, and make sure that it is open."""
        with self.turns:
            if not self._open:
                raise RuntimeMemoryError(f"the {self._what} is closed: compile it again.")
            yield

    # --- steps ----------------------------------------------------------------------------------------------------

    def commit(self, plan: Plan) -> None:
        """Commit the memory of a plan, the current one from then on, before it is bound or run.

        Raises
        ------
        DoesNotFit
            If it needs more than the budget.
        """
        self._memory.commit(plan)
        self.current = plan

    def bound(self, key: Hashable) -> BoundStep | None:
        """Return the step that was bound for a key, if it is among those kept."""
        return self._bound.get(key)

    def bind(
        self,
        plan: Plan,
        places: WeightMap | None,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        key: Hashable = None,
    ) -> BoundStep:
        """Bind a plan whose memory is committed.

        Parameters
        ----------
        places, tensors
            Where weights were loaded, and those that are somewhere else: `weights` and `tensors` of `Executor`.
        key
            Keep it for whoever asks for this key; None: it serves once.
        """
        executor = Executor(
            plan, self.workspace, tensors=tensors, weights=places, debug=self.debug, streams=self._streams,
            capture=self._capture and plan.predicted_step_ms <= CAPTURED_MS,
        )  # fmt: skip
        step = BoundStep(plan=plan, executor=executor, **carried_bytes(plan.records))
        if key is not None:
            self._bound.keep(key, step)
        return step

    @property
    def executors(self) -> tuple[Executor, ...]:
        """The executors that are kept, in the order of their last use."""
        return tuple(step.executor for step in self._bound.values())

    def lend(self, outputs: Collection[Tensor]) -> bool:
        """Lend views of outputs to a caller, until the next step; False where the caller has to get copies.

        It has to where another thread may have a turn before the caller's next one.
        """
        alone = self.turns.is_alone
        if alone and self.on_cuda:
            self._handed_out.hold(outputs)
        return alone

    # --- memory ---------------------------------------------------------------------------------------------------

    def give_back(self) -> None:
        """Give back what neither the last step nor owners of rows need; the workspace later if outputs are lent."""
        self._memory.trim(self.current, states_alone=bool(self._handed_out))

    def trim(self) -> None:
        """Give back the same, at once: outputs that are lent are emptied."""
        self._handed_out.empty()
        self.give_back()

    def give_all_back(self) -> None:
        """Give back all memory but that of states; no step is bound any more."""
        self._handed_out.empty()
        self._bound.clear()
        self.workspace.resize_all(
            {name: 0 for name in self.workspace.committed_bytes() if not name.startswith("state/")}
        )
        self._memory.exact = True

    def memory(self, *, adopted_bytes: int = 0) -> MemoryReport:
        """Report planned, committed and resident bytes by pool; planned are those of the last step's plan.

        Parameters
        ----------
        adopted_bytes
            Weights that the budget covers and the workspace does not have.
        """
        planned, committed = self.current.pools, self.workspace.committed_bytes()
        used = planned[HOST] or committed.get(HOST)
        pools = {name: 0 for name in ("weights", "workspace", *planned, *committed) if name != HOST or used}
        adopted = {"weights": adopted_bytes} if adopted_bytes else {}
        planned, committed, resident = (
            {name: found.get(name, 0) for name in pools}
            for found in (planned, committed | adopted, self.workspace.resident_bytes() | adopted)
        )
        return MemoryReport(
            planned=planned,
            committed=committed,
            resident=resident,
            budget_bytes=self.current.budget_bytes,
            in_use=in_use() if self.on_cuda else None,
        )

    def close(self) -> None:
        """Give all memory back. Closing twice is fine."""
        with self.turns:
            self._open = False
            self._bound.clear()
            self.workspace.close()
