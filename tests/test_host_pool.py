"""Pinned host memory, over a fake driver: exact, one registration, and whatever fails, as it was before."""

from __future__ import annotations

import errno
import gc
import logging
import signal
from typing import Any

import pytest
import torch
from fake_cuda import FakeDriver
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic.errors import DoesNotFit, RuntimeMemoryError
from mosaic.runtime import page_pool
from mosaic.runtime.cuda_pool import CudaPool
from mosaic.runtime.host_pool import HostMemoryError, HostPool
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.page_pool import PAGE_BYTES, Linux, PagePool
from mosaic.runtime.workspace import Workspace
from mosaic.units import GIB, MIB, round_up

TIB = 1 << 40


class Machine(Linux):
    """A machine with so much memory available, which may grow as it is used."""

    def __init__(self, available: int | None = None, *, grows: bool = False) -> None:
        super().__init__()
        self.left, self.may_grow = available, grows
        self.populated: list[int] = []
        self.fail_populate: int | None = None

    def available(self) -> int | None:
        return self.left

    def grows(self) -> bool:
        return self.may_grow

    def populate(self, address: int, size: int) -> None:
        if len(self.populated) == self.fail_populate:
            raise OSError(errno.EFAULT, "Bad address")
        self.populated.append(size)
        super().populate(address, size)
        if self.left is not None and not self.may_grow:
            self.left -= size


def exact(driver: FakeDriver, pool: HostPool) -> bool:
    """Everything committed is charged, resident, and one registration."""
    part = pool.ranges["host"]
    pinned = {part.address: part.committed_bytes} if part.committed_bytes else {}
    sizes = {part.committed_bytes, part.resident_bytes(), pool.ledger.held().get("host", 0), pool.committed_bytes}
    return driver.pinned == pinned and len(sizes) == 1


# --- growing and shrinking --------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 3 * MIB), max_size=6))
def test_committed_bytes_are_pinned_exactly(sizes: list[int]) -> None:
    driver = FakeDriver(GIB)
    with HostPool(driver, DeviceLedger(8 * MIB, "host")) as pool:
        part = pool.reserve("host", TIB)
        for size in sizes:
            driver.launch()
            part.resize(size)
            assert part.committed_bytes == round_up(size, PAGE_BYTES) and exact(driver, pool)
    assert driver.is_empty() and pool.ledger.committed_bytes == 0


def test_a_resize_keeps_contents_addresses_and_views() -> None:
    driver = FakeDriver(GIB)
    with HostPool(driver, page_bytes=MIB) as pool:
        part = pool.reserve("host", TIB)
        part.commit(1)
        first, seen = part.tensor, part.device_tensor
        first[:MIB].fill_(7)
        part.commit(2 * MIB + 1)
        assert part.committed_bytes == 3 * MIB and part.tensor is first and part.device_tensor is seen
        seen[2 * MIB] = 9  # what the device writes the host reads
        assert first.data_ptr() == part.address and first[2 * MIB] == 9 and bool((first[:MIB] == 7).all())
        part.decommit(MIB)
        assert bool((first[:MIB] == 7).all()) and exact(driver, pool)


def test_whatever_lies_in_the_range_is_copied_asynchronously() -> None:
    driver = FakeDriver(GIB)
    with HostPool(driver) as pool:
        part = pool.reserve("host", TIB)
        for size in (MIB, 2 * MIB, 5 * MIB, 3 * MIB):
            part.resize(size)
            assert driver.may_copy(part.address, part.committed_bytes)  # so every buffer within it, too


def test_streams_are_drained_before_memory_is_unpinned_and_only_then() -> None:
    driver = FakeDriver(GIB)
    with HostPool(driver) as pool:
        part = pool.reserve("host", TIB)
        driver.launch()
        part.resize(MIB)
        part.resize(MIB)
        assert "synchronize" not in driver.calls
        part.resize(2 * MIB)
        driver.launch()
        part.resize(MIB)
        driver.launch()
    assert driver.calls.count("synchronize") == 3


def test_pages_are_faulted_in_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_pool, "POPULATE_BYTES", MIB)
    driver, machine = FakeDriver(GIB), Machine()
    with HostPool(driver, system=machine) as pool:
        pool.reserve("host", TIB).commit(3 * MIB + PAGE_BYTES)
        assert machine.populated == [MIB] * 3 + [PAGE_BYTES] and exact(driver, pool)
        assert driver.calls.count("host_register") == 1


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_machine_with_too_little_memory_refuses_before_a_page_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_pool, "POPULATE_BYTES", MIB)
    driver, machine = FakeDriver(GIB), Machine(10 * MIB)
    with HostPool(driver, system=machine) as pool:
        part = pool.reserve("host", TIB)
        part.commit(2 * MIB)
        message = r"host: the system refused 9\.00 MiB on top of 2\.00 MiB \(host memory too small: 8\.00 MiB of phys"
        with pytest.raises(HostMemoryError, match=message) as refusal:
            part.commit(11 * MIB)
        numbers = (refusal.value.asked_bytes, refusal.value.committed_bytes, refusal.value.available_bytes)
        assert numbers == (9 * MIB, 2 * MIB, 8 * MIB) and machine.populated == [MIB, MIB] and exact(driver, pool)
        part.commit(10 * MIB)
        assert exact(driver, pool)


