"""CudaRange: device addresses reserved once, of which a prefix, except holes, is backed by memory mapped in chunks.

The range never moves. Growth is all or nothing. Streams are drained before anything is unmapped.
"""

from __future__ import annotations

import logging
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

from torch import Tensor

from mosaic.errors import RuntimeMemoryError
from mosaic.runtime.cuda_driver import Addresses, CudaDriver, CudaError
from mosaic.runtime.interrupts import interrupts_held
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.range_pool import Range
from mosaic.runtime.spans import Span, Spans, joined, total, without
from mosaic.units import MIB, format_bytes, round_up

_log = logging.getLogger(__name__)


CHUNK_BYTES: Final = 512 * MIB
"""The largest piece of physical memory. The cost is per piece: on an H200 mapping 4 GiB took 0.9 ms in pieces of 512
MiB and 122 ms in pieces of 2 MiB. Larger pieces would gain little, and the kept part of a piece that shrinks is copied
through the host."""


class CudaMemoryError(RuntimeMemoryError):
    """The driver refused to give memory, or to take it back.

    Attributes
    ----------
    asked_bytes
        Bytes of the call, given or taken back.
    committed_bytes
        What the range holds now.
    free_bytes
        The driver's count of free bytes on the device; None if it does not answer.
    """

    def __init__(self, message: str, *, asked_bytes: int, committed_bytes: int, free_bytes: int | None) -> None:
        self.asked_bytes, self.committed_bytes, self.free_bytes = asked_bytes, committed_bytes, free_bytes
        super().__init__(message)


def _abandon(driver: CudaDriver, address: int, size: int, chunks: dict[int, int]) -> None:
    """End the reservation of a range, closed or not. Finalizers cannot raise, so a failure is logged."""
    try:
        if chunks:
            driver.synchronize()
        for chunk in chunks.items():
            driver.unmap(*chunk)
        driver.free_addresses(address, size)
    except CudaError as error:
        _log.debug("%s keeps %s of addresses until the process ends: %s", driver.name, format_bytes(size), error)


