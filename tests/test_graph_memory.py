"""Captured graphs are bounded by bytes: random sizes over a fake driver, against what the driver itself has in use."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from compiled_runner import CompiledRunner
from dropping import CUT
from fake_cuda import GRANULARITY as UNIT
from fake_cuda import FakeDriver
from runtime_helpers import buffer_row
from test_cut import CONFIG, TENSORS, Sequence
from test_streams import Capturing, bind, heads, planned, steps_of

import mosaic
from mosaic.errors import DoesNotFit
from mosaic.planner.plan import Plan
from mosaic.planner.plan_records import PlanRecords
from mosaic.registrar import graph as registrar
from mosaic.runtime.graph_memory import GraphMemory, NoRoom
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.state_rows import RowTable
from mosaic.runtime.step_memory import StepMemory
from mosaic.runtime.workspace import Workspace

CONTEXT = 100 * UNIT


@pytest.fixture
def workspace() -> Iterator[Workspace]:
    with Workspace() as opened:
        for pool in ("workspace", "weights", "host"):
            opened.resize(pool, 1 << 21)
        yield opened


class Device:
    """A driver that gives memory of graphs back when they go, or that keeps it for later ones."""

    def __init__(self, *, keeps: bool = False) -> None:
        self.driver, self.keeps = FakeDriver(1 << 50), keeps
        self.live, self.dropped_busy = 0, False
        self._units: list[int] = []

    def free_bytes(self) -> int:
        return self.driver.memory_info()[0]

    def add(self, units: int) -> None:
        self.live += units
        while len(self._units) < self.live:
            self._units.append(self.driver.allocate(UNIT))
        while len(self._units) > self.live and not self.keeps:
            self.driver.free(self._units.pop())


class Graph:
    """Takes memory of a device with its first launch, until it is garbage."""

    def __init__(self, device: Device, units: int) -> None:
        self._device, self._units, self._launched = device, units, False

    def replay(self) -> None:
        if not self._launched:
            self._device.add(self._units)
        self._launched = True
        self._device.driver.launch()

    def __del__(self) -> None:
        if self._launched:
            self._device.dropped_busy |= self._device.driver.busy
            self._device.add(-self._units)


class Engine:
    """Graph memory within a budget, and what was asked of it."""

    def __init__(self, seed: int, *, keeps: bool = False) -> None:
        self.rng = random.Random(seed)
        self.device = Device(keeps=keeps)
        self.most, self.reserved = self.rng.randint(4, 30) * UNIT, self.rng.randint(0, 6) * UNIT
        self.others = self.rng.choice((0, 5, 20, 60)) * UNIT  # what the budget has beside context
        self.ledger = DeviceLedger(CONTEXT + self.others)
        self.ledger.charge("context", CONTEXT)
        self.graphs = GraphMemory(
            self.ledger, self.device.free_bytes, self.device.driver.synchronize,
            most_bytes=self.most, reserved_bytes=self.reserved,
        )  # fmt: skip
        self.sizes = [self.rng.randint(1, 9) for _ in range(self.rng.randint(2, 14))]
        self.order: list[int] = []  # of the last launch
        self.step: set[int] = set()

    @property
    def kept(self) -> set[int]:
        return {key for key in range(len(self.sizes)) if key in self.graphs}

    @property
    def bound(self) -> int:
        workspace = self.ledger.held().get("workspace", 0)
        return min(self.most, self.reserved + self.others - workspace)

    def ask(self, key: int) -> bool:
        """Launch the graph of a key, as an executor does; False: it is not kept."""
        self.order = [*(other for other in self.order if other != key), key]
        graph = self.graphs.find(key)
        if graph is not None:
            graph.replay()
            self.step.add(key)
            return True
        try:
            self.graphs.capture(key, lambda: Graph(self.device, self.sizes[key]))
        except NoRoom:
            self.order.remove(key)
            return False
        self.step.add(key)
        return True

    def begin(self) -> None:
        self.graphs.begin()
        self.step.clear()

    def grow(self) -> None:
        """Let a plan take memory, or give it back."""
        held = self.ledger.held().get("workspace", 0)
        self.ledger.release("workspace", held)
        wanted = self.rng.randint(0, self.others // UNIT) * UNIT
        try:
            self.ledger.charge("workspace", wanted)
        except DoesNotFit:
            assert self.graphs.held_bytes > self.reserved
            idle = self.kept - self.step
            assert self.graphs.give_way() is bool(idle) and self.kept == self.step & self.kept
            with suppress(DoesNotFit):  # graphs in use stay
                self.ledger.charge("workspace", wanted)


@pytest.mark.some
@pytest.mark.parametrize("seed", range(60))
def test_graphs_stay_within_the_bound_and_the_least_recently_used_go(seed: int) -> None:
    engine = Engine(seed)
    for _ in range(120):
        before, held = engine.kept, engine.graphs.held_bytes
        action = engine.rng.choice(("ask", "ask", "ask", "begin", "grow"))
        if action == "begin":
            engine.begin()
        elif action == "grow":
            engine.grow()
        else:
            key = engine.rng.randrange(len(engine.sizes))
            usual = held // max(len(before - {key}), 1)
            pinned = engine.step | {key}
            kept = engine.ask(key)
            gone, size = before - engine.kept - {key}, engine.sizes[key] * UNIT
            assert not gone & engine.step
            if not kept:  # no other than those of this step is left, and there is no room beside them
                assert engine.kept <= pinned and engine.graphs.held_bytes + size > engine.bound
            if gone and kept:
                last = max(gone, key=engine.order.index)  # nothing went while there was room
                room_for = max(engine.graphs.held_bytes, engine.graphs.held_bytes - size + usual)
                assert room_for + engine.sizes[last] * UNIT > engine.bound
        assert engine.graphs.held_bytes == sum(engine.sizes[key] for key in engine.kept) * UNIT
        assert engine.graphs.held_bytes == engine.device.driver.used_bytes <= max(engine.bound, 0)
        held_by = engine.ledger.held()
        assert held_by.get("graphs", 0) == engine.graphs.held_bytes
        assert held_by["context"] == CONTEXT - min(engine.graphs.held_bytes, engine.reserved)
        recent = [other for other in engine.order if other in before | engine.kept]
        assert set(recent[len(recent) - len(engine.kept) :]) == engine.kept
        assert engine.step <= engine.kept and not engine.device.dropped_busy
    engine.graphs.clear()
    assert not engine.kept and not engine.device.driver.used_bytes
    assert engine.ledger.held()["context"] == CONTEXT and "graphs" not in engine.ledger.held()


@pytest.mark.parametrize("seed", range(20))
def test_a_driver_that_keeps_memory_of_graphs_that_went_has_it_counted(seed: int) -> None:
    """Graphs of one size: what one leaves serves the next, and the ledger has what the driver has."""
    engine = Engine(seed, keeps=True)
    engine.sizes = [engine.rng.randint(1, 4)] * len(engine.sizes)
    most_kept = 0
    for _ in range(120):
        engine.begin()
        engine.ask(engine.rng.randrange(len(engine.sizes)))
        used = engine.device.driver.used_bytes
        assert engine.graphs.held_bytes == used
        assert engine.ledger.held().get("graphs", 0) == min(used, engine.bound)
        assert used <= max(engine.bound, engine.sizes[0] * UNIT)
        assert len(engine.kept) >= most_kept or not engine.kept  # never fewer than there was room for before
        most_kept = len(engine.kept)
    if engine.bound >= engine.sizes[0] * UNIT:
        assert most_kept == min(engine.bound // (engine.sizes[0] * UNIT), len(set(engine.order)))


@pytest.mark.parametrize("seed", range(20))
def test_a_driver_that_keeps_more_than_there_is_room_for_costs_no_other_graphs(seed: int) -> None:
    """Graphs of several sizes: those that have room together stay, once they are captured, whatever came before."""
    engine = Engine(seed, keeps=True)
    engine.sizes = [engine.rng.randint(2, 4) for _ in range(12)]
    for _ in range(60):
        engine.begin()
        engine.ask(engine.rng.randrange(len(engine.sizes)))
        assert engine.device.driver.used_bytes <= max(engine.bound, 0) + max(engine.sizes) * UNIT
    few = engine.rng.sample(range(12), min(engine.bound // (5 * UNIT), 12))
    for _ in range(3):
        for key in few:
            engine.begin()
            engine.ask(key)
    assert engine.kept.issuperset(few)


class Both:
    def __init__(self, *graphs: Any) -> None:
        self._graphs = graphs

    def replay(self) -> None:
        for graph in self._graphs:
            graph.replay()


class Costly(Capturing):
    """Its captures take memory of a device."""

    def __init__(self, device: Device, units: int) -> None:
        super().__init__()
        self.device, self.units = device, units

    def capture(self, step: Callable[[], None]) -> Any:
        return Both(Graph(self.device, self.units), super().capture(step))


def test_a_graph_that_went_is_captured_again(workspace: Workspace) -> None:
    """Room for one graph: two executors take turns, and neither result nor ledger shows it."""
    device, ledger = Device(), DeviceLedger(10 * UNIT)
    graphs = GraphMemory(ledger, device.free_bytes, device.driver.synchronize, most_bytes=5 * UNIT)
    document, log = planned(heads), Costly(device, 3)
    expected = steps_of(bind(document, workspace), 3)
    executors = [bind(document, workspace, streams=log, capture=True, graphs=graphs) for _ in range(2)]
    for turn in range(6):
        executor, other = executors[turn % 2], executors[1 - turn % 2]
        graphs.begin()
        assert all(found.equal(value) for found, value in zip(steps_of(executor, 3), expected, strict=True))
        assert executor.captured and not other.captured
        assert ledger.held() == {"graphs": 3 * UNIT} and device.driver.used_bytes == 3 * UNIT
    assert log.captures == 6
    executors[1].drop_graph()
    assert not ledger.held() and not device.driver.used_bytes and not executors[1].captured


def test_a_step_whose_graph_has_no_room_runs_launch_by_launch(
    workspace: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device()
    graphs = GraphMemory(DeviceLedger(2 * UNIT), device.free_bytes, device.driver.synchronize)
    document = planned(heads)
    log = Costly(device, 3)
    executor = bind(document, workspace, streams=log, capture=True, graphs=graphs)
    expected = steps_of(bind(document, workspace), 5)
    assert all(found.equal(value) for found, value in zip(steps_of(executor, 5), expected, strict=True))
    assert log.captures == 1 and not executor.captured and not device.driver.used_bytes
    assert executor.not_captured is not None and "takes 6.00 MiB, there are 4.00 MiB" in executor.not_captured
    assert len(caplog.records) == 1


def test_graphs_give_way_to_plans_before_memory_of_earlier_steps_does() -> None:
    ledger = DeviceLedger(20 * UNIT)
    ledger.charge("context", 4 * UNIT)
    device = Device()
    graphs = GraphMemory(ledger, device.free_bytes, device.driver.synchronize, reserved_bytes=2 * UNIT)

    def plan(**units: int) -> Plan:
        pools = {name: size * UNIT for name, size in units.items()}
        return cast(Plan, SimpleNamespace(pools=pools, records=PlanRecords({"buffers": []})))

    with Workspace(ledger, page_bytes=UNIT) as workspace:
        memory = StepMemory(workspace, (), lambda: None, graphs.give_way)
        memory.commit(plan(workspace=6))
        for key in range(4):
            graphs.begin()
            graphs.capture(key, lambda: Graph(device, 3))
        assert ledger.held() == {"context": 2 * UNIT, "workspace": 6 * UNIT, "graphs": 12 * UNIT}
        graphs.begin()
        assert graphs.find(1) is not None
        memory.commit(plan(workspace=9))
        assert workspace.committed_bytes() == {"workspace": 9 * UNIT}
        assert ledger.held() == {"context": 2 * UNIT, "graphs": 3 * UNIT, "workspace": 9 * UNIT} and 1 in graphs
        assert not graphs.give_way()
        with pytest.raises(DoesNotFit):
            memory.commit(plan(workspace=17))
        graphs.begin()
        memory.commit(plan(workspace=16))
        assert ledger.held() == {"context": 4 * UNIT, "workspace": 16 * UNIT} and device.driver.used_bytes == 0
        for _ in range(2):  # captured again, it takes the place of what it was
            graphs.capture(5, lambda: Graph(device, 2))
            assert graphs.held_bytes == device.driver.used_bytes == 2 * UNIT
        graphs.begin()
        assert not graphs.give_way() and 5 in graphs  # what is reserved is in every plan
        graphs.close()
        assert 5 not in graphs and ledger.held()["context"] == 4 * UNIT


def test_rows_of_nobody_give_way_to_graphs_and_to_plans_before_graphs_do() -> None:
    ledger, device, table = DeviceLedger(20 * UNIT), Device(), RowTable("kv")
    ledger.charge("context", 2 * UNIT)
    state = buffer_row("kv", "state", (9, UNIT), "uint8")

    def plan(**units: int) -> Plan:
        pools = {name.replace("_", "/"): size * UNIT for name, size in units.items()}
        return cast(Plan, SimpleNamespace(pools=pools, records=PlanRecords({"buffers": [state]})))

    with Workspace(ledger, page_bytes=UNIT) as workspace:
        memory = StepMemory(workspace, (table,), lambda: None, lambda: graphs.give_way())
        graphs = GraphMemory(
            ledger, device.free_bytes, device.driver.synchronize, make_room=memory.give_idle_back, most_bytes=5 * UNIT
        )
        for _ in range(2):
            with table.open() as owned:
                owned.reserve(8)
                memory.commit(plan(workspace=6, state_kv=8))
                changes = workspace.changes()
        assert workspace.changes() == changes  # the second time, all was there
        assert workspace.committed_bytes() == {"workspace": 6 * UNIT, "state/kv": 8 * UNIT}  # kept for the next
        graphs.capture("small", lambda: Graph(device, 3))
        assert workspace.committed_bytes() == {"workspace": 6 * UNIT, "state/kv": 0}
        with table.open() as owned:
            owned.reserve(8)
            memory.commit(plan(workspace=6, state_kv=8))
        graphs.begin()
        memory.commit(plan(workspace=9))
        assert ledger.held() == {"context": 2 * UNIT, "workspace": 9 * UNIT, "graphs": 3 * UNIT} and "small" in graphs
        graphs.close()


def test_each_step_begins_once_and_reports_what_graphs_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cut step too: its prefix is in use until the next step. Graphs of earlier steps are dropped."""
    device, made, begun = Device(), [], []

    class Watched(GraphMemory):
        def begin(self) -> None:
            begun.append(self)
            super().begin()

    def opened(ledger: DeviceLedger, of: torch.device, **options: Any) -> GraphMemory:
        made.append(Watched(ledger, device.free_bytes, device.driver.synchronize, **options))
        return made[-1]

    monkeypatch.setattr("mosaic.runtime.engine.graph_memory", opened)
    with closing(CompiledRunner(CONFIG, TENSORS)) as runner, mosaic.compile(double) as program:
        model, rng = runner.model, random.Random(0)
        graphs, other = made
        sequence = Sequence.filled(model, 64, rng)
        for step in range(3):
            request = sequence.window(rng, CUT)
            before = len(begun)
            model.step([request])
            assert begun[before:] == [graphs]
            graphs.capture(step, lambda: Graph(device, 3))
            assert graphs.held_bytes == model.workspace.ledger.held()["graphs"] == model.memory().graph_bytes
            assert "in captured graphs" in str(model.memory())
        assert graphs.held_bytes == 9 * UNIT and graphs.give_way() and 2 in graphs and 1 not in graphs
        before = len(begun)
        program(x=torch.ones(3, 2))
        assert begun[before:] == [other] and "graphs" not in str(program.memory())
        sequence.close()
        model.close()
        assert 2 not in graphs and not device.driver.used_bytes


def double(g: registrar.Graph) -> None:
    """Register a product."""
    n = g.dim("tokens")
    x, w = g.input("x", (n, 2), "float32"), g.weight("w", (2, 2), "float32")
    g.add_op("linear", x, w, out=g.output("y", (n, 2), "float32"))
