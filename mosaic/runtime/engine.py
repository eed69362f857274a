"""The engine of a model: its ranges, weights, states, plans and executors; it runs one step at a time."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from mosaic.errors import UsageError
from mosaic.models.state import State
from mosaic.models.step import MAX_TOKENS, StepSize
from mosaic.runtime.executor import Debug, Executor
from mosaic.runtime.handed_out import HandedOut
from mosaic.runtime.opening import in_use, open_workspace
from mosaic.runtime.outputs import MemoryReport
from mosaic.runtime.packing import PackedStep
from mosaic.runtime.poison import POISON
from mosaic.runtime.spans import Span, joined, total, without
from mosaic.runtime.state_rows import RowTable
from mosaic.runtime.step_memory import StepMemory
from mosaic.runtime.step_plans import Settings, StepPlans
from mosaic.runtime.streams import shared_streams
from mosaic.runtime.threads import StepThreads
from mosaic.runtime.turns import Turns
from mosaic.runtime.weight_store import WeightStore

if TYPE_CHECKING:
    from mosaic.planner.plan import Plan
    from mosaic.planner.planner import Planner

__all__ = ["Engine"]

KEPT_EXECUTORS: Final = 16
CAPTURED_MS: Final = 500.0
"""Longest predicted step that is captured into a CUDA graph: launches of longer ones hide behind their kernels."""
_log = logging.getLogger(__name__)


class Engine:
    """What runs the steps of one model. It does not wait for other threads: its caller holds the turn.

    Parameters
    ----------
    planner
        As the caller asked for it.
    turns
        Held while rows of states change hands.
    adopted
        A module's own parameters by name, taken without a copy; the model's own weights are loaded, if not given.
    config
        Settings that every plan takes instead of searching.
    max_tokens
        The longest step expected: weights are loaded to where its plan wants them.
    capture
        Replay short steps from CUDA graphs.
    threads
        On a CPU, the threads that operations of a step may use.
    debug
        As for `Executor`.
    seed
        For random weights.

    Attributes
    ----------
    plans
        The plans of its steps.
    workspace
        Its memory.
    weights
        Where its weights are.
    current
        The plan of the last step.
    handed_out
        Views of outputs that a caller may hold.
    """

    def __init__(
        self,
        planner: Planner,
        turns: Turns,
        *,
        adopted: Mapping[str, Tensor] | None = None,
        config: Settings | None = None,
        max_tokens: int = 1,
        capture: bool = True,
        threads: int | None = None,
        debug: Debug = None,
        seed: int = 0,
    ) -> None:
        on_cuda = planner.device.backend == "cuda"
        self.debug, self._capture, self.on_cuda = debug, capture and on_cuda, on_cuda
        self._architecture = planner.model.architecture
        self._threads = StepThreads(self._architecture.parameters, threads)
        self.plans = StepPlans(planner, config)
        self.current = self.plans.exact(StepSize(windows=(max_tokens,), rows=max_tokens))
        self.workspace = open_workspace(planner)
        self._turns = turns
        self._tables: dict[State, RowTable] = {}
        self._fresh: dict[State, list[Span]] = {}  # of a poisoned model: rows handed out since the last step
        self.handed_out = HandedOut()
        self._memory = StepMemory(self.workspace, self._tables.values(), self.handed_out.empty)
        self._bound: OrderedDict[Hashable, tuple[Plan, Executor]] = OrderedDict()
        self._streams = shared_streams(torch.cuda.current_device()) if on_cuda else None
        where = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        self.weights = WeightStore(planner.model, self.workspace, where, seed=seed)
        for fixed in ("context", "library"):
            self.workspace.ledger.charge(fixed, self.current.components[fixed])
        try:
            self.plans.settle_on(self.current)
            if adopted is None:
                self.weights.load(self.current)
            else:
                self.weights.adopt(self.current, adopted)
        except BaseException:
            self.workspace.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether it has weights, thus can run."""
        return bool(self.weights.views)

    # --- states ---------------------------------------------------------------------------------------------------

    def table(self, state: State) -> RowTable:
        """Return the table of who owns which rows of a state.

        Raises
        ------
        UsageError
            If another state of the same name has a table.
        """
        other = next((known for known in self._tables if known.name == state.name and known != state), None)
        if other is not None:
            raise UsageError(f"the state '{state.name}' is {other}, asked for {state}: give one of them another name.")
        if state not in self._tables:
            taken = self._fresh.setdefault(state, []).extend if self.debug == "poison" else None
            self._tables[state] = RowTable(state.name, self._turns, drained=self.give_back, taken=taken)
        return self._tables[state]

    @property
    def states(self) -> dict[State, int]:
        """Rows of each state that are in use."""
        return {state: table.rows for state, table in self._tables.items()}

    def states_with(self, more: Mapping[State, int]) -> dict[State, int]:
        """Return the rows of each state once `more` are taken: those that nobody owns are handed out first."""
        found = dict.fromkeys(more, 0) | self.states
        for state, count in more.items():
            free = self._tables[state].free if state in self._tables else ()
            found[state] += max(count - total(free), 0)
        return found

    # --- running --------------------------------------------------------------------------------------------------

    def run(self, step: PackedStep, config: Settings | None = None) -> Mapping[str, Tensor]:
        """Run a step; gives its outputs by name, which are valid until the next one.

        Raises
        ------
        DoesNotFit
            If it needs more than the budget.
        """
        executor = self._executor(step.size, config)
        self._poison_fresh_rows()
        executor.write(step.inputs)
        with self._threads.in_force():
            executor.run()
        return executor.outputs

    def _poison_fresh_rows(self) -> None:
        """Fill rows that were handed out since the last step: whoever reads them before they are written gets NaN."""
        for state, spans in self._fresh.items():
            table, size = self._tables[state], self._memory.row_bytes.get(self._tables[state].pool)
            if size is None:
                continue
            for start, end in without(joined(spans), [*table.free, (table.rows, MAX_TOKENS)]):
                self.workspace.view(table.pool, start * size, ((end - start) * size,), "uint8").fill_(POISON)
            spans.clear()

    @property
    def executors(self) -> tuple[Executor, ...]:
        """The executors that are kept, in the order of their last use."""
        return tuple(executor for _, executor in self._bound.values())

    def _executor(self, step: StepSize, config: Settings | None) -> Executor:
        """Find or bind the executor of a step's size and configuration, and commit its memory."""
        key = step.key, None if config is None else tuple(sorted((name, repr(value)) for name, value in config.items()))
        found = self._bound.get(key)
        plan = self.plans.plan(step, config) if found is None else found[0]
        if not self.weights.serves(plan):
            self._move(plan)
        self._memory.commit(plan)
        self.current = plan
        if found is not None:
            self._bound.move_to_end(key)
            return found[1]
        executor = Executor(
            plan, self.workspace, tensors=self.weights.adopted, weights=self.weights.places, debug=self.debug,
            streams=self._streams, capture=self._capture and plan.predicted_step_ms <= CAPTURED_MS,
        )  # fmt: skip
        if step.rounded().dims(self._architecture).items() <= plan.dims.items():
            self._bound[key] = (plan, executor)  # a plan for the exact numbers serves no other
        while len(self._bound) > KEPT_EXECUTORS:
            self._bound.popitem(last=False)
        return executor

    def _move(self, plan: Plan) -> None:
        """Load the weights again, to where another plan wants them."""
        lost = "; what was written into `weights()` is lost" if self.weights.shown else ""
        say = _log.warning if self.weights.shown else _log.info
        say("weights move: %s is streamed from now on, loaded again%s", plan.config["stream"], lost)
        self.handed_out.empty()
        self._bound.clear()
        self.weights.forget()
        self.workspace.resize_all(
            {name: 0 for name in self.workspace.committed_bytes() if not name.startswith("state/")}
        )
        self.current, self._memory.exact = plan, True
        self.plans.settle_on(plan)
        try:
            self.weights.load(plan)
        except BaseException:
            self.close()
            raise

    # --- memory ---------------------------------------------------------------------------------------------------

    def give_back(self) -> None:
        """Give back what neither the last step nor owners of rows need; the workspace later if outputs may be in it."""
        self._memory.trim(self.current, states_alone=bool(self.handed_out))

    def memory(self) -> MemoryReport:
        """Report planned, committed and resident bytes; planned are those of the last step's plan."""
        adopted = {"weights": self.weights.adopted_bytes} if self.weights.adopted_bytes else {}
        planned, committed = self.current.pools, self.workspace.committed_bytes()
        device: Sequence[str] = (
            "weights", "workspace", *(name for name in {**planned, **committed} if name.startswith("state/"))
        )  # fmt: skip
        pools = dict.fromkeys((*device, "host") if planned["host"] else device, 0)
        return MemoryReport(
            planned={name: planned.get(name, 0) for name in pools},
            committed={**pools, **committed, **adopted},
            resident={**pools, **self.workspace.resident_bytes(), **adopted},
            budget_bytes=self.plans.planner.budget_bytes,
            in_use=in_use() if self.on_cuda else None,
        )

    def close(self) -> None:
        """Give all memory back. Closing twice is fine."""
        self._bound.clear()
        self.weights.forget()
        self.workspace.close()
