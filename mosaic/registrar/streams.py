"""Side streams of a graph: the stream of each op, and the edges that order ops."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mosaic.errors import GraphError
from mosaic.registrar.parts import MAIN, Edge
from mosaic.registrar.source import caller


@dataclass(slots=True)
class _Side:
    """A side stream: the main op that it forked from, and its first and last op since."""

    name: str
    forked_after: int
    first: int | None = None
    last: int | None = None


class Streams:
    """The order between streams, as ops are registered.

    Attributes
    ----------
    edges
        Forks and waits so far.
    """

    def __init__(self) -> None:
        self.edges: list[Edge] = []
        self._waits: list[tuple[int, int | None]] = []
        self._sides: dict[str, _Side] = {}
        self._current: _Side | None = None
        self._last_main = -1

    @property
    def current(self) -> str:
        """The stream that ops are registered on."""
        return MAIN if self._current is None else self._current.name

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """Register ops beside the main stream, forked after its last op so far."""
        if self._current is not None or name == MAIN:
            raise GraphError(f"stream '{name}' ({caller()}): streams fork from the main stream only")
        side = self._sides.get(name)
        if side is None or side.last is None:
            side = self._sides[name] = _Side(name, self._last_main)
        else:
            side.forked_after, side.first = self._last_main, None
        self._current = side
        try:
            yield
        finally:
            self._current = None

    @property
    def open_waits(self) -> list[int]:
        """Side ops that a later main op waits for."""
        return [last for last, _ in self._waits]

    def wait(self, name: str, updates: int | None = None) -> None:
        """Make the next main op, or the next that writes the buffer `updates`, wait for a side stream's ops so far."""
        side = self._sides.get(name)
        if side is None or side.last is None:
            raise GraphError(f"wait('{name}') ({caller()}): nothing was registered on that stream")
        self._waits.append((side.last, updates))

    def order(self, op: int, writes: Collection[int]) -> None:
        """Record an op of the current stream, and the ids of the buffers that it writes."""
        side = self._current
        if side is None:
            self._last_main = op
            due = [wait for wait in self._waits if wait[1] is None or wait[1] in writes]
            self.edges.extend(Edge("wait", last, op) for last, _ in due)
            self._waits = [wait for wait in self._waits if wait not in due]
            return
        if side.first is None:
            side.first = op
            if side.forked_after >= 0:
                self.edges.append(Edge("fork", side.forked_after, op))
        side.last = op
