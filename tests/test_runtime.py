"""Ledger, page pool and workspace: commits are exact, measured and all or nothing."""

from __future__ import annotations

import errno
import gc
import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mosaic.errors import DoesNotFit, PlanFormatError, RuntimeMemoryError
from mosaic.planner import Planner
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.opening import open_workspace
from mosaic.runtime.page_pool import PAGE_BYTES, Access, HostMemoryError, Linux, PagePool
from mosaic.runtime.workspace import Workspace
from mosaic.units import format_bytes

MIB = 1 << 20


class Faulty(Linux):
    """Fails the calls named in `failing`; counts reservations that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: set[str] = set()
        self.alive = 0

    def reserve(self, size: int) -> int:
        if "reserve" in self.failing:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        self.alive += 1
        return super().reserve(size)

    def unmap(self, address: int, size: int) -> None:
        self.alive -= 1
        super().unmap(address, size)

    def protect(self, address: int, size: int, access: Access) -> None:
        if "protect" in self.failing and access == "write":
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        super().protect(address, size, access)

    def populate(self, address: int, size: int) -> None:
        super().populate(address, size)
        if "populate" in self.failing:
            raise OSError(errno.EFAULT, "Bad address")


# --- ledger -----------------------------------------------------------------------------------------------------------


def test_ledger_adds_up_and_refuses_with_numbers() -> None:
    ledger = DeviceLedger(100 * MIB)
    ledger.charge("weights", 60 * MIB)
    ledger.charge("workspace", 30 * MIB)
    with pytest.raises(DoesNotFit, match=r"state asks for 20.00 MiB .* 10.00 MiB of the budget") as refusal:
        ledger.charge("state", 20 * MIB)
    assert (refusal.value.needed_bytes, refusal.value.available_bytes) == (20 * MIB, 10 * MIB)
    assert "weights 60.00 MiB, workspace 30.00 MiB" in str(refusal.value)
    assert "Raise the budget to 110.00 MiB" in str(refusal.value)
    assert ledger.held() == {"weights": 60 * MIB, "workspace": 30 * MIB}
    ledger.release("weights", 60 * MIB)
    ledger.charge("state", 70 * MIB)
    assert ledger.free_bytes == 0


def test_ledger_without_a_budget_only_counts() -> None:
    ledger = DeviceLedger()
    ledger.charge("workspace", 1 << 50)
    assert ledger.free_bytes is None and ledger.committed_bytes == 1 << 50


def test_ledger_catches_wrong_accounts() -> None:
    ledger = DeviceLedger(10)
    with pytest.raises(AssertionError):
        ledger.release("nobody", 1)
    with pytest.raises(ValueError, match="at least 0"):
        ledger.charge("x", -1)
    with pytest.raises(ValueError, match="at least 0"):
        DeviceLedger(-1)


# --- page pool --------------------------------------------------------------------------------------------------------


def test_resident_bytes_follow_commits_and_decommits() -> None:
    with PagePool() as pool:
        part = pool.reserve("workspace", 1 << 40)
        assert part.resident_bytes() == part.committed_bytes == 0
        for size in (3 * MIB, 10 * MIB + 1, 4 * MIB, 0, 7 * MIB):
            part.resize(size)
            rounded = -(-size // PAGE_BYTES) * PAGE_BYTES
            assert part.committed_bytes == part.resident_bytes() == rounded
            assert pool.ledger.held().get("workspace", 0) == pool.committed_bytes == rounded


def test_without_populating_pages_become_resident_when_touched() -> None:
    with PagePool() as pool:
        part = pool.reserve("weights", 64 * MIB)
        part.commit(8 * MIB, populate=False)
        assert part.resident_bytes() == 0
        part.tensor[: 2 * PAGE_BYTES].fill_(1)
        assert 2 * PAGE_BYTES <= part.resident_bytes() <= 8 * MIB
        part.tensor[: 8 * MIB].fill_(1)
        assert part.resident_bytes() == 8 * MIB


def test_commit_keeps_what_is_there_and_gives_zeros() -> None:
    with PagePool() as pool:
        part = pool.reserve("workspace", 64 * MIB)
        part.commit(MIB)
        part.tensor[:MIB].fill_(7)
        part.commit(2 * MIB)
        assert bool((part.tensor[:MIB] == 7).all()) and not bool(part.tensor[MIB : 2 * MIB].any())
        part.decommit(PAGE_BYTES)
        part.commit(MIB)
        assert bool((part.tensor[:PAGE_BYTES] == 7).all()) and not bool(part.tensor[PAGE_BYTES:MIB].any())


@pytest.mark.parametrize("failing", ["protect", "populate"])
@pytest.mark.parametrize("before", [0, 2 * MIB])
def test_a_failed_commit_changes_nothing(failing: str, before: int) -> None:
    system = Faulty()
    with PagePool(DeviceLedger(64 * MIB), system=system) as pool:
        part = pool.reserve("workspace", 64 * MIB)
        part.commit(before)
        if before:
            part.tensor[:before].fill_(3)
        system.failing = {failing}
        with pytest.raises(RuntimeMemoryError, match=r"workspace: the system refused .* nothing was changed"):
            part.commit(8 * MIB)
        assert part.committed_bytes == pool.ledger.committed_bytes == before
        assert part.resident_bytes() == before
        system.failing = set()
        part.commit(8 * MIB)
        assert not before or bool((part.tensor[:before] == 3).all())
        assert part.committed_bytes == part.resident_bytes() == 8 * MIB


def test_a_commit_over_budget_changes_nothing() -> None:
    with PagePool(DeviceLedger(4 * MIB)) as pool:
        weights, workspace = pool.reserve("weights", 64 * MIB), pool.reserve("workspace", 64 * MIB)
        weights.commit(3 * MIB)
        with pytest.raises(DoesNotFit):
            workspace.commit(2 * MIB)
        assert workspace.committed_bytes == workspace.resident_bytes() == 0
        weights.decommit()
        workspace.commit(2 * MIB)


def test_more_than_the_machine_has_is_refused_before_a_page_is_touched() -> None:
    with PagePool() as pool:
        part = pool.reserve("workspace", 1 << 46)
        with pytest.raises(HostMemoryError, match="of physical memory are available") as refusal:
            part.commit(1 << 45)
        assert part.committed_bytes == part.resident_bytes() == refusal.value.committed_bytes == 0
        assert refusal.value.asked_bytes == 1 << 45 and refusal.value.available_bytes is not None


def test_a_range_that_is_too_small_or_cannot_be_reserved_says_so() -> None:
    system = Faulty()
    with PagePool(system=system) as pool:
        part = pool.reserve("workspace", MIB)
        with pytest.raises(RuntimeMemoryError, match="holds 1,048,576 at most"):
            part.commit(MIB + 1)
        with pytest.raises(RuntimeMemoryError, match="exists already"):
            pool.reserve("workspace", MIB)
        system.failing = {"reserve"}
        with pytest.raises(RuntimeMemoryError, match=r"cannot reserve 1\.00 MiB of address space for state") as refusal:
            pool.reserve("state", MIB)
        assert "close models" in str(refusal.value) and "ulimit" not in str(refusal.value)  # where there is no limit


def test_a_limit_of_addresses_is_named_and_raising_it_helps() -> None:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_BYTES
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = taken + (1 << 40)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        with PagePool() as pool, pytest.raises(RuntimeMemoryError) as refusal:
            pool.reserve("state", 1 << 41)
        resource.setrlimit(resource.RLIMIT_AS, (limit + (1 << 41), before[1]))  # as it says
        with PagePool() as pool:
            pool.reserve("state", 1 << 41).commit(1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert f"this process may have {format_bytes(limit)}: raise the limit (ulimit -v), close" in str(refusal.value)


def test_hundreds_of_models_are_open_at_once() -> None:
    """Each reserves what its budget lets it ever use, in every range."""
    opened = []
    for _ in range(300):
        workspace = open_workspace(Planner("llada-8b", device="cpu", host_budget="4GiB"))
        opened.append(workspace)
        for name in ("workspace", "weights", "state/kv", "host"):
            workspace.resize(name, 1)
        assert workspace.range("workspace").capacity_bytes == 16 << 30
        assert workspace.range("host").capacity_bytes == 4 << 30
    with pytest.raises(DoesNotFit, match=r"Raise the budget to 16\.00 GiB"):
        opened[-1].resize("weights", (16 << 30) + 1)
    for workspace in opened:
        workspace.close()


def test_close_frees_memory_at_once_and_addresses_with_the_last_view() -> None:
    system = Faulty()
    pool = PagePool(system=system)
    part = pool.reserve("workspace", 64 * MIB)
    part.commit(8 * MIB)
    view = part.tensor[:100]
    pool.close()
    pool.close()
    assert pool.ledger.committed_bytes == 0 and system.alive == 1
    with pytest.raises(RuntimeMemoryError, match="closed"):
        _ = part.tensor
    with pytest.raises(RuntimeMemoryError):
        part.commit(1)
    del view
    gc.collect()
    assert system.alive == 0


STRAY = """
import json, os, sys
from mosaic.runtime.page_pool import PagePool

