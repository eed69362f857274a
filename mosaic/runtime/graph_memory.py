"""Captured graphs: their device memory, in the ledger under `graphs`, and which graphs are kept.

The size of a graph is unknown before its first launch, when the driver uploads its launches and arguments. So the
device's free memory is read before a capture and after the first launch, and again when a graph is dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch

from mosaic.runtime.interrupts import interrupts_held
from mosaic.runtime.ledger import DeviceLedger
from mosaic.units import MIB, format_bytes

GRAPH_BYTES: Final = 2048 * MIB
"""The most that captured graphs of a model take, if the budget has it free: those of all steps that a session keeps, with 600
launches each."""


class NoRoom(Exception):
    """A graph needs more than the room for graphs, less that of the other graphs of the same step."""


@dataclass(slots=True)
class _Kept:
    graph: torch.cuda.CUDAGraph
    num_bytes: int


class GraphMemory:
    """The captured graphs of one engine, most recently replayed, up to the room for graphs.

    The room is the reserve, plus what the ledger has free, up to `most_bytes`. The reserve is part of the owner
    `context` in the ledger, and moves from there to `graphs` and back. Graphs launched since `begin` are in use and
    stay. Others are dropped when room is needed, least recently used first, after the device is drained.

    Parameters
    ----------
    ledger
        Of the device. A fresh one without a limit if not given.
    free_bytes
        Reads the device's free memory; None: graphs count as 0 bytes.
    drain
        Waits until no graph runs.
    make_room
        Called if there is less room than `most_bytes`: gives back unneeded memory of the budget.
    most_bytes
        The most that all graphs take together.
    reserved_bytes
        The part of `context` that is reserved for graphs.

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
        ledger: DeviceLedger | None = None,
        free_bytes: Callable[[], int] | None = None,
        drain: Callable[[], None] = lambda: None,
        *,
        make_room: Callable[[], None] = lambda: None,
        most_bytes: int = GRAPH_BYTES,
        reserved_bytes: int = 0,
    ) -> None:
        self._ledger = ledger if ledger is not None else DeviceLedger()
        self._free_bytes, self._drain = free_bytes if free_bytes is not None else lambda: 0, drain
        self._make_room, self._most, self._reserved = make_room, most_bytes, reserved_bytes
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._in_use: set[Hashable] = set()
        self._held = self._charged = self._largest = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of graphs: the ledger's `graphs`."""
        return self._held

    @property
    def room_bytes(self) -> int:
        """The most that graphs may hold now."""
        free = self._ledger.free_bytes
        return self._most if free is None else min(self._most, max(self._charged, self._reserved) + free)

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
        if self.room_bytes < self._most:
            self._make_room()
        self._drop_while(lambda: self._taken() + usual > self.room_bytes)
        room, before = self.room_bytes, self._free_bytes()
        with interrupts_held():
            graph = capture()
            graph.replay()
            more = max(before - self._free_bytes(), 0)
            # a driver may have kept memory of dropped graphs, for later ones
            self._largest = max(self._largest, more)
            again = min(self._held - self._taken(), self._largest - more)
            self._held += more
            self._kept[key] = _Kept(graph, more + again)
            self._in_use.add(key)
            del graph
            if more:
                self._shrink(room)
            fits = self._held <= room or not more  # what lies in kept memory takes none from others
            if not fits:
                self._give_back(key)
            self._charge(min(self._held, room))
        if not fits:
            taken, there = format_bytes(more), format_bytes(max(room - self._held, 0))
            raise NoRoom(f"its graph takes {taken}, there are {there} for it beside others of the same step")

    def drop(self, key: Hashable) -> None:
        """Drop the graph of a key, if there is one, in use or not."""
        if key in self._kept:
            self._give_back(key)
            self._charge(self._held)

    def give_way(self) -> bool:
        """Drop all graphs that are not in use, if they hold more than the reserve; return whether any was dropped."""
        if self._held <= self._reserved:
            return False
        before = self._held
        self._drop_while(lambda: True)
        return self._held < before

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
        self._held = 0
        self._charge(0)

    def _taken(self) -> int:
        """Bytes of the graphs that are kept."""
        return sum(kept.num_bytes for kept in self._kept.values())

    def _drop_while(self, lacks_room: Callable[[], bool]) -> None:
        """Drop graphs that are not in use, least recently used first, until there is enough room."""
        idle = [key for key in self._kept if key not in self._in_use]
        while idle and lacks_room():
            self._give_back(idle.pop(0))
        self._charge(min(self._held, self._charged))

    def _shrink(self, room: int) -> None:
        """Drop graphs that are not in use until no more than `room` is held, or the driver keeps the memory of one that goes."""
        before = self._held + 1
        for key in [key for key in self._kept if key not in self._in_use]:
            if not room < self._held < before:
                break
            before = self._held
            self._give_back(key)

    def _give_back(self, key: Hashable) -> None:
        """Drop one graph after draining the device, and measure what the driver frees."""
        self._drain()
        with interrupts_held():
            self._in_use.discard(key)
            before = self._free_bytes()
            del self._kept[key]
            self._held -= min(max(self._free_bytes() - before, 0), self._held)

    def _charge(self, num_bytes: int) -> None:
        """Charge the ledger for the graphs: the reserve is moved from `context` first."""
        more = num_bytes - self._charged
        reserved = min(num_bytes, self._reserved) - min(self._charged, self._reserved)
        with interrupts_held():
            for owner, change in sorted({"graphs": more, "context": -reserved}.items(), key=lambda entry: entry[1]):
                if change < 0:
                    self._ledger.release(owner, -change)
                elif change > 0:
                    self._ledger.charge(owner, change)
            self._charged = num_bytes
