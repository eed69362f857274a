"""PagePool: address ranges on the CPU, reserved once, of which a prefix, except holes, is committed.

Reserved pages cost nothing and fault when touched (PROT_NONE). Committing makes pages readable and writable;
decommitting returns them to the system and makes them fault again, so that a stray access is caught.
Linux: mmap, mprotect, madvise, mincore through ctypes. `host_pool` pins such ranges for a CUDA device.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from mosaic.errors import RuntimeMemoryError
from mosaic.runtime.interrupts import interrupts_held
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.range_pool import Range, RangePool
from mosaic.runtime.spans import Spans, joined, total, without
from mosaic.units import MIB, format_bytes, round_up

PAGE_BYTES: Final = mmap.PAGESIZE
"""Granularity of commits: the system's page, as in the built-in profile of a CPU."""

POPULATE_BYTES: Final = 256 * MIB
"""Bytes of pages that are faulted in at a time: free memory is checked, and Ctrl-C is noticed, in between."""

Access = Literal["none", "read", "write"]
_PROTECTION: Final[dict[Access, int]] = {"none": 0, "read": 1, "write": 3}
_MAP_PRIVATE: Final = 0x02
_MAP_ANONYMOUS: Final = 0x20
_MAP_NORESERVE: Final = 0x4000
_MADV_DONTNEED: Final = 4
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


class HostMemoryError(RuntimeMemoryError):
    """The machine's memory is too small, or the operating system or the driver refused to give or pin it.

    Attributes
    ----------
    asked_bytes
        Bytes to commit on top of the committed ones, or to pin.
    committed_bytes
        What the range holds now.
    available_bytes
        What the machine could give before the call without swapping; None if unknown.
    """

    def __init__(
        self, message: str, *, asked_bytes: int, committed_bytes: int, available_bytes: int | None = None
    ) -> None:
        self.asked_bytes, self.committed_bytes, self.available_bytes = asked_bytes, committed_bytes, available_bytes
        super().__init__(message)