def test_memory_that_grows_as_it_is_used_is_asked_for_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_pool, "POPULATE_BYTES", MIB)
    driver, machine = FakeDriver(GIB), Machine(2 * MIB, grows=True)
    with HostPool(driver, system=machine) as pool:
        part = pool.reserve("host", TIB)
        part.commit(5 * MIB)  # more than is available at any time
        assert exact(driver, pool)
        machine.populated.clear()
        before, rest = machine.populate, iter([2 * MIB, MIB - 1])

        def populate(address: int, size: int) -> None:
            before(address, size)
            machine.left = next(rest)

        monkeypatch.setattr(machine, "populate", populate)
        with pytest.raises(HostMemoryError, match=r"host memory too small: 3\.00 MiB of physical") as refusal:
            part.commit(9 * MIB)
        assert refusal.value.available_bytes == 3 * MIB - 1 and exact(driver, pool)


def test_the_budget_of_the_host_is_its_own() -> None:
    driver = FakeDriver(GIB)
    device, host = DeviceLedger(GIB, "cuda:0"), DeviceLedger(4 * MIB, "host")
    with Workspace(pool=CudaPool(driver, device), host=HostPool(driver, host)) as workspace:
        workspace.resize_all({"workspace": 6 * MIB, "host": 4 * MIB})
        assert device.held() == {"workspace": 6 * MIB} and host.held() == {"host": 4 * MIB}
        with pytest.raises(DoesNotFit, match=r"host asks for 1\.00 MiB on host, 0 B of the budget of 4\.00 MiB"):
            workspace.resize("host", 5 * MIB)
        assert workspace.committed_bytes() == workspace.resident_bytes() == {"workspace": 6 * MIB, "host": 4 * MIB}
    assert driver.is_empty() and device.committed_bytes == host.committed_bytes == 0


def test_a_driver_that_refuses_to_pin_is_reported_with_numbers() -> None:
    driver, machine = FakeDriver(GIB), Machine(GIB)
    driver.most_pinned_bytes = 3 * MIB
    with HostPool(driver, DeviceLedger(8 * MIB), system=machine) as pool:
        part = pool.reserve("host", TIB)
        part.commit(2 * MIB)
        part.tensor[: 2 * MIB].fill_(5)
        message = r"pin or unpin 4\.00 MiB .*OUT_OF_MEMORY \(2\).* 2\.00 MiB are held, 2\.00 MiB of them pinned, 1020"
        with pytest.raises(HostMemoryError, match=message) as refusal:
            part.commit(4 * MIB)
        numbers = (refusal.value.asked_bytes, refusal.value.committed_bytes, refusal.value.available_bytes)
        assert numbers == (4 * MIB, 2 * MIB, 1020 * MIB) and exact(driver, pool)
        assert bool((part.tensor[: 2 * MIB] == 5).all())
        driver.most_pinned_bytes = GIB
        part.commit(4 * MIB)
        assert exact(driver, pool)


GROWTH_CALLS = ["synchronize", "host_unregister", "host_register"]


@pytest.mark.parametrize("failure", ["refused", "interrupt"])
@pytest.mark.parametrize("index", range(len(GROWTH_CALLS)))
@pytest.mark.parametrize("size", [6 * MIB, MIB])
def test_a_resize_that_fails_anywhere_leaves_what_is_held_pinned(index: int, failure: str, size: int) -> None:
    driver = FakeDriver(GIB)
    with HostPool(driver, DeviceLedger(8 * MIB)) as pool:
        part = pool.reserve("host", TIB)
        part.commit(2 * MIB)
        part.tensor[:MIB].fill_(3)
        start = len(driver.calls)
        driver.fail_at = start + index
        if failure == "interrupt":
            driver.failure = KeyboardInterrupt
        with pytest.raises(HostMemoryError if failure == "refused" else KeyboardInterrupt):
            part.resize(size)
        assert driver.calls[start : start + index + 1] == GROWTH_CALLS[: index + 1]
        if size > 2 * MIB or index < 2:
            assert part.committed_bytes == 2 * MIB and exact(driver, pool)
        else:  # the rest of what was cut is memory, and is pinned by the next resize
            assert part.committed_bytes == part.resident_bytes() == pool.ledger.committed_bytes == MIB
            assert driver.pinned == {}
        part.resize(size)
        assert part.committed_bytes == size and exact(driver, pool) and bool((part.tensor[:MIB] == 3).all())
    assert driver.is_empty()


