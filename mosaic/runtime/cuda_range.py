"""CudaRange: device addresses reserved once, of which a prefix is memory, but for holes, mapped in chunks. It never moves.

Growth is all or nothing; streams are drained before anything is unmapped.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from torch import Tensor

from mosaic.runtime.cuda_driver import Addresses, CudaError, Driver
from mosaic.runtime.device_range import DeviceRange
from mosaic.runtime.interrupts import interrupts_held
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.spans import Span, Spans, inner_pages, joined, total, without
from mosaic.units import format_bytes, round_up

__all__ = ["CudaRange", "chunk_sizes"]

_log = logging.getLogger(__name__)


def chunk_sizes(num_bytes: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Cut bytes into the fewest chunks, large ones first.

    Parameters
    ----------
    num_bytes
        A multiple of the last of `sizes`.
    sizes
        Allowed sizes, largest first, each a multiple of the next.

    Examples
    --------
    >>> chunk_sizes(1100, (512, 32, 2))
    (512, 512, 32, 32, 2, 2, 2, 2, 2, 2)
    """
    chunks: list[int] = []
    for size in sizes:
        count, num_bytes = divmod(num_bytes, size)
        chunks += [size] * count
    assert num_bytes == 0, f"{num_bytes} bytes are less than the smallest chunk"
    return tuple(chunks)


def _abandon(driver: Driver, address: int, size: int, chunks: list[tuple[int, int]]) -> None:
    """End a reservation, also of a range that nobody closed. Nothing can be raised from here."""
    try:
        if chunks:
            driver.synchronize()
        while chunks:
            driver.unmap(*chunks[-1])
            chunks.pop()
        driver.free_addresses(address, size)
    except CudaError as error:
        _log.debug("%s keeps %s of addresses until the process ends: %s", driver.name, format_bytes(size), error)


