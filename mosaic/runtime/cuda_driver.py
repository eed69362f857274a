"""The CUDA driver's memory calls, thin and checked; the pools of `cuda_pool` and `host_pool` use them.

Every call that fails raises `CudaError` with the driver's name and code and what was asked. cuda-python is imported
here alone, when a `CudaDriver` is made. Tests replace it by a stateful fake.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mosaic.errors import MissingExtra, MosaicError, RuntimeMemoryError
from mosaic.units import format_bytes


class CudaError(MosaicError):
    """A call that the CUDA driver refused.

    Attributes
    ----------
    name, code
        The driver's error: "CUDA_ERROR_OUT_OF_MEMORY", 2.
    asked
        The request: "create 32.00 MiB on cuda:0".

    Examples
    --------
    >>> str(CudaError("CUDA_ERROR_OUT_OF_MEMORY", 2, "create 32.00 MiB on cuda:0"))
    'CUDA_ERROR_OUT_OF_MEMORY (2): create 32.00 MiB on cuda:0'
    """

    def __init__(self, name: str, code: int, asked: str) -> None:
        self.name, self.code, self.asked = name, code, asked
        super().__init__(f"{name} ({code}): {asked}")


class Addresses:
    """Addresses that a device can reach, in the form that `CudaDriver.as_tensor` takes; kept by every tensor over them.

    Parameters
    ----------
    address, size
        Start, and number of bytes.
    owner
        An object to keep alive as long as this one.
    """

    def __init__(self, address: int, size: int, owner: object = None) -> None:
        self.owner = owner
        # PyTorch reads it once, and keeps this object as long as the storage.
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaDriver:
    """The driver of this machine, through cuda-python: memory of one device, and host memory that it can reach, sizes in bytes.

    The primary context, which PyTorch uses too, is retained for the life of the process, and is current only during
    this class's own calls.

    Parameters
    ----------
    device
        Ordinal among the visible devices.

    Raises
    ------
    MissingExtra
        Without cuda-python.
    RuntimeMemoryError
        Without a driver, or without that device.
    """

    def __init__(self, device: int = 0) -> None:
        self._cuda = cuda = bindings()
        self.name = f"cuda:{device}"
        """The device as PyTorch names it."""
        try:
            self._call(cuda.cuInit(0), "start")
        except CudaError as error:
            raise RuntimeMemoryError(f"no CUDA device can be used ({error}); run nvidia-smi to see why.") from error
        except (RuntimeError, OSError) as error:  # cuda-python found no libcuda
            raise RuntimeMemoryError(f"no CUDA driver is installed ({error}); install NVIDIA's.") from error
        count = self._call(cuda.cuDeviceGetCount(), "count the devices")
        if not 0 <= device < count:
            raise RuntimeMemoryError(f"{self.name} was asked for, {count} CUDA devices are visible, from cuda:0 on.")
        self._device = self._call(cuda.cuDeviceGet(device), "open")
        self._context = self._call(cuda.cuDevicePrimaryCtxRetain(self._device), "make a context")
        self._property = cuda.CUmemAllocationProp()
        self._property.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._property.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._property.location.id = device
        self._access = cuda.CUmemAccessDesc()
        self._access.location = self._property.location
        self._access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def _call(self, answer: tuple[Any, ...], asked: str) -> Any:
        """Check an answer of cuda-python, (error, value...), and give the value."""
        error = answer[0]
        if int(error) != 0:
            raise CudaError(error.name, int(error), f"{asked} on {self.name}")
        return answer[1] if len(answer) > 1 else None

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the context current and restore the previous one: the caller's thread may work on another device."""
        self._call(self._cuda.cuCtxPushCurrent(self._context), "make the context current")
        try:
            yield
        finally:
            self._call(self._cuda.cuCtxPopCurrent(), "restore the context")

    def virtual_memory(self) -> bool:
        """Say whether addresses and memory can be had apart."""
        attribute = self._cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        return bool(self._call(self._cuda.cuDeviceGetAttribute(attribute, self._device), "ask for virtual memory"))

    def granularity(self) -> int:
        """Give the size that addresses and sizes of mappings are multiples of: 2 MiB on every card seen."""
        minimum = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call(self._cuda.cuMemGetAllocationGranularity(self._property, minimum), "ask the granularity"))

    def memory_info(self) -> tuple[int, int]:
        """Give free and total bytes, of all processes."""
        with self._current():
            error, free, total = self._cuda.cuMemGetInfo()
            self._call((error,), "read the free memory")
            return int(free), int(total)

    def reserve(self, size: int) -> int:
        """Reserve addresses without memory behind them."""
        return int(self._call(self._cuda.cuMemAddressReserve(size, 0, 0, 0), f"reserve {format_bytes(size)}"))

    def free_addresses(self, address: int, size: int) -> None:
        """End a reservation in which nothing is mapped."""
        self._call(self._cuda.cuMemAddressFree(address, size), f"free the addresses {_span(address, size)}")

    def create(self, size: int) -> int:
        """Take physical memory, pinned to the device, and give a handle that keeps it."""
        return int(self._call(self._cuda.cuMemCreate(size, self._property, 0), f"create {format_bytes(size)}"))

    def release(self, handle: int) -> None:
        """Drop a handle; the memory goes back when no mapping of it is left either."""
        self._call(self._cuda.cuMemRelease(handle), f"release handle {handle:#x}")

    def map(self, address: int, size: int, handle: int) -> None:
        """Put memory behind reserved addresses; access to it is still denied."""
        self._call(self._cuda.cuMemMap(address, size, 0, handle, 0), f"map {_span(address, size)}")

    def set_access(self, address: int, size: int) -> None:
        """Let the device, and no other, read and write mapped addresses."""
        self._call(
            self._cuda.cuMemSetAccess(address, size, [self._access], 1), f"allow access to {_span(address, size)}"
        )

    def unmap(self, address: int, size: int) -> None:
        """Undo exactly one `map`. Not ordered against streams: drain them first."""
        self._call(self._cuda.cuMemUnmap(address, size), f"unmap {_span(address, size)}")

    def host_register(self, address: int, size: int) -> None:
        """Pin whole pages of host memory and let every device reach them; a copy must lie inside one registration."""
        cuda = self._cuda
        flags = int(cuda.CU_MEMHOSTREGISTER_PORTABLE) | int(cuda.CU_MEMHOSTREGISTER_DEVICEMAP)
        with self._current():
            self._call(cuda.cuMemHostRegister(address, size, flags), f"register the host's {_span(address, size)}")

    def host_unregister(self, address: int) -> None:
        """Undo the registration that starts at `address`. Not ordered against streams: drain them first."""
        with self._current():
            self._call(self._cuda.cuMemHostUnregister(address), f"unregister the host's {address:#x}")

    def host_device_pointer(self, address: int) -> int:
        """Give the address at which the device sees registered host memory."""
        with self._current():
            answer = self._cuda.cuMemHostGetDevicePointer(address, 0)
            return int(self._call(answer, f"ask where the device sees the host's {address:#x}"))

    def synchronize(self) -> None:
        """Wait until all streams of the context are empty."""
        with self._current():
            self._call(self._cuda.cuCtxSynchronize(), "wait for all streams")

    def as_tensor(self, memory: object) -> Tensor:
        """View an object with `__cuda_array_interface__`, which lives as long as the tensor; uint8, as it cannot name bfloat16."""
        return torch.as_tensor(memory, dtype=torch.uint8, device=self.name)


def bindings() -> Any:
    """Return cuda-python's calls of the driver.

    Raises
    ------
    MissingExtra
        If cuda-python is not installed.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise MissingExtra("cuda-python", "cuda", "memory on a CUDA device") from error


def _span(address: int, size: int) -> str:
    return f"{format_bytes(size)} at {address:#x}"
