"""Page pools on a CUDA device, with the interface of `page_pool`: ranges of addresses of which a prefix is memory.

`CudaPool` uses virtual memory: a range never moves, and grows and shrinks by mapping and unmapping physical chunks.
`SlabPool` is for devices without it: one allocation per range, which moves when it grows.
Never grow or shrink while a CUDA graph is captured.
"""

from __future__ import annotations

import logging
import signal
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from torch import Tensor

from mosaic.errors import RuntimeMemoryError, UnknownName
from mosaic.runtime.cuda_driver import CudaError, Driver
from mosaic.runtime.ledger import DeviceLedger
from mosaic.units import MIB, format_bytes, round_up

__all__ = [
    "CHUNK_BYTES",
    "CudaMemoryError",
    "CudaPool",
    "CudaRange",
    "SlabPool",
    "SlabRange",
    "chunk_sizes",
    "open_pool",
]

CHUNK_BYTES: Final = (512 * MIB, 32 * MIB)
"""Sizes of physical chunks, largest first; pages finish the edge. A chunk costs the same whatever its size: on an H200
4 GiB were mapped in 0.9 ms by chunks of 512 MiB, 7 ms by 32 MiB, 122 ms by 2 MiB."""

VOLATILE: Final = frozenset({"workspace"})
"""Ranges whose contents nobody needs after a resize: a plan fills its workspace anew in every call."""

_log = logging.getLogger(__name__)


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