def test_what_could_not_be_pinned_again_is_by_the_next_resize(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver(GIB)
    with HostPool(driver, DeviceLedger(8 * MIB)) as pool:
        part = pool.reserve("host", TIB)
        part.commit(2 * MIB)
        part.tensor[: 2 * MIB].fill_(3)
        driver.failing = {"host_register"}
        with caplog.at_level(logging.WARNING), pytest.raises(HostMemoryError, match=r"held, 0 B of them pinned"):
            part.commit(4 * MIB)
        assert "2.00 MiB are not pinned until the next resize" in caplog.text
        assert part.committed_bytes == pool.ledger.committed_bytes == 2 * MIB and driver.pinned == {}
        with pytest.raises(RuntimeMemoryError, match="is not pinned"):
            _ = part.device_tensor
        with pytest.raises(HostMemoryError):
            part.resize(2 * MIB)
        driver.failing = set()
        part.resize(2 * MIB)
        assert exact(driver, pool) and bool((part.tensor[: 2 * MIB] == 3).all())
    assert driver.is_empty()


@pytest.mark.parametrize("call", GROWTH_CALLS)
def test_ctrl_c_between_a_call_and_its_answer_leaves_a_whole_state(call: str) -> None:
    driver = FakeDriver(GIB)
    with HostPool(driver, DeviceLedger(8 * MIB)) as pool:
        part = pool.reserve("host", TIB)
        part.commit(2 * MIB)
        driver.after_call = lambda name: signal.raise_signal(signal.SIGINT) if name == call else None
        for size in (4 * MIB, MIB):
            with pytest.raises(KeyboardInterrupt):
                part.resize(size)
            assert exact(driver, pool)
        driver.after_call = lambda name: None
        part.resize(3 * MIB)
        assert exact(driver, pool)
    assert driver.is_empty()


def test_ctrl_c_while_pages_are_faulted_in_is_heard_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_pool, "POPULATE_BYTES", MIB)
    driver, machine = FakeDriver(GIB), Machine()
    with HostPool(driver, system=machine) as pool:
        part = pool.reserve("host", TIB)
        part.commit(MIB)
        populate = machine.populate

        def interrupted(address: int, size: int) -> None:
            populate(address, size)
            signal.raise_signal(signal.SIGINT)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(machine, "populate", interrupted)
            part.commit(8 * MIB)
        assert len(machine.populated) == 2 and part.committed_bytes == MIB and exact(driver, pool)
        machine.fail_populate = 4
        with pytest.raises(HostMemoryError, match=r"refused 7\.00 MiB on top of 1\.00 MiB \(Bad address\)"):
            part.commit(8 * MIB)
        assert exact(driver, pool)
        machine.fail_populate = None
        part.commit(8 * MIB)
        assert exact(driver, pool)


def test_a_device_that_sees_host_memory_elsewhere_is_refused() -> None:
    driver = FakeDriver(GIB)
    driver.host_shift = 1 << 30
    with HostPool(driver) as pool:
        part = pool.reserve("host", TIB)
        part.commit(MIB)
        assert part.tensor.numel() == TIB
        with pytest.raises(RuntimeMemoryError, match="cuda:0 sees host memory at other addresses"):
            _ = part.device_tensor


# --- closing ----------------------------------------------------------------------------------------------------------


def test_close_frees_memory_at_once_and_addresses_with_the_last_view() -> None:
    driver, machine = FakeDriver(GIB), Machine()
    ended: list[int] = []
    unmap = machine.unmap
    machine.unmap = lambda address, size: (ended.append(address), unmap(address, size))[1]  # type: ignore[method-assign]
    pool = HostPool(driver, system=machine)
    part = pool.reserve("host", 64 * MIB)
    part.commit(2 * MIB)
    view, seen = part.tensor[:10], part.device_tensor[:10]
    driver.launch()
    pool.close()
    pool.close()
    assert driver.pinned == {} and pool.ledger.committed_bytes == 0
    for attribute in ("tensor", "device_tensor"):
        with pytest.raises(RuntimeMemoryError, match="closed"):
            getattr(part, attribute)
    with pytest.raises(RuntimeMemoryError):
        part.commit(1)
    del view
    gc.collect()
    assert ended == []  # the device's view keeps the addresses as well
    del seen
    gc.collect()
    assert ended == [part.address]


def test_a_range_that_nobody_closed_is_unpinned_before_its_addresses_go() -> None:
    driver = FakeDriver(GIB)
    pool = HostPool(driver)
    pool.reserve("host", 64 * MIB).commit(2 * MIB)
    driver.launch()
    del pool
    gc.collect()
    assert driver.is_empty()


