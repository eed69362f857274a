"""HostPool: pinned host memory that a CUDA device copies from and to asynchronously, and that its kernels read.

A range is anonymous memory at fixed addresses. Its committed prefix is one registration with the driver, exact to the
page (PyTorch's `pin_memory` rounds up to powers of two).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from torch import Tensor

from mosaic.errors import RuntimeMemoryError
from mosaic.runtime.cuda_driver import Addresses, CudaDriver, CudaError
from mosaic.runtime.interrupts import interrupts_held
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.page_pool import PAGE_BYTES, HostMemoryError, Linux, PagePool, PageRange
from mosaic.runtime.spans import Spans
from mosaic.units import format_bytes, round_up

__all__ = ["HostMemoryError", "HostPool", "HostRange"]

_log = logging.getLogger(__name__)


class _Registration:
    """The pinned prefix `[0, size)` of a reservation: one registration, or none."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self.address, self.size = 0, 0

    def take(self, size: int) -> None:
        """Pin the prefix, while nothing of it is pinned."""
        if size:
            self._driver.host_register(self.address, size)
            self.size = size

    def drop(self) -> None:
        """Unpin it; streams must be drained."""
        if self.size:
            self._driver.host_unregister(self.address)
            self.size = 0

    def abandon(self, end: Callable[[], None]) -> None:
        """Unpin the memory of a range, closed or not, and end its reservation. A failure is only logged."""
        try:
            if self.size:
                self._driver.synchronize()
            self.drop()
            end()
        except CudaError as error:
            _log.debug("%s of host memory stay pinned until the process ends: %s", format_bytes(self.size), error)


