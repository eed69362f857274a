"""The common part of all pools: ranges by name, charged to one ledger, and closed together."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from mosaic.errors import RuntimeMemoryError
from mosaic.runtime.interrupts import interrupts_held
from mosaic.runtime.ledger import DeviceLedger

__all__ = ["ClosesOnExit", "RangePool", "close_all"]


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


class PoolRange(Closable, Protocol):
    """The range interface that a pool needs."""

    @property
    def committed_bytes(self) -> int:
        """Bytes that are memory."""


AnyRange = TypeVar("AnyRange", bound=PoolRange)


class RangePool(ClosesOnExit, Generic[AnyRange]):
    """Ranges by name, charged to one ledger."""

    def __init__(self, ledger: DeviceLedger) -> None:
        self.ledger = ledger
        self._ranges: dict[str, AnyRange] = {}

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

    def close(self) -> None:
        """Close every range, even if one close fails; its error is raised at the end. Twice is fine."""
        with interrupts_held():
            parts = tuple(self._ranges.values())
            self._ranges.clear()
            close_all(*parts)
