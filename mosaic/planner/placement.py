"""Addresses for the workspace: replay a known order for the new sizes, or solve and remember the order.

One order serves every context and chunk count as long as its peak stays at the
lower bound; where it does not, the problem is solved anew and the order joins
the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mosaic.planner.offsets import Order, Problem, solve
from mosaic.planner.peaks import ALIGNMENT
from mosaic.planner.space import Config, Point, Variant

__all__ = ["NODE_LIMIT", "place"]

NODE_LIMIT: Final = 200_000
"""Search nodes that an exact solver may spend on one plan: a count, so that the same input gives the same plan."""
_POOL: Final = 8


def place(point: Point, config: Config, *, solver: str = "auto") -> tuple[Sequence[int], int, str]:
    """Place every root of the workspace.

    Returns
    -------
    offsets, peak_bytes, solver
        Offsets in the order of the variant's `formula.roots`; the solver that found the order.
    """
    variant = point.space.variant(config)
    sizes = point.root_sizes(config)
    target = point.lower_bound(config)
    best: tuple[Sequence[int], int, str] | None = None
    if solver == "auto":
        for order in variant.orders:
            offsets, peak = order.replay(sizes)
            if best is None or peak < best[1]:
                best = offsets, int(peak), "replay"
            if peak == target:
                return best
    solution = solve(problem := _problem(variant, sizes.tolist()), solver=solver, node_limit=NODE_LIMIT)
    if solver == "auto" and (best is None or solution.peak_bytes < best[1]):
        variant.orders.insert(0, Order.of(problem, solution))
        del variant.orders[_POOL:]
    if best is not None and best[1] <= solution.peak_bytes:
        return best
    return solution.offsets, solution.peak_bytes, solution.solver


def _problem(variant: Variant, sizes: list[int]) -> Problem:
    life, roots = variant.life, variant.formula.roots.tolist()
    gaps = [life.gaps[b] for b in roots]
    return Problem(
        sizes=sizes,
        starts=[life.starts[b] for b in roots],
        ends=[life.ends[b] for b in roots],
        gaps=gaps if any(gaps) else None,
        alignments=ALIGNMENT,
    )
