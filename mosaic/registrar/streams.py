"""Side streams of a graph: which op runs where, and the edges that order them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mosaic.errors import GraphError
from mosaic.registrar.parts import MAIN, Edge
from mosaic.registrar.source import caller

__all__ = ["Streams"]


@dataclass(slots=True)
class _Side:
    """A side stream: the main op that its next ops wait for, and the first and last op since."""

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
    open_waits
        Side ops that the next main op waits for.
    """

    def __init__(self) -> None:
        self.edges: list[Edge] = []
        self.open_waits: list[int] = []
        self._sides: dict[str, _Side] = {}
        self._current: _Side | None = None
        self._last_main = -1

    @property
    def current(self) -> str:
        """The stream that ops are registered on."""
        return MAIN if self._current is None else self._current.name

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """Let ops run beside the main stream, after its last op so far."""
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

    def wait(self, name: str) -> None:
        """Let the next main op wait for everything on a side stream so far."""
        side = self._sides.get(name)
        if side is None or side.last is None:
            raise GraphError(f"wait('{name}') ({caller()}): nothing was registered on that stream")
        self.open_waits.append(side.last)

    def order(self, op: int) -> None:
        """Note an op of the current stream."""
        side = self._current
        if side is None:
            self._last_main = op
            self.edges.extend(Edge("wait", last, op) for last in self.open_waits)
            self.open_waits.clear()
            return
        if side.first is None:
            side.first = op
            if side.forked_after >= 0:
                self.edges.append(Edge("fork", side.forked_after, op))
        side.last = op
