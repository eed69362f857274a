"""The engine of a model: an engine with the plans of its steps, its weights, and rows of its states."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakSet

from torch import Tensor

from mosaic.errors import UsageError
from mosaic.models.parts.cut import COUNT
from mosaic.models.state import State
from mosaic.models.step import MAX_TOKENS, StepSize
from mosaic.runtime.engine import Engine
from mosaic.runtime.executor import Debug, Executor
from mosaic.runtime.kept_counts import KeptCounts
from mosaic.runtime.numbers import Numbers
from mosaic.runtime.packing import PackedStep
from mosaic.runtime.poison import POISON
from mosaic.runtime.recent import Recent
from mosaic.runtime.sharing import SharedSizes
from mosaic.runtime.spans import Span, joined, total, without
from mosaic.runtime.state_rows import RowTable
from mosaic.runtime.step_plans import Settings, StepPlans
from mosaic.runtime.threads import StepThreads
from mosaic.runtime.weight_store import WeightStore

if TYPE_CHECKING:
    from mosaic.planner.plan import Plan
    from mosaic.planner.planner import Planner

__all__ = ["ModelEngine", "Ran"]

KEPT_SIZES: Final = 256
"""Sizes of steps of two graphs of which it is known that all their graphs have plans."""
_log = logging.getLogger(__name__)


class Ran(NamedTuple):
    """A step that was given to the device.

    `outputs` by name are valid until the next step. Where its second graph waits for a size, they are the count alone, and `again`
    takes it and gives the step with that graph run. Where the size was guessed, `again` takes the count that has come with the
    outputs: it gives None if the size was enough, and else the step with that graph run again, larger.
    """

    outputs: Mapping[str, Tensor]
    plan: Plan
    again: Callable[[int], Ran | None] | None = None


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
        self._counts, self._planned = KeptCounts(), Recent[Hashable, bool](KEPT_SIZES)
        self._last_kept = Recent[Hashable, int](KEPT_SIZES)
        self.unsettled: Callable[[], None] | None = None
        """Of the last step, if its second graph has yet to run, or may have to again: what waits until it has."""
        self.shared = WeakSet[SharedSizes]()
        """What the requests of each session come to share: one session admits what leaves room for the steps of all."""
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
            self._tables[state] = RowTable(state.name, extents=state.extents, turns=self.turns, taken=taken)
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
        found, now = [], {state: table.most_extents(0) for state, table in self._tables.items()}
        for size in sizes:
            kept = size.phase.cache.kept
            extents = now[kept] + len(size.windows) if kept in now else 0
            found.append(replace(size, extents=extents) if extents > size.extents else size)
        return found

    # --- running --------------------------------------------------------------------------------------------------

    def run(self, step: PackedStep, config: Settings | None = None) -> Ran:
        """Run a step.

        Raises
        ------
        DoesNotFit
            If it needs more than the budget.
        BucketOverflow
            If its second graph has no size for the rows that its first one keeps.
        """
        self.settle()
        self.begin_step()
        if step.size.phase.bucketed is not None:
            return self._run_cut(step, config)
        executor = self._executor(step, config)
        self._poison_fresh_rows()
        return self._ran(executor, step.inputs)

    def prepare(self, step: PackedStep) -> None:
        """Write what a step takes to where it is copied from, if it is bound; nothing that a step before it reads changes."""
        bound = self._bound.get((step.key, None))
        if bound is not None and step.size.phase.bucketed is None:
            bound[1].prepare(step.inputs)

    def _ran(self, executor: Executor, inputs: Mapping[str, Tensor | Numbers]) -> Ran:
        self.held.begin(self.current)
        executor.write(inputs)
        with self._threads.in_force():
            executor.run()
        self.held.done(self.current)
        return Ran(executor.outputs, self.current)

    # --- steps of two graphs --------------------------------------------------------------------------------------

    def _run_cut(self, step: PackedStep, config: Settings | None) -> Ran:
        """Run the first graph, and the second at the size that the first asks for, or that steps before have needed."""
        size, prefix, buckets = step.size, step.graph(), step.buckets
        cut, how = size.phase.cut, size.phase.bucketed
        assert cut is not None and how is not None
        self._planned.find((self.plans.planner, step.key, repr(config)), partial(self._require_all, size, config))
        executor = self._executor(prefix, config)
        self._poison_fresh_rows()
        found = self._ran(executor, prefix.taken(executor.inputs))
        if cut.guesses:
            expected = self._counts.expected(size.phase, size.tokens)
            kept = next((kept for kept in buckets if expected is not None and kept >= expected), buckets[-1])
            again = partial(self._again, step, config, kept)
            return self._run_suffix(step.graph(kept), config)._replace(again=again)
        if buckets[0] >= size.tokens:  # there is one, which holds all rows
            return self._run_suffix(step.graph(buckets[0]), config)
        likely = self._prepared(step) if config is None else None  # while the first graph runs
        return Ran({COUNT: found.outputs[how.count]}, found.plan, partial(self._sized, step, config, likely))

    def _sized(self, step: PackedStep, config: Settings | None, likely: PackedStep | None, count: int) -> Ran:
        """Run the second graph at the size that the first asks for; `likely` is it at the size that is most likely."""
        how = step.size.phase.bucketed
        assert how is not None
        kept = how.bucket(count, step.buckets)
        self._last_kept.pop(step.key, None)
        self._last_kept.find(step.key, lambda: kept)
        return self._run_suffix(likely if likely and likely.size.kept == kept else step.graph(kept), config)

    def _prepared(self, step: PackedStep) -> PackedStep | None:
        """The second graph at the size that the last such step has needed, prepared if it is bound; None: there was none."""
        if step.key not in self._last_kept:
            return None
        graph = step.graph(self._last_kept[step.key])
        bound = self._bound.get((graph.key, None))
        if bound is not None:
            bound[1].prepare(graph.taken(bound[1].inputs))
        return graph

    def _require_all(self, size: StepSize, config: Settings | None) -> bool:
        """Make sure that all graphs of a step have plans before anything of it runs: where one does not fit, nothing does. Of given
        settings each graph takes those that it has, so one of them has each."""
        if config is None:
            self.plans.require([size], {})
            return True
        known: set[str] = set()
        for graph in size.graphs:
            self.plans.plan(graph, config)
            known.update(self.plans.planner.space(graph.kind).known(config))
        for name in config.keys() - known:
            self.plans.planner.at(size.graphs[-1]).config({name: config[name]})  # which says what there is
        return True

    def _run_suffix(self, graph: PackedStep, config: Settings | None) -> Ran:
        executor = self._executor(graph, config)
        self.held.require(graph.size.phase.name, self.current)
        return self._ran(executor, graph.taken(executor.inputs))

    def _again(self, step: PackedStep, config: Settings | None, kept: int, count: int) -> Ran | None:
        """Run the second graph again where there are more rows than it has run for: it has left everything as it was."""
        how = step.size.phase.bucketed
        assert how is not None
        self._counts.note(step.size.phase, count, step.size.tokens)
        if count <= kept:
            return None
        enough = how.bucket(count, step.buckets)
        _log.debug("%s rows are kept: the second graph, which has run for %s, runs again for %s", count, kept, enough)
        return self._run_suffix(step.graph(enough), config)

    def settle(self) -> None:
        """Wait for the last step where its second graph has yet to run, or may have to again: what it takes is still there."""
        waiting, self.unsettled = self.unsettled, None
        if waiting is not None:
            try:
                waiting()
            except BaseException:  # who is interrupted has not run it
                self.unsettled = waiting
                raise

    def trim(self) -> None:
        """Give back what neither the last step nor owners of rows need. Outputs that are lent are emptied."""
        self.settle()
        super().trim()

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
        serves_again = bound is not None or self._serves_again(plan, size)
        return self.bind(plan, self.weights.places, self.weights.adopted, key=key if serves_again else None)

    def _serves_again(self, plan: Plan, size: StepSize) -> bool:
        """Whether a plan is for the rounded size; one for the exact numbers serves no other step."""
        asked = size.rounded().dims(self.model.architecture).items()
        return all(plan.dims.get(name, value) == value for name, value in asked)

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
            self.unsettled = None
            self.weights.forget()
            super().close()