class HostRange(PageRange):
    """Host memory at fixed addresses, `[0, committed_bytes)` of it pinned. Made by `HostPool.reserve`.

    All of it is one registration: buffers of a plan ignore pages, and the driver refuses a copy that crosses from one
    registration into another ("invalid argument"). So a resize pins again, contents untouched. That takes the time of
    pinning all of it, not of faulting it in. Streams are drained before.
    """

    def __init__(
        self, name: str, capacity_bytes: int, ledger: DeviceLedger, page_bytes: int, system: Linux, driver: CudaDriver
    ) -> None:
        self._registration = _Registration(driver)
        self._driver = driver
        self._device_tensor: Tensor | None = None
        super().__init__(name, capacity_bytes, ledger, page_bytes, system, released="none")
        self._registration.address = self.address
        # Pages of 2 MiB are faulted in and pinned several times as fast as those of 4 KiB.
        system.prefer_huge(self.address, self.capacity_bytes)

    def _ending(self) -> Callable[[], None]:
        return partial(self._registration.abandon, super()._ending())

    @property
    def device_tensor(self) -> Tensor:
        """uint8 [capacity_bytes] on the device over the same bytes, for kernels that reach them across the link."""
        owner = self.tensor
        if not self._registration.size:
            raise RuntimeMemoryError(f"the range {self.name} is not pinned: commit first.")
        if self._device_tensor is None:
            seen = self._driver.host_device_pointer(self.address)
            if seen != self.address:  # then it might change when the range grows, under views that are kept
                raise RuntimeMemoryError(
                    f"{self.name}: {self._driver.name} sees host memory at other addresses than the CPU "
                    f"({seen:#x}, not {self.address:#x}): plan with weights and hidden states on the device."
                )
            self._device_tensor = self._driver.as_tensor(Addresses(seen, self.capacity_bytes, owner))
        return self._device_tensor

    def commit(self, num_bytes: int, *, holes: Spans = (), populate: bool = True) -> None:
        """Make `[0, num_bytes)` pinned memory, rounded up to pages; contents stay. All or nothing.

        Parameters
        ----------
        num_bytes
            One past the last byte that must be memory.
        holes, populate
            Unused: one registration has no holes, and pinned memory is always populated.

        Raises
        ------
        DoesNotFit
            If the ledger's budget does not allow it.
        HostMemoryError
            If the machine's memory is too small, or the driver refuses to pin it; nothing is changed.
        """
        super().commit(num_bytes, populate=True)
        if self._registration.size != self.committed_bytes:  # a refused resize left less pinned
            with interrupts_held():
                self._attach(self.committed_bytes)

    def _attach(self, end: int) -> None:
        """Pin exactly `[0, end)`. On failure the old prefix is pinned again, now or by the next `commit`."""
        before = self._registration.size
        try:
            if before:
                self._driver.synchronize()
            self._registration.drop()
            self._registration.take(end)
        except BaseException as error:
            self._restore(before)
            if isinstance(error, CudaError):
                raise self._not_pinned(end or before, error) from error
            raise

    def _restore(self, size: int) -> None:
        """Pin `[0, size)` again, unless it is pinned."""
        if self._registration.size == size:
            return
        try:
            self._registration.take(size)
        except CudaError as error:
            _log.warning("%s: %s are not pinned until the next resize: %s", self.name, format_bytes(size), error)

    def _not_pinned(self, size: int, error: CudaError) -> HostMemoryError:
        available, pinned = self._system.available(), format_bytes(self._registration.size)
        there = "" if available is None else f", {format_bytes(available)} of physical memory are available"
        return HostMemoryError(
            f"{self.name}: the driver refused to pin or unpin {format_bytes(size)} of host memory ({error}); "
            f"{format_bytes(self.committed_bytes)} are held, {pinned} of them pinned{there}. "
            f"Free memory, or plan with a smaller host budget.",
            asked_bytes=size,
            committed_bytes=self.committed_bytes,
            available_bytes=available,
        )

    def decommit(self, num_bytes: int = 0, *, holes: Spans = ()) -> None:
        """Give back the memory beyond `[0, num_bytes)`, rounded up to pages, after all streams are drained; no holes.

        Raises
        ------
        HostMemoryError
            If the driver refuses to unpin (nothing is changed), or to pin the rest (the next `commit` pins it).
        """
        end = round_up(num_bytes, self.page_bytes)
        if end >= self.committed_bytes:
            return
        with interrupts_held():
            self._attach(0)
            super().decommit(end)
            self._attach(end)

    def close(self) -> None:
        """Give the memory back, and the addresses once no tensor views them. Closing twice is fine.

        Raises
        ------
        HostMemoryError
            If the driver refuses to unpin, as it does when the device is lost. The range is closed nevertheless; its
            memory stays charged until the process ends.
        """
        self._device_tensor = None
        super().close()


class HostPool(PagePool):
    """Pinned ranges of the host for one device, charged to a ledger of their own.

    Parameters
    ----------
    driver
        The device that shares the memory.
    ledger
        Owner of the host's budget; a fresh one without a limit if not given.
    page_bytes
        Granularity of commits.
    system
        The calls to the operating system.

    Examples
    --------
    >>> from mosaic.runtime.cuda_driver import CudaDriver
    >>> with HostPool(CudaDriver(0)) as pool:  # doctest: +SKIP
    ...     weights = pool.reserve("host", 1 << 40)
    ...     weights.commit(5_000_000)
    ...     weights.committed_bytes, weights.tensor.device.type, weights.device_tensor.device.type
    (5001216, 'cpu', 'cuda')
    """

    def __init__(
        self,
        driver: CudaDriver,
        ledger: DeviceLedger | None = None,
        *,
        page_bytes: int = PAGE_BYTES,
        system: Linux | None = None,
    ) -> None:
        super().__init__(
            ledger if ledger is not None else DeviceLedger(device="host"), page_bytes=page_bytes, system=system
        )
        self._driver = driver

    def _make(self, name: str, capacity_bytes: int) -> HostRange:
        return HostRange(name, capacity_bytes, self.ledger, self.page_bytes, self._system, self._driver)
