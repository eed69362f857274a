"""PagePool on a CPU: large ranges of address space, reserved once, of which a prefix is committed.

Reserved pages cost nothing and fault when touched (PROT_NONE); committing makes [0, n) readable and writable,
decommitting hands the pages back and makes them fault again, so that a stray access is caught.
Linux: mmap, mprotect, madvise, mincore through ctypes.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Literal, Protocol, Self

import torch
from torch import Tensor

from mosaic.errors import RuntimeMemoryError
from mosaic.runtime.ledger import DeviceLedger
from mosaic.units import format_bytes, round_up

__all__ = ["PAGE_BYTES", "Access", "PagePool", "PageRange", "System"]

PAGE_BYTES: Final = mmap.PAGESIZE
"""Granularity of commits: the system's page, as in the built-in profile of a CPU."""

Access = Literal["none", "read", "write"]
_PROTECTION: Final[dict[Access, int]] = {"none": 0, "read": 1, "write": 3}
_MAP_PRIVATE: Final = 0x02
_MAP_ANONYMOUS: Final = 0x20
_MAP_NORESERVE: Final = 0x4000
_MADV_DONTNEED: Final = 4
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


class System(Protocol):
    """The calls to the operating system; tests replace them."""

    def reserve(self, size: int) -> int:
        """Reserve inaccessible address space and give its address."""

    def protect(self, address: int, size: int, access: Access) -> None:
        """Allow what `access` says and nothing else; "write" includes reading."""

    def populate(self, address: int, size: int) -> None:
        """Make accessible pages resident."""

    def discard(self, address: int, size: int) -> None:
        """Give the contents of pages back."""

    def unmap(self, address: int, size: int) -> None:
        """End a reservation."""

    def resident(self, address: int, size: int) -> int:
        """Measure the resident bytes of a range."""


