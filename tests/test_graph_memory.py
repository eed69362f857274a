"""Captured graphs are bounded by bytes: random sizes over a fake driver, against what the driver itself has in use."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import takewhile
from typing import Any, cast

import pytest
import torch
from compiled_runner import CompiledRunner
from dropping import CUT
from fake_cuda import GRANULARITY as UNIT
from fake_cuda import FakeDriver
from test_cut import CONFIG, TENSORS, Sequence
from test_request_table import CONFIGS, prompt_of
from test_streams import Capturing, bind, heads, planned, steps_of

import mosaic
from mosaic.decoding import GenerationConfig, Session, Submission
from mosaic.planner.plan import Plan
from mosaic.registrar import graph as registrar
from mosaic.runtime.graph_memory import GraphMemory, NoRoom
from mosaic.runtime.workspace import Workspace


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
    """Graph memory that is set aside from a budget, and what was asked of it."""

    def __init__(self, seed: int, *, keeps: bool = False) -> None:
        self.rng = random.Random(seed)
        self.device = Device(keeps=keeps)
        self.most, self.reserved = self.rng.randint(4, 30) * UNIT, self.rng.randint(0, 6) * UNIT
        self.free = self.rng.choice((0, 5, 20, 60)) * UNIT  # what others leave of the budget
        self.aside = 0
        self.graphs = GraphMemory(
            self.device.free_bytes, self.device.driver.synchronize, set_aside=self.set_aside,
            most_bytes=max(self.most, self.reserved), reserved_bytes=self.reserved,
        )  # fmt: skip
        self.sizes = [self.rng.randint(1, 9) for _ in range(self.rng.randint(2, 14))]
        self.order: list[int] = []  # of the last launch
        self.step: set[int] = set()

    def set_aside(self, num_bytes: int) -> bool:
        assert num_bytes > self.aside
        if num_bytes > self.free:
            return False
        self.aside = num_bytes
        return True

    @property
    def kept(self) -> set[int]:
        return {key for key in range(len(self.sizes)) if key in self.graphs}

    @property
    def bound(self) -> int:
        return self.reserved + self.aside

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


@pytest.mark.some
@pytest.mark.parametrize("seed", range(60))
def test_graphs_stay_within_the_bound_and_the_least_recently_used_go(seed: int) -> None:
    engine = Engine(seed)
    for _ in range(120):
        before, held = engine.kept, engine.graphs.held_bytes
        if engine.rng.random() < 0.3:
            engine.begin()
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
        assert engine.graphs.held_bytes == engine.device.driver.used_bytes <= engine.bound
        assert engine.bound == engine.graphs.room_bytes <= max(engine.most, engine.reserved)
        assert engine.aside <= engine.free
        recent = [other for other in engine.order if other in before | engine.kept]
        assert set(recent[len(recent) - len(engine.kept) :]) == engine.kept
        assert engine.step <= engine.kept and not engine.device.dropped_busy
    engine.graphs.clear()
    assert not engine.kept and not engine.device.driver.used_bytes


def test_all_that_graphs_may_take_is_set_aside_when_many_are_expected() -> None:
    """By doubling, as far as it is granted."""
    for free, aside in ((1 << 30, 62), (40, 30), (13, 6), (5, 2), (1, 0)):
        asked = list[int]()

        def granted(num_bytes: int, asked: list[int] = asked, free: int = free) -> bool:
            asked.append(num_bytes // UNIT)
            return num_bytes <= free * UNIT

        graphs = GraphMemory(set_aside=granted, most_bytes=64 * UNIT, reserved_bytes=2 * UNIT)
        graphs.expect()
        assert graphs.room_bytes == (2 + aside) * UNIT and sorted(set(asked)) == asked
        assert graphs.most == 1 + aside * UNIT // (4 << 20)


@pytest.mark.parametrize("seed", range(20))
def test_a_driver_that_keeps_memory_of_graphs_that_went_has_it_counted(seed: int) -> None:
    """Graphs of one size: what one leaves serves the next."""
    engine = Engine(seed, keeps=True)
    engine.sizes = [engine.rng.randint(1, 4)] * len(engine.sizes)
    most_kept = 0
    for _ in range(120):
        engine.begin()
        engine.ask(engine.rng.randrange(len(engine.sizes)))
        used = engine.device.driver.used_bytes
        assert engine.graphs.held_bytes == used <= max(engine.bound, engine.sizes[0] * UNIT)
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
        assert engine.device.driver.used_bytes <= engine.bound + max(engine.sizes) * UNIT
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
    device = Device()
    graphs = GraphMemory(device.free_bytes, device.driver.synchronize, most_bytes=5 * UNIT)
    document, log = planned(heads), Costly(device, 3)
    expected = steps_of(bind(document, workspace), 3)
    executors = [bind(document, workspace, streams=log, capture=True, graphs=graphs) for _ in range(2)]
    for turn in range(6):
        executor, other = executors[turn % 2], executors[1 - turn % 2]
        graphs.begin()
        assert all(found.equal(value) for found, value in zip(steps_of(executor, 3), expected, strict=True))
        assert executor.captured and not other.captured
        assert graphs.held_bytes == device.driver.used_bytes == 3 * UNIT
    assert log.captures == 6
    executors[1].drop_graph()
    assert not graphs.held_bytes and not device.driver.used_bytes and not executors[1].captured


def test_a_step_whose_graph_has_no_room_runs_launch_by_launch(
    workspace: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device()
    graphs = GraphMemory(device.free_bytes, device.driver.synchronize, most_bytes=2 * UNIT)
    document = planned(heads)
    log = Costly(device, 3)
    executor = bind(document, workspace, streams=log, capture=True, graphs=graphs)
    expected = steps_of(bind(document, workspace), 5)
    assert all(found.equal(value) for found, value in zip(steps_of(executor, 5), expected, strict=True))
    assert log.captures == 1 and not executor.captured and not device.driver.used_bytes
    assert executor.not_captured is not None and "takes 6.00 MiB, there are 4.00 MiB" in executor.not_captured
    assert len(caplog.records) == 1


def test_each_step_begins_once_and_reports_what_graphs_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cut step too: its prefix is in use until the next step."""
    device, made, begun = Device(), [], []

    class Watched(GraphMemory):
        def begin(self) -> None:
            begun.append(self)
            super().begin()

    def opened(plan: Plan, budget: int, of: torch.device, set_aside: Callable[[int], bool]) -> GraphMemory:
        made.append(Watched(device.free_bytes, device.driver.synchronize, set_aside=set_aside))
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
            assert graphs.held_bytes == model.memory().graph_bytes <= model.workspace.ledger.held()["graphs"]
            assert "in captured graphs" in str(model.memory())
        assert graphs.held_bytes == 9 * UNIT and all(step in graphs for step in range(3))
        before = len(begun)
        program(x=torch.ones(3, 2))
        assert begun[before:] == [other] and "graphs" not in str(program.memory())
        sequence.close()
        model.close()
        assert 2 not in graphs and not device.driver.used_bytes


