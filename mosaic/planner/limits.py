"""The largest context that fits: solved from the peak formula, then verified at L and L + 1.

With every knob at its smallest chunk, each live set is linear in the context up
to rounding, so two evaluations give its line and the line gives L_max.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from mosaic.planner.space import Config, Point, Space

__all__ = ["DimsAt", "is_feasible", "max_context", "smallest_host", "smallest_total"]

DimsAt = Callable[[int], Mapping[str, int]]
_PROBE: Final = 1 << 22
_SAMPLES: Final = (_PROBE, 1 << 20, 1 << 17, 1)
_SHORT: Final = 4096
_LIKELY: Final = 4
"""Configurations that the search for the limit asks before all are asked to verify it."""


def smallest_total(point: Point, host_budget_bytes: int = 0) -> tuple[int, Config]:
    """Bytes of the configuration that needs least, at one point."""
    return min(
        ((point.total_bytes(config), config) for config in point.smallest(host_budget_bytes)), key=lambda item: item[0]
    )


def is_feasible(point: Point, budget_bytes: int, host_budget_bytes: int = 0) -> bool:
    """Whether any configuration fits the budgets, its workspace at the lower bound."""
    return any(point.fits(config, budget_bytes, host_budget_bytes) for config in point.smallest(host_budget_bytes))


def smallest_host(point: Point, budget_bytes: int, host_budget_bytes: int) -> int | None:
    """Least pinned host memory, within a budget of it, with which a configuration fits the device; None if none does.

    Higher rungs of a ladder need less of the device and more of the host, so the first that fits is found by bisection.
    """

    def fitting(rung: tuple[str, ...]) -> bool:
        return point.total_bytes(point.lowest(rung)) <= budget_bytes

    least: int | None = None
    for _, ladders in point.groups():
        for ladder in ladders:
            rungs = point.affordable(ladder, host_budget_bytes if least is None else least - 1)
            if rungs and fitting(rungs[-1]):
                least = point.host_bytes(rungs[bisect_left(rungs, True, key=fitting)])
    return least


def max_context(
    space: Space,
    dims_at: DimsAt,
    budget_bytes: int,
    *,
    limit: int,
    host_budget_bytes: int = 0,
    pinned: Mapping[str, str] | None = None,
) -> int:
    """Largest context L with a configuration that fits the budgets; 0 if none does.

    Parameters
    ----------
    dims_at
        Dims of the request at a context length (its masked rows follow by ratio or stay as given).
    limit
        Where to stop looking.
    pinned
        Choices that are not free.

    Needs that more tokens never need fewer bytes, which holds for sizes that grow with the dims.
    """

    def at(context: int) -> Point:
        return space.at(dims_at(context), pinned=pinned)

    # what the host has room for depends on the context: weights alone, or hidden states as well
    contexts = _SAMPLES if host_budget_bytes else _SAMPLES[:1]
    combinations = dict.fromkeys(c for context in contexts for c in at(context).frugal(host_budget_bytes))
    configs = dict.fromkeys(at(context).lowest(c) for context in (_PROBE, _SHORT) for c in combinations)
    probes = at(_PROBE), at(2 * _PROBE)
    solved = {config: _solve(probes, budget_bytes, host_budget_bytes, config, limit) for config in configs}
    likely = sorted(configs, key=lambda config: -solved[config])[:_LIKELY]

    def fits(context: int, candidates: Iterable[Config]) -> bool:
        point = at(context)
        return any(point.fits(config, budget_bytes, host_budget_bytes) for config in candidates)

    def fits_somehow(context: int) -> bool:
        """Ask the likely ones, then all there are; one that proves right is likely from then on."""
        if fits(context, likely):
            return True
        likely.extend(c for c in at(context).smallest(host_budget_bytes) if fits(context, (c,)))
        return fits(context, likely)

    if not fits_somehow(1):
        return 0
    low = min(max(1, *solved.values()), limit)
    if not fits(low, likely):  # rounding to pages, or a host too small for hidden states
        low = _bisect(1, low, lambda context: fits(context, likely))
    while low < limit and fits_somehow(low + 1):  # grown by the likeliest, verified by all
        low = _grow(low + 1, limit, lambda context: fits(context, likely))
    return low


def _grow(low: int, limit: int, fits: Callable[[int], bool]) -> int:
    """The largest context from `low`, which fits, that a predicate still accepts; by doubling, then bisection."""
    step = 1
    while low < limit and fits(min(low + step, limit)):
        low = min(low + step, limit)
        step *= 2
    return _bisect(low, min(low + step, limit + 1), fits)


def _bisect(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest context in [low, high) that fits; `low` does, `high` does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _solve(probes: tuple[Point, Point], budget_bytes: int, host_budget_bytes: int, config: Config, limit: int) -> int:
    """Where the highest line of one configuration meets the budget, or its host memory the host's."""
    lows, highs = (point.form_values(config) for point in probes)
    page = probes[0].space.device.page_bytes
    available = (budget_bytes - probes[0].fixed_bytes(config)) // page * page
    hosts = [point.host_bytes(config.choices) for point in probes]
    lines = [(low, high, available) for low, high in zip(map(int, lows), map(int, highs), strict=True)]
    solved = limit
    for low, high, room in (*lines, (*hosts, host_budget_bytes)):
        if high > low:
            solved = min(solved, (room - (2 * low - high)) * _PROBE // (high - low))
        elif low > room:
            return 0
    return solved