def stray(action, released):
    pool = PagePool(released=released)
    part = pool.reserve("workspace", 64 << 20)
    part.commit(8 << 20)
    part.tensor[:8 << 20].fill_(1)
    view = part.tensor[4 << 20 : 8 << 20]
    part.decommit(4 << 20)
    return int(view[5] if action == "read" else view.fill_(2)[0])

for action, released in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        code = 99
        try:
            code = stray(action, released)
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_stray_access_to_released_memory_faults() -> None:
    """Each in a process of its own, forked from one; what may be read is zero."""
    asked = {("read", "none"): -signal.SIGSEGV, ("read", "read"): 0, ("write", "read"): -signal.SIGSEGV}
    command = [sys.executable, "-c", STRAY, json.dumps(list(asked))]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [int(line) for line in result.stdout.split()] == list(asked.values())


def test_page_bytes_are_whole_pages() -> None:
    with pytest.raises(ValueError, match="multiple of"):
        PagePool(page_bytes=1000)
    with PagePool(page_bytes=2 * MIB) as pool:
        part = pool.reserve("workspace", 64 * MIB)
        part.commit(1)
        assert part.committed_bytes == part.resident_bytes() == 2 * MIB


# --- workspace --------------------------------------------------------------------------------------------------------


def test_views_share_memory_at_their_offsets() -> None:
    with Workspace() as workspace:
        workspace.resize("workspace", 8192)
        whole = workspace.view("workspace", 0, (2048,), "float32").zero_()
        view = workspace.view("workspace", 512, (3, 5), "float32")
        view.copy_(torch.arange(15.0).view(3, 5))
        assert view.data_ptr() == workspace.range("workspace").address + 512
        assert whole[128:143].tolist() == list(range(15)) and not bool(whole[:128].any())
        assert workspace.view("workspace", 512, (15,), "int32")[1] == 0x3F800000
        assert workspace.view("workspace", 4, (), "bool").shape == ()


