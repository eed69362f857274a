"""Addresses for the workspace: replay a known order for the new sizes, or solve for them.

One order serves every context and chunk count as long as its peak stays at the
lower bound. A replayed answer is checked like a solver's, and dropped where it does
not hold. A variant's orders come from reference sizes that depend on the
template alone, never on earlier requests, so the same input gives the same
plan whatever was planned before.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mosaic.planner.offsets import Guard, Order, Problem, Solution, solve
from mosaic.planner.peaks import ALIGNMENT
from mosaic.planner.space import Config, Point, Variant

__all__ = ["NODE_LIMIT", "Placement", "place", "problem_of"]

_log = logging.getLogger(__name__)

NODE_LIMIT: Final = 50_000
"""Search nodes that an exact solver may spend on one plan: a count, so that the same input gives the same plan."""
REFERENCES: Final = ((4096, 256), (262144, 2048))
"""(every free dim, rows per chunk) at which a variant's orders are found: a short step, and a long one."""


class Placement(NamedTuple):
    """Offsets in the order of a variant's `formula.roots`, and the solver that found the order."""

    offsets: Sequence[int]
    peak_bytes: int
    solver: str


def place(point: Point, config: Config, *, solver: str = "auto") -> Placement:
    """Place every root of the workspace."""
    variant = point.space.variant(config)
    sizes = point.root_sizes(config)
    if solver != "auto":
        solution = _solve(variant, sizes, solver)
        return Placement(solution.offsets, solution.peak_bytes, solution.solver)
    best: Placement | None = None
    for number in range(len(REFERENCES)):
        order, guard, found_by = _reference_order(point, variant, number)
        offsets, peak = order.replay(sizes)
        if fault := guard.fault(offsets, sizes):
            _log.warning("dropped a replayed order of the solver %s: %s", found_by, fault)
            continue
        if best is None or peak < best.peak_bytes:
            best = Placement(offsets, int(peak), f"{found_by}, replayed")
        if best.peak_bytes == point.lower_bound(config):
            return best
    solution = _solve(variant, sizes, solver)
    if best is not None and best.peak_bytes <= solution.peak_bytes:
        return best
    return Placement(solution.offsets, solution.peak_bytes, solution.solver)


def _reference_order(point: Point, variant: Variant, number: int) -> tuple[Order, Guard, str]:
    """The order found at one of the reference sizes, solved on first use."""
    while len(variant.orders) <= number:
        extent, rows = REFERENCES[len(variant.orders)]
        dims = point.space.template.dims
        values = [extent if dim.value is None else dim.value for dim in dims]
        known = dict(zip((dim.name for dim in dims), values, strict=True))
        # a knob over a small fixed dim (heads) has fewer rows than it has tokens
        values += [min(rows, known[knob.over]) for knob in point.space.template.knobs]
        sizes = variant.formula.root_sizes(variant.body.monomials(values))
        solution = solve(problem := problem_of(variant, sizes.tolist()), node_limit=NODE_LIMIT)
        variant.orders.append((Order.of(problem, solution), Guard(problem), solution.solver))
    return variant.orders[number]


def _solve(variant: Variant, sizes: npt.NDArray[np.int64], solver: str) -> Solution:
    return solve(problem_of(variant, sizes.tolist()), solver=solver, node_limit=NODE_LIMIT)


def problem_of(variant: Variant, sizes: list[int]) -> Problem:
    """The offset-assignment problem of a variant at given sizes of its roots."""
    life, roots = variant.life, variant.formula.roots.tolist()
    gaps = [life.gaps[b] for b in roots]
    return Problem(
        sizes=sizes,
        starts=[life.starts[b] for b in roots],
        ends=[life.ends[b] for b in roots],
        gaps=gaps if any(gaps) else None,
        alignments=ALIGNMENT,
    )
