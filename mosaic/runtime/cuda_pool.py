"""The page pool of a CUDA device, with the interface of `page_pool`: address ranges of which a prefix is memory.

A range never moves. It grows and shrinks by mapping and unmapping physical chunks, and never while a CUDA graph is captured.
"""

from __future__ import annotations

from typing import Final

from mosaic.errors import RuntimeMemoryError
from mosaic.runtime.cuda_driver import CudaDriver
from mosaic.runtime.cuda_range import CudaMemoryError, CudaRange
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.range_pool import RangePool

__all__ = ["CudaMemoryError", "CudaPool", "CudaRange"]

VOLATILE: Final = frozenset({"workspace"})
"""Ranges whose contents need not survive a resize: a plan writes its whole workspace in every call."""


class CudaPool(RangePool):
    """The ranges of one CUDA device, charged to one ledger. See `CudaRange`.

    Parameters
    ----------
    driver
        The device.
    ledger
        Owner of the budget; a fresh one without a limit if not given. Pools of one device share one.
    page_bytes
        Granularity of commits, a multiple of the driver's; the driver's if not given.

    Raises
    ------
    RuntimeMemoryError
        If the device has no virtual memory.

    Examples
    --------
    >>> from mosaic.runtime.cuda_driver import CudaDriver
    >>> with CudaPool(CudaDriver(0)) as pool:  # doctest: +SKIP
    ...     workspace = pool.reserve("workspace", 1 << 40)
    ...     workspace.commit(5_000_000)
    ...     workspace.committed_bytes, pool.verify()
    (6291456, 0)
    """

    def __init__(
        self, driver: CudaDriver, ledger: DeviceLedger | None = None, *, page_bytes: int | None = None
    ) -> None:
        if not driver.virtual_memory():
            raise RuntimeMemoryError(
                f"{driver.name} has no virtual memory, which all memory is mapped by: use another card, or device='cpu'."
            )
        super().__init__(ledger if ledger is not None else DeviceLedger(device=driver.name))
        self._driver = driver
        granularity = driver.granularity()
        self.page_bytes = granularity if page_bytes is None else page_bytes
        if self.page_bytes <= 0 or self.page_bytes % granularity:
            raise ValueError(f"page_bytes is a multiple of {granularity:,} on {driver.name}, got {page_bytes}")
        self.mark()

    def mark(self) -> None:
        """Note the driver's counter and the ledger as the start of the next `verify`."""
        self._marked = (self._driver.memory_info()[0], self.ledger.committed_bytes)

    def verify(self, allowed_bytes: int = 0) -> int:
        """Compare the bytes taken since `mark`, by the ledger and by the driver's counter of free memory.

        Parameters
        ----------
        allowed_bytes
            The largest difference allowed. The driver counts all processes and all libraries of this one: PyTorch's
            allocator, and modules that load at a kernel's first launch. Call `mark` again after such a load.

        Returns
        -------
        int
            Bytes taken by the driver's counter minus bytes by the ledger.

        Raises
        ------
        RuntimeMemoryError
            If the difference is larger.
        """
        free, committed = self._marked
        taken, charged = free - self._driver.memory_info()[0], self.ledger.committed_bytes - committed
        if abs(taken - charged) > allowed_bytes:
            raise RuntimeMemoryError(
                f"{self._driver.name}: the driver's counter of free memory fell by {taken:,} bytes, the ledger rose by "
                f"{charged:,}, {allowed_bytes:,} of difference are allowed: another process or library took memory."
            )
        return taken - charged

    def _make(self, name: str, capacity_bytes: int) -> CudaRange:
        return CudaRange(name, capacity_bytes, self.ledger, self.page_bytes, self._driver, name in VOLATILE)
