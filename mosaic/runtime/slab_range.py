"""SlabRange: one allocation of a CUDA device without virtual memory, which moves when it grows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from torch import Tensor

from mosaic.errors import RuntimeMemoryError
from mosaic.runtime.cuda_driver import Addresses, CudaError, Driver
from mosaic.runtime.device_range import DeviceRange
from mosaic.runtime.interrupts import interrupts_held
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.spans import Spans

__all__ = ["SlabRange"]


class SlabRange(DeviceRange):
    """One allocation, replaced when it has to grow: between calls only, for `address` and `tensor` change then.

    Views made before are dangling; `generation` counts the moves. Shrinking keeps the allocation, except to nothing.
    """

    def __init__(
        self,
        name: str,
        capacity_bytes: int,
        ledger: DeviceLedger,
        page_bytes: int,
        driver: Driver,
        synchronize: Callable[[], None],
        volatile: bool,
    ) -> None:
        super().__init__(name, capacity_bytes, ledger, page_bytes, driver)
        self._synchronize, self._volatile = synchronize, volatile
        self.address = 0
        self.generation = 0

    def _view(self) -> Tensor:
        if not self.address:
            raise RuntimeMemoryError(f"the range {self.name} holds no memory yet: commit first.")
        return self._driver.as_tensor(Addresses(self.address, self.committed_bytes))

    def _reach(self, end: int, holes: Spans) -> None:
        """Allocate again where `end` is further: contents are copied, which takes old and new at once, or first given up
        where volatile. An allocation has no holes."""
        before = self.committed_bytes
        if end <= before:
            return
        try:
            if before and self._volatile:
                self._replace(before, end)
            else:
                self._add(end)
        except CudaError as error:
            state = "as before" if self.committed_bytes == before else "the range is empty"
            raise self._refused("allocate", end, state, error) from error

    def _add(self, end: int) -> None:
        """Allocate `end` bytes beside what is there, move in, and free the old."""
        old_address, old_bytes = self.address, self.committed_bytes
        with interrupts_held(), ExitStack() as undo:
            self._ledger.charge(self.name, end)
            undo.callback(self._ledger.release, self.name, end)
            address = self._driver.allocate(end)
            undo.callback(self._driver.free, address)
            if old_bytes:
                self._synchronize()
                self._driver.copy(address, old_address, old_bytes)
                self._driver.free(old_address)
            undo.pop_all()
            self._moved(address, end)
            self._ledger.release(self.name, old_bytes)

    def _replace(self, before: int, end: int) -> None:
        """Free, then allocate: never more than the budget. A refusal brings the old size back, without contents."""
        self._ledger.require(self.name, end - before)  # before anything is given up
        with interrupts_held():
            self.decommit()
            try:
                self._add(end)
            except BaseException:
                self._add(before)
                raise

    def _moved(self, address: int, size: int) -> None:
        self.address, self.committed_bytes, self._tensor = address, size, None
        self.generation += 1
        self.changes += 1

    def decommit(self, num_bytes: int = 0, *, holes: Spans = ()) -> None:
        """Give the allocation back if nothing is to remain of it; else it stays as large as it is."""
        if num_bytes > 0 or not self.committed_bytes:
            return
        size = self.committed_bytes
        try:
            self._synchronize()
            with interrupts_held():
                self._driver.free(self.address)
                self._moved(0, 0)
                self._ledger.release(self.name, size)
        except CudaError as error:
            raise self._refused("take back", size, "of which the contents are intact", error) from error

    def close(self) -> None:
        """Give the memory back; tensors over it must not be used any more. Closing twice is fine."""
        if not self._closed:
            self._closed, self._tensor = True, None
            self.decommit()