class Linux:
    """The calls as Linux offers them; each raises OSError."""

    def __init__(self) -> None:
        self._libc = libc = ctypes.CDLL(None, use_errno=True)
        size, address = ctypes.c_size_t, ctypes.c_void_p
        libc.mmap.restype = address
        libc.mmap.argtypes = [address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        libc.mprotect.argtypes = libc.madvise.argtypes = [address, size, ctypes.c_int]
        libc.munmap.argtypes = [address, size]
        libc.mincore.argtypes = [address, size, address]

    def reserve(self, size: int) -> int:
        """Reserve inaccessible address space; counts against no limit of memory."""
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        address = self._libc.mmap(None, size, _PROTECTION["none"], flags, -1, 0)
        if address is None or address == _MAP_FAILED:
            raise _os_error()
        return int(address)

    def protect(self, address: int, size: int, access: Access) -> None:
        """Call mprotect."""
        _check(self._libc.mprotect(address, size, _PROTECTION[access]))

    def populate(self, address: int, size: int) -> None:
        """Fault the pages in; a kernel older than 5.14 leaves that to the first touch.

        More than the machine has available is refused here: Linux would rather kill a process than fail the call.
        """
        available = _available_bytes()
        if available is not None and size > available:
            raise OSError(errno.ENOMEM, f"{format_bytes(available)} of physical memory are available")
        try:
            _check(self._libc.madvise(address, size, _MADV_POPULATE_WRITE))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise

    def discard(self, address: int, size: int) -> None:
        """Call madvise(DONTNEED): private anonymous pages are freed and read as zero afterwards."""
        _check(self._libc.madvise(address, size, _MADV_DONTNEED))

    def unmap(self, address: int, size: int) -> None:
        """Call munmap."""
        _check(self._libc.munmap(address, size))

    def resident(self, address: int, size: int) -> int:
        """Count the pages that mincore calls resident."""
        pages = -(-size // mmap.PAGESIZE)
        vector = (ctypes.c_ubyte * pages)()
        _check(self._libc.mincore(address, size, ctypes.addressof(vector)))
        return bytes(vector).translate(_LOW_BIT).count(1) * mmap.PAGESIZE


_LOW_BIT: Final = bytes(value & 1 for value in range(256))  # the other bits of mincore's answer are undefined


def _available_bytes() -> int | None:
    """Read what Linux thinks can be had without swapping; None where it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _check(code: int) -> None:
    if code != 0:
        raise _os_error()


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


class PageRange:
    """One reservation, `capacity_bytes` long, of which `[0, committed_bytes)` is memory.

    Made by `PagePool.reserve`. `tensor` views the whole reservation without a copy; touching it beyond the committed
    bytes is a segmentation fault, by design. Tensors keep the addresses reserved after `close`, never the memory.
    """

    def __init__(
        self, name: str, capacity_bytes: int, ledger: DeviceLedger, page_bytes: int, system: System, released: Access
    ) -> None:
        self.name, self.page_bytes = name, page_bytes
        self.capacity_bytes = round_up(max(capacity_bytes, 1), page_bytes)
        self.committed_bytes = 0
        self._high_water = 0
        self._ledger, self._system, self._released = ledger, system, released
        try:
            self.address = system.reserve(self.capacity_bytes)
        except OSError as error:
            raise RuntimeMemoryError(
                f"cannot reserve {format_bytes(self.capacity_bytes)} of address space for {name}: {error.strerror}; "
                f"raise the limit of virtual memory (ulimit -v)."
            ) from error
        buffer = (ctypes.c_uint8 * self.capacity_bytes).from_address(self.address)
        # The addresses go back when the last tensor over them is gone: a stray view faults, it never sees foreign
        # memory.
        weakref.finalize(buffer, system.unmap, self.address, self.capacity_bytes)
        self._tensor: Tensor | None = torch.frombuffer(buffer, dtype=torch.uint8)

    @property
    def tensor(self) -> Tensor:
        """uint8 [capacity_bytes] over the reservation, zero-copy."""
        if self._tensor is None:
            raise RuntimeMemoryError(f"the range {self.name} is closed: compile the model again.")
        return self._tensor

    def commit(self, num_bytes: int, *, populate: bool = True) -> None:
        """Make `[0, num_bytes)` memory, rounded up to pages; what is committed already stays. All or nothing.

        Parameters
        ----------
        num_bytes
            How far memory has to reach.
        populate
            Fault the new pages in now, so that a later touch cannot fail and resident bytes equal committed ones.

        Raises
        ------
        DoesNotFit
            If the ledger's budget does not allow it.
        RuntimeMemoryError
            If the range is too small, or the operating system refuses.
        """
        end = round_up(num_bytes, self.page_bytes)
        if self._tensor is None or end > self.capacity_bytes:
            raise RuntimeMemoryError(
                f"{self.name}: {num_bytes:,} bytes asked for, the range holds {self.capacity_bytes:,} at most: "
                f"reserve a larger one."
            )
        if end > self.committed_bytes:
            self._grow(end, populate)

    def _grow(self, end: int, populate: bool) -> None:
        start, size = self.address + self.committed_bytes, end - self.committed_bytes
        with ExitStack() as undo:
            self._ledger.charge(self.name, size)
            undo.callback(self._ledger.release, self.name, size)
            try:
                undo.callback(self._withdraw, start, size)
                self._system.protect(start, size, "write")
                if populate:
                    self._system.populate(start, size)
            except OSError as error:
                raise RuntimeMemoryError(
                    f"{self.name}: the system refused {format_bytes(size)} on top of "
                    f"{format_bytes(self.committed_bytes)} ({error.strerror}); nothing was changed. "
                    f"Free memory, or plan with a smaller budget."
                ) from error
            undo.pop_all()
        self.committed_bytes = end
        self._high_water = max(self._high_water, end)

    def _withdraw(self, start: int, size: int) -> None:
        """Give pages back and guard them; also pages that never were accessible."""
        self._system.discard(start, size)
        self._system.protect(start, size, self._released)

    def decommit(self, num_bytes: int = 0) -> None:
        """Give back the memory beyond `[0, num_bytes)`, rounded up to pages; touching it faults, or see `released`."""
        end = round_up(num_bytes, self.page_bytes)
        if end < self.committed_bytes:
            size = self.committed_bytes - end
            self._withdraw(self.address + end, size)
            self._ledger.release(self.name, size)
            self.committed_bytes = end

    def resize(self, num_bytes: int, *, populate: bool = True) -> None:
        """Commit or decommit so that exactly `[0, num_bytes)`, rounded up to pages, is memory."""
        self.decommit(num_bytes)
        self.commit(num_bytes, populate=populate)

    def resident_bytes(self) -> int:
        """Measure how much of the range is in physical memory, by the system's own account."""
        return (
            self._system.resident(self.address, self._high_water)
            if self._high_water and self._tensor is not None
            else 0
        )

    def close(self) -> None:
        """Give the memory back, and the addresses once no tensor views them. Closing twice is fine."""
        self.decommit()
        self._tensor = None


class PagePool:
    """The ranges of one device, charged to one ledger.

    Parameters
    ----------
    ledger
        Owner of the budget; a fresh one without a limit if not given.
    page_bytes
        Granularity of commits.
    system
        The calls to the operating system.
    released
        What may be done with memory that was given back: "none", so that a stray access faults; or "read", which finds
        zeros, where views were handed to users whom a forgotten `.clone()` must not cost the process.

    Examples
    --------
    >>> with PagePool() as pool:
    ...     workspace = pool.reserve("workspace", 1 << 40)
    ...     workspace.commit(5_000_000)
    ...     workspace.committed_bytes
    5001216
    """

    def __init__(
        self,
        ledger: DeviceLedger | None = None,
        *,
        page_bytes: int = PAGE_BYTES,
        system: System | None = None,
        released: Access = "none",
    ) -> None:
        if page_bytes <= 0 or page_bytes % mmap.PAGESIZE:
            raise ValueError(f"page_bytes is a multiple of {mmap.PAGESIZE}, got {page_bytes}")
        self.ledger = ledger if ledger is not None else DeviceLedger()
        self.page_bytes, self._released = page_bytes, released
        self._system: System = system if system is not None else Linux()
        self._ranges: dict[str, PageRange] = {}

    @property
    def ranges(self) -> dict[str, PageRange]:
        """The open ranges by name."""
        return dict(self._ranges)

    def reserve(self, name: str, capacity_bytes: int) -> PageRange:
        """Reserve a range; it holds no memory yet."""
        if name in self._ranges:
            raise RuntimeMemoryError(f"the range {name} exists already: close it first, or choose another name.")
        self._ranges[name] = PageRange(name, capacity_bytes, self.ledger, self.page_bytes, self._system, self._released)
        return self._ranges[name]

    @property
    def committed_bytes(self) -> int:
        """Bytes committed in all ranges."""
        return sum(part.committed_bytes for part in self._ranges.values())

    def close(self) -> None:
        """Close every range. Closing twice is fine."""
        for part in self._ranges.values():
            part.close()
        self._ranges.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
