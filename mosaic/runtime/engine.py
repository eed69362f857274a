"""The engine of models and programs: plans, weights, states and executors of one device, for one caller at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from mosaic.errors import DoesNotFit, RuntimeMemoryError, UsageError
from mosaic.models.state import State
from mosaic.models.step import StepSize
from mosaic.runtime.divided import Divided
from mosaic.runtime.executor import Debug, Executor
from mosaic.runtime.handed_out import HandedOut
from mosaic.runtime.host_copy import HostCopy
from mosaic.runtime.opening import graph_memory, in_use, open_workspace
from mosaic.runtime.outputs import MemoryReport
from mosaic.runtime.packing import PackedStep
from mosaic.runtime.recent import Recent
from mosaic.runtime.sharing import SharedSizes
from mosaic.runtime.spans import Span
from mosaic.runtime.state_rows import OwnedRows, RowTable
from mosaic.runtime.step_memory import APART, WORKSPACE, HeldValues, StepMemory
from mosaic.runtime.step_plans import Settings, StepPlans
from mosaic.runtime.streams import shared_streams
from mosaic.runtime.threads import StepThreads
from mosaic.runtime.turns import Turns
from mosaic.runtime.weight_store import WeightStore
from mosaic.runtime.workspace import HOST

if TYPE_CHECKING:
    from mosaic.kernels.card import Card
    from mosaic.planner.plan import Plan
    from mosaic.planner.planner import Planner, SizedStep
    from mosaic.runtime.divided import Results
    from mosaic.runtime.workspace import Workspace

KEPT_EXECUTORS: Final = 1024
"""Executors that are kept, such as those of a session's ladder, two where steps are cut: they take host memory only. The bytes of
their graphs are bounded by `GraphMemory`."""
KEPT_SIZES: Final = 256
"""Remembered sizes of two-graph steps all of whose graphs have plans."""
MAKING_MS: Final = 150.0
"""What it takes to plan a step of some 8B parameters, to bind it, and to capture it: it stops whoever waits for it."""
SLOWER: Final = 1.5
"""How much longer a step that is ready takes, at most, than one that would have to be made."""
CAPTURED_MS: Final = 150.0
"""Longest predicted step, in milliseconds, that is captured: a longer step hides its launches behind its kernels."""
_log = logging.getLogger(__name__)


class Ran(NamedTuple):
    """A launched step: outputs by name, valid until the next one, and the plan; of a step of two graphs, those of the second."""

    outputs: Mapping[str, Tensor]
    plan: Plan


class Engine:
    """Runs the steps of one model or program. Its callers hold the turn.

    Parameters
    ----------
    planner
        As the caller asked for it.
    first
        The step whose plan decides where weights are loaded.
    given
        A model's own parameters by name, adopted without a copy; or a program's weights, which are copied. If not given, a model's
        weights are loaded from its directory and a program's are drawn at random.
    config
        Settings that every plan takes instead of searching.
    capture
        Replay short steps from CUDA graphs.
    threads
        CPU only: the threads that operations of a model's step may use.
    debug
        As for `Executor`.
    seed
        For random weights.
    ahead
        Plan steps for this card, and run none: it need not be there, and weights are not loaded.

    Attributes
    ----------
    planner
        The planner as given; `plans.planner` is the one with the weights where they are.
    plans
        The plans of the steps.
    weights
        The weights and their places.
    workspace
        The memory of the device.
    turns
        The lock that a thread holds while it uses the engine.
    current
        The plan of the last step.
    held
        The values that states and carries hold.
    shared
        The steps that the requests of each session may share; admission leaves room for the steps of all sessions.
    """

    def __init__(
        self,
        planner: Planner,
        first: SizedStep,
        *,
        given: Mapping[str, Tensor] | None = None,
        config: Settings | None = None,
        capture: bool = True,
        threads: int | None = None,
        debug: Debug = None,
        seed: int = 0,
        ahead: Card | None = None,
    ) -> None:
        self.ahead, self._on_cuda = ahead, planner.device.backend == "cuda" and ahead is None
        if threads is not None and self._on_cuda:
            raise UsageError("threads are those of a CPU's operations: leave them out, or use device='cpu'.")
        self.planner, self.debug, self._capture = planner, debug, capture and self._on_cuda
        self._in_force: Callable[[], AbstractContextManager[None]] = nullcontext
        if planner.architecture is not None and not self._on_cuda:
            self._in_force = StepThreads(planner.architecture.parameters, threads).in_force
        self._open = True
        self._tables: dict[State, RowTable] = {}
        self._fresh: dict[State, list[Span]] = {}  # of a poisoned model: rows handed out since the last step
        self._lost: Recent[Hashable, float] = Recent(KEPT_SIZES)
        self._rehearsed, self._placed = set[Hashable](), Recent[Hashable, bool](KEPT_SIZES)
        self._planned, self._counted = Recent[Hashable, bool](KEPT_SIZES), HostCopy()
        self.shared = WeakSet[SharedSizes]()
        self.held = HeldValues()
        self._handed_out = HandedOut()
        self._bound: Recent[Hashable, tuple[Plan, Executor]] = Recent(
            KEPT_EXECUTORS, lambda bound: bound[1].drop_graph()
        )
        self.device = torch.device("cuda", torch.cuda.current_device()) if self._on_cuda else torch.device("cpu")
        self.plans = StepPlans(planner, config)
        plan = self.plans.exact(first)
        self.current, self.turns = plan, Turns(self.device)
        self._running = first
        self._streams = shared_streams(self.device.index) if self._on_cuda else None
        self.workspace = open_workspace(planner, ahead=ahead is not None)
        self._divided: Divided | None = None
        self._memory = StepMemory(self.workspace, self._tables.values(), self._handed_out.empty, self._finish_divided)
        self._graphs = graph_memory(plan, planner, self.device, self._set_aside)
        self.weights = WeightStore(planner, self.workspace, self.device, seed=seed)
        try:
            for fixed in ("context", "library"):
                self.workspace.ledger.charge(fixed, plan.components[fixed])
            self.plans.settle_on(plan)
            if ahead is None:
                self.weights.fill(plan, given)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Take the turn, and make sure that the engine is open."""
        with self.turns:
            if not self._open:
                what = "model" if self.planner.program is None else "program"
                raise RuntimeMemoryError(f"the {what} is closed: compile it again.")
            yield

    # --- states ---------------------------------------------------------------------------------------------------

    def table(self, state: State) -> RowTable:
        """Return the table of a state's owners and rows.

        Raises
        ------
        UsageError
            If another state of the same name has a table.
        """
        if (found := self._tables.get(state)) is None:
            if other := next((known for known in self._tables if known.name == state.name), None):
                raise UsageError(
                    f"the state '{state.name}' is {other}, asked for {state}: give one of them another name."
                )
            taken = self._fresh.setdefault(state, []).extend if self.debug == "poison" else None
            found = self._tables[state] = RowTable(
                state.name, extents=state.extents, together=state.together, turns=self.turns, taken=taken
            )
        return found

    @property
    def changes(self) -> int:
        """How often rows of states changed hands."""
        return sum([table.changes for table in self._tables.values()])

    @property
    def states(self) -> dict[State, int]:
        """Rows of each state in use."""
        return {state: table.rows for state, table in self._tables.items()}

    def states_with(self, more: Mapping[State, int], gone: Collection[OwnedRows] = ()) -> dict[State, int]:
        """Return the rows of each state once owners have `gone` and `more` are taken: rows that nobody owns come first."""
        found = {state: table.room(more.get(state, 0), gone) for state, table in self._tables.items()}
        if not more.keys() <= found.keys():
            found |= {state: count for state, count in more.items() if state not in found}
        return found

    def commit_rows(self, table: RowTable, row_bytes: int) -> None:
        """Let all rows of a state be memory before a step needs them, as `StepMemory.commit_rows`."""
        self._memory.commit_rows(table, row_bytes)
        self._poison_fresh_rows()

    def scattered(self, sizes: Iterable[StepSize]) -> list[StepSize]:
        """Return the same steps with as many extents of rows as their sequences may come to have; `exact` ones have them."""
        found, now = [], {state: table.most_extents(0) for state, table in self._tables.items()}
        for size in sizes:
            kept = size.phase.cache.kept
            extents = now[kept] + len(size.windows) if kept in now and not size.exact else 0
            found.append(replace(size, extents=extents) if extents > size.extents else size)
        return found

    # --- running --------------------------------------------------------------------------------------------------

    def run(self, step: PackedStep, config: Settings | None = None) -> Ran:
        """Run a step. One of two graphs waits for the count of rows that the first one keeps.

        Raises
        ------
        DoesNotFit
            If it needs more than the budget.
        BucketOverflow
            If the second graph has no size for the rows that the first one keeps.
        UsageError
            If the step reads a carry that was not written before, or an input is missing.
        """
        self._graphs.begin()
        self._running = step.size
        return self._run(step, config) if step.size.bucketed is None else self._run_two(step, config)

    def is_ready(self, step: PackedStep) -> bool:
        """Whether a step is bound and captured; of one of two graphs, the first."""
        bound = self._bound.get((step.first.key, None))
        return bound is not None and bound[1].is_ready

    def rehearse(self, step: PackedStep, kept: int | None) -> None:
        """Run a step that serves nobody, the second graph of a cut one at a size, until its graphs are bound and captured."""
        graphs = [step] if kept is None else [step.graph(), step.graph(kept)]
        self._rehearsed.add(step.key)
        for _ in range(2 if self._on_cuda else 1):  # the second run captures
            if all(map(self.is_ready, graphs)):
                break
            self._graphs.begin()
            self._running = step.size
            for graph in graphs:
                self._run(graph, None)

    def _run(self, step: PackedStep, config: Settings | None) -> Ran:
        """Run one graph; missing inputs raise before anything changes."""
        key = step.key, None if config is None else tuple(sorted((name, repr(value)) for name, value in config.items()))
        bound = self._bound.get(key)
        plan = self.plans.plan(step.size, config) if bound is None else bound[0]
        if bound is None and not self.weights.serves(plan):  # moving the weights drops all executors
            self._move(plan)
        records = plan.records if bound is None else bound[1].records
        step.check(records, self.held)
        self.held.begin(records)
        self._memory.commit(plan)
        self.current = plan
        executor = self._bind(plan, step.size, key) if bound is None else bound[1]
        if bound is not None:
            self._bound.move_to_end(key)
        if self.planner.program is not None:
            self._memory.zero_new_rows(records, self.held)
        self._poison_fresh_rows()
        step.write(executor)
        with self._in_force():
            executor.run()
        self.held.done(records)
        return Ran(executor.outputs, plan)

    def divide(self, step: PackedStep, part_ms: float, names: Sequence[str], results: Results) -> Divided | None:
        """Begin a step in parts of so many predicted milliseconds, or one launch; None if it is as short as a part, or there is no
        memory for it beside what others have. `names` and `results` as for `Divided`.

        Until its end others may run, in other memory. A step that needs this one's has it launched to its end first.
        """
        going_on = self._divided is not None and not self._divided.is_over
        if going_on or step.size.bucketed is not None or self.predicted_ms(step) <= part_ms:
            return None
        plan = self.plans.within(self.workspace.committed_bytes().get(WORKSPACE, 0), step.size)
        if plan is None or plan.predicted_step_ms <= part_ms or not self.weights.serves(plan):
            return None
        keeps_on_host = any(buffer.pool == HOST and not buffer.holds_weight for buffer in plan.records.buffers)
        step.check(plan.records, self.held)
        if keeps_on_host or not self._memory.commit_apart(plan):
            return None
        self.current = plan
        self._poison_fresh_rows()
        executor = self._executor(plan, self.workspace.renamed(**{WORKSPACE: APART}), capture=False)
        step.write(executor)
        share = part_ms / plan.predicted_step_ms
        self._divided = Divided(plan, executor, share, self._in_force, names, results)
        return self._divided

    def predicted_ms(self, step: PackedStep) -> float:
        """Return the predicted time of a step, in milliseconds: of one of two graphs, of the first."""
        bound = self._bound.get((step.first.key, None))
        return (self.plans.plan(step.first.size) if bound is None else bound[0]).predicted_step_ms

    def _finish_divided(self) -> None:
        """Launch a step in parts to its end: its memory goes."""
        if self._divided is not None:
            self._divided.finish()

    def _executor(self, plan: Plan, workspace: Workspace, *, capture: bool) -> Executor:
        return Executor(
            plan, workspace, tensors=self.weights.adopted, weights=self.weights.places, debug=self.debug,
            streams=self._streams, capture=capture, graphs=self._graphs,
        )  # fmt: skip

    def _bind(self, plan: Plan, size: SizedStep, key: Hashable) -> Executor:
        """Bind a plan; its executor is kept for later steps of the same plan."""
        capture = self._capture and plan.predicted_step_ms <= CAPTURED_MS
        executor = self._executor(plan, self.workspace, capture=capture)
        if self._serves_again(plan, size):
            self._bound.find(key, lambda: (plan, executor))
        return executor

    def _serves_again(self, plan: Plan, size: SizedStep) -> bool:
        """Whether a plan is for the rounded size; a plan for the exact numbers serves no other step."""
        asked = size.rounded().dims(self.planner.architecture).items()
        return all(plan.dims.get(name, value) == value for name, value in asked)

    def _poison_fresh_rows(self) -> None:
        """Fill rows that were handed out since the last step with NaN, so that reading them unwritten shows."""
        for state, spans in self._fresh.items():
            self._memory.poison(self._tables[state], spans)

    @property
    def executors(self) -> tuple[Executor, ...]:
        """The executors that are kept, least recently used first."""
        return tuple(executor for _, executor in self._bound.values())

    def lend(self, outputs: Collection[Tensor]) -> bool:
        """Lend views of outputs to a caller until the next step; return False if the caller must get copies.

        Copies are needed if another thread may run a step before the caller's next one.
        """
        if (alone := self.turns.is_alone) and self._on_cuda:
            self._handed_out.hold(outputs)
        return alone

    # --- steps of two graphs --------------------------------------------------------------------------------------

    def _run_two(self, step: PackedStep, config: Settings | None) -> Ran:
        """Run the first graph, and the second at the size that the first computed."""
        size, buckets, how = step.size, step.buckets, step.size.bucketed
        assert how is not None
        if config is not None or step.key not in self._rehearsed:  # these were found to fit
            self._planned.find((self.plans.planner, step.key, repr(config)), partial(self._require_all, size, config))
        first = self._run(step.graph(), config)
        if isinstance(size, StepSize) and buckets[0] >= size.tokens:
            kept = buckets[0]  # the only bucket holds all rows
        else:
            kept = how.bucket(int(self._counted.start([first.outputs[how.count]]).wait()[0]), buckets)
            kept = kept if config or self.planner.program is not None else self._ready_instead(step, kept)
        return self._run(step.graph(kept), config)

    def _ready_instead(self, step: PackedStep, kept: int) -> int:
        """A size of the second graph that is ready, and holds as much: of a rehearsed step any, of others one that is not much
        larger, until it has cost what making the right one would."""
        rehearsed = step.key in self._rehearsed
        near = (size for size in step.buckets if kept <= size and (rehearsed or size <= SLOWER * kept))
        ready = next((size for size in near if self.is_ready(step.graph(size))), kept)
        if ready > kept and not rehearsed:
            plan, _ = self._bound[step.graph(ready).key, None]
            lost = self._lost[step.key, kept] = (
                self._lost.get((step.key, kept), 0.0) + (1 - kept / ready) * plan.predicted_step_ms
            )
            ready = ready if lost < MAKING_MS else kept
        return ready

    def _require_all(self, size: SizedStep, config: Settings | None) -> bool:
        """Make sure that all graphs of a step have plans before any of them runs. A given setting must belong to one of
        the graphs; each graph takes the settings that it has."""
        if config is None:
            self.plans.require([size], {})
            return True
        known: set[str] = set()
        for graph in size.graphs:
            self.plans.plan(graph, config)
            known.update(self.plans.planner.space(graph.kind).known(config))
        for name in config.keys() - known:
            self.plans.planner.at(size.graphs[-1]).config({name: config[name]})  # raises, with the names that exist
        return True

    # --- memory ---------------------------------------------------------------------------------------------------

    def expect_graphs(self) -> int:
        """Set memory of the budget aside for the graphs of many steps; return about how many there is room for."""
        self._graphs.expect()
        return self._graphs.most

    def _set_aside(self, graph_bytes: int) -> bool:
        """Set so much of the budget aside for captured graphs, if the step in progress, and all that was admitted or foreseen, fit
        beside it; return whether they do."""
        before = self.plans.aside_bytes
        self.plans.set_aside(graph_bytes)
        if self._all_fit():
            self._memory.give_idle_back(self.current)
            with suppress(DoesNotFit):
                self.workspace.ledger.charge("graphs", graph_bytes - before)
                for key in [
                    key for key, (plan, _) in self._bound.items() if plan.total_bytes > self.plans.planner.budget_bytes
                ]:
                    self._bound.pop(key)[1].drop_graph()
                return True
        self.plans.set_aside(before)
        return False

    def _all_fit(self) -> bool:
        sizes = next(iter(self.shared)).beside([], rows=True) if self.shared else []
        if not all(map(self.plans.fits_exactly, self._running.graphs)):
            return False
        others = self.plans.fits(self.scattered(sizes), self.states)
        return others and all(one.table.stands() for one in self.shared if one.table is not None)

    def trim(self) -> None:
        """Give back memory that neither the last step nor owners of rows need. Outputs that are lent are emptied."""
        self._handed_out.empty()
        self._memory.trim(self.current)

    def _give_all_back(self) -> None:
        """Give back all memory except rows of states; all executors are dropped."""
        self._handed_out.empty()
        self._bound.clear()
        self._graphs.clear()
        self._memory.give_idle_back()
        committed = self.workspace.committed_bytes()
        self.workspace.trim_all({name: 0 for name in committed if not name.startswith("state/")})

    def memory(self) -> MemoryReport:
        """Report planned, committed and resident bytes by pool; the planned ones are those of the last step's plan."""
        adopted = {"weights": self.weights.adopted_bytes} if self.weights.adopted_bytes else {}
        return MemoryReport.of(
            self.current.pools, self.workspace.committed_bytes() | adopted, self.workspace.resident_bytes() | adopted,
            budget_bytes=self.planner.budget_bytes, graph_bytes=self._graphs.held_bytes, in_use=in_use() if self._on_cuda else None,
        )  # fmt: skip

    def place(self, steps: Mapping[str, StepSize], times: Mapping[str, int]) -> None:
        """Load the weights again where these steps take the least predicted time together, if that saves more time than it takes,
        and no settings were given, and nobody has rows, or has written into the weights.

        Parameters
        ----------
        times
            How often each step runs, by name.
        """
        key = self.plans.planner, *[(size.key, times[name]) for name, size in steps.items()]
        given = self.plans.config is not None or "stream" in self.plans.asked.pinned
        if given or any(self.states.values()) or key in self._placed or not self.weights.can_move:
            return
        better = self.plans.placed({name: size.rounded() for name, size in steps.items()}, times)
        if better is not None:
            self._move(better)
        self._placed.find(key, lambda: True)

    def _move(self, plan: Plan) -> None:
        """Load the weights again, where another plan has them."""
        lost = "; what was written into `weights()` is lost" if self.weights.shown else ""
        say = _log.warning if self.weights.shown else _log.info
        self._finish_divided()
        say("weights move: %s is streamed from now on, loaded again%s", plan.config["stream"], lost)
        try:
            self.weights.forget()
            self._give_all_back()
            self.current = plan
            self.plans.settle_on(plan)
            self.weights.fill(plan)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give all memory back. Closing twice is fine."""
        with self.turns:
            self._open = False
            if self._divided is not None:
                self._divided.drop()
            self.weights.forget()
            self._bound.clear()
            self._graphs.close()
            self.workspace.close()