class Counted:
    """Takes bytes of a device whose driver never gives them back, with its launch."""

    def __init__(self, used: list[int], num_bytes: int) -> None:
        self._used, self._bytes = used, num_bytes

    def replay(self) -> None:
        self._used.append(self._bytes)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 6))])
@pytest.mark.parametrize("warm", [False, True])
def test_graphs_take_nothing_from_those_who_were_admitted(
    seed: int, warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor from those for whom the session is warm; who comes later has what they leave."""
    rng, used, made, refused = random.Random(seed), list[int](), list[GraphMemory](), [0]

    def opened(plan: Plan, budget: int, of: torch.device, set_aside: Callable[[int], bool]) -> GraphMemory:
        made.append(GraphMemory(lambda: (1 << 50) - sum(used), set_aside=set_aside, most_bytes=5 << 19))
        return made[-1]

    def submitted(session: Session) -> bool:
        way = {"gen_length": 8, "stop_at_eos": False, "steps": 2}
        asked = Submission(prompt=prompt_of(rng.randrange(8, 500)), config=GenerationConfig(**way))
        if admitted := session.admits(asked):
            session.submit_all([asked])
        return admitted

    monkeypatch.setattr("mosaic.runtime.engine.graph_memory", opened)
    config = CONFIGS["sdar"]
    with mosaic.compile(config, seed=3, host_budget=0, budget="4MiB") as model, model.session() as session:
        (graphs,) = made
        foreseen = session.warm(GenerationConfig(gen_length=8), requests=64, tokens=512) if warm else 0
        for turn in takewhile(lambda turn: turn < 25 or not refused[0], range(200)):
            room = graphs.room_bytes
            while rng.random() < 0.97 and submitted(session):
                pass
            try:
                graphs.begin()
                graphs.capture(turn, lambda: cast(Any, Counted(used, rng.choice([0, 1 << 17, 1 << 18]))))
            except NoRoom:
                refused[0] += 1
            if session.live:
                session.advance()
            assert graphs.room_bytes >= room
            assert model.workspace.ledger.committed_bytes <= 4 << 20
        for _ in range(foreseen - len(session.live)):
            asked = Submission(prompt=prompt_of(504), config=GenerationConfig(gen_length=8))
            assert session.admits(asked)
            session.submit_all([asked])
        while session.live:
            session.advance()
    assert sum(used) and refused[0]


def double(g: registrar.Graph) -> None:
    """Register a product."""
    n = g.dim("tokens")
    x, w = g.input("x", (n, 2), "float32"), g.weight("w", (2, 2), "float32")
    g.add_op("linear", x, w, out=g.output("y", (n, 2), "float32"))
