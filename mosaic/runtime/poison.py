"""Poison: fill bytes that hold no value, so that a wrong plan shows.

Floats get NaN, integers their least value. All fills run on main. A buffer is filled around its loop only, not in each
iteration, if it rotates, is carried, or is touched by side ops of the loop: iterations may then overlap.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from mosaic.planner.plan_records import PlanBuffer, PlanRecords, PlanRegion
from mosaic.runtime.regions import Regions
from mosaic.runtime.streams import MAIN
from mosaic.runtime.views import Views

POISON: Final = 0xFF
"""The fill byte for bytes without a dtype: NaN in every float dtype, -1 in integers."""

_KEPT: Final = ("weight", "state", "external", "host")  # a step must not overwrite them


class Fill(NamedTuple):
    """Bytes to fill, the value, and a label."""

    view: Tensor
    value: float | int | bool
    name: str


@dataclass(frozen=True, slots=True)
class Times:
    """The roots to fill by op: before it (their lifetime starts) or after the op before it (their lifetime ends)."""

    starts: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, list[int]] = field(default_factory=dict)

    def inside(self, region: PlanRegion) -> Times:
        """Keep the times strictly inside a region; times on its borders are filled once, outside of the loop."""
        return Times(
            *(
                {time: roots for time, roots in table.items() if region.start < time < region.end}
                for table in (self.starts, self.ends)
            )
        )

    def merged(self, other: Times) -> Times:
        """Return both sets of times as one."""
        return Times(*(_merge(a, b) for a, b in ((self.starts, other.starts), (self.ends, other.ends))))


def _merge(a: dict[int, list[int]], b: dict[int, list[int]]) -> dict[int, list[int]]:
    return {time: a.get(time, []) + b.get(time, []) for time in [*a, *(time for time in b if time not in a)]}


class Poison:
    """The fills of one plan."""

    def __init__(self, records: PlanRecords, regions: Regions, views: Views) -> None:
        self._buffers = records.buffers
        self._peak_bytes = records.peak_bytes
        self._regions, self._views = regions, views
        self._outliving = defaultdict[str | None, set[int]](set)  # by loop, values that outlive an iteration
        for barrier in records.barriers:
            self._outliving[barrier.region].update(barrier.carried)
        for op in records.ops:
            if op.stream != MAIN:
                self._outliving[op.region].update(op.operands.values())
        self._times: dict[str | None, Times] = {}
        self._find_times()

    def times(self, region: str | None) -> Times:
        """Give the fills of every pass over a region's body (None: the step)."""
        return self._times.get(region, Times())

    def fill(self, root: int, when: str) -> Fill:
        """Give the fill of a root."""
        record, view = self._buffers[root], self._views.bytes_of(root)
        return Fill(view, _value(view.dtype), f"poison {record.name} at its {when}")

    def everything(self) -> Iterator[Fill]:
        """Fill all bytes that no input occupies before the step."""
        inputs = sorted(
            (record.offset, record.offset + record.size)
            for record in self._buffers
            if record.pool == "workspace" and record.kind in ("input", *_KEPT)
        )
        position = 0
        for start, end in [*inputs, (self._peak_bytes, 0)]:
            if start > position:
                yield Fill(self._views.at("workspace", position, (start - position,), "uint8"), POISON, "poison")
            position = max(position, end)

    def _find_times(self) -> None:
        """Note when each alias group is filled, by the region in whose body the fill runs.

        A group is filled before its lifetime, after it, and in its gaps; if its home is a region, in every iteration.
        """
        groups: dict[int, list[PlanBuffer]] = {}
        for record in self._buffers:
            groups.setdefault(self._views.root(record).id, []).append(record)
        for root_id, group in groups.items():
            root, kinds = self._buffers[root_id], {record.kind for record in group}
            if root.pool != "workspace" or not kinds.isdisjoint(_KEPT):
                continue
            home, start, end = self._home(root, group)
            mine = self._times.setdefault(home, Times())
            if "input" not in kinds:
                mine.starts.setdefault(start, []).append(root_id)
            if "output" not in kinds:
                mine.ends.setdefault(end, []).append(root_id)
            for gap in root.gaps if len(group) == 1 else ():
                mine.ends.setdefault(gap[0], []).append(root_id)

    def _home(self, root: PlanBuffer, group: Sequence[PlanBuffer]) -> tuple[str | None, int, int]:
        """Find the region in whose every iteration a group is filled, and its lifetime there."""
        home: str | None = root.region
        for record in group:  # an alias that lives outside of the loop keeps values of earlier iterations
            home = self._regions.common(home, record.region)
        start, end = min(record.start for record in group), max(record.end for record in group)
        while home is not None:
            region = self._regions[home]
            if root.rotate == 1 and not any(record.id in self._outliving[home] for record in group):
                break
            home, start, end = region.parent, min(start, region.start), max(end, region.end)
        return home, start, end


def _value(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return math.nan
    if dtype == torch.bool:
        return True
    return POISON if dtype == torch.uint8 else torch.iinfo(dtype).min
