"""Signals right after each call by which memory changes hands: what is counted is what is there, and the next step is right."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from fake_cuda import GRANULARITY as PAGE
from fake_cuda import FakeDriver
from test_graph_memory import Device, Graph
from test_runtime_compiled import LLADA
from test_states import keep, look
from torch import Tensor

import mosaic
from mosaic.runtime import cuda_range, graph_memory, state_rows
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.cuda_pool import CudaPool
from mosaic.runtime.graph_memory import GraphMemory
from mosaic.runtime.host_pool import HostPool
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.page_pool import PAGE_BYTES, Linux
from mosaic.runtime.state_rows import OwnedRows, RowTable
from mosaic.runtime.workspace import Workspace

NUMBERS = [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)]


class Struck(BaseException):
    """The exception of the handlers."""


class Strikes:
    """Sends this process a signal after one call of many."""

    def __init__(self) -> None:
        self.left, self.number, self.calls = -1, int(signal.SIGINT), 0

    def call(self, name: str = "") -> None:
        self.calls += 1
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(self.number)

    def after_each(self, action: Callable[[], object], number: int, again: Callable[[], None]) -> int:
        """Do it once in peace, then struck after every call that it makes, and say how many there were."""
        again()
        before = self.calls
        action()
        calls = self.calls - before
        for struck in range(1, calls + 1):
            again()
            self.left, self.number = struck, number
            with pytest.raises(Struck):
                action()
            self.left = -1
        return calls

    def at_each_line(self, module: ModuleType, action: Callable[[], object], again: Callable[[], None]) -> int:
        """The same, struck before every line of a module, and say how many there were."""

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            if frame.f_code.co_filename != module.__file__:
                return None
            if event == "line":
                self.call()
            return trace

        def traced() -> None:
            before = sys.gettrace()
            sys.settrace(trace)
            try:
                action()
            finally:
                sys.settrace(before)

        return self.after_each(traced, signal.SIGINT, again)


@pytest.fixture
def strikes() -> Iterator[Strikes]:
    def raising(number: int, frame: FrameType | None) -> None:
        raise Struck

    before = {number: signal.signal(number, raising) for number in (signal.SIGINT, signal.SIGTERM)}
    yield Strikes()
    for number, handler in before.items():
        signal.signal(number, handler)


# --- pools of a device ------------------------------------------------------------------------------------------------


def check(driver: FakeDriver, workspace: Workspace) -> None:
    """The driver has what the ledgers say, all of it can be touched, and the state has what was written."""
    committed = workspace.committed_bytes()
    host = committed.pop("host", 0)
    assert driver.used_bytes == sum(committed.values()) == workspace.ledger.committed_bytes
    assert driver.accessible == set(driver.mappings) and not driver.handles
    assert workspace.host is not None and workspace.host.ledger.committed_bytes == host == sum(driver.pinned.values())
    if committed:  # it is not closed
        assert [int(workspace.range("state/kv").tensor[page * PAGE]) for page in (0, 2, 3)] == [1, 2, 3]


@pytest.mark.parametrize("number", NUMBERS)
def test_the_pool_of_a_device_holds_what_it_counts(
    number: int, strikes: Strikes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_range, "CHUNK_BYTES", 3 * PAGE)
    driver = FakeDriver(100 * PAGE)
    driver.after_call = strikes.call
    small = {"workspace": 2 * PAGE, "state/kv": 4 * PAGE, "host": PAGE_BYTES}
    large = {"workspace": 9 * PAGE, "state/kv": 8 * PAGE, "host": 5 * PAGE_BYTES}
    holes = {"state/kv": [(PAGE, 2 * PAGE)]}
    opened: list[Workspace] = []

    def at(sizes: dict[str, int], **more: Any) -> Workspace:
        """A workspace of these sizes, after earlier ones were verified."""
        while opened:
            check(driver, opened[0])
            opened.pop().close()
        made = Workspace(pool=CudaPool(driver, DeviceLedger(100 * PAGE)), host=HostPool(driver))
        made.resize_all(sizes, **more)
        for page in (0, 2, 3):
            made.range("state/kv").tensor[page * PAGE] = max(page, 1)
        opened.append(made)
        return made

    calls = [
        strikes.after_each(lambda: opened[0].commit_all(large), number, lambda: at(small, holes=holes)),
        strikes.after_each(lambda: opened[0].trim_all(small, holes=holes), number, lambda: at(large)),
        strikes.after_each(lambda: opened[0].resize_all({**large, "workspace": PAGE}), number, lambda: at(small)),
        strikes.after_each(lambda: opened[0].close(), number, lambda: at(large)),
    ]
    assert all(count > 8 for count in calls), calls
    opened.clear()
    assert driver.is_empty() or (not driver.mappings and not driver.allocations and not driver.pinned)


# --- who has what -----------------------------------------------------------------------------------------------------


def test_rows_are_somebodys_or_free_wherever_it_strikes(strikes: Strikes) -> None:
    tables: list[tuple[RowTable, OwnedRows, OwnedRows]] = []

    def check_last() -> None:
        for table, *opened in tables[-1:]:
            taken = sorted(row for owned in opened for row in owned.slots().tolist())
            free = [row for start, end in table.free for row in range(start, end)]
            assert sorted([*taken, *free]) == [*range(table.rows)]
            assert [owned for owned in opened if owned.length] == [*table.owned]

    def again() -> None:
        check_last()
        table = RowTable("kv")
        tables.append((table, table.open("one"), table.open("another")))
        tables[-1][1].reserve(5)
        tables[-1][2].reserve(3)
        tables[-1][1].drop(1, 3)

    def change() -> None:
        tables[-1][1].reserve(9)
        tables[-1][2].close()
        tables[-1][1].close()

    assert strikes.at_each_line(state_rows, change, again) > 40
    check_last()


def test_what_is_set_aside_is_what_graphs_may_hold_wherever_it_strikes(strikes: Strikes) -> None:
    device, made, aside = Device(), list[GraphMemory](), [0]

    def set_aside(num_bytes: int) -> bool:
        aside[0] = num_bytes
        return True

    def again() -> None:
        for graphs in made[-1:]:
            assert graphs.held_bytes == device.driver.used_bytes <= graphs.room_bytes == 2 * PAGE + aside[0]
            graphs.close()
            assert not device.driver.used_bytes
        aside[0] = 0
        made.append(
            GraphMemory(device.free_bytes, device.driver.synchronize, set_aside=set_aside, reserved_bytes=2 * PAGE)
        )
        for key in range(2):
            made[-1].capture(key, lambda: Graph(device, 3))
        made[-1].begin()

    def change() -> None:
        made[-1].capture(2, lambda: Graph(device, 5))
        made[-1].drop(1)

    assert strikes.at_each_line(graph_memory, change, again) > 30
    again()
    made[-1].close()
    assert not device.dropped_busy


# --- a model on a CPU -------------------------------------------------------------------------------------------------


@pytest.fixture
def struck_linux(strikes: Strikes, monkeypatch: pytest.MonkeyPatch) -> Strikes:
    """Strikes after calls of the system."""

    class StruckLinux(Linux):
        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if name not in ("protect", "discard", "populate", "unmap"):
                return found

            def call(*arguments: Any) -> None:
                found(*arguments)
                strikes.call()

            return call

    monkeypatch.setattr("mosaic.runtime.page_pool.Linux", StruckLinux)
    return strikes


@pytest.mark.parametrize("number", NUMBERS)
def test_a_step_after_an_interrupt_finds_its_memory(number: int, struck_linux: Strikes) -> None:
    """In commits of a step, on `trim`, and in `close`: with rows in the middle of a state that go and come."""
    opened: list[CompiledModel] = []
    with mosaic.compile(LLADA, host_budget=0, debug="poison") as model:
        kept = [model.open_sequence() for _ in range(3)]
        for seed, (owned, count) in enumerate(zip(kept, (100, 300, 60), strict=True)):
            owned.reserve(count)
            keep(model, owned, seed)
        expected = look(model, kept[2])

        def right() -> Tensor:
            ledger, resident = model.workspace.ledger.held(), model.workspace.resident_bytes()
            assert resident == model.workspace.committed_bytes()
            assert all(ledger.get(name, 0) == size for name, size in resident.items() if name != "host")
            found = look(model, kept[2])
            assert torch.equal(found, expected)
            return found

        def full() -> None:
            right()
            kept[1].close()
            kept[1].reserve(300)
            keep(model, kept[1], 1)
            model(torch.full((500,), 256))
            right()
            kept[1].close()

        def empty() -> None:
            right()
            kept[1].close()
            model.trim()
            kept[1].reserve(300)
            right()

        assert struck_linux.after_each(model.trim, number, full) > 3
        assert struck_linux.after_each(lambda: keep(model, kept[1], 1), number, empty) > 1
        right()

    def compiled() -> None:
        opened.append(mosaic.compile(LLADA, host_budget=0))
        with opened[-1].open_sequence() as owned:
            owned.reserve(100)
            keep(opened[-1], owned, 0)

    assert struck_linux.after_each(lambda: opened[-1].close(), number, compiled) > 4
    for closed in opened:
        assert not closed.workspace.ledger.held().keys() - {"context", "library"}
