"""Limits: the smallest budgets and the largest context, each confirmed by a packing and not by its lower bound alone.

Limits are found by lower bounds, which take microseconds, and then packed. If a packing misses its bound, the limit is
lowered, so that every promised limit is one that `search_and_place` reaches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Final, NamedTuple

from mosaic.planner.placement import Placement, place, replayed
from mosaic.planner.search import Rung, SearchResult, groups, lowest, search, smallest, trace_step
from mosaic.planner.space import Config, Point, Space

DimsAt = Callable[[int], Mapping[str, int]]
_FAR: Final = 1 << 20
"""A context at which the configurations with the least device memory are found."""
QUICK: Final = "greedy_by_size"
"""Packs in milliseconds, never lower than the portfolio."""


class MemoryBytes(NamedTuple):
    """Bytes of the device, and of pinned host memory."""

    device_bytes: int
    host_bytes: int


class _Packer:
    """The packings of one point by one solver, each computed on first use."""

    def __init__(self, point: Point, host_budget_bytes: int, solver: str) -> None:
        self.point, self.host_budget_bytes = point, host_budget_bytes
        self.place: Callable[[Config], Placement] = cache(lambda config: place(point, config, solver=solver))

    def total_bytes(self, config: Config) -> int:
        """Return the bytes of the whole request as packed."""
        return self.point.total_bytes(config, self.place(config).peak_bytes)

    def search(self, budget_bytes: int) -> SearchResult:
        """Search by lower bounds; if a packing exceeds the budget, search again with a lower one."""
        allowance = budget_bytes
        while True:
            result = search(self.point, allowance, self.host_budget_bytes)
            total = self.total_bytes(result.config)
            if not result.fits or total <= budget_bytes:
                return result
            allowance = budget_bytes - (total - self.point.total_bytes(result.config))

    def tightest(self) -> Config:
        """Return the configuration that packs lowest of those with the smallest chunks, one per combination of choices."""
        best = lowest(self.point, self.host_budget_bytes)
        missed = self.total_bytes(best) - self.point.total_bytes(best)
        for config in smallest(self.point, self.host_budget_bytes, slack=missed):
            if self.point.total_bytes(config) >= self.total_bytes(best):
                break
            best = min(best, config, key=self.total_bytes)
        return best

    def floor(self) -> Config:
        """Return the configuration that packs lowest: the tightest, or, if that misses its lower bound, what the search
        finds below it."""
        best = self.tightest()
        least = self.point.total_bytes(lowest(self.point, self.host_budget_bytes))
        while self.total_bytes(best) > least:
            result = self.search(self.total_bytes(best) - 1)
            if not result.fits:
                break
            best = result.config
        return best

    def found(self, budget_bytes: int) -> SearchResult:
        """Return the best configuration that fits as packed, or the floor."""
        result = self.search(budget_bytes)
        if result.fits:
            return result
        floor = min(result.config, self.floor(), key=self.total_bytes)
        steps = [] if floor == result.trace[-1].config else [trace_step(self.point, floor, "packs lowest")]
        return replace(
            result, config=floor, fits=self.total_bytes(floor) <= budget_bytes, seconds=self.point.seconds(floor),
            trace=(*result.trace, *steps),
        )  # fmt: skip


def search_and_place(
    point: Point, budget_bytes: int, host_budget_bytes: int = 0, *, solver: str = "auto"
) -> tuple[SearchResult, Placement]:
    """Find the best configuration that fits the budgets as packed, and its addresses; else the one that packs lowest.

    It finds a plan whenever this module states that one fits: from `smallest_total` on, and up to `max_context`.
    """
    packer = _Packer(point, host_budget_bytes, solver)
    result = packer.found(budget_bytes)
    return result, packer.place(result.config)


def smallest_total(point: Point, host_budget_bytes: int = 0, *, solver: str = "auto") -> tuple[int, Config]:
    """Return the packed bytes of the configuration that needs least at one point: every larger budget has a plan."""
    packer = _Packer(point, host_budget_bytes, solver)
    config = packer.floor()
    return packer.total_bytes(config), config


def is_feasible(point: Point, budget_bytes: int, host_budget_bytes: int = 0, *, solver: str = "auto") -> bool:
    """Return whether a plan fits the budgets.

    Packs only if the lower bound fits, and searches only if the configuration of the lowest bound misses it.
    """
    if not point.fits(next(smallest(point, host_budget_bytes)), budget_bytes, host_budget_bytes):
        return False
    least = lowest(point, host_budget_bytes)
    if solver == "auto" and _fits_quickly(point, least, budget_bytes):
        return True
    packer = _Packer(point, host_budget_bytes, solver)
    return packer.total_bytes(least) <= budget_bytes or packer.found(budget_bytes).fits


def least(point: Point, budget: MemoryBytes, config: Config | None = None) -> MemoryBytes:
    """Return the least bytes that a step needs, in a given configuration or in the one that needs least.

    This is the lower bound; if that is within the budgets, the step is packed, which may take a second.
    """
    chosen = next(smallest(point, budget.host_bytes)) if config is None else config
    if not point.fits(chosen, *budget):
        return MemoryBytes(point.total_bytes(chosen), point.host_bytes(chosen.choices))
    if config is None:
        total, chosen = smallest_total(point, budget.host_bytes)
    else:
        total = point.total_bytes(chosen, place(point, chosen).peak_bytes)
    return MemoryBytes(total, point.host_bytes(chosen.choices))


def holds(point: Point, config: Config, budget_bytes: int, host_budget_bytes: int = 0) -> bool:
    """Whether a configuration is allowed and fits by one of its known orders; this takes a tenth of a millisecond.

    If True, a plan fits; if False, one may still fit.
    """
    return (
        all(option in free for option, free in zip(config.choices, point.choice_options, strict=True))
        and point.fits(config, budget_bytes, host_budget_bytes)
        and any(point.total_bytes(config, packing.peak_bytes) <= budget_bytes for packing in replayed(point, config))
    )


def _fits_quickly(point: Point, config: Config, budget_bytes: int) -> bool:
    """Whether a greedy or replayed packing fits; the portfolio's is never larger."""
    quick = place(point, config, solver=QUICK)
    return any(
        point.total_bytes(config, packing.peak_bytes) <= budget_bytes
        for packing in chain([quick], replayed(point, config))
    )


