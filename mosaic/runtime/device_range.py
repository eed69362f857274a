"""What ranges of a CUDA device share, whatever their memory is made of: the checks of `commit`, messages, `resize`."""

from __future__ import annotations

from torch import Tensor

from mosaic.errors import RuntimeMemoryError
from mosaic.runtime.cuda_driver import CudaError, Driver
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.spans import Spans
from mosaic.units import format_bytes, round_up

__all__ = ["CudaMemoryError", "DeviceRange"]


class CudaMemoryError(RuntimeMemoryError):
    """The driver refused memory, or to take it back.

    Attributes
    ----------
    asked_bytes
        What the call wanted on top, or back.
    committed_bytes
        What the range holds now.
    free_bytes
        What the driver says is free on the device; None if it does not answer.
    """

    def __init__(self, message: str, *, asked_bytes: int, committed_bytes: int, free_bytes: int | None) -> None:
        self.asked_bytes, self.committed_bytes, self.free_bytes = asked_bytes, committed_bytes, free_bytes
        super().__init__(message)


class DeviceRange:
    """The base of `CudaRange` and `SlabRange`.

    Attributes
    ----------
    changes
        How often memory was added or given back.
    """

    def __init__(self, name: str, capacity_bytes: int, ledger: DeviceLedger, page_bytes: int, driver: Driver) -> None:
        self.name, self.page_bytes = name, page_bytes
        self.capacity_bytes = round_up(max(capacity_bytes, 1), page_bytes)
        self.committed_bytes = self.changes = 0
        self._ledger, self._driver = ledger, driver
        self._closed = False
        self._tensor: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """The range as a uint8 tensor on the device, zero-copy; made when it is first asked for."""
        if self._closed:
            raise RuntimeMemoryError(f"the range {self.name} is closed: compile the model again.")
        if self._tensor is None:
            self._tensor = self._view()
        return self._tensor

    @property
    def device_tensor(self) -> Tensor:
        """The same as `tensor`: it is on the device already."""
        return self.tensor

    def _view(self) -> Tensor:
        raise NotImplementedError

    @property
    def end_bytes(self) -> int:
        """Where the last byte that is memory ends."""
        return self.committed_bytes

    def _reach(self, end: int, holes: Spans) -> None:
        """Back `[0, end)` with memory, except whole pages inside of `holes` where the kind of range can leave them out."""
        raise NotImplementedError

    def decommit(self, num_bytes: int = 0, *, holes: Spans = ()) -> None:
        """Give back memory beyond `[0, num_bytes)`, and inside of `holes` where the kind of range can."""
        raise NotImplementedError

    def _end(self, num_bytes: int) -> int:
        end = round_up(num_bytes, self.page_bytes)
        if self._closed or end > self.capacity_bytes:
            self._ledger.require(self.name, end - self.committed_bytes)
            raise RuntimeMemoryError(
                f"{self.name}: {num_bytes:,} bytes asked for, the range holds "
                f"{0 if self._closed else self.capacity_bytes:,} at most: reserve a larger one."
            )
        return end

    def commit(self, num_bytes: int, *, holes: Spans = (), populate: bool = True) -> None:
        """Back `[0, num_bytes)`, rounded up to pages, with memory. All or nothing.

        Parameters
        ----------
        num_bytes
            How far memory has to reach.
        holes
            Bytes `[start, end)`, sorted, that need not be memory: the whole pages inside are left as they are.
        populate
            For the interface: memory of a device is always populated. Its contents are undefined.

        Raises
        ------
        DoesNotFit
            If the ledger's budget does not allow it.
        CudaMemoryError
            If the driver refuses; nothing was changed then.
        """
        self._reach(self._end(num_bytes), holes)

    def resize(self, num_bytes: int, *, holes: Spans = (), populate: bool = True) -> None:
        """Commit and decommit so that exactly `[0, num_bytes)`, rounded up to pages, has memory, except `holes`."""
        self._end(num_bytes)
        self.decommit(num_bytes, holes=holes)
        self.commit(num_bytes, holes=holes, populate=populate)

    def resident_bytes(self) -> int:
        """Give the bytes in physical memory: what is committed. `verify` asks the driver's own counter."""
        return self.committed_bytes

    def _refused(self, asked: str, size: int, state: str, error: CudaError) -> CudaMemoryError:
        try:
            free = self._driver.memory_info()[0]
        except CudaError:
            free = None
        says = "does not say what is free" if free is None else f"says {format_bytes(free)} are free"
        advice = "Restart the process." if free is None else "Free memory, or plan with a smaller budget."
        return CudaMemoryError(
            f"{self.name}: the driver refused to {asked} {format_bytes(size)} ({error}) and {says}; "
            f"{format_bytes(self.committed_bytes)} are held, {state}. {advice}",
            asked_bytes=size,
            committed_bytes=self.committed_bytes,
            free_bytes=free,
        )
