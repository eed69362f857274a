"""Pools of a CUDA device, over a fake driver: whatever fails, driver and ledger say what they said before."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
from fake_cuda import GRANULARITY, FakeDriver
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic.errors import DoesNotFit, MissingExtra, RuntimeMemoryError
from mosaic.runtime import cuda_driver, cuda_range
from mosaic.runtime.cuda_driver import CudaDriver, CudaError
from mosaic.runtime.cuda_pool import CudaMemoryError, CudaPool
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.page_pool import PagePool
from mosaic.runtime.workspace import Workspace
from mosaic.units import GIB, MIB, round_up

PAGE = GRANULARITY
TIB = 1 << 40


def driver_and_ledger_agree(driver: FakeDriver, pool: CudaPool) -> bool:
    return driver.used_bytes == pool.ledger.committed_bytes == pool.committed_bytes and pool.verify() == 0


# --- layout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["workspace", "weights", "state/kv"])
@pytest.mark.parametrize("num_bytes", [PAGE, 31 * PAGE, GIB, 18 * GIB + 60 * MIB])
def test_a_growth_takes_few_chunks_and_going_back_few_calls(num_bytes: int, name: str) -> None:
    driver = FakeDriver(100 * GIB)
    with CudaPool(driver) as pool:
        part = pool.reserve(name, TIB)
        part.commit(num_bytes)
        assert sum(part.chunks) == num_bytes == driver.used_bytes
        assert len(part.chunks) == -(-num_bytes // cuda_range.CHUNK_BYTES)  # 37 for 18 GiB
        assert driver.calls.count("set_access") == 1
        assert driver.handles == {}  # released right after mapping
        before = len(driver.calls)
        part.decommit()
        assert driver.calls[before:] == ["synchronize", *["unmap"] * -(-num_bytes // cuda_range.CHUNK_BYTES)]
    assert driver.is_empty()


class Instant(FakeDriver):
    """Says yes at once, so that what takes time is the pool."""

    def create(self, size: int) -> int:
        return 1

    def release(self, handle: int) -> None: ...

    def map(self, address: int, size: int, handle: int) -> None: ...

    def set_access(self, address: int, size: int) -> None: ...

    def unmap(self, address: int, size: int) -> None: ...


@pytest.mark.soak
def test_giving_back_pages_that_came_one_by_one_takes_no_time() -> None:
    """9,246 pages, each a chunk, and then every other one of them: a search of all for each would take seconds."""
    pages, times = 9246, []
    with CudaPool(Instant(100 * GIB)) as pool:
        part = pool.reserve("state/kv", TIB)
        every_other = [(page * PAGE, (page + 1) * PAGE) for page in range(0, 2 * pages, 2)]
        for _ in range(3):
            part.commit(2 * pages * PAGE, holes=every_other)
            assert part.chunks == (PAGE,) * pages
            started = time.process_time()
            part.decommit(pages * PAGE, holes=[(page * PAGE, (page + 1) * PAGE) for page in range(1, pages, 4)])
            part.decommit()
            times.append(time.process_time() - started)
            assert not part.committed_bytes
    assert min(times) < 0.05


# --- growing and shrinking --------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["workspace", "state"]), st.integers(0, 60 * PAGE)), max_size=8))
def test_committed_bytes_are_the_drivers(steps: list[tuple[str, int]]) -> None:
    driver = FakeDriver(8 * GIB)
    with mock.patch.object(cuda_range, "CHUNK_BYTES", 16 * PAGE), CudaPool(driver, DeviceLedger(8 * GIB)) as pool:
        for name in ("workspace", "state"):
            pool.reserve(name, TIB)
        for name, size in steps:
            driver.launch()
            pool.ranges[name].resize(size)
            assert pool.ranges[name].committed_bytes == round_up(size, PAGE)
            assert driver_and_ledger_agree(driver, pool)
            assert driver.accessible == set(driver.mappings)
    assert driver.is_empty() and pool.ledger.committed_bytes == 0


def test_growth_keeps_contents_and_the_address() -> None:
    driver = FakeDriver(GIB)
    with CudaPool(driver) as pool:
        part = pool.reserve("workspace", TIB)
        part.commit(PAGE)
        address, first = part.address, part.tensor
        first[:PAGE].fill_(7)
        part.commit(200 * MIB)
        assert part.address == address == part.tensor.data_ptr() and part.tensor is first
        assert bool((part.tensor[:PAGE] == 7).all())
        part.tensor[PAGE : 200 * MIB : 4096].fill_(1)


def test_what_must_be_kept_survives_a_cut_in_a_chunk() -> None:
    driver = FakeDriver(GIB)
    with CudaPool(driver) as pool:
        state = pool.reserve("state", TIB)
        state.commit(100 * MIB)
        assert state.chunks == (100 * MIB,)
        state.tensor[: 10 * MIB].fill_(5)
        state.tensor[90 * MIB : 92 * MIB].fill_(6)
        driver.launch()
        state.decommit(92 * MIB, holes=[(9 * MIB, 90 * MIB + 1)])
        assert state.chunks == (10 * MIB, 2 * MIB) and driver_and_ledger_agree(driver, pool)
        assert bool((state.tensor[: 10 * MIB] == 5).all()) and bool((state.tensor[90 * MIB : 92 * MIB] == 6).all())


def test_what_is_cut_while_others_take_the_memory_is_there_once_it_can_be_mapped() -> None:
    driver = FakeDriver(100 * MIB)
    with CudaPool(driver) as pool:
        state = pool.reserve("state", TIB)
        state.commit(100 * MIB)
        state.tensor[: 10 * MIB].copy_(torch.arange(10 * MIB))
        expected = state.tensor[: 10 * MIB].clone()
        driver.after_call = lambda call: setattr(driver, "foreign_bytes", 100 * MIB) if call == "unmap" else None
        with pytest.raises(CudaMemoryError, match=r"refused to add 10\.00 MiB"):
            state.decommit(10 * MIB)
        assert state.committed_bytes == 0 == pool.ledger.committed_bytes
        driver.foreign_bytes = 96 * MIB
        state.commit(10 * MIB, holes=[(0, 4 * MIB), (6 * MIB, 8 * MIB)])
        driver.foreign_bytes = 0
        state.commit(20 * MIB)
        assert torch.equal(state.tensor[: 10 * MIB], expected)


def test_volatile_ranges_shrink_exactly() -> None:
    driver = FakeDriver(GIB)
    with CudaPool(driver) as pool:
        part = pool.reserve("workspace", TIB)
        part.commit(GIB)
        part.tensor[:MIB].fill_(5)
        part.decommit(600 * MIB + 1)
        assert part.committed_bytes == driver.used_bytes == 602 * MIB
        assert part.chunks == (512 * MIB, 90 * MIB)
        assert bool((part.tensor[:MIB] == 5).all())  # chunks below stay as they are
        part.tensor[512 * MIB : 602 * MIB : 4096].fill_(1)


def test_streams_are_drained_before_pages_go_and_only_then() -> None:
    driver = FakeDriver(GIB)
    with CudaPool(driver) as pool:
        part = pool.reserve("workspace", TIB)
        part.commit(100 * MIB)
        driver.launch()
        part.resize(200 * MIB)
        part.resize(200 * MIB)
        assert "synchronize" not in driver.calls and driver.busy
        part.resize(60 * MIB)
        assert driver.calls.count("synchronize") == 1
    assert driver.calls.count("synchronize") == 2


def test_another_range_takes_returned_pages() -> None:
    driver = FakeDriver(GIB)
    with CudaPool(driver, DeviceLedger(GIB)) as pool:
        workspace = Workspace(pool=pool)
        workspace.resize("workspace", 900 * MIB)
        with pytest.raises(DoesNotFit, match=r"state asks for 800\.00 MiB"):
            workspace.resize("state", 800 * MIB)
        workspace.resize_all({"state": 800 * MIB, "workspace": 200 * MIB})  # only the second makes room for the first
        assert workspace.committed_bytes() == {"workspace": 200 * MIB, "state": 800 * MIB}
        assert driver_and_ledger_agree(driver, pool)
        with pytest.raises(DoesNotFit):
            workspace.resize_all({"state": 900 * MIB, "workspace": 150 * MIB})
        assert workspace.committed_bytes() == {"workspace": 150 * MIB, "state": 800 * MIB}


def test_two_pools_of_a_device_share_a_ledger() -> None:
    driver, ledger = FakeDriver(4 * GIB), DeviceLedger(GIB)
    with CudaPool(driver, ledger) as one, CudaPool(driver, ledger) as other:
        one.reserve("workspace", TIB).commit(700 * MIB)
        part = other.reserve("workspace", TIB)
        with pytest.raises(DoesNotFit):
            part.commit(400 * MIB)
        part.commit(300 * MIB)
        assert ledger.held() == {"workspace": 1000 * MIB} and driver.used_bytes == 1000 * MIB
        assert one.verify() == other.verify() == 0
        one.close()
        assert ledger.held() == {"workspace": 300 * MIB} and other.verify() == 0
        part.commit(GIB)
    assert driver.is_empty() and ledger.committed_bytes == 0


def test_what_another_model_holds_lowers_what_there_is() -> None:
    driver = FakeDriver(GIB)
    with CudaPool(driver, DeviceLedger(GIB)) as one, CudaPool(driver, DeviceLedger(GIB)) as other:
        one.reserve("weights", TIB).commit(700 * MIB)
        part = other.reserve("workspace", TIB)
        with pytest.raises(
            CudaMemoryError, match=r"refused to add 400\.00 MiB .* says 324\.00 MiB are free"
        ) as refusal:
            part.commit(400 * MIB)
        assert (refusal.value.asked_bytes, refusal.value.free_bytes) == (400 * MIB, 324 * MIB)
        assert part.committed_bytes == other.ledger.committed_bytes == 0 and driver.used_bytes == 700 * MIB
        part.commit(324 * MIB)
        one.close()
        part.commit(GIB)
    assert driver.is_empty()


# --- failures ---------------------------------------------------------------------------------------------------------

GROWTH = 1200 * MIB  # from 40 MiB: 2 chunks of 512 MiB, 1 of 136
GROWTH_CALLS = 3 * 3 + 1
CARD = 2 * GIB


def grown(driver: FakeDriver, pool: CudaPool) -> Any:
    part = pool.reserve("workspace", TIB)
    part.commit(40 * MIB)
    part.tensor[39 * MIB : 40 * MIB].fill_(3)
    return part


def test_a_growth_makes_the_calls_that_the_tests_below_break() -> None:
    driver = FakeDriver(CARD)
    with CudaPool(driver) as pool:
        part, before = grown(driver, pool), len(driver.calls)
        part.commit(GROWTH)
        assert len(driver.calls) - before == GROWTH_CALLS


@pytest.mark.parametrize("failure", ["refused", "interrupt"])
@pytest.mark.parametrize("index", range(GROWTH_CALLS))
def test_a_growth_that_fails_anywhere_changes_nothing(index: int, failure: str) -> None:
    driver = FakeDriver(CARD)
    with CudaPool(driver, DeviceLedger(CARD)) as pool:
        part = grown(driver, pool)
        state, chunks = driver.state(), part.chunks
        driver.fail_at = len(driver.calls) + index
        if failure == "interrupt":
            driver.failure = KeyboardInterrupt
        with pytest.raises(CudaMemoryError if failure == "refused" else KeyboardInterrupt) as caught:
            part.commit(GROWTH)
        if isinstance(caught.value, CudaMemoryError):
            assert "refused to add 1.13 GiB (CUDA_ERROR_OUT_OF_MEMORY (2): injected)" in str(caught.value)
            assert "40.00 MiB are held, nothing was added" in str(caught.value)
            assert (caught.value.asked_bytes, caught.value.committed_bytes) == (1160 * MIB, 40 * MIB)
            assert caught.value.free_bytes == CARD - 40 * MIB
        assert driver.state() == state and part.chunks == chunks
        assert driver_and_ledger_agree(driver, pool)
        part.commit(GROWTH)
        assert driver_and_ledger_agree(driver, pool) and part.committed_bytes == GROWTH
        assert bool((part.tensor[39 * MIB : 40 * MIB] == 3).all())
    assert driver.is_empty()


@pytest.mark.parametrize("index", range(GROWTH_CALLS))
def test_ctrl_c_between_a_call_and_its_answer_changes_nothing(index: int) -> None:
    driver = FakeDriver(CARD)
    with CudaPool(driver, DeviceLedger(CARD)) as pool:
        part = grown(driver, pool)
        state, last = driver.state(), len(driver.calls) + index + 1
        driver.after_call = lambda call: signal.raise_signal(signal.SIGINT) if len(driver.calls) == last else None
        handler = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            part.commit(GROWTH)
        assert signal.getsignal(signal.SIGINT) is handler
        assert driver.state() == state and driver_and_ledger_agree(driver, pool)
        part.commit(GROWTH)
    assert driver.is_empty()


def test_ctrl_c_while_shrinking_or_reserving_leaves_nothing_behind() -> None:
    driver = FakeDriver(CARD)
    with CudaPool(driver) as pool:
        part = grown(driver, pool)
        driver.after_call = lambda call: signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            part.decommit()
        with pytest.raises(KeyboardInterrupt):
            pool.reserve("state", TIB)
        driver.after_call = lambda call: None
        gc.collect()
        assert driver_and_ledger_agree(driver, pool) and len(driver.reservations) == 1
    assert driver.is_empty()


def test_other_threads_grow_without_touching_signals() -> None:
    driver = FakeDriver(CARD)
    with CudaPool(driver) as pool:
        part = pool.reserve("workspace", TIB)
        thread = threading.Thread(target=part.commit, args=(100 * MIB,))
        thread.start()
        thread.join()
        assert part.committed_bytes == 100 * MIB


def test_a_device_that_others_fill_refuses_with_numbers() -> None:
    driver = FakeDriver(CARD)
    with CudaPool(driver) as pool:
        part = pool.reserve("workspace", TIB)
        driver.foreign_bytes = 600 * MIB
        with pytest.raises(CudaMemoryError, match=r"says 1\.41 GiB are free; 0 B are held, nothing was added"):
            part.commit(CARD)
        driver.foreign_bytes = 0
        part.commit(CARD)
    with pytest.raises(RuntimeMemoryError, match="counter of free memory fell by 2,097,152 bytes"):
        driver.foreign_bytes = PAGE
        pool.verify()
    assert pool.verify(PAGE) == PAGE
    pool.mark()
    assert pool.verify() == 0


@pytest.mark.parametrize("failing", [{"unmap"}, {"release"}, {"unmap", "release"}])
def test_what_cannot_be_undone_stays_charged_and_is_undone_later(failing: set[str]) -> None:
    driver = FakeDriver(CARD)
    with CudaPool(driver, DeviceLedger(CARD)) as pool:
        part = pool.reserve("workspace", TIB)
        driver.failing = {"set_access", *failing}
        with pytest.raises(CudaMemoryError):
            part.commit(36 * MIB)
        assert part.committed_bytes == 0 and driver.used_bytes == pool.ledger.committed_bytes > 0
        with pytest.raises(CudaMemoryError):
            part.commit(36 * MIB)
        assert pool.verify() == 0
        driver.failing = set()
        part.commit(36 * MIB)
        assert driver_and_ledger_agree(driver, pool)
        driver.failing = {"set_access", *failing}
        with pytest.raises(CudaMemoryError):
            part.commit(72 * MIB)
        driver.failing = set()
    assert driver.is_empty() and pool.ledger.committed_bytes == 0


@pytest.mark.parametrize("index", range(1 + 4 + 3 + 1))  # drain, unmap all, map the part to keep anew
def test_a_shrink_that_fails_anywhere_is_consistent_and_can_be_repeated(index: int) -> None:
    driver = FakeDriver(CARD)
    with CudaPool(driver, DeviceLedger(CARD)) as pool:
        part = grown(driver, pool)
        part.commit(GROWTH)
        driver.fail_at = len(driver.calls) + index
        with pytest.raises(CudaMemoryError):
            part.decommit(30 * MIB)
        assert sum(part.chunks) == part.committed_bytes and driver_and_ledger_agree(driver, pool)
        part.resize(30 * MIB)
        assert part.committed_bytes == 30 * MIB and driver_and_ledger_agree(driver, pool)
    assert driver.is_empty()


def test_a_lost_device_is_reported_once_and_closed() -> None:
    driver = FakeDriver(CARD)
    pool = CudaPool(driver, DeviceLedger(CARD))
    part = grown(driver, pool)
    driver.lose()
    with pytest.raises(CudaMemoryError, match=r"DEVICE_UNAVAILABLE \(46\).* does not say .* Restart the process"):
        part.commit(GROWTH)
    assert part.committed_bytes == pool.ledger.committed_bytes == 40 * MIB
    with pytest.raises(CudaMemoryError, match=r"take back 40\.00 MiB"):
        pool.close()
    pool.close()
    with pytest.raises(RuntimeMemoryError, match="closed"):
        _ = part.tensor


def test_the_error_inside_a_pool_wins_over_that_of_closing_it() -> None:
    driver = FakeDriver(CARD)
    with pytest.raises(ZeroDivisionError) as caught, CudaPool(driver) as pool:
        grown(driver, pool)
        driver.lose()
        raise ZeroDivisionError
    assert "closing failed too: workspace: the driver refused" in caught.value.__notes__[0]


def test_ranges_that_cannot_be() -> None:
    driver = FakeDriver(GIB)
    with CudaPool(driver) as pool:
        part = pool.reserve("workspace", 3 * MIB)
        assert part.capacity_bytes == 4 * MIB
        with pytest.raises(RuntimeMemoryError, match="holds 4,194,304 at most"):
            part.commit(5 * MIB)
        with pytest.raises(RuntimeMemoryError, match="exists already"):
            pool.reserve("workspace", MIB)
        driver.failing = {"reserve"}
        with pytest.raises(CudaMemoryError, match=r"state: the driver refused to reserve addresses for 2\.00 MiB"):
            pool.reserve("state", MIB)
        assert list(pool.ranges) == ["workspace"]
    with pytest.raises(ValueError, match="multiple of 2,097,152"):
        CudaPool(driver, page_bytes=4096)


# --- closing ----------------------------------------------------------------------------------------------------------


def test_close_frees_memory_at_once_and_addresses_with_the_last_view() -> None:
    driver = FakeDriver(CARD)
    pool = CudaPool(driver)
    part = grown(driver, pool)
    part.commit(GROWTH)
    view = part.tensor[:100]
    driver.launch()
    pool.close()
    pool.close()
    assert driver.used_bytes == pool.ledger.committed_bytes == 0 and len(driver.reservations) == 1
    with pytest.raises(RuntimeMemoryError, match="closed"):
        _ = part.tensor
    with pytest.raises(RuntimeMemoryError, match="the range is closed"):
        part.commit(1)
    del view
    gc.collect()
    assert driver.is_empty()


def test_a_range_that_nobody_closed_gives_back_what_it_held() -> None:
    driver = FakeDriver(CARD)
    pool = CudaPool(driver)
    grown(driver, pool)
    driver.launch()
    del pool
    gc.collect()
    assert driver.is_empty()


# --- workspace and driver ---------------------------------------------------------------------------------------------


def test_a_device_without_virtual_memory_is_refused() -> None:
    with pytest.raises(RuntimeMemoryError, match=r"no virtual memory.*device='cpu'"):
        CudaPool(FakeDriver(GIB, virtual_memory=False))


def test_a_workspace_runs_over_the_pool() -> None:
    driver = FakeDriver(GIB)
    with Workspace(pool=CudaPool(driver, DeviceLedger(GIB))) as workspace:
        workspace.resize("workspace", 8192)
        view = workspace.view("workspace", 512, (3, 5), "float32")
        view.copy_(torch.arange(15.0).view(3, 5))
        assert workspace.view("workspace", 512, (15,), "int32")[1] == 0x3F800000
        assert workspace.view("workspace", 512, (15,), "float32", on_device=True).data_ptr() == view.data_ptr()
        with pytest.raises(RuntimeMemoryError, match="within the 2,097,152 committed bytes"):
            workspace.view("workspace", PAGE, (1,), "float32")
        with pytest.raises(RuntimeMemoryError, match="no pool of pinned memory was given"):
            workspace.resize("host", PAGE)
        assert workspace.committed_bytes() == workspace.resident_bytes() == {"workspace": PAGE}
        del view
    gc.collect()
    assert driver.is_empty()


def test_without_cuda_python_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(MissingExtra, match=r"needs cuda-python: pip install 'mosaic-dllm\[cuda\]'"):
        CudaDriver()


def test_importing_the_pools_does_not_import_cuda() -> None:
    code = (  # PyTorch's CUDA builds may import the bindings themselves
        "import sys, torch; before = set(sys.modules); import mosaic.runtime.cuda_pool; "
        "print([m for m in sys.modules if m.split('.')[0] == 'cuda' and m not in before])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


class Bindings:
    """The few calls of cuda-python that open a driver, with answers given by name."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> Any:
            answer = self.answers[name]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