@contextmanager
def _interrupts_held() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back; the callable that is given raises it, to be called where everything held is on record.

    Otherwise KeyboardInterrupt may strike between the driver's answer and our note of it, and the memory would be
    nobody's. Python runs signal handlers in the main thread only.
    """
    before = signal.getsignal(signal.SIGINT)
    pending: list[tuple[int, FrameType | None]] = []

    def raise_pending() -> None:
        if pending and callable(before):
            before(*pending.pop())

    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield raise_pending
        return
    signal.signal(signal.SIGINT, lambda number, frame: pending.append((number, frame)))
    try:
        yield raise_pending
    finally:
        signal.signal(signal.SIGINT, before)
        raise_pending()


class _Addresses:
    """Addresses of a device, kept by every tensor over them; what is still mapped goes back with the last."""

    def __init__(self, address: int, size: int) -> None:
        # PyTorch reads it once, and keeps this object for as long as the storage.
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


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


class _Range:
    """What ranges of both kinds share: the checks of `commit`, messages, `resize`, `resident_bytes`."""

    def __init__(self, name: str, capacity_bytes: int, ledger: DeviceLedger, page_bytes: int, driver: Driver) -> None:
        self.name, self.page_bytes = name, page_bytes
        self.capacity_bytes = round_up(max(capacity_bytes, 1), page_bytes)
        self.committed_bytes = 0
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

    def _view(self) -> Tensor:
        raise NotImplementedError

    def _grow(self, end: int) -> None:
        raise NotImplementedError

    def decommit(self, num_bytes: int = 0) -> None:
        """Give memory beyond `[0, num_bytes)` back."""
        raise NotImplementedError

    def _end(self, num_bytes: int) -> int:
        end = round_up(num_bytes, self.page_bytes)
        if self._closed or end > self.capacity_bytes:
            raise RuntimeMemoryError(
                f"{self.name}: {num_bytes:,} bytes asked for, the range holds "
                f"{0 if self._closed else self.capacity_bytes:,} at most: reserve a larger one."
            )
        return end

    def commit(self, num_bytes: int, *, populate: bool = True) -> None:
        """Make `[0, num_bytes)` memory, rounded up to pages. All or nothing.

        Parameters
        ----------
        num_bytes
            How far memory has to reach.
        populate
            For the interface: memory of a device is always populated. Its contents are undefined.

        Raises
        ------
        DoesNotFit
            If the ledger's budget does not allow it.
        CudaMemoryError
            If the driver refuses; nothing was changed then.
        """
        end = self._end(num_bytes)
        if end > self.committed_bytes:
            self._grow(end)

    def resize(self, num_bytes: int, *, populate: bool = True) -> None:
        """Commit or decommit so that `[0, num_bytes)`, rounded up to pages, is memory."""
        self._end(num_bytes)
        self.decommit(num_bytes)
        self.commit(num_bytes, populate=populate)

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


class CudaRange(_Range):
    """A reservation of device addresses, of which the prefix `[0, committed_bytes)` is memory. It never moves.

    Made by `CudaPool.reserve`. Touching more than the committed bytes is an illegal address, by design. Tensors keep
    the addresses reserved after `close`, never the memory.

    Memory is mapped in chunks, and a chunk goes back whole. Shrinking into the middle of one replaces it by smaller
    ones where the contents may go (`volatile`), so that the committed bytes are exact; elsewhere the chunk stays, and
    up to one chunk more than asked for stays committed.
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
        self._chunks: list[tuple[int, int]] = []  # (address, size), gapless from the start of the range
        self._owed: list[tuple[list[Callable[[], None]], int]] = []  # undoing calls that failed, bytes they return
        with _interrupts_held():
            try:
                self.address = driver.reserve(self.capacity_bytes)
            except CudaError as error:
                raise self._refused(
                    "reserve addresses for", self.capacity_bytes, "nothing was changed", error
                ) from error
            self._addresses: _Addresses | None = _Addresses(self.address, self.capacity_bytes)
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

    # --- growing --------------------------------------------------------------------------------------------------

    def _grow(self, end: int) -> None:
        """Map `[committed_bytes, end)`; whatever fails, what was mapped goes back."""
        start, size = self.address + self.committed_bytes, end - self.committed_bytes
        try:
            with _interrupts_held() as raise_pending, ExitStack() as undo:
                self._settle()
                self._ledger.charge(self.name, size)
                undo.callback(self._release, size)
                chunks, address = [], start
                for chunk in chunk_sizes(size, self._sizes):
                    self._map(address, chunk)
                    undo.callback(self._take_back, [partial(self._driver.unmap, address, chunk)], chunk)
                    chunks.append((address, chunk))
                    address += chunk
                    raise_pending()
                self._driver.set_access(start, size)
                raise_pending()
                undo.pop_all()
                self._chunks += chunks
                self.committed_bytes = end
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

    def decommit(self, num_bytes: int = 0) -> None:
        """Give back the memory beyond `[0, num_bytes)`, rounded up to pages, after all streams are drained.

        Raises
        ------
        CudaMemoryError
            If the driver refuses. What went back by then is off the range and off the ledger; call again.
        """
        end = round_up(num_bytes, self.page_bytes)
        keep = end if self._volatile else self._whole_chunks(end)
        if keep >= self.committed_bytes:
            return
        try:
            self._synchronize()
            while self.committed_bytes > keep:
                self._unmap_last()
        except CudaError as error:
            size = self.committed_bytes - keep
            raise self._refused("take back", size, "of which the contents are intact", error) from error
        if self.committed_bytes < keep:  # a chunk was cut
            self._grow(keep)

    def _whole_chunks(self, end: int) -> int:
        """Round up to the end of the chunk that `end` lies in."""
        reach = 0
        for size in self.chunks:
            if reach >= end:
                break
            reach += size
        return reach

    def _unmap_last(self) -> None:
        with _interrupts_held():
            address, size = self._chunks[-1]
            self._driver.unmap(address, size)
            self._chunks.pop()
            self._ledger.release(self.name, size)
            self.committed_bytes -= size

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


class SlabRange(_Range):
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
        return self._driver.as_tensor(_Addresses(self.address, self.committed_bytes))

    def _grow(self, end: int) -> None:
        """Allocate anew: contents are copied, which takes old and new at once, or first given up where volatile."""
        before = self.committed_bytes
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
        with _interrupts_held(), ExitStack() as undo:
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
        if (free := self._ledger.free_bytes) is not None and end - before > free:
            self._ledger.charge(self.name, end - before)  # raises, before anything is given up
        self.decommit()
        try:
            self._add(end)
        except BaseException:
            self._add(before)
            raise

    def _moved(self, address: int, size: int) -> None:
        self.address, self.committed_bytes, self._tensor = address, size, None
        self.generation += 1

    def decommit(self, num_bytes: int = 0) -> None:
        """Give the allocation back if nothing is to remain of it; else it stays as large as it is."""
        if num_bytes > 0 or not self.committed_bytes:
            return
        size = self.committed_bytes
        try:
            self._synchronize()
            with _interrupts_held():
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


