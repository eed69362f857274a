"""Captured graphs: how many bytes of the budget are set aside for them, and which graphs are kept.

The size of a graph is unknown before its first launch, when the driver uploads its launches and arguments. So the device's free
memory is read before a capture and after the first launch, and again when a graph is dropped. Drivers keep what graphs took, for
later graphs: what is set aside does not come back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch

from mosaic.runtime.interrupts import interrupts_held
from mosaic.units import MIB, format_bytes

USUAL_BYTES: Final = 4 * MIB
"""What a graph of 600 launches takes."""
MOST_BYTES: Final = 512 * USUAL_BYTES
"""The most that captured graphs of a model take."""
SHARE: Final = 8
"""Which part of what weights leave of the budget they take at most, as a divisor."""


class NoRoom(Exception):
    """A graph needs more than the room for graphs, less that of the other graphs of the same step."""


@dataclass(slots=True)
class _Kept:
    graph: torch.cuda.CUDAGraph
    num_bytes: int


class GraphMemory:
    """The captured graphs of one engine, most recently replayed, within the bytes that are set aside for them.

    Graphs launched since `begin` are in use and stay. Others are dropped when room is needed, least recently used first, after the
    device is drained.

    Parameters
    ----------
    free_bytes
        Reads the device's free memory; None: graphs count as 0 bytes.
    drain
        Waits until no graph runs.
    set_aside
        Asked for so many bytes in all, beside the reserve, when more are needed; returns whether they are set aside from now on.
    most_bytes
        The most that all graphs take together.
    reserved_bytes
        The part of the context that is reserved for graphs.

    Attributes
    ----------
    room_bytes
        The most that graphs may hold now.
    held_bytes
        What they hold, and the driver for them.

    Examples
    --------
    >>> class Graph:
    ...     def replay(self) -> None:
    ...         print("launched")
    >>> graphs = GraphMemory()
    >>> graphs.capture("a step", Graph)
    launched
    >>> "a step" in graphs
    True
    """

    def __init__(
        self,
        free_bytes: Callable[[], int] | None = None,
        drain: Callable[[], None] = lambda: None,
        *,
        set_aside: Callable[[int], bool] = lambda num_bytes: True,
        most_bytes: int = MOST_BYTES,
        reserved_bytes: int = 0,
    ) -> None:
        self._free_bytes, self._drain = free_bytes if free_bytes is not None else lambda: 0, drain
        self._set_aside, self._most, self._reserved = set_aside, most_bytes, reserved_bytes
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._in_use: set[Hashable] = set()
        self.room_bytes, self.held_bytes, self._largest = reserved_bytes, 0, 0

    @property
    def most(self) -> int:
        """About as many graphs are kept at once; where they take nothing, as many as that of the most room."""
        return max((self.room_bytes or MOST_BYTES) // USUAL_BYTES, 1)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def begin(self) -> None:
        """Begin a step: graphs of the last step are not in use any more."""
        self._in_use.clear()

    def find(self, key: Hashable) -> torch.cuda.CUDAGraph | None:
        """Return the graph of a key, to be launched in this step; None if it is not kept."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        self._kept.move_to_end(key)
        self._in_use.add(key)
        return kept.graph

    def capture(self, key: Hashable, capture: Callable[[], torch.cuda.CUDAGraph]) -> None:
        """Capture the graph of a key, launch it, and count its bytes.

        Raises
        ------
        NoRoom
            If it needs more room than there is beside the graphs in use. It was launched, and is not kept.
        """
        self.drop(key)
        usual = self._taken() // max(len(self._kept), 1)
        while self._taken() + usual > self.room_bytes and self._grow():
            pass
        self._drop_while(lambda: self._taken() + usual > self.room_bytes)
        before = self._free_bytes()
        with interrupts_held():
            graph = capture()
            graph.replay()
            more = max(before - self._free_bytes(), 0)
            # a driver may have kept memory of dropped graphs, for later ones
            self._largest = max(self._largest, more)
            again = min(self.held_bytes - self._taken(), self._largest - more)
            self.held_bytes += more
            self._kept[key] = _Kept(graph, more + again)
            self._in_use.add(key)
            del graph
            while more and self.held_bytes > self.room_bytes and self._grow():
                pass
            if more:
                self._shrink()
            fits = self.held_bytes <= self.room_bytes or not more  # what lies in kept memory takes none from others
            if not fits:
                self._give_back(key)
        if not fits:
            taken, there = format_bytes(more), format_bytes(max(self.room_bytes - self.held_bytes, 0))
            raise NoRoom(f"its graph takes {taken}, there are {there} for it beside others of the same step")

    def expect(self) -> None:
        """Set aside all that graphs may take, as far as that is possible: many are to come."""
        while self._grow():
            pass

    def _grow(self) -> bool:
        """Set twice as many bytes aside; return whether that was possible."""
        more = min(max(2 * self.room_bytes, self._most // 64), self._most)
        with interrupts_held():
            if more <= self.room_bytes or not self._set_aside(more - self._reserved):
                return False
            self.room_bytes = more
        return True

    def drop(self, key: Hashable) -> None:
        """Drop the graph of a key, if there is one, in use or not."""
        if key in self._kept:
            self._give_back(key)

    def clear(self) -> None:
        """Drop all graphs."""
        self.begin()
        self._drop_while(lambda: True)

    def close(self) -> None:
        """Drop all graphs, also those of a lost device."""
        with suppress(RuntimeError):
            self._drain()
        self._kept.clear()
        self.begin()
        self.held_bytes = 0

    def _taken(self) -> int:
        """Bytes of the graphs that are kept."""
        return sum(kept.num_bytes for kept in self._kept.values())

    def _drop_while(self, lacks_room: Callable[[], bool]) -> None:
        """Drop graphs that are not in use, least recently used first, until there is enough room."""
        idle = [key for key in self._kept if key not in self._in_use]
        while idle and lacks_room():
            self._give_back(idle.pop(0))

    def _shrink(self) -> None:
        """Drop graphs that are not in use until no more is held than there is room, or the driver keeps the memory of one that
        goes."""
        before = self.held_bytes + 1
        for key in [key for key in self._kept if key not in self._in_use]:
            if not self.room_bytes < self.held_bytes < before:
                break
            before = self.held_bytes
            self._give_back(key)

    def _give_back(self, key: Hashable) -> None:
        """Drop one graph after draining the device, and measure what the driver frees."""
        self._drain()
        with interrupts_held():
            self._in_use.discard(key)
            before = self._free_bytes()
            del self._kept[key]
            self.held_bytes -= min(max(self._free_bytes() - before, 0), self.held_bytes)