class Code(int):
    name = "CUDA_ERROR_NO_DEVICE"


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"cuInit": (Code(100),)}, r"no CUDA device can be used \(CUDA_ERROR_NO_DEVICE \(100\): start on cuda:1\)"),
        ({"cuInit": RuntimeError("libcuda.so.1 not found")}, "no CUDA driver is installed .libcuda"),
        ({"cuInit": (Code(0),), "cuDeviceGetCount": (Code(0), 1)}, "cuda:1 was asked for, 1 CUDA devices are visible"),
    ],
)
def test_a_machine_without_the_device_says_why(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(cuda_driver, "bindings", lambda: Bindings(**answers))
    with pytest.raises(RuntimeMemoryError, match=message):
        CudaDriver(1)


def test_the_fake_keeps_the_drivers_rules() -> None:
    driver = FakeDriver(8 * PAGE)
    address, handle = driver.reserve(8 * PAGE), driver.create(2 * PAGE)
    for broken in (
        lambda: driver.create(PAGE // 2),
        lambda: driver.create(7 * PAGE),
        lambda: driver.map(address + 4096, 2 * PAGE, handle),
        lambda: driver.map(address + 7 * PAGE, 2 * PAGE, handle),
        lambda: driver.set_access(address, PAGE),
        lambda: driver.release(-99),
        lambda: driver.unmap(address, PAGE),
        lambda: driver.free_addresses(address, PAGE),
    ):
        with pytest.raises(CudaError):
            broken()
    driver.map(address, 2 * PAGE, handle)
    driver.release(handle)
    assert driver.used_bytes == 2 * PAGE
    for broken in (
        lambda: driver.map(address + PAGE, 2 * PAGE, handle),
        lambda: driver.unmap(address, PAGE),
        lambda: driver.free_addresses(address, 8 * PAGE),
        lambda: driver.set_access(address, 3 * PAGE),
    ):
        with pytest.raises(CudaError):
            broken()
    driver.set_access(address, 2 * PAGE)
    driver.launch()
    with pytest.raises(AssertionError, match="while a stream"):
        driver.unmap(address, 2 * PAGE)
    driver.synchronize()
    driver.unmap(address, 2 * PAGE)
    driver.free_addresses(address, 8 * PAGE)
    with PagePool() as pool:
        part = pool.reserve("host", MIB)
        part.commit(MIB)
        driver.host_register(part.address, MIB // 2)
        for broken in (
            lambda: driver.host_register(part.address + 1, 4096),
            lambda: driver.host_register(part.address + MIB // 2, 100),
            lambda: driver.host_register(part.address + 4096, MIB // 2),
            lambda: driver.host_unregister(part.address + 4096),
            lambda: driver.host_device_pointer(part.address + MIB // 2),
        ):
            with pytest.raises(CudaError):
                broken()
        driver.host_register(part.address + MIB // 2, MIB // 2)
        assert not driver.may_copy(part.address + MIB // 2 - 1, 2)  # across two registrations
        driver.launch()
        with pytest.raises(AssertionError, match="while a stream"):
            driver.host_unregister(part.address)
        driver.synchronize()
        driver.host_unregister(part.address)
        driver.host_unregister(part.address + MIB // 2)
    assert driver.is_empty()