class CudaRange(Range):
    """A range of a device's memory. Touching it beyond the committed bytes is an illegal address.

    Memory is mapped in chunks as large as a growth, up to `CHUNK_BYTES`, and a chunk goes back whole. Shrinking into the
    middle of one, or a hole in it, replaces it by chunks of what is kept, so that the committed bytes are exact. Contents that
    are kept cross to the host and back, unless they may go (`volatile`).
    """

    def __init__(
        self, name: str, capacity_bytes: int, ledger: DeviceLedger, page_bytes: int, driver: CudaDriver, volatile: bool
    ) -> None:
        super().__init__(name, capacity_bytes, ledger, page_bytes)
        self._driver, self._volatile = driver, volatile
        self._tensor: Tensor | None = None
        self._chunks: dict[int, int] = {}  # address -> size
        self._saved: list[tuple[int, Tensor]] = []  # contents that await memory: (first byte, on the host)
        self._owed: list[tuple[list[Callable[[], None]], int]] = []  # undoing calls that failed, bytes they return
        with interrupts_held():
            try:
                self.address = driver.reserve(self.capacity_bytes)
            except CudaError as error:
                raise self._refused(
                    "reserve addresses for", self.capacity_bytes, "nothing was changed", error
                ) from error
            self._addresses: Addresses | None = Addresses(self.address, self.capacity_bytes)
            # The addresses are freed when the last tensor over them is gone: a stray view faults, it never sees foreign
            # memory. Not at exit, when the driver is being torn down.
            self._abandoned = weakref.finalize(
                self._addresses, _abandon, driver, self.address, self.capacity_bytes, self._chunks
            )
            self._abandoned.atexit = False

    @property
    def chunks(self) -> tuple[int, ...]:
        """Sizes of the mapped chunks, in the order of their addresses."""
        return tuple(size for _, size in sorted(self._chunks.items()))

    @property
    def tensor(self) -> Tensor:
        """The range as a uint8 tensor on the device, zero-copy; made on first use."""
        if self._closed:
            raise RuntimeMemoryError(f"the range {self.name} is closed: compile the model again.")
        if self._tensor is None:
            self._tensor = self._driver.as_tensor(self._addresses)
        return self._tensor

    # --- growing --------------------------------------------------------------------------------------------------

    def _grow(self, missing: Spans, populate: bool = True) -> None:
        """Map spans of the range and restore their saved contents; on failure, unmap all that this call mapped."""
        size = total(missing)
        try:
            with interrupts_held() as raise_pending, ExitStack() as undo:
                self._settle()
                self._ledger.charge(self.name, size)
                undo.callback(self._release, size)
                chunks: list[tuple[int, int]] = []
                for first, last in missing:
                    for start in range(first, last, CHUNK_BYTES):
                        chunk = self.address + start, min(CHUNK_BYTES, last - start)
                        self._map(*chunk)
                        undo.callback(self._take_back, [partial(self._driver.unmap, *chunk)], chunk[1])
                        chunks.append(chunk)
                        raise_pending()
                    self._driver.set_access(self.address + first, last - first)
                    raise_pending()
                self._restore(missing)
                undo.pop_all()
                self._chunks.update(chunks)
                self._count(joined([*self._committed, *missing]))
        except CudaError as error:
            state = "some of it beyond reach until undoing succeeds" if self._owed else "nothing was added"
            raise self._refused("add", size, state, error) from error

    def _map(self, address: int, size: int) -> None:
        """Map fresh memory at addresses and drop its handle, so that unmapping frees it."""
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
        """Undo a chunk. Failed calls go to `_owed`, and the chunk stays charged: the device still holds it."""
        failed = []
        for call in calls:
            try:
                call()
            except CudaError:
                failed.append(call)
        if failed:
            self._owed.append((failed, size))

    def _release(self, size: int) -> None:
        """Release the charge of a growth, except for the bytes in `_owed`, which was empty before the growth."""
        self._ledger.release(self.name, size - sum(owed for _, owed in self._owed))

    def _settle(self) -> None:
        """Repeat the undoing calls that failed; raise CudaError at the first that fails again."""
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
            If the driver refuses. Memory freed until then is off the range and the ledger; call again for the rest.
        """
        unwanted = without(self._committed, self._pages(round_up(num_bytes, self.page_bytes), holes))
        if not unwanted:
            return
        with interrupts_held():
            kept = self._kept(unwanted)
            try:
                self._driver.synchronize()
                self._unmap([chunk for chunk, spans in kept.items() if not spans])
                for chunk, spans in kept.items():
                    if spans:
                        self._cut(chunk, spans)
            except CudaError as error:
                left = total(without(unwanted, without(unwanted, self._committed)))
                raise self._refused("take back", left, "of which the contents are intact", error) from error

    def _kept(self, unwanted: Spans) -> dict[tuple[int, int], Spans]:
        """The kept spans of each chunk that has bytes to free."""
        starts, ends = [start for start, _ in unwanted], [end for _, end in unwanted]
        found: dict[tuple[int, int], Spans] = {}
        for chunk in self._chunks.items():
            start, end = span = self._span(chunk)
            inside = unwanted[bisect_right(ends, start) : bisect_left(starts, end)]
            if inside:
                found[chunk] = without([span], inside)
        return found

    def _span(self, chunk: tuple[int, int]) -> Span:
        return chunk[0] - self.address, chunk[0] - self.address + chunk[1]

    def _unmap(self, chunks: Sequence[tuple[int, int]]) -> None:
        """Unmap chunks and record each one that is unmapped, also if the driver refuses a later one."""
        gone: list[tuple[int, int]] = []
        try:
            for chunk in chunks:
                self._driver.unmap(*chunk)
                gone.append(chunk)
        finally:
            for address, _ in gone:
                del self._chunks[address]
            if gone:
                self._ledger.release(self.name, sum(size for _, size in gone))
                self._count(without(self._committed, joined(map(self._span, gone))))

    def _cut(self, chunk: tuple[int, int], kept: Spans) -> None:
        """Replace a chunk by memory for `kept` of it. If refused, the next commit of the span restores it."""
        saved = (
            [] if self._volatile else [(first, self.tensor[first:last].to("cpu", copy=True)) for first, last in kept]
        )
        self._unmap([chunk])
        self._saved += saved
        self._grow(kept)

    def _restore(self, fresh: Spans) -> None:
        """Copy saved contents into fresh memory."""
        waiting = []
        for first, contents in self._saved:
            saved = [(first, first + len(contents))]
            later = without(saved, fresh)
            for start, end in without(saved, later):
                self.tensor[start:end].copy_(contents[start - first : end - first])
            waiting += [(start, contents[start - first : end - first]) for start, end in later]
        self._saved = waiting

    def _count(self, committed: Spans) -> None:
        self._committed = committed
        self.changes += 1

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

    def close(self) -> None:
        """Give the memory back, and the addresses once no tensor views them. Closing twice is fine.

        Raises
        ------
        CudaMemoryError
            If the driver refuses, as it does when the device is lost. The range is closed nevertheless; memory that
            could not be freed stays charged until the process ends.
        """
        if self._closed:
            return
        self._closed, self._tensor, self._saved = True, None, []
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
