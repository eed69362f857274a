"""When each buffer is alive, in op indices, half-open: the rules of regions, streams, barriers and aliases.

Pure: a body and the set of active chunk knobs in, intervals out. Linear in the
number of accesses. Regions are applied from the inside out (Mosaic, section
4.3: barriers keep a loop's inputs alive until the last chunk).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from mosaic.planner.body import Access, Body

__all__ = ["BarrierRecord", "Lifetimes", "derive"]

_UNLISTED = frozenset({"weights", "host", "external"})


class BarrierRecord(NamedTuple):
    """The buffers that one region (or explicit barrier, `region` None) keeps alive over [start, end)."""

    name: str
    region: int | None
    start: int
    end: int
    inputs: list[int]
    outputs: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """Intervals of every buffer of a body; a root's covers its whole alias group."""

    starts: list[int]
    ends: list[int]
    gaps: list[Sequence[tuple[int, int]]]
    regions: tuple[int, ...]
    barriers: tuple[BarrierRecord, ...]
    homes: list[int | None]


def derive(body: Body, active: Set[str]) -> Lifetimes:
    """Derive all lifetimes with the chunk regions of the knobs in `active` on and all others off."""
    accesses = body.accesses
    starts, ends = map(list, body.intervals)
    on = [i for i, region in enumerate(body.regions) if region.knob in active]
    homes = [None if buffer.home is None else _nearest(body, buffer.home, active) for buffer in body.buffers]
    inside_out = reversed(on)  # a region is registered before those inside it
    barriers = [_apply_region(body, i, homes, starts, ends) for i in inside_out]
    barriers += _apply_barriers(body, starts, ends)
    _apply_streams(body, active, starts, ends)
    gaps = _merge_aliases(body, on, accesses, starts, ends)
    order = {i: rank for rank, i in enumerate(on)}
    barriers.sort(key=lambda b: (b.region is None, order.get(b.region if b.region is not None else -1, 0), b.end))
    return Lifetimes(starts=starts, ends=ends, gaps=gaps, regions=tuple(on), barriers=tuple(barriers), homes=homes)


def _nearest(body: Body, region: int | None, active: Set[str]) -> int | None:
    while region is not None and body.regions[region].knob not in active:
        region = body.regions[region].parent
    return region


def _is_inside(body: Body, home: int | None, region: int) -> bool:
    while home is not None and home != region:
        home = body.regions[home].parent
    return home == region


def _apply_region(body: Body, index: int, homes: list[int | None], starts: list[int], ends: list[int]) -> BarrierRecord:
    region = body.regions[index]
    inputs, outputs = list[int](), list[int]()
    for b, written in body.touched[index]:
        if (home := homes[b]) is not None and _is_inside(body, home, index):
            continue
        if body.buffers[b].pool not in _UNLISTED:
            (outputs if written else inputs).append(b)
        if written and starts[b] > region.start:
            starts[b] = region.start
        if ends[b] < region.end:
            ends[b] = region.end
    return BarrierRecord(region.name, index, region.start, region.end, inputs, outputs)


def _apply_barriers(body: Body, starts: list[int], ends: list[int]) -> list[BarrierRecord]:
    """Stretch what registrars ask for; a barrier without effect is not recorded."""
    found = []
    for name, ids, since, end in body.barriers:
        begin = since if since is not None else end - 1
        stretched = [b for b in ids if ends[b] < end or starts[b] > begin]
        for b in stretched:
            starts[b], ends[b] = min(starts[b], begin), max(ends[b], end)
        if stretched:
            found.append(BarrierRecord(name, None, begin, end, stretched, []))
    return found


def _apply_streams(body: Body, active: Set[str], starts: list[int], ends: list[int]) -> None:
    """Keep the buffers of a side op alive from its fork to its join; inside a loop, through the loop."""
    for region, start, end, touched in body.side_windows:
        loop = _nearest(body, region, active)
        if loop is not None:
            start, end = body.regions[loop].start, body.regions[loop].end
        for b in touched:
            starts[b] = min(starts[b], start)
            ends[b] = max(ends[b], end)


def _merge_aliases(
    body: Body, on: list[int], accesses: list[list[Access]], starts: list[int], ends: list[int]
) -> list[Sequence[tuple[int, int]]]:
    """Give roots the union of their group's lifetimes, and find the gaps in which a group holds no value."""
    looped = [False] * len(body.ops)
    for i in on:
        looped[body.regions[i].start : body.regions[i].end] = [True] * (body.regions[i].end - body.regions[i].start)
    gaps: list[Sequence[tuple[int, int]]] = [()] * len(body.buffers)
    stretched = {b for _, ids, _, _ in body.barriers for b in ids}
    for b, members in body.reused:
        live: list[tuple[int, int]] = []
        for m in members:
            plain = m not in stretched and not any(looped[a.op] or body.ops[a.op].stream != "main" for a in accesses[m])
            live += _values(accesses[m], starts[m], ends[m]) if plain else [(starts[m], ends[m])]
        live.sort()
        end = live[0][1]
        for start, stop in live[1:]:
            if start > end:
                gaps[b] = [*gaps[b], (end, start)]
            end = max(end, stop)
        starts[b], ends[b] = live[0][0], end
    return gaps


def _values(accesses: list[Access], start: int, end: int) -> list[tuple[int, int]]:
    """Intervals in which a buffer holds a value that is read later: each complete overwrite begins a new one."""
    found: list[tuple[int, int]] = []
    begin, last = start, start
    for access in accesses:
        if not access.read and access.op > begin:
            found.append((begin, last + 1))
            begin = access.op
        last = access.op
    found.append((begin, end))
    return found
