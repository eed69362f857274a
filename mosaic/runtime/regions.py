"""The loops of a plan: their ops, and the rows of each iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from mosaic.planner.plan_records import PlanRecords, PlanRegion


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One iteration of a region: rows [start, end) of its dim."""

    index: int
    start: int
    end: int


Chunks: TypeAlias = Mapping[str, Chunk]
"""The current iterations of the enclosing loops."""


class Regions:
    """The regions of a plan by name, and their nesting. None stands for the step itself."""

    def __init__(self, records: PlanRecords) -> None:
        self.by_name = {region.name: region for region in records.regions}
        self._chains: dict[str, tuple[str, ...]] = {}
        self._chunks: dict[tuple[int, int, int], tuple[Chunk, ...]] = {}
        self._children: dict[str | None, dict[int, PlanRegion]] = {}
        for region in self.by_name.values():
            self._children.setdefault(region.parent, {})[region.start] = region

    def __getitem__(self, name: str) -> PlanRegion:
        """Fetch a region by name."""
        return self.by_name[name]

    def children(self, name: str | None) -> Mapping[int, PlanRegion]:
        """Give the loops directly inside, by their first op."""
        return self._children.get(name, {})

    def chain(self, name: str | None) -> tuple[str, ...]:
        """Give a region and its enclosing regions, innermost first; nothing for the step itself."""
        if name is None:
            return ()
        if name not in self._chains:
            self._chains[name] = (name, *self.chain(self.by_name[name].parent))
        return self._chains[name]

    def common(self, a: str | None, b: str | None) -> str | None:
        """Give the innermost region that holds both; None if only the step does."""
        around = self.chain(a)
        return next((name for name in self.chain(b) if name in around), None)

    def item(self, name: str | None, op: int, op_region: str | None) -> tuple[int, int]:
        """Give the ops [start, end) of the item directly inside a region that holds an op: the op alone, or a loop."""
        chain = self.chain(op_region)
        inner = chain[: len(chain) - len(self.chain(name))]
        if not inner:
            return op, op + 1
        loop = self.by_name[inner[-1]]
        return loop.start, loop.end

    def iterations(self, region: PlanRegion, outer: Chunks) -> tuple[Chunk, ...]:
        """Give the iterations of a region; the last one has the rest. Equal iterations are the same object.

        A loop inside a loop over the same dim divides the rows of the outer iteration; its chunks count from its start.
        """
        extent = region.extent
        for name in self.chain(region.parent):
            if self.by_name[name].dim == region.dim:
                extent = min(extent, outer[name].end - outer[name].start)
                break
        key = region.count, region.rows, extent
        if key not in self._chunks:
            ranges = ((i, i * region.rows, min((i + 1) * region.rows, extent)) for i in range(region.count))
            self._chunks[key] = tuple(
                Chunk(index=index, start=start, end=end) for index, start, end in ranges if start < end
            )
        return self._chunks[key]
