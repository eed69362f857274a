"""The largest context that fits: solved from the peak formula, then verified at L and L + 1.

With every knob at its smallest chunk, each live set is linear in the context up
to rounding, so two evaluations give its line and the line gives L_max.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mosaic.planner.space import Config, Point, Space

__all__ = ["DimsAt", "max_context", "smallest_total"]

DimsAt = Callable[[int], Mapping[str, int]]
_PROBE = 1 << 22


def smallest_total(point: Point) -> tuple[int, Config]:
    """Bytes of the configuration that needs least, at one point."""
    return min(((point.total_bytes(config), config) for config in point.smallest()), key=lambda item: item[0])


def max_context(space: Space, dims_at: DimsAt, budget_bytes: int, *, limit: int) -> int:
    """Largest context L with a configuration that fits the budget; 0 if none does.

    Parameters
    ----------
    dims_at
        Dims of the request at a context length (its masked rows follow by ratio or stay as given).
    limit
        Where to stop looking.

    Needs that more tokens never need fewer bytes, which holds for sizes that grow with the dims.
    """

    configs = list(space.at(dims_at(_PROBE)).smallest())
    solved = {config: _solve(space, dims_at, budget_bytes, config) for config in configs}
    order = sorted(configs, key=lambda config: -solved[config])

    def fits(context: int) -> bool:
        point = space.at(dims_at(context))
        return any(point.total_bytes(config) <= budget_bytes for config in order)

    low = min(max(solved[order[0]], 1), limit)
    while low > 1 and not fits(low):
        low = min(low - 1, low * 1023 // 1024)
    if not fits(low):
        return 0
    step = 1
    while low < limit and fits(min(low + step, limit)):
        low = min(low + step, limit)
        step *= 2
    high = min(low + step, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _solve(space: Space, dims_at: DimsAt, budget_bytes: int, config: Config) -> int:
    """Where the highest line of one configuration meets the budget."""
    points = [space.at(dims_at(context)) for context in (_PROBE, 2 * _PROBE)]
    lows, highs = (point.form_values(config) for point in points)
    available = (budget_bytes - points[0].fixed_bytes(config)) // space.device.page_bytes * space.device.page_bytes
    contexts = []
    for low, high in zip(map(int, lows), map(int, highs), strict=True):
        slope = high - low
        if slope > 0:
            contexts.append((available - (2 * low - high)) * _PROBE // slope)
    return min(contexts, default=0)
