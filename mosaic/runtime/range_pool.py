"""Shared by ranges and pools of every kind: the committed part of a range, and ranges by name, charged to one ledger."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType, TracebackType
from typing import Protocol, Self

from torch import Tensor

from mosaic.errors import RuntimeMemoryError
from mosaic.runtime.interrupts import interrupts_held
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.spans import Spans, inner_pages, total, without
from mosaic.units import round_up


class Closable(Protocol):
    """A range or a pool, for `close_all`."""

    def close(self) -> None:
        """Give everything back."""


def close_all(*parts: Closable) -> None:
    """Close everything, even if one close fails; its error is raised at the end."""
    with ExitStack() as closing:
        for part in reversed(parts):
            closing.callback(part.close)


class ClosesOnExit:
    """A context manager that closes at the end; an error of the body is raised with failures of closing as notes."""

    def close(self) -> None:
        """Give everything back."""
        raise NotImplementedError

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
            error.add_note(f"closing failed too: {failure}")


class Range:
    """Addresses reserved once, of which `[0, end_bytes)` is memory, but for holes; they never move. Made by a pool's `reserve`.

    Touching what is not memory is a fault, by design. Tensors keep the addresses reserved after `close`, never the memory.

    Attributes
    ----------
    changes
        How often memory was added or given back.
    """

    address: int

    def __init__(self, name: str, capacity_bytes: int, ledger: DeviceLedger, page_bytes: int) -> None:
        self.name, self.page_bytes = name, page_bytes
        self.capacity_bytes = round_up(max(capacity_bytes, 1), page_bytes)
        self.changes = 0
        self._ledger, self._closed = ledger, False
        self._committed: Spans = ()

    @property
    def committed_bytes(self) -> int:
        """Bytes that are memory."""
        return total(self._committed)

    @property
    def end_bytes(self) -> int:
        """Where the last byte that is memory ends."""
        return self._committed[-1][1] if self._committed else 0

    def holds(self, start: int, end: int) -> bool:
        """Whether all bytes `[start, end)` are memory."""
        return not without([(start, end)], self._committed)

    @property
    def tensor(self) -> Tensor:
        """uint8 [capacity_bytes] over the range, zero-copy."""
        raise NotImplementedError

    @property
    def device_tensor(self) -> Tensor:
        """The same bytes as the device sees them; another tensor than `tensor` for pinned host memory alone."""
        return self.tensor

    def commit(self, num_bytes: int, *, holes: Spans = (), populate: bool = True) -> None:
        """Make `[0, num_bytes)` memory, rounded up to pages; what is committed already stays. All or nothing.

        Parameters
        ----------
        num_bytes
            How far memory has to reach.
        holes
            Bytes `[start, end)`, sorted, that need not be memory: the whole pages inside are left as they are.
        populate
            Fault new pages of the host in now, so that a later touch cannot fail and resident bytes equal committed ones. Memory
            of a device is always populated; what new memory of it holds is undefined.

        Raises
        ------
        DoesNotFit
            If the ledger's budget does not allow it.
        RuntimeMemoryError
            If the range is too small, or the operating system or the driver refuses.
        """
        missing = without(self._pages(self._end(num_bytes), holes), self._committed)
        if missing:
            self._grow(missing, populate)

    def _end(self, num_bytes: int) -> int:
        if self._closed:
            raise RuntimeMemoryError(f"{self.name}: the range is closed.")
        end = round_up(num_bytes, self.page_bytes)
        if end > self.capacity_bytes:
            self._ledger.require(self.name, end - self.committed_bytes)
            raise RuntimeMemoryError(
                f"{self.name}: {num_bytes:,} bytes asked for, the range holds {self.capacity_bytes:,} at most: "
                f"reserve a larger one."
            )
        return end

    def _pages(self, end: int, holes: Spans) -> Spans:
        """The pages of `[0, end)` that are not inside of holes."""
        return without([(0, end)], inner_pages(holes, self.page_bytes))

    def _grow(self, missing: Spans, populate: bool) -> None:
        """Make spans memory; on failure nothing is changed."""
        raise NotImplementedError

    def decommit(self, num_bytes: int = 0, *, holes: Spans = ()) -> None:
        """Give back the memory beyond `[0, num_bytes)`, rounded up to pages, and the whole pages inside `holes`."""
        raise NotImplementedError

    def resize(self, num_bytes: int, *, holes: Spans = (), populate: bool = True) -> None:
        """Commit and decommit so that exactly `[0, num_bytes)`, rounded up to pages, is memory, but for `holes`."""
        self._end(num_bytes)
        self.decommit(num_bytes, holes=holes)
        self.commit(num_bytes, holes=holes, populate=populate)

    def resident_bytes(self) -> int:
        """Give the bytes in physical memory."""
        return self.committed_bytes

    def close(self) -> None:
        """Give the memory back, and the addresses once no tensor views them. Closing twice is fine."""
        raise NotImplementedError


class RangePool(ClosesOnExit):
    """Ranges by name, charged to one ledger."""

    def __init__(self, ledger: DeviceLedger) -> None:
        self.ledger = ledger
        self._ranges: dict[str, Range] = {}
        self.ranges: Mapping[str, Range] = MappingProxyType(self._ranges)
        """The open ranges by name."""

    def _make(self, name: str, capacity_bytes: int) -> Range:
        raise NotImplementedError

    def reserve(self, name: str, capacity_bytes: int) -> Range:
        """Reserve a range; it holds no memory yet."""
        if name in self._ranges:
            raise RuntimeMemoryError(f"the range {name} exists already: close it first, or choose another name.")
        self._ranges[name] = self._make(name, capacity_bytes)
        return self._ranges[name]

    @property
    def committed_bytes(self) -> int:
        """Bytes committed in all ranges."""
        return sum(part.committed_bytes for part in self._ranges.values())

    def close(self) -> None:
        """Close every range, even if one close fails; its error is raised at the end. Twice is fine."""
        with interrupts_held():
            parts = tuple(self._ranges.values())
            self._ranges.clear()
            close_all(*parts)