class Linux:
    """The calls to the operating system, each of which raises OSError; tests replace them."""

    def __init__(self) -> None:
        self._libc = libc = ctypes.CDLL(None, use_errno=True)
        size, address = ctypes.c_size_t, ctypes.c_void_p
        libc.mmap.restype = address
        libc.mmap.argtypes = [address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        libc.mprotect.argtypes = libc.madvise.argtypes = [address, size, ctypes.c_int]
        libc.munmap.argtypes = [address, size]
        libc.mincore.argtypes = [address, size, address]

    def available(self) -> int | None:
        """Give the bytes that this process can have without swapping, by MemAvailable and its container's limit; None: not said."""
        known = [room for room in (_machine_room(), container_room()) if room is not None]
        return min(known, default=None)

    def grows(self) -> bool:
        """Say whether more becomes available as memory is used: a virtio-mem device has the hypervisor plug it in."""
        return any(Path("/sys/bus/virtio/drivers/virtio_mem").glob("virtio*"))

    def reserve(self, size: int) -> int:
        """Reserve inaccessible address space; counts against no limit of memory."""
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        address = self._libc.mmap(None, size, _PROTECTION["none"], flags, -1, 0)
        if address is None or address == _MAP_FAILED:
            raise _os_error()
        return int(address)

    def protect(self, address: int, size: int, access: Access) -> None:
        """Allow what `access` says and nothing else; "write" includes reading."""
        _check(self._libc.mprotect(address, size, _PROTECTION[access]))

    def populate(self, address: int, size: int) -> None:
        """Fault the pages in; on a kernel older than 5.14, the first touch does that."""
        try:
            _check(self._libc.madvise(address, size, _MADV_POPULATE_WRITE))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise

    def discard(self, address: int, size: int) -> None:
        """Give the contents of pages back: they read as zero afterwards."""
        _check(self._libc.madvise(address, size, _MADV_DONTNEED))

    def prefer_huge(self, address: int, size: int) -> None:
        """Ask for large pages; a kernel without them says EINVAL, and does with small ones."""
        self._libc.madvise(address, size, _MADV_HUGEPAGE)

    def unmap(self, address: int, size: int) -> None:
        """End a reservation."""
        _check(self._libc.munmap(address, size))

    def resident(self, address: int, size: int) -> int:
        """Measure the resident bytes of a range."""
        pages = -(-size // mmap.PAGESIZE)
        vector = (ctypes.c_ubyte * pages)()
        _check(self._libc.mincore(address, size, ctypes.addressof(vector)))
        return bytes(vector).translate(_LOW_BIT).count(1) * mmap.PAGESIZE


_LOW_BIT: Final = bytes(value & 1 for value in range(256))  # the other bits of mincore's answer are undefined


def _machine_room() -> int | None:
    """Read MemAvailable of /proc/meminfo."""
    try:
        return _fields(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    except (OSError, KeyError, ValueError):
        return None


def container_room(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Read the rest of this container's limit; its control group is the root that it sees (v2, else v1).

    The kernel drops cached files before it enforces a limit, so they count as free.
    """
    v1 = root / "memory"
    for limit, used, stat in (
        (root / "memory.max", root / "memory.current", root / "memory.stat"),
        (v1 / "memory.limit_in_bytes", v1 / "memory.usage_in_bytes", v1 / "memory.stat"),
    ):
        try:
            fields = _fields(stat)
            cached = fields["inactive_file"] + fields["active_file"]
            return max(int(limit.read_text()) - int(used.read_text()) + cached, 0)
        except (OSError, KeyError, ValueError):  # no such file, or the limit is the word "max"
            continue
    return None


def _fields(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if (words := line.split())[1:]}


def _address_advice() -> str:
    """Advice for a failed reservation: a process has 128 TiB of addresses, or its limit."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY:
        return "close models that are open, or open them with smaller budgets"
    return (
        f"this process may have {format_bytes(most)}: raise the limit (ulimit -v), close models that are open, or open them "
        f"with smaller budgets"
    )


def _check(code: int) -> None:
    if code != 0:
        raise _os_error()


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


class PageRange(Range):
    """A range of the host's memory. Touching it beyond the committed bytes is a segmentation fault."""

    def __init__(
        self, name: str, capacity_bytes: int, ledger: DeviceLedger, page_bytes: int, system: Linux, released: Access
    ) -> None:
        super().__init__(name, capacity_bytes, ledger, page_bytes)
        self._high_water = 0
        self._system, self._released = system, released
        try:
            self.address = system.reserve(self.capacity_bytes)
        except OSError as error:
            raise RuntimeMemoryError(
                f"cannot reserve {format_bytes(self.capacity_bytes)} of address space for {name}: {error.strerror}; "
                f"{_address_advice()}."
            ) from error
        buffer = (ctypes.c_uint8 * self.capacity_bytes).from_address(self.address)
        # The addresses are freed when the last tensor over them is gone: a stray view faults, it never sees foreign
        # memory.
        weakref.finalize(buffer, self._ending())
        self._tensor: Tensor | None = torch.frombuffer(buffer, dtype=torch.uint8)

    def _ending(self) -> Callable[[], None]:
        """Give the function that ends the reservation; it must not hold the range itself."""
        return partial(self._system.unmap, self.address, self.capacity_bytes)

    @property
    def tensor(self) -> Tensor:
        """uint8 [capacity_bytes] over the reservation, zero-copy."""
        if self._tensor is None:
            raise RuntimeMemoryError(f"the range {self.name} is closed: compile the model again.")
        return self._tensor

    def _grow(self, missing: Spans, populate: bool) -> None:
        size, end = total(missing), max(missing[-1][1], self.end_bytes)
        with interrupts_held() as raise_pending, ExitStack() as undo:
            self._ledger.charge(self.name, size)
            undo.callback(self._ledger.release, self.name, size)
            try:
                for first, last in missing:
                    start, part = self.address + first, last - first
                    undo.callback(self._withdraw, start, part)
                    self._system.protect(start, part, "write")
                    if populate:
                        self._populate(start, part, raise_pending)
            except OSError as error:
                raise self._refused(size, error.strerror or str(error), self._system.available()) from error
            self._attach(end)
            undo.pop_all()
            self._committed = joined([*self._committed, *missing])
            self._high_water = max(self._high_water, end)
            self.changes += 1

    def _populate(self, start: int, size: int, raise_pending: Callable[[], None]) -> None:
        """Fault pages in piece by piece, never more than is free: Linux would kill a process rather than fail a call.

        All of it must be free beforehand; on a machine whose memory grows with use, only the next piece.
        """
        grows = self._system.grows()
        for done in range(0, size, POPULATE_BYTES):
            step, room = min(POPULATE_BYTES, size - done), self._system.available()
            if room is not None and room < (step if grows else size - done):
                there = f"host memory too small: {format_bytes(room + done)} of physical memory are available"
                raise self._refused(size, there, room + done)
            self._system.populate(start + done, step)
            raise_pending()

    def _attach(self, end: int) -> None:
        """Do the last step of a growth to `[0, end)` that a kind of range needs, such as pinning."""

    def _refused(self, size: int, reason: str, available: int | None) -> HostMemoryError:
        return HostMemoryError(
            f"{self.name}: the system refused {format_bytes(size)} on top of {format_bytes(self.committed_bytes)} "
            f"({reason}); nothing was changed. Free memory, or plan with a smaller budget.",
            asked_bytes=size,
            committed_bytes=self.committed_bytes,
            available_bytes=available,
        )

    def _withdraw(self, start: int, size: int) -> None:
        """Discard and protect pages, also pages that never were accessible."""
        self._system.discard(start, size)
        self._system.protect(start, size, self._released)

    def decommit(self, num_bytes: int = 0, *, holes: Spans = ()) -> None:
        """Give back the memory beyond `[0, num_bytes)`, rounded up to pages, and the whole pages inside `holes`.

        Touching it faults, unless the pool's `released` is "read".
        """
        gone = without(self._committed, self._pages(round_up(num_bytes, self.page_bytes), holes))
        with interrupts_held() as raise_pending:
            for first, last in gone:
                self._withdraw(self.address + first, last - first)
                self._ledger.release(self.name, last - first)
                self._committed = without(self._committed, [(first, last)])
                self.changes += 1
                raise_pending()

    def resident_bytes(self) -> int:
        """Measure the range's bytes in physical memory, as counted by the system."""
        return (
            self._system.resident(self.address, self._high_water)
            if self._high_water and self._tensor is not None
            else 0
        )

    def close(self) -> None:
        """Give the memory back, and the addresses once no tensor views them. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            try:
                self.decommit()
            finally:
                self._tensor = None


class PagePool(RangePool):
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
        Access to memory that was given back: "none", so that a stray access faults; or "read", which reads zeros, for
        views that users hold: a forgotten `.clone()` must not end the process.

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
        system: Linux | None = None,
        released: Access = "none",
    ) -> None:
        super().__init__(ledger if ledger is not None else DeviceLedger())
        if page_bytes <= 0 or page_bytes % mmap.PAGESIZE:
            raise ValueError(f"page_bytes is a multiple of {mmap.PAGESIZE}, got {page_bytes}")
        self.page_bytes, self._released = page_bytes, released
        self._system = system if system is not None else Linux()

    def _make(self, name: str, capacity_bytes: int) -> PageRange:
        return PageRange(name, capacity_bytes, self.ledger, self.page_bytes, self._system, self._released)
