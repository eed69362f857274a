"""First fit and best fit in program order, as a run-time allocator places: only what is live matters, and the holes between."""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heappush

from .blocks import Blocks, Tick, on, paced
from .greedy import place_in_order


def first_fit(blocks: Blocks, tick: Tick = on) -> list[int]:
    """Place blocks by start time, each in the lowest hole."""
    return _by_start(blocks, tick, best=False)


def best_fit(blocks: Blocks, tick: Tick = on) -> list[int]:
    """Place blocks by start time, each in the smallest hole that holds it; above all if none does."""
    return _by_start(blocks, tick, best=True)


def _by_start(blocks: Blocks, tick: Tick, *, best: bool) -> list[int]:
    if blocks.plain:
        return place_online(blocks, best=best, tick=tick)
    return place_in_order(blocks, program_order(blocks), best=best, tick=tick)


def program_order(blocks: Blocks) -> list[int]:
    """Return rows by start, ties by row."""
    return sorted(range(len(blocks)), key=blocks.starts.__getitem__)


def place_online(blocks: Blocks, *, best: bool, tick: Tick = on) -> list[int]:
    """Place plain blocks by start time, each in the lowest (or, if `best`, the smallest) hole; O(n * holes).

    Above the highest live block begins a hole without an end; it is taken if no other will do.
    """
    sizes, starts, ends = blocks.sizes, blocks.starts, blocks.ends
    offsets = [0] * len(sizes)
    lows, tops = [0], [_ENDLESS]  # holes, ascending; no two touch
    expiring: list[tuple[int, int]] = []
    for row in paced(program_order(blocks), tick, every=512):
        while expiring and expiring[0][0] <= starts[row]:
            freed = heappop(expiring)[1]
            _free(lows, tops, offsets[freed], offsets[freed] + sizes[freed])
        size = sizes[row]
        hole = _smallest(lows, tops, size) if best else _lowest(lows, tops, size)
        offsets[row] = lows[hole]
        lows[hole] += size
        if lows[hole] == tops[hole]:
            del lows[hole], tops[hole]
        heappush(expiring, (ends[row], row))
    return offsets


_ENDLESS = 1 << 200


def _lowest(lows: list[int], tops: list[int], size: int) -> int:
    for hole, low in enumerate(lows):
        if tops[hole] - low >= size:
            return hole
    raise AssertionError("the last hole has no end")


def _smallest(lows: list[int], tops: list[int], size: int) -> int:
    rooms = [top - low for low, top in zip(lows, tops, strict=True)]
    return rooms.index(min([room for room in rooms if room >= size]))


def _free(lows: list[int], tops: list[int], low: int, top: int) -> None:
    """Give an address range back: it joins the holes that it touches."""
    after = bisect_left(lows, top)
    joins_after = lows[after] == top
    if after and tops[after - 1] == low:
        if joins_after:
            tops[after - 1] = tops[after]
            del lows[after], tops[after]
        else:
            tops[after - 1] = top
    elif joins_after:
        lows[after] = low
    else:
        lows.insert(after, low)
        tops.insert(after, top)
