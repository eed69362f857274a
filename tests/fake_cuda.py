"""A CUDA driver that is a table: it keeps the real one's rules about memory, and breaks on demand.

Reserved addresses are real ones of this machine, inaccessible until mapped and allowed, so that tensors over them work
and a stray access ends the process as it ends a CUDA context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mosaic.runtime.cuda_driver import CudaError
from mosaic.runtime.page_pool import PAGE_BYTES, Linux
from mosaic.units import round_up

GRANULARITY = 2 << 20


class FakeDriver:
    """One device with `physical_bytes`, of which others hold `foreign_bytes`.

    `calls` lists the calls so far. The call number `fail_at` raises `failure`, once, without an effect; `after_call`
    runs after each call that took effect; `lose` makes every call fail from then on.
    """

    name = "cuda:0"

    def __init__(self, physical_bytes: int, *, virtual_memory: bool = True) -> None:
        self.physical_bytes, self.foreign_bytes = physical_bytes, 0
        self.calls: list[str] = []
        self.fail_at: int | None = None
        self.failure: Callable[[], BaseException] = lambda: CudaError("CUDA_ERROR_OUT_OF_MEMORY", 2, "injected")
        self.failing: set[str] = set()
        self.after_call: Callable[[str], None] = lambda call: None
        self.busy = False
        self.reservations: dict[int, int] = {}
        self.mappings: dict[int, tuple[int, int]] = {}  # address -> (size, memory)
        self.accessible: set[int] = set()
        self.allocations: dict[int, int] = {}
        self.handles: dict[int, int] = {}  # handle -> memory
        self.memories: dict[int, int] = {}  # memory -> size
        self.pinned: dict[int, int] = {}  # address of the host -> size
        self.most_pinned_bytes, self.host_shift = 1 << 60, 0
        self._virtual_memory, self._lost, self._count, self._system = virtual_memory, False, 0, Linux()

    # --- what tests read and do -----------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        return sum(self.memories.values()) + sum(round_up(size, GRANULARITY) for size in self.allocations.values())

    def state(self) -> tuple[Any, ...]:
        """Everything that an undone call must leave as it was, but for the names of memories."""
        mappings = {address: size for address, (size, _) in self.mappings.items()}
        tables = (self.reservations, mappings, self.allocations, self.handles, self.pinned)
        return (*(dict(table) for table in tables), set(self.accessible), self.used_bytes)

    def is_empty(self) -> bool:
        tables = (self.reservations, self.mappings, self.allocations, self.handles, self.memories, self.pinned)
        return not any(tables)

    def may_copy(self, address: int, size: int) -> bool:
        """Say whether a copy from or to host memory is asynchronous: pinned, and within one registration."""
        return any(start <= address and address + size <= start + length for start, length in self.pinned.items())

    def launch(self) -> None:
        """Start work that may touch everything."""
        self.busy = True

    def lose(self) -> None:
        self._lost = True

    # --- rules ----------------------------------------------------------------------------------------------------

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        if self._lost:
            raise CudaError("CUDA_ERROR_DEVICE_UNAVAILABLE", 46, call)
        if len(self.calls) - 1 == self.fail_at:
            raise self.failure()
        if call in self.failing:
            raise CudaError("CUDA_ERROR_UNKNOWN", 999, call)

    def _require(self, rule: bool, call: str) -> None:
        if not rule:
            raise CudaError("CUDA_ERROR_INVALID_VALUE", 1, call)

    def _take(self, size: int, call: str) -> int:
        if self.used_bytes + self.foreign_bytes + round_up(size, GRANULARITY) > self.physical_bytes:
            raise CudaError("CUDA_ERROR_OUT_OF_MEMORY", 2, call)
        self._count += 1
        return self._count

    def _drop_unused(self) -> None:
        kept = {*self.handles.values(), *(memory for _, memory in self.mappings.values())}
        self.memories = {memory: size for memory, size in self.memories.items() if memory in kept}

    # --- the protocol ---------------------------------------------------------------------------------------------

    def virtual_memory(self) -> bool:
        self._enter("virtual_memory")
        return self._virtual_memory

    def granularity(self) -> int:
        self._enter("granularity")
        return GRANULARITY

    def memory_info(self) -> tuple[int, int]:
        self._enter("memory_info")
        return self.physical_bytes - self.used_bytes - self.foreign_bytes, self.physical_bytes

    def reserve(self, size: int) -> int:
        self._enter("reserve")
        self._require(self._virtual_memory and size > 0 and size % GRANULARITY == 0, "reserve")
        address = round_up(self._system.reserve(size + GRANULARITY), GRANULARITY)
        self.reservations[address] = size
        self.after_call("reserve")
        return address

    def free_addresses(self, address: int, size: int) -> None:
        self._enter("free_addresses")
        self._require(self.reservations.get(address) == size, "free_addresses")
        self._require(not any(address <= mapped < address + size for mapped in self.mappings), "free_addresses")
        del self.reservations[address]
        self._system.unmap(address, size)

    def create(self, size: int) -> int:
        self._enter("create")
        self._require(size > 0 and size % GRANULARITY == 0, "create")
        memory = self._take(size, "create")
        self.memories[memory] = size
        self.handles[-memory] = memory
        self.after_call("create")
        return -memory

    def release(self, handle: int) -> None:
        self._enter("release")
        self._require(handle in self.handles, "release")
        del self.handles[handle]
        self._drop_unused()
        self.after_call("release")

    def map(self, address: int, size: int, handle: int) -> None:
        self._enter("map")
        self._require(handle in self.handles and self.memories[self.handles[handle]] == size, "map")
        self._require(address % GRANULARITY == 0, "map")
        self._require(
            any(start <= address and address + size <= start + length for start, length in self.reservations.items()),
            "map",
        )
        overlap = any(
            start < address + size and address < start + length for start, (length, _) in self.mappings.items()
        )
        self._require(not overlap, "map")
        self.mappings[address] = (size, self.handles[handle])
        self.after_call("map")

    def set_access(self, address: int, size: int) -> None:
        self._enter("set_access")
        inside = [start for start in self.mappings if address <= start < address + size]
        self._require(sum(self.mappings[start][0] for start in inside) == size and address in inside, "set_access")
        self.accessible.update(inside)
        self._system.protect(address, size, "write")
        self.after_call("set_access")

    def unmap(self, address: int, size: int) -> None:
        self._enter("unmap")
        assert not (self.busy and address in self.accessible), "unmapped while a stream may touch it"
        self._require(address in self.mappings and self.mappings[address][0] == size, "unmap")
        del self.mappings[address]
        self.accessible.discard(address)
        self._drop_unused()
        self._system.discard(address, size)
        self._system.protect(address, size, "none")
        self.after_call("unmap")

    def allocate(self, size: int) -> int:
        """Take memory as captured graphs do."""
        self._enter("allocate")
        self._take(size, "allocate")
        address = self._system.reserve(size)
        self._system.protect(address, size, "write")
        self.allocations[address] = size
        self.after_call("allocate")
        return address

    def free(self, address: int) -> None:
        self._enter("free")
        assert not self.busy, "freed while a stream may touch it"
        self._require(address in self.allocations, "free")
        self._system.unmap(address, self.allocations.pop(address))
        self.after_call("free")

    def host_register(self, address: int, size: int) -> None:
        self._enter("host_register")
        self._require(size > 0 and address % PAGE_BYTES == size % PAGE_BYTES == 0, "host_register")
        if any(start < address + size and address < start + length for start, length in self.pinned.items()):
            raise CudaError("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", 712, "host_register")
        if sum(self.pinned.values()) + size > self.most_pinned_bytes:
            raise CudaError("CUDA_ERROR_OUT_OF_MEMORY", 2, "host_register")
        assert self._system.resident(address, size) == size, "pages are faulted in before they are pinned"
        self.pinned[address] = size
        self.after_call("host_register")

    def host_unregister(self, address: int) -> None:
        self._enter("host_unregister")
        assert not self.busy, "unpinned while a stream may touch it"
        if address not in self.pinned:
            raise CudaError("CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", 713, "host_unregister")
        # the pages go back after they are unpinned: before, the device would keep reading the old ones
        assert self._system.resident(address, self.pinned[address]) == self.pinned[address]
        del self.pinned[address]
        self.after_call("host_unregister")

    def host_device_pointer(self, address: int) -> int:
        self._enter("host_device_pointer")
        self._require(self.may_copy(address, 1), "host_device_pointer")
        return address + self.host_shift

    def synchronize(self) -> None:
        self._enter("synchronize")
        self.busy = False
        self.after_call("synchronize")

    def as_tensor(self, memory: Any) -> Tensor:
        interface = memory.__cuda_array_interface__
        assert interface["typestr"] == "|u1" and interface["version"] == 3 and interface["strides"] is None
        address, read_only = interface["data"]
        assert not read_only
        buffer = (ctypes.c_uint8 * interface["shape"][0]).from_address(address)
        buffer.owner = memory  # a tensor keeps the object it was made of
        return torch.frombuffer(buffer, dtype=torch.uint8)
