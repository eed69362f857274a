"""Combinations of choices that may fit a request: ladders of escalating choices, and the lowest configuration of each.

Each rung of a ladder needs less of the device than the one before, and more of the host. So a few rungs, each a
compiled body, decide for all of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import TypeAlias

from mosaic.planner.space import Config, Point

Rung: TypeAlias = tuple[str, ...]
"""An option of every choice."""


def groups(point: Point) -> Iterator[tuple[Rung, list[list[Rung]]]]:
    """Yield each combination of the plain choices, with nothing escalated, and its ladders.

    A last rung that does not need less of the device, as may be with returned logits, is left out.
    """

    def least(choices: Rung) -> int:
        return point.total_bytes(point.lowest(choices))

    for base, ladders in point.ladders():
        for rungs in ladders:
            while len(rungs) > 1 and "logit_rows" in point.dims and least(rungs[-1]) >= least(rungs[-2]):
                rungs.pop()
        yield base, ladders


def whole_grid(point: Point, host_budget_bytes: int = 0) -> Iterator[Config]:
    """Yield every configuration of the grid that the host has room for, in a fixed order."""
    combinations = dict[Rung, None]()
    for base, ladders in groups(point):
        combinations[base] = None
        for ladder in ladders if host_budget_bytes else ():
            combinations.update(dict.fromkeys(affordable(point, ladder, host_budget_bytes)))
    for choices in combinations:
        yield from point.configs(choices)


def smallest(point: Point, host_budget_bytes: int = 0, *, slack: float = inf) -> Iterator[Config]:
    """Yield the configuration with the lowest total, then the others with up to `slack` bytes more.

    There is one per combination of plain choices and per ladder: the one with the least device memory for which the
    host has room. If the host has room for none, those with nothing escalated are yielded.

    The highest rung bounds the other rungs of its ladder from below, so their bodies are compiled only if the bound is
    low enough.
    """
    found = list(groups(point))
    bases = [[base] for base, _ in found]
    ladders = [ladder for _, several in found for ladder in several if ladder and host_budget_bytes]
    held = [point.lowest(rungs[-1]) for rungs in (*bases, *ladders)]
    waiting: list[tuple[int, int, Sequence[Rung]]] = [
        (point.total_bytes(held[k]), k, rungs) for k, rungs in enumerate((*bases, *ladders))
    ]
    heapify(waiting)
    given, most = set[Config](), inf
    while waiting and waiting[0][0] <= most:
        total, k, rungs = heappop(waiting)
        room = affordable(point, rungs, host_budget_bytes)
        if room and len(room) < len(rungs):
            held[k] = point.lowest(room[-1])
            heappush(waiting, (point.total_bytes(held[k]), k, room))
        elif room and held[k] not in given:
            most = min(most, total + slack)
            given.add(held[k])
            yield held[k]
    if not given:
        yield from sorted(held[: len(bases)], key=point.total_bytes)


def affordable(point: Point, ladder: Sequence[Rung], host_budget_bytes: int) -> Sequence[Rung]:
    """Return the lower rungs of a ladder for which the host has room; higher ones need more of it."""
    if not ladder or point.host_bytes(ladder[-1]) <= host_budget_bytes:
        return ladder
    low, high = 0, len(ladder) - 1
    for k, rung in enumerate(ladder[:-1]):
        if point.space.has_counted(rung, "host"):  # its body is compiled, so the question is cheap
            low, high = (k + 1, high) if point.host_bytes(rung) <= host_budget_bytes else (low, min(k, high))
    return ladder[: bisect_right(ladder, host_budget_bytes, low, high, key=point.host_bytes)]