def smallest_host(point: Point, budget_bytes: int, host_budget_bytes: int) -> int | None:
    """Return the least pinned host memory, within its budget, with which a plan fits the device; None if none does.

    Higher rungs of a ladder need less of the device and more of the host. So the first rung that fits by its lower
    bound is found by bisection, and from there the first that fits as packed. Later ladders are tried only with less
    host memory than that.
    """
    least: int | None = None
    found = 0
    for _, ladders in groups(point):
        for ladder in ladders:
            room = host_budget_bytes if least is None else least - 1
            for rung in range(_first_rung(point, ladder, budget_bytes, room, found), len(ladder)):
                if point.host_bytes(ladder[rung]) > room:
                    break
                if _packs(point, point.lowest(ladder[rung]), budget_bytes):
                    least, found = point.host_bytes(ladder[rung]), rung
                    break
    return least


def _first_rung(point: Point, ladder: Sequence[Rung], budget_bytes: int, host_budget_bytes: int, near: int) -> int:
    """The first rung that fits the device by its lower bound, or exceeds the host's budget. Rungs around `near` are
    tried first, because each needs a compiled body."""

    def enough(rung: int) -> bool:
        choices = ladder[rung]
        return point.host_bytes(choices) > host_budget_bytes or point.total_bytes(point.lowest(choices)) <= budget_bytes

    low, high = 0, len(ladder)
    for rung in (near - 1, near):
        if low <= rung < high:
            low, high = (low, rung) if enough(rung) else (rung + 1, high)
    return bisect_left(range(high), True, low, key=enough)


def _packs(point: Point, config: Config, budget_bytes: int) -> bool:
    """Whether a configuration fits the device as packed; the thorough packing runs only if a quick one does not fit."""
    if point.total_bytes(config) > budget_bytes:
        return False
    return (
        _fits_quickly(point, config, budget_bytes)
        or point.total_bytes(config, place(point, config).peak_bytes) <= budget_bytes
    )


def max_context(
    space: Space,
    dims_at: DimsAt,
    budget_bytes: int,
    *,
    limit: int,
    host_budget_bytes: int = 0,
    pinned: Mapping[str, str] | None = None,
    solver: str = "auto",
) -> int:
    """Return the largest context L at which a plan fits the budgets; 0 if none does.

    Parameters
    ----------
    dims_at
        Dims of the request at a context length (masked rows follow the ratio or stay as given).
    limit
        The largest context to consider.
    pinned
        Choices that are fixed.
    solver
        The packer.

    Requires that more tokens never need fewer bytes, which holds for sizes that grow with the dims.
    """

    @cache
    def at(context: int) -> Point:
        return space.at(dims_at(context), pinned=pinned)

    def fits_quickly(context: int) -> bool:
        point = at(context)
        return _fits_quickly(point, lowest(point, host_budget_bytes), budget_bytes)

    def misses(context: int) -> bool:
        return not is_feasible(at(context), budget_bytes, host_budget_bytes, solver=solver)

    longest = _by_bounds(at, budget_bytes, host_budget_bytes, limit)
    if not longest or (solver == "auto" and fits_quickly(longest)):
        return longest
    # thorough packing may take a second, so it starts from the quick packing's limit
    held = bisect_left(range(1, longest), True, key=lambda c: not fits_quickly(c)) if solver == "auto" else 0
    if misses(held + 1):
        return held
    if not misses(longest):
        return longest
    return held + bisect_left(range(held + 1, longest), True, key=misses)


def _by_bounds(at: Callable[[int], Point], budget_bytes: int, host_budget_bytes: int, limit: int) -> int:
    """The largest context with a configuration whose lower bound fits the budgets; 0 if there is none.

    Ladders are tried in order of their least device memory. If a rung exceeds the host's budget, only lower rungs can
    allow a longer context; if it exceeds the device's, only higher ones. Each tested rung thus rules out half of the
    others, so few bodies are compiled.
    """
    far = at(_FAR)
    found = list(groups(far))
    ladders = [[base] for base, _ in found]
    ladders += [ladder for _, several in found for ladder in several if ladder and host_budget_bytes]
    ladders.sort(key=lambda rungs: far.total_bytes(far.lowest(rungs[-1])))

    def largest(config: Config, least: int) -> int:
        """The largest context of one configuration, given one that fits."""

        def misses(context: int) -> bool:
            return not at(context).fits(config, budget_bytes, host_budget_bytes)

        return least - 1 + bisect_left(range(least, limit + 1), True, key=misses)

    longest = 0
    for rungs in ladders:
        low, rung, high = 0, len(rungs) - 1, len(rungs) - 1
        while low <= high and longest < limit:
            point = at(longest + 1)
            config = point.lowest(rungs[rung])
            crowded = point.total_bytes(config) > budget_bytes
            costly = point.host_bytes(config.choices) > host_budget_bytes
            if not crowded and not costly:
                longest = largest(config, longest + 1)
                continue
            low, high = (rung + 1 if crowded else low), (rung - 1 if costly else high)
            rung = (low + high) // 2
    return longest