def test_host_memory_of_a_cpu_is_ordinary_and_outside_its_budget() -> None:
    with Workspace(pool=PagePool(DeviceLedger(MIB))) as workspace:
        workspace.resize_all({"workspace": MIB, "host": 2 * MIB})
        view = workspace.view("host", MIB, (4,), "int64", on_device=True).fill_(3)
        assert torch.equal(workspace.view("host", MIB, (4,), "int64"), view)
        assert workspace.ledger.held() == {"workspace": MIB} and workspace.host is not None
        assert workspace.host.ledger.held() == {"host": 2 * MIB}
        assert workspace.committed_bytes() == workspace.resident_bytes() == {"workspace": MIB, "host": 2 * MIB}
    assert workspace.committed_bytes() == {}


def test_several_pools_resize_in_an_order_that_fits() -> None:
    with Workspace(pool=PagePool(DeviceLedger(3 * MIB))) as workspace:
        workspace.resize_all({"workspace": 2 * MIB, "state": MIB})
        workspace.resize_all({"workspace": MIB // 2, "state": 2 * MIB})
        workspace.resize_all({"workspace": 2 * MIB, "state": MIB})
        assert workspace.committed_bytes() == {"workspace": 2 * MIB, "state": MIB}


def test_views_beyond_the_commit_or_misaligned_are_refused() -> None:
    with Workspace() as workspace:
        workspace.resize("workspace", 4096)
        with pytest.raises(RuntimeMemoryError, match="within the 4,096 committed bytes"):
            workspace.view("workspace", 512, (1024,), "float32")
        with pytest.raises(RuntimeMemoryError, match="aligned"):
            workspace.view("workspace", 2, (1,), "float32")
        with pytest.raises(RuntimeMemoryError):
            workspace.view("workspace", -4, (1,), "float32")
        with pytest.raises(PlanFormatError, match="unknown dtype 'float12'"):
            workspace.view("workspace", 0, (1,), "float12")


def test_pools_are_ranges_of_their_own_in_one_budget() -> None:
    with Workspace(pool=PagePool(DeviceLedger(3 * MIB)), capacities={"state": 2 * MIB}) as workspace:
        workspace.resize("workspace", MIB)
        workspace.resize("state", MIB)
        assert workspace.range("state").capacity_bytes == 2 * MIB
        assert workspace.committed_bytes() == workspace.resident_bytes() == {"workspace": MIB, "state": MIB}
        with pytest.raises(DoesNotFit):
            workspace.resize("weights", 2 * MIB)
        workspace.resize("workspace", 0)
        workspace.resize("weights", 2 * MIB)
    assert workspace.ledger.committed_bytes == 0
