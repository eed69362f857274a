"""Pools of a real card: the driver's counter moves by exactly what was mapped, and PyTorch's allocator by nothing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from mosaic.runtime.cuda_driver import CudaDriver
from mosaic.runtime.cuda_pool import CudaMemoryError, CudaPool, SlabPool
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.workspace import Workspace
from mosaic.units import GIB, MIB

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if importlib.util.find_spec("cuda") is None:
    pytest.skip("no cuda-python", allow_module_level=True)

TIB = 1 << 40


@pytest.fixture(scope="module")
def driver() -> CudaDriver:
    torch.ones(1 << 20, device="cuda:0").sum().item()  # context and kernels of the tests, before counters are read
    driver = CudaDriver(0)
    if not driver.virtual_memory():
        pytest.skip("the device has no virtual memory")
    return driver


@pytest.fixture
def pool(driver: CudaDriver) -> Iterator[CudaPool]:
    with CudaPool(driver, DeviceLedger()) as pool:
        yield pool
        # Kernels that a test launches first load modules, so only what closing moves is exact.
        held, free = pool.committed_bytes, driver.memory_info()[0]
        pool.close()
        assert driver.memory_info()[0] - free == held


def test_reserving_a_tebibyte_costs_nothing(pool: CudaPool) -> None:
    part = pool.reserve("workspace", TIB)
    assert part.capacity_bytes == TIB and pool.verify() == 0


def test_the_counter_moves_by_exactly_the_mapped_bytes(driver: CudaDriver, pool: CudaPool) -> None:
    workspace, state = pool.reserve("workspace", TIB), pool.reserve("state", TIB)
    start = driver.memory_info()[0]
    for size in (1, 40 * MIB, 4 * GIB + 1, 4 * GIB - 3 * MIB, 700 * MIB, 0, 2 * GIB):
        workspace.resize(size)
        state.resize(size // 3)
        assert workspace.committed_bytes == -(-size // pool.page_bytes) * pool.page_bytes
        assert start - driver.memory_info()[0] == pool.committed_bytes
        assert pool.verify() == 0


def test_tensors_read_and_write_and_pytorch_counts_nothing(pool: CudaPool) -> None:
    counted = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    part = pool.reserve("workspace", TIB)
    part.commit(64 * MIB)
    tensor = part.tensor
    assert tensor.device == torch.device("cuda:0") and tensor.numel() == TIB and tensor.data_ptr() == part.address
    tensor[: 64 * MIB].fill_(7)
    part.commit(600 * MIB)
    tensor[64 * MIB : 600 * MIB].fill_(9)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == counted
    assert tensor[64 * MIB - 1].item() == 7 and tensor[64 * MIB].item() == 9 and tensor[600 * MIB - 1].item() == 9
    assert bool((tensor[: 64 * MIB] == 7).all())
    tail = tensor[32 * MIB : 32 * MIB + 4096].view(torch.bfloat16).view(2, 1024)
    tail.copy_(torch.arange(2048.0, device="cuda:0").view(2, 1024))
    assert tail[1, 3].item() == torch.tensor(1027.0).bfloat16().item()


def test_a_tensor_can_be_asked_for_before_there_is_memory(pool: CudaPool) -> None:
    part = pool.reserve("workspace", TIB)
    tensor = part.tensor
    part.commit(MIB)
    tensor[:MIB].fill_(3)
    assert tensor[MIB - 1].item() == 3


def test_more_than_the_card_has_is_refused_and_undone(driver: CudaDriver, pool: CudaPool) -> None:
    part = pool.reserve("workspace", TIB)
    part.commit(100 * MIB)
    free, total = driver.memory_info()
    with pytest.raises(CudaMemoryError, match="CUDA_ERROR_OUT_OF_MEMORY") as refusal:
        part.commit(total + GIB)
    assert part.committed_bytes == 100 * MIB and driver.memory_info()[0] == free == refusal.value.free_bytes
    part.commit(GIB)
    assert pool.verify() == 0


def test_memory_goes_back_under_work_in_flight(pool: CudaPool) -> None:
    part = pool.reserve("workspace", TIB)
    part.commit(4 * GIB)
    for _ in range(20):
        part.tensor[: 4 * GIB].fill_(1)
    part.decommit()  # drains the streams, or the writes would end in an illegal address
    torch.cuda.synchronize()
    part.commit(MIB)
    part.tensor[:MIB].fill_(2)
    assert part.tensor[5].item() == 2


def test_graphs_replay_over_pages(pool: CudaPool) -> None:
    part = pool.reserve("workspace", TIB)
    part.commit(MIB)
    view = part.tensor[:4096].view(torch.float32)
    view.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        view.add_(1)
    for _ in range(3):
        graph.replay()
    part.commit(GIB)
    graph.replay()
    assert bool((view == 4).all())


def test_views_outlive_the_pool_as_addresses_only(driver: CudaDriver) -> None:
    before = driver.memory_info()[0]
    pool = CudaPool(driver)
    pool.reserve("workspace", TIB).commit(GIB)
    view = pool.ranges["workspace"].tensor[:10]
    pool.close()
    assert driver.memory_info()[0] == before and view.numel() == 10


STRAY = """
import torch
from mosaic.runtime.cuda_driver import CudaDriver
from mosaic.runtime.cuda_pool import CudaMemoryError, CudaPool
pool = CudaPool(CudaDriver(0))
part = pool.reserve("workspace", 1 << 40)
part.commit(64 << 20)
view = part.tensor[32 << 20 :][:100]
print(int(view.fill_(3).sum()), flush=True)
part.decommit(32 << 20)
try:
    view.fill_(1)
    torch.cuda.synchronize()
except RuntimeError as error:
    print("illegal" if "illegal memory access" in str(error) else error)
try:
    pool.close()
except CudaMemoryError as error:
    print(error)
pool.close()
"""


def test_a_stray_access_to_released_memory_is_illegal_and_closing_reports_it() -> None:
    result = subprocess.run([sys.executable, "-c", STRAY], capture_output=True, text=True)
    lines = result.stdout.splitlines()
    assert result.returncode == 0 and lines[:2] == ["300", "illegal"], result.stdout + result.stderr
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in lines[2] and "Restart the process" in lines[2]


def test_slabs_on_a_card(driver: CudaDriver) -> None:
    before = driver.memory_info()[0]
    with SlabPool(driver, DeviceLedger()) as pool:
        state = pool.reserve("state", TIB)
        state.commit(64 * MIB)
        state.tensor.fill_(5)
        state.commit(256 * MIB)
        assert state.tensor[64 * MIB - 1].item() == 5 and pool.verify() == 0
    assert driver.memory_info()[0] == before


def test_a_workspace_of_views(pool: CudaPool) -> None:
    workspace = Workspace(pool=pool)
    workspace.resize("workspace", 8192)
    workspace.view("workspace", 512, (3, 5), "bfloat16").fill_(1.5)
    assert workspace.view("workspace", 512, (15,), "bfloat16").sum().item() == 22.5


def test_mapping_a_plan_takes_milliseconds(pool: CudaPool) -> None:
    part = pool.reserve("workspace", TIB)
    times = []
    for size in (16 * GIB + 500 * MIB + 1, 0):
        start = time.perf_counter()
        part.resize(size)
        times.append(time.perf_counter() - start)
    print(f"map {times[0] * 1e3:.1f} ms, unmap {times[1] * 1e3:.1f} ms, 16.5 GiB")
    assert max(times) < 0.5  # 8,000 chunks of 2 MiB would take this long