@pytest.mark.parametrize("lost", [True, False])
def test_what_cannot_be_unpinned_stays_charged_and_mapped(lost: bool) -> None:
    driver, ended = FakeDriver(GIB), []
    machine = Machine()
    machine.unmap = lambda address, size: ended.append(address)  # type: ignore[method-assign]
    pool = HostPool(driver, DeviceLedger(8 * MIB), system=machine)
    part = pool.reserve("host", TIB)
    part.commit(2 * MIB)
    if lost:
        driver.lose()
    else:
        driver.failing = {"host_unregister"}
    for size in (4 * MIB, MIB):
        with pytest.raises(HostMemoryError, match=r"2\.00 MiB are held, 2\.00 MiB of them pinned"):
            part.resize(size)
        assert exact(driver, pool)
    with pytest.raises(HostMemoryError):
        pool.close()
    pool.close()
    assert pool.ledger.committed_bytes == 2 * MIB  # the machine still lacks them
    del part, pool
    gc.collect()
    assert ended == []


def test_the_other_pool_is_closed_if_one_cannot_be() -> None:
    driver = FakeDriver(GIB)
    workspace = Workspace(pool=CudaPool(driver, DeviceLedger(GIB)), host=HostPool(driver))
    workspace.resize_all({"workspace": MIB, "host": MIB})
    driver.failing = {"host_unregister"}
    with pytest.raises(ZeroDivisionError) as caught, workspace:
        raise ZeroDivisionError
    assert "closing failed too: host: the driver refused" in caught.value.__notes__[0]
    assert driver.used_bytes == 0
    driver.failing = set()
    for address in list(driver.pinned):
        driver.host_unregister(address)


# --- workspace --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_workspace_shows_both_sides_of_host_memory(kind: str) -> None:
    driver = FakeDriver(GIB)
    pool: Any = PagePool() if kind == "cpu" else CudaPool(driver)
    host = None if kind == "cpu" else HostPool(driver, page_bytes=2 * MIB)
    with Workspace(pool=pool, host=host, capacities={"host": 64 * MIB}) as workspace:
        workspace.resize_all({"host": 8192, "workspace": 8192})
        near = workspace.view("host", 512, (3, 5), "float32")
        far = workspace.view("host", 512, (3, 5), "float32", on_device=True)
        near.copy_(torch.arange(15.0).view(3, 5))
        assert torch.equal(near, far) and near.data_ptr() == far.data_ptr()
        assert "host" not in workspace.ledger.held() and workspace.host is not None
        assert workspace.host.ledger.held() == {"host": 8192 if kind == "cpu" else 2 * MIB}
        with pytest.raises(RuntimeMemoryError, match="commit the plan's peak first"):
            workspace.view("host", 4 * MIB, (1,), "float32", on_device=True)
        del near, far
    gc.collect()
    assert driver.is_empty()


def test_a_failed_registration_undoes_only_itself_in_a_resize_of_several() -> None:
    driver = FakeDriver(GIB)
    with Workspace(pool=CudaPool(driver, DeviceLedger(GIB)), host=HostPool(driver)) as workspace:
        workspace.resize_all({"workspace": 8 * MIB, "host": MIB})
        driver.most_pinned_bytes = 2 * MIB
        with pytest.raises(HostMemoryError):
            workspace.resize_all({"host": 4 * MIB, "workspace": 2 * MIB})
        assert workspace.committed_bytes() == {"workspace": 2 * MIB, "host": MIB}
        driver.most_pinned_bytes = GIB
        workspace.resize_all({"host": 4 * MIB, "workspace": 2 * MIB})
        assert workspace.committed_bytes() == {"workspace": 2 * MIB, "host": 4 * MIB}
    assert driver.is_empty()


# --- what the machine says --------------------------------------------------------------------------------------------


def test_the_limit_of_a_container_counts_and_cached_files_are_free(tmp_path: Any) -> None:
    assert page_pool.container_room(tmp_path) is None
    (tmp_path / "memory.stat").write_text("anon 5000\ninactive_file 100\nactive_file 20\n")
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert page_pool.container_room(tmp_path) == 1000 - 400 + 120
    (tmp_path / "memory.max").write_text("max\n")
    assert page_pool.container_room(tmp_path) is None
    old = tmp_path / "memory"
    old.mkdir()
    (old / "memory.stat").write_text("inactive_file 1\nactive_file 2\n")
    (old / "memory.limit_in_bytes").write_text("50\n")
    (old / "memory.usage_in_bytes").write_text("90\n")
    assert page_pool.container_room(tmp_path) == 0


def test_this_machine_says_what_it_has() -> None:
    available = Linux().available()
    assert available is not None and 16 * MIB < available < 1 << 50
