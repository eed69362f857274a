"""Pools of a real card and pinned host memory: counters move by exactly what was mapped, PyTorch's allocator by nothing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mosaic.runtime.checkpoint import PIECE_BYTES, Checkpoint, write_safetensors
from mosaic.runtime.cuda_driver import CudaDriver
from mosaic.runtime.cuda_pool import CudaMemoryError, CudaPool
from mosaic.runtime.host_pool import HostMemoryError, HostPool
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.page_pool import Linux
from mosaic.runtime.weights import fill_randomly, load_weights
from mosaic.runtime.workspace import Workspace
from mosaic.units import GIB, MIB

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
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
from mosaic.runtime.host_pool import HostMemoryError, HostPool
pool, host = CudaPool(CudaDriver(0)), HostPool(CudaDriver(0))
host.reserve("host", 1 << 40).commit(1 << 20)
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
try:
    host.close()
except HostMemoryError as error:
    print(error)
host.close()
"""


def test_a_stray_access_to_released_memory_is_illegal_and_closing_reports_it() -> None:
    result = subprocess.run([sys.executable, "-c", STRAY], capture_output=True, text=True)
    lines = result.stdout.splitlines()
    assert result.returncode == 0 and lines[:2] == ["300", "illegal"], result.stdout + result.stderr
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in lines[2] and "Restart the process" in lines[2]
    assert len(lines) == 4 and "refused to pin or unpin 1.00 MiB" in lines[3]


def test_a_workspace_of_views(pool: CudaPool) -> None:
    workspace = Workspace(pool=pool)
    workspace.resize("workspace", 8192)
    workspace.view("workspace", 512, (3, 5), "bfloat16").fill_(1.5)
    assert workspace.view("workspace", 512, (15,), "bfloat16").sum().item() == 22.5


@pytest.mark.parametrize("name", ["workspace", "state/kv"])
def test_18_gib_come_and_go_in_milliseconds(pool: CudaPool, name: str) -> None:
    """The keys of a request of 128K; 9,246 pages of 2 MiB one by one took 2.3 s."""
    part = pool.reserve(name, TIB)
    times = []
    for size in (18 * GIB + 60 * MIB, 0):
        torch.cuda.synchronize()
        start = time.perf_counter()
        part.resize(size)
        times.append(time.perf_counter() - start)
    print(f"{name}: map {times[0] * 1e3:.1f} ms, unmap {times[1] * 1e3:.1f} ms, 18.06 GiB")
    assert max(times) < 0.05 and pool.verify() == 0