class CudaRange(DeviceRange):
    """A reservation of device addresses, of which the prefix `[0, end_bytes)` is memory, but for holes. It never moves.

    Made by `CudaPool.reserve`. Touching more than the committed bytes is an illegal address, by design. Tensors keep
    the addresses reserved after `close`, never the memory.

    Memory is mapped in chunks, and a chunk goes back whole. Shrinking into the middle of one, or a hole in it, replaces it
    by smaller ones where the contents may go (`volatile`), so that the committed bytes are exact; elsewhere the chunk
    stays committed.
    """

    def __init__(
        self,
        name: str,
        capacity_bytes: int,
        ledger: DeviceLedger,
        sizes: Sequence[int],
        driver: Driver,
        synchronize: Callable[[], None],
        volatile: bool,
    ) -> None:
        super().__init__(name, capacity_bytes, ledger, sizes[-1], driver)
        self._sizes, self._synchronize, self._volatile = tuple(sizes), synchronize, volatile
        self._chunks: list[tuple[int, int]] = []  # (address, size), by address
        self._committed: Spans = ()  # what they cover of the range
        self._owed: list[tuple[list[Callable[[], None]], int]] = []  # undoing calls that failed, bytes they return
        with interrupts_held():
            try:
                self.address = driver.reserve(self.capacity_bytes)
            except CudaError as error:
                raise self._refused(
                    "reserve addresses for", self.capacity_bytes, "nothing was changed", error
                ) from error
            self._addresses: Addresses | None = Addresses(self.address, self.capacity_bytes)
            # The addresses go back when the last tensor over them is gone: a stray view faults, it never sees foreign
            # memory. Not at exit, when the driver is going away by itself.
            self._abandoned = weakref.finalize(
                self._addresses, _abandon, driver, self.address, self.capacity_bytes, self._chunks
            )
            self._abandoned.atexit = False

    @property
    def chunks(self) -> tuple[int, ...]:
        """Sizes of the mapped chunks, in the order of their addresses."""
        return tuple(size for _, size in self._chunks)

    def _view(self) -> Tensor:
        return self._driver.as_tensor(self._addresses)

    @property
    def end_bytes(self) -> int:
        """Where the last byte that is memory ends."""
        return self._committed[-1][1] if self._committed else 0

    def _pages(self, end: int, holes: Spans) -> Spans:
        """The pages of `[0, end)` that are not inside of holes."""
        return without([(0, end)], inner_pages(holes, self.page_bytes))

    # --- growing --------------------------------------------------------------------------------------------------

    def _reach(self, end: int, holes: Spans) -> None:
        missing = without(self._pages(end, holes), self._committed)
        if missing:
            self._grow(missing)

    def _grow(self, missing: Spans) -> None:
        """Map spans of the range; whatever fails, what was mapped goes back."""
        size = total(missing)
        try:
            with interrupts_held() as raise_pending, ExitStack() as undo:
                self._settle()
                self._ledger.charge(self.name, size)
                undo.callback(self._release, size)
                chunks: list[tuple[int, int]] = []
                for first, last in missing:
                    address = self.address + first
                    for chunk in chunk_sizes(last - first, self._sizes):
                        self._map(address, chunk)
                        undo.callback(self._take_back, [partial(self._driver.unmap, address, chunk)], chunk)
                        chunks.append((address, chunk))
                        address += chunk
                        raise_pending()
                    self._driver.set_access(self.address + first, last - first)
                    raise_pending()
                undo.pop_all()
                self._chunks += chunks
                self._chunks.sort()
                self._count(joined([*self._committed, *missing]))
                self.changes += 1
        except CudaError as error:
            state = "some of it beyond reach until undoing succeeds" if self._owed else "nothing was added"
            raise self._refused("add", size, state, error) from error

    def _map(self, address: int, size: int) -> None:
        """Put fresh memory behind addresses; the mapping alone keeps it, so that unmapping frees it."""
        driver, undo = self._driver, list[Callable[[], None]]()
        try:
            handle = driver.create(size)
            undo.append(partial(driver.release, handle))
            driver.map(address, size, handle)
            undo.insert(0, partial(driver.unmap, address, size))
            driver.release(handle)
        except BaseException:
            self._take_back(undo, size)
            raise

    def _take_back(self, calls: list[Callable[[], None]], size: int) -> None:
        """Undo a chunk. Calls that fail are owed, and its bytes stay charged: the device still holds them."""
        failed = []
        for call in calls:
            try:
                call()
            except CudaError:
                failed.append(call)
        if failed:
            self._owed.append((failed, size))

    def _release(self, size: int) -> None:
        """Release the charge of a growth but for what is owed; before it nothing was."""
        self._ledger.release(self.name, size - sum(owed for _, owed in self._owed))

    def _settle(self) -> None:
        """Make the undoing calls that failed; the first that fails again raises CudaError."""
        while self._owed:
            calls, size = self._owed[0]
            while calls:
                calls[0]()
                calls.pop(0)
            self._owed.pop(0)
            self._ledger.release(self.name, size)

    # --- shrinking ------------------------------------------------------------------------------------------------

    def decommit(self, num_bytes: int = 0, *, holes: Spans = ()) -> None:
        """Give back the memory beyond `[0, num_bytes)`, rounded up to pages, and the whole pages inside of `holes`.

        All streams are drained before.

        Raises
        ------
        CudaMemoryError
            If the driver refuses. What went back by then is off the range and off the ledger; call again.
        """
        unwanted = without(self._committed, self._pages(round_up(num_bytes, self.page_bytes), holes))
        kept = without(self._committed, unwanted)
        gone = [chunk for chunk in self._chunks if self._goes(self._span(chunk), unwanted)] if unwanted else []
        if not gone:
            return
        try:
            self._synchronize()
            self.changes += 1
            while gone:
                self._unmap(gone[-1])
                gone.pop()
        except CudaError as error:
            size = sum(size for _, size in gone)
            raise self._refused("take back", size, "of which the contents are intact", error) from error
        if cut := without(kept, self._committed):
            self._grow(cut)

    def _goes(self, span: Span, unwanted: Spans) -> bool:
        """Whether a chunk goes back: where nothing of it is wanted, or its contents may go and something is not."""
        left = total(without([span], unwanted))
        return left < span[1] - span[0] if self._volatile else left == 0

    def _span(self, chunk: tuple[int, int]) -> Span:
        return chunk[0] - self.address, chunk[0] - self.address + chunk[1]

    def _unmap(self, chunk: tuple[int, int]) -> None:
        with interrupts_held():
            self._driver.unmap(*chunk)
            self._chunks.remove(chunk)
            self._ledger.release(self.name, chunk[1])
            self._count(without(self._committed, [self._span(chunk)]))

    def _count(self, committed: Spans) -> None:
        self._committed, self.committed_bytes = committed, total(committed)

    def close(self) -> None:
        """Give the memory back, and the addresses once no tensor views them. Closing twice is fine.

        Raises
        ------
        CudaMemoryError
            If the driver refuses, as it does when the device is lost. The range is closed all the same; what could
            not be given back stays charged, and comes free when the process ends.
        """
        if self._closed:
            return
        self._closed, self._tensor = True, None
        try:
            try:
                self._settle()
            finally:
                self.decommit()
        except CudaError as error:
            raise self._refused("take back", sum(owed for _, owed in self._owed), "until exit", error) from error
        finally:
            if self._chunks or self._owed:
                self._abandoned.detach()
            self._addresses = None
