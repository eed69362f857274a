"""Page pools on a CUDA device, with the interface of `page_pool`: ranges of addresses of which a prefix is memory.

`CudaPool` uses virtual memory: a range never moves, and grows and shrinks by mapping and unmapping physical chunks.
`SlabPool` is for devices without it: one allocation per range, which moves when it grows.
Never grow or shrink while a CUDA graph is captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Final, TypeVar

from mosaic.errors import RuntimeMemoryError
from mosaic.runtime.cuda_driver import Driver
from mosaic.runtime.cuda_range import CudaRange
from mosaic.runtime.device_range import CudaMemoryError
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.range_pool import RangePool
from mosaic.runtime.slab_range import SlabRange

__all__ = [
    "CudaMemoryError",
    "CudaPool",
    "CudaRange",
    "SlabPool",
    "SlabRange",
    "open_pool",
]

VOLATILE: Final = frozenset({"workspace"})
"""Ranges whose contents nobody needs after a resize: a plan writes its whole workspace in every call."""

_log = logging.getLogger(__name__)

DevicePart = TypeVar("DevicePart", CudaRange, SlabRange)


class _Pool(RangePool[DevicePart]):
    """What pools of both kinds share: checks of construction, and the check against the driver's counter.

    Parameters
    ----------
    driver
        The device.
    ledger
        Owner of the budget; a fresh one without a limit if not given. Pools of one device share one.
    page_bytes
        Granularity of commits, a multiple of the driver's; the driver's if not given.
    synchronize
        Waits for all work that can touch the ranges; the driver's wait for the whole context if not given.
    volatile
        Names of ranges whose contents nobody needs after a resize.
    """

    def __init__(
        self,
        driver: Driver,
        ledger: DeviceLedger | None = None,
        *,
        page_bytes: int | None = None,
        synchronize: Callable[[], None] | None = None,
        volatile: Collection[str] = VOLATILE,
    ) -> None:
        super().__init__(ledger if ledger is not None else DeviceLedger(device=driver.name))
        self._driver, self._volatile = driver, frozenset(volatile)
        granularity = driver.granularity()
        self.page_bytes = granularity if page_bytes is None else page_bytes
        if self.page_bytes <= 0 or self.page_bytes % granularity:
            raise ValueError(f"page_bytes is a multiple of {granularity:,} on {driver.name}, got {page_bytes}")
        self._synchronize = synchronize if synchronize is not None else driver.synchronize
        self.mark()

    def mark(self) -> None:
        """Take the driver's counter and the ledger, as they are, as the start of what `verify` compares."""
        self._marked = (self._driver.memory_info()[0], self.ledger.committed_bytes)

    def verify(self, allowed_bytes: int = 0) -> int:
        """Compare what the ledger and the driver's counter of free memory say was taken since `mark`.

        Parameters
        ----------
        allowed_bytes
            How far they may differ. The driver counts all processes and all of this one: PyTorch's allocator, and
            modules that load with the first launch of a kernel; mark again after such.

        Returns
        -------
        int
            Bytes taken by the driver's account and not by the ledger's; negative if the ledger has more.

        Raises
        ------
        RuntimeMemoryError
            If they differ by more.
        """
        free, committed = self._marked
        taken, charged = free - self._driver.memory_info()[0], self.ledger.committed_bytes - committed
        if abs(taken - charged) > allowed_bytes:
            raise RuntimeMemoryError(
                f"{self._driver.name}: the driver's counter of free memory fell by {taken:,} bytes, the ledger rose by "
                f"{charged:,}, {allowed_bytes:,} of difference are allowed: another process or library took memory."
            )
        return taken - charged


class CudaPool(_Pool[CudaRange]):
    """The ranges of one CUDA device with virtual memory, charged to one ledger. See `CudaRange`.

    Examples
    --------
    >>> from mosaic.runtime.cuda_driver import CudaDriver
    >>> with CudaPool(CudaDriver(0)) as pool:  # doctest: +SKIP
    ...     workspace = pool.reserve("workspace", 1 << 40)
    ...     workspace.commit(5_000_000)
    ...     workspace.committed_bytes, pool.verify()
    (6291456, 0)
    """

    def _make(self, name: str, capacity_bytes: int) -> CudaRange:
        return CudaRange(
            name, capacity_bytes, self.ledger, self.page_bytes, self._driver, self._synchronize, name in self._volatile
        )


class SlabPool(_Pool[SlabRange]):
    """The ranges of one CUDA device without virtual memory: an allocation each. See `SlabRange`."""

    def _make(self, name: str, capacity_bytes: int) -> SlabRange:
        return SlabRange(
            name, capacity_bytes, self.ledger, self.page_bytes, self._driver, self._synchronize, name in self._volatile
        )


def open_pool(
    driver: Driver,
    ledger: DeviceLedger | None = None,
    *,
    page_bytes: int | None = None,
    synchronize: Callable[[], None] | None = None,
    volatile: Collection[str] = VOLATILE,
) -> CudaPool | SlabPool:
    """Open the pool that a device allows: virtual memory, or slabs where it has none.

    Parameters
    ----------
    driver
        The device.
    ledger
        Owner of the budget; a fresh one without a limit if not given. Pools of one device share one.
    page_bytes
        Granularity of commits, a multiple of the driver's; the driver's if not given.
    synchronize
        Waits for all work that can touch the ranges; the driver's wait for the whole context if not given.
    volatile
        Names of ranges whose contents nobody needs after a resize.
    """
    if driver.virtual_memory():
        return CudaPool(driver, ledger, page_bytes=page_bytes, synchronize=synchronize, volatile=volatile)
    _log.warning("%s has no virtual memory: ranges are allocations that move when they grow.", driver.name)
    return SlabPool(driver, ledger, page_bytes=page_bytes, synchronize=synchronize, volatile=volatile)