def test_what_a_state_keeps_crosses_to_the_host_and_back(pool: CudaPool) -> None:
    state = pool.reserve("state/kv", TIB)
    state.commit(2 * GIB)
    view = state.tensor[: 2 * GIB].view(torch.int32)
    torch.arange(view.numel(), out=view)  # no memory of PyTorch's, which the counter would show
    torch.cuda.synchronize()
    start = time.perf_counter()
    state.decommit(GIB, holes=[(300 * MIB, 700 * MIB)])
    print(f"two cuts, 448 MiB of contents: {(time.perf_counter() - start) * 1e3:.1f} ms")
    assert state.chunks == (300 * MIB, 324 * MIB) and pool.verify() == 0
    for first, last in ((0, 300 * MIB), (700 * MIB, GIB)):
        expected = torch.arange(first // 4, last // 4, dtype=torch.int32, device="cuda")
        assert torch.equal(state.tensor[first:last].view(torch.int32), expected)


# --- pinned host memory -----------------------------------------------------------------------------------------------


@pytest.fixture
def host(driver: CudaDriver) -> Iterator[HostPool]:
    with HostPool(driver, DeviceLedger(device="host")) as host:
        yield host


@pytest.fixture
def workspace(driver: CudaDriver) -> Iterator[Workspace]:
    host = HostPool(driver, DeviceLedger(device="host"))
    with Workspace(pool=CudaPool(driver, DeviceLedger()), host=host) as workspace:
        yield workspace


def pytorch_counts() -> tuple[int, int, int]:
    return (
        torch.cuda.memory_allocated(),
        torch.cuda.memory_reserved(),
        torch.cuda.host_memory_stats().get("num_host_alloc", 0),
    )


def test_pinning_is_exact_on_the_host_and_nearly_nothing_on_the_device(driver: CudaDriver, host: HostPool) -> None:
    counted, part = pytorch_counts(), host.reserve("host", TIB)
    for size in (1, 3 * MIB + 1, GIB + 5, 20 * MIB, 0, 300 * MIB):
        free = driver.memory_info()[0]
        held = part.committed_bytes
        part.resize(size)
        exact = -(-size // host.page_bytes) * host.page_bytes
        assert part.committed_bytes == part.resident_bytes() == host.ledger.committed_bytes == exact
        # entries of the device's page tables: 8 B for each 4 KiB, taken by whole pages
        taken = free - driver.memory_info()[0]
        print(f"{held:>13,} -> {exact:>13,} B pinned take {taken:,} B of the device")
        assert abs(taken) <= abs(exact - held) // 512 + 4 * MIB
        if exact:
            pinned = part.tensor[:exact].is_pinned()
            assert pinned  # no tensor in an assertion: pytest would print a TiB of which little is memory
    assert pytorch_counts() == counted


def test_the_device_reads_and_writes_host_memory_at_the_same_addresses(host: HostPool) -> None:
    part = host.reserve("host", TIB)
    part.commit(64 * MIB)
    seen = part.device_tensor
    assert seen.device == torch.device("cuda:0") and seen.data_ptr() == part.address and seen.numel() == TIB
    near = part.tensor[512 : 64 * MIB].view(torch.int32)
    near.copy_(torch.arange(near.numel(), dtype=torch.int32))
    far = seen[512 : 64 * MIB].view(torch.int32)
    assert torch.equal(far.to("cuda:0", copy=True).cpu(), near)
    far.add_(1)
    torch.cuda.synchronize()
    assert int(near[0]) == 1 and int(near[-1]) == near.numel()
    part.commit(128 * MIB)  # pinned anew: views stay valid
    far.add_(1)
    torch.cuda.synchronize()
    assert int(near[0]) == 2 and part.device_tensor is seen


def test_copies_both_ways_are_asynchronous_wherever_a_buffer_lies(workspace: Workspace) -> None:
    workspace.resize_all({"workspace": 96 * MIB, "host": 32 * MIB})
    workspace.resize("host", 96 * MIB)  # a second growth: a buffer over the old end must copy as well
    shape = (32 * MIB // 4,)
    device, counted = workspace.view("workspace", 32 * MIB, shape, "int32"), pytorch_counts()
    source = workspace.view("host", 16 * MIB + 512, shape, "int32")
    target = workspace.view("host", 60 * MIB, shape, "int32")
    source.copy_(torch.arange(shape[0], dtype=torch.int32))
    target.zero_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for out, value in ((device, source), (target, device)):
            torch.cuda._sleep(1_000_000_000)
            start = time.perf_counter()
            out.copy_(value, non_blocking=True)
            assert time.perf_counter() - start < 0.05 and not stream.query()
            assert not bool(target.any())
    stream.synchronize()
    assert torch.equal(target, source) and pytorch_counts() == counted


def test_memory_goes_back_under_copies_in_flight(workspace: Workspace) -> None:
    workspace.resize_all({"workspace": GIB, "host": GIB})
    out, source = (workspace.view(name, 0, (GIB,), "uint8") for name in ("workspace", "host"))
    source.fill_(3)
    for _ in range(10):
        out.copy_(source, non_blocking=True)
    workspace.resize("host", 2 * GIB)  # drains the streams
    assert torch.cuda.current_stream().query() and int(out[-1]) == 3
    for _ in range(10):
        out.copy_(source, non_blocking=True)
    workspace.resize("host", 0)


def test_more_than_the_machine_has_is_refused_and_the_card_stays_usable(host: HostPool) -> None:
    part = host.reserve("host", 1 << 46)
    part.commit(MIB)
    if not Linux().grows():
        with pytest.raises(HostMemoryError, match="host memory too small") as refusal:
            part.commit(1 << 45)
        assert refusal.value.available_bytes is not None and part.committed_bytes == MIB
    part.device_tensor[:MIB].fill_(4)
    torch.cuda.synchronize()
    assert int(part.tensor[MIB - 1]) == 4


def test_pinning_takes_so_long(host: HostPool) -> None:
    part = host.reserve("host", TIB)
    for size in (2 * GIB, 4 * GIB, 2 * GIB, 0):
        start = time.perf_counter()
        part.resize(size)
        print(f"pinned {size / GIB:.0f} GiB after {time.perf_counter() - start:.2f} s")


# --- weights on both sides of the link --------------------------------------------------------------------------------


def views_on_both_sides(workspace: Workspace, shape: tuple[int, ...], dtype: str) -> list[dict[str, torch.Tensor]]:
    size = 512 + 8 * torch.Size(shape).numel()
    workspace.resize_all({"weights": size, "host": size})
    return [{"w": workspace.view(name, 512, shape, dtype)} for name in ("weights", "host")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(5000, 7001), (13,)])
def test_random_weights_are_the_same_wherever_they_lie(
    workspace: Workspace, dtype: str, shape: tuple[int, ...]
) -> None:
    resident, streamed = views_on_both_sides(workspace, shape, dtype)
    workspace.resize("workspace", 2 * PIECE_BYTES)
    for size in (PIECE_BYTES, 2 * PIECE_BYTES):
        counted = pytorch_counts()
        staging = workspace.view("workspace", 0, (size,), "uint8")
        fill_randomly(resident, seed=1, staging=staging)
        fill_randomly(streamed, seed=1, staging=staging)
        assert pytorch_counts() == counted
        assert torch.equal(resident["w"].cpu(), streamed["w"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_checkpoint_loads_to_either_side_and_is_saved_from_it(
    workspace: Workspace, dtype: str, tmp_path: Path
) -> None:
    values = torch.randn(3000, 5001).bfloat16()
    write_safetensors(tmp_path / "model.safetensors", {"w": values})
    counted = pytorch_counts()
    with Checkpoint(tmp_path) as checkpoint:
        for views in views_on_both_sides(workspace, tuple(values.shape), dtype):
            load_weights(views, checkpoint)
            write_safetensors(tmp_path / "copy.safetensors", views)
            assert torch.equal(views["w"].cpu(), values.to(views["w"].dtype))
            written = (tmp_path / "copy.safetensors").read_bytes()
            assert dtype != "bfloat16" or written == (tmp_path / "model.safetensors").read_bytes()
    assert pytorch_counts() == counted