AnyRange = TypeVar("AnyRange", CudaRange, SlabRange)


class _Pool(Generic[AnyRange]):
    """What pools of both kinds share: ranges by name, the check against the driver's counter, closing.

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
        self.ledger = ledger if ledger is not None else DeviceLedger(device=driver.name)
        self._driver, self._volatile = driver, frozenset(volatile)
        granularity = driver.granularity()
        self.page_bytes = granularity if page_bytes is None else page_bytes
        if self.page_bytes <= 0 or self.page_bytes % granularity:
            raise ValueError(f"page_bytes is a multiple of {granularity:,} on {driver.name}, got {page_bytes}")
        self._synchronize = synchronize if synchronize is not None else driver.synchronize
        self._ranges: dict[str, AnyRange] = {}
        self.mark()

    @property
    def ranges(self) -> dict[str, AnyRange]:
        """The open ranges by name."""
        return dict(self._ranges)

    def _make(self, name: str, capacity_bytes: int) -> AnyRange:
        raise NotImplementedError

    def reserve(self, name: str, capacity_bytes: int) -> AnyRange:
        """Reserve a range; it holds no memory yet."""
        if name in self._ranges:
            raise RuntimeMemoryError(f"the range {name} exists already: close it first, or choose another name.")
        self._ranges[name] = self._make(name, capacity_bytes)
        return self._ranges[name]

    @property
    def committed_bytes(self) -> int:
        """Bytes committed in all ranges."""
        return sum(part.committed_bytes for part in self._ranges.values())

    def resize(self, sizes: Mapping[str, int]) -> None:
        """Resize several ranges, first those that shrink: the others may need their pages."""
        for name in sizes:
            if name not in self._ranges:
                raise UnknownName("range", name, self._ranges, "Reserve it first.")
        for name, size in sorted(sizes.items(), key=lambda item: item[1] > self._ranges[item[0]].committed_bytes):
            self._ranges[name].resize(size)

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

    def close(self) -> None:
        """Close every range, also if one cannot give its memory back; that is raised at the end. Twice is fine."""
        with ExitStack() as closing:
            for part in self._ranges.values():
                closing.callback(part.close)
            self._ranges.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except RuntimeMemoryError as failure:
            if error is None:
                raise
            error.add_note(f"closing the pool failed too: {failure}")  # the first failure is the cause


class CudaPool(_Pool[CudaRange]):
    """The ranges of one CUDA device with virtual memory, charged to one ledger.

    Parameters
    ----------
    chunk_bytes
        Sizes of physical chunks, largest first, each a multiple of the next and the last of the page. Ranges that
        keep their contents leave the largest out: they cannot shrink by less than a chunk.
    driver, ledger, page_bytes, synchronize, volatile
        See `open_pool`.

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
        self,
        driver: Driver,
        ledger: DeviceLedger | None = None,
        *,
        page_bytes: int | None = None,
        synchronize: Callable[[], None] | None = None,
        volatile: Collection[str] = VOLATILE,
        chunk_bytes: Sequence[int] = CHUNK_BYTES,
    ) -> None:
        super().__init__(driver, ledger, page_bytes=page_bytes, synchronize=synchronize, volatile=volatile)
        self._sizes = (*chunk_bytes, self.page_bytes)
        if any(large % small for large, small in zip(self._sizes, self._sizes[1:], strict=False)):
            raise ValueError(f"each chunk is a multiple of the next, the last of the page; got {self._sizes}")

    def _make(self, name: str, capacity_bytes: int) -> CudaRange:
        volatile = name in self._volatile
        sizes = self._sizes if volatile else self._sizes[-2:]
        return CudaRange(name, capacity_bytes, self.ledger, sizes, self._driver, self._synchronize, volatile)


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
