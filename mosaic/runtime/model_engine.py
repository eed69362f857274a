"""The engine of a model: an engine with the plans of its steps, its weights, and rows of its states."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from mosaic.errors import UsageError
from mosaic.models.state import State
from mosaic.models.step import MAX_TOKENS, StepSize
from mosaic.runtime.engine import Engine
from mosaic.runtime.executor import Debug, Executor
from mosaic.runtime.packing import PackedStep
from mosaic.runtime.poison import POISON
from mosaic.runtime.spans import Span, joined, total, without
from mosaic.runtime.state_rows import RowTable
from mosaic.runtime.step_plans import Settings, StepPlans
from mosaic.runtime.threads import StepThreads
from mosaic.runtime.weight_store import WeightStore

if TYPE_CHECKING:
    from mosaic.planner.plan import Plan
    from mosaic.planner.planner import Planner

__all__ = ["ModelEngine"]

_log = logging.getLogger(__name__)


class ModelEngine(Engine):
    """What runs the steps of one model.

    Parameters
    ----------
    planner
        As the caller asked for it.
    adopted
        A module's own parameters by name, taken without a copy; the model's own weights are loaded, if not given.
    config
        Settings that every plan takes instead of searching.
    max_tokens
        The longest step expected, 1 if not given: weights are loaded to where its plan wants them.
    capture, debug
        As for `Engine`.
    threads
        On a CPU, the threads that operations of a step may use.
    seed
        For random weights.

    Attributes
    ----------
    model
        The model's description.
    plans
        The plans of its steps.
    weights
        Where its weights are.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        adopted: Mapping[str, Tensor] | None = None,
        config: Settings | None = None,
        max_tokens: int | None = None,
        capture: bool = True,
        threads: int | None = None,
        debug: Debug = None,
        seed: int = 0,
    ) -> None:
        if threads is not None and planner.device.backend != "cpu":
            raise UsageError("threads are those of a CPU's operations: leave them out, or use device='cpu'.")
        self.model = planner.model
        self._threads = StepThreads(self.model.architecture.parameters, threads)
        self._tables: dict[State, RowTable] = {}
        self._fresh: dict[State, list[Span]] = {}  # of a poisoned model: rows handed out since the last step
        self.plans = StepPlans(planner, config)
        longest = self.plans.exact(StepSize(windows=(max_tokens or 1,), rows=max_tokens or 1))
        super().__init__(planner, longest, "model", tables=self._tables.values(), capture=capture, debug=debug)
        self.weights = WeightStore(self.model, self.workspace, self.device, seed=seed)
        try:
            self.plans.settle_on(longest)
            if adopted is None:
                self.weights.load(longest)
            else:
                self.weights.adopt(longest, adopted)
                self._adopted_bytes = longest.components["weights"]
        except BaseException:
            self.close()
            raise

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
            self._tables[state] = RowTable(
                state.name, extents=state.extents, turns=self.turns, drained=self.give_back, taken=taken
            )
        return self._tables[state]

    @property
    def changes(self) -> int:
        """How often rows of states changed hands."""
        return sum(table.changes for table in self._tables.values())

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

    def scattered(self, sizes: Iterable[StepSize]) -> list[StepSize]:
        """Return the same steps where the rows of their sequences lie in as many extents as they may come to lie in."""
        found = []
        for size in sizes:
            table = None if size.phase.cache.kept is None else self._tables.get(size.phase.cache.kept)
            extents = size.extents if table is None else table.most_extents(len(size.windows))
            found.append(replace(size, extents=max(size.extents, extents)))
        return found

    # --- running --------------------------------------------------------------------------------------------------

    def run(self, step: PackedStep, config: Settings | None = None) -> Mapping[str, Tensor]:
        """Run a step; gives its outputs by name, which are valid until the next one.

        Raises
        ------
        DoesNotFit
            If it needs more than the budget.
        """
        executor = self._executor(step, config)
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

    def _executor(self, step: PackedStep, config: Settings | None) -> Executor:
        """Find or bind the executor of a step's size and configuration, with its memory committed."""
        size = step.size
        key = step.key, None if config is None else tuple(sorted((name, repr(value)) for name, value in config.items()))
        bound = self.plan_of(key)
        plan = bound or self.plans.plan(size, config)
        if not self.weights.serves(plan):
            self._move(plan)
        # a plan for the exact numbers serves no other step
        serves_again = bound is not None or size.rounded().dims(self.model.architecture).items() <= plan.dims.items()
        return self.bind(plan, self.weights.places, self.weights.adopted, key=key if serves_again else None)

    def _move(self, plan: Plan) -> None:
        """Load the weights again, to where another plan wants them."""
        lost = "; what was written into `weights()` is lost" if self.weights.shown else ""
        say = _log.warning if self.weights.shown else _log.info
        say("weights move: %s is streamed from now on, loaded again%s", plan.config["stream"], lost)
        try:
            self.weights.forget()
            self.give_all_back()
            self.current = plan
            self.plans.settle_on(plan)
            self.weights.load(plan)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give all memory back. Closing twice is fine."""
        with self.turns:
            self.weights.forget()
            super().close()
