"""The engine that models and programs run on: memory, streams and executors of a device; one caller at a time."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from mosaic.devices import GRAPH_BYTES
from mosaic.errors import RuntimeMemoryError
from mosaic.runtime.executor import Debug, Executor
from mosaic.runtime.handed_out import HandedOut
from mosaic.runtime.held_values import HeldValues
from mosaic.runtime.opening import Plans, graph_memory, in_use, open_workspace
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

KEPT_EXECUTORS: Final = 128
"""Executors that are kept: views and calls, which take memory of the host alone. Bytes bound their graphs (`GraphMemory`)."""
CAPTURED_MS: Final = 500.0
"""Longest predicted step that is captured into a CUDA graph: launches of longer ones hide behind their kernels."""


class Engine:
    """What plans run on. Whoever calls it holds the turn.

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
        One thread at a time has it.
    current
        The plan of the last step.
    held
        What states and carries hold.
    device
        That plans run on.
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
        self._on_cuda = planner.device.backend == "cuda"
        self.debug, self._capture = debug, capture and self._on_cuda
        self._what, self._open = what, True
        self._adopted_bytes = 0  # weights that the ledger counts and no range has
        self.held = HeldValues()
        self._handed_out = HandedOut()
        self._bound: Recent[Hashable, tuple[Plan, Executor]] = Recent(
            KEPT_EXECUTORS, lambda bound: bound[1].drop_graph()
        )
        self.device = torch.device("cuda", torch.cuda.current_device()) if self._on_cuda else torch.device("cpu")
        self.current, self.turns = first, Turns(self.device)
        self._streams = shared_streams(self.device.index) if self._on_cuda else None
        self.workspace = open_workspace(planner)
        self._memory = StepMemory(self.workspace, tables, self._handed_out.empty, lambda: self._graphs.give_way())
        self._graphs = graph_memory(
            self.workspace.ledger, self.device, make_room=self._memory.give_idle_back,
            reserved_bytes=min(GRAPH_BYTES, first.components["context"]),
        )  # fmt: skip
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

    def begin_step(self) -> None:
        """Begin a step: executors of the one before may lose their captured graphs to those of this one."""
        self._graphs.begin()

    def plan_of(self, key: Hashable) -> Plan | None:
        """Return the plan that is bound for a key, if there is one."""
        return self._bound[key][0] if key in self._bound else None

    def bind(
        self, plan: Plan, places: WeightMap | None, tensors: Mapping[str, Tensor] | None = None, *, key: Hashable = None
    ) -> Executor:
        """Commit the memory of a plan, the current one from then on, and bind the plan.

        Parameters
        ----------
        places, tensors
            Where weights were loaded, and those that are somewhere else: `weights` and `tensors` of `Executor`.
        key
            The executor is kept for whoever asks for this key next; None: it serves once.

        Raises
        ------
        DoesNotFit
            If it needs more than the budget.
        """
        self._memory.commit(plan)
        self.current = plan

        def make() -> tuple[Plan, Executor]:
            return plan, Executor(
                plan, self.workspace, tensors=tensors, weights=places, debug=self.debug, streams=self._streams,
                capture=self._capture and plan.predicted_step_ms <= CAPTURED_MS, graphs=self._graphs,
            )  # fmt: skip

        return (make() if key is None else self._bound.find(key, make))[1]

    @property
    def executors(self) -> tuple[Executor, ...]:
        """The executors that are kept, in the order of their last use."""
        return tuple(executor for _, executor in self._bound.values())

    def lend(self, outputs: Collection[Tensor]) -> bool:
        """Lend views of outputs to a caller, until the next step; False where the caller has to get copies.

        It has to where another thread may have a turn before the caller's next one.
        """
        alone = self.turns.is_alone
        if alone and self._on_cuda:
            self._handed_out.hold(outputs)
        return alone

    # --- memory ---------------------------------------------------------------------------------------------------

    def trim(self) -> None:
        """Give back what neither the last step nor owners of rows need. Outputs that are lent are emptied."""
        self._handed_out.empty()
        self._memory.trim(self.current)

    def give_all_back(self) -> None:
        """Give back all memory but that of rows of states; no step is bound any more."""
        self._handed_out.empty()
        self._bound.clear()
        self._graphs.clear()
        self._memory.give_idle_back()
        committed = self.workspace.committed_bytes()
        self.workspace.trim_all({name: 0 for name in committed if not name.startswith("state/")})

    def memory(self) -> MemoryReport:
        """Report planned, committed and resident bytes by pool; planned are those of the last step's plan."""
        adopted = {"weights": self._adopted_bytes} if self._adopted_bytes else {}
        planned, committed = self.current.pools, self.workspace.committed_bytes() | adopted
        resident = self.workspace.resident_bytes() | adopted
        pools = dict.fromkeys(("weights", "workspace", *planned, *committed))
        if not planned[HOST] and not committed.get(HOST):
            del pools[HOST]
        return MemoryReport(
            planned={name: planned.get(name, 0) for name in pools},
            committed={name: committed.get(name, 0) for name in pools},
            resident={name: resident.get(name, 0) for name in pools},
            budget_bytes=self.current.budget_bytes,
            graph_bytes=self._graphs.held_bytes,
            in_use=in_use() if self._on_cuda else None,
        )

    def close(self) -> None:
        """Give all memory back. Closing twice is fine."""
        with self.turns:
            self._open = False
            self._bound.clear()
            self._graphs.close()
            self.workspace.close()
