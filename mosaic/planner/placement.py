"""Addresses for the workspace: replay a known order for the new sizes, or solve for them.

One order serves every context and chunk count as long as its peak stays at the
lower bound. A replayed answer is checked like a solver's, and dropped where it does
not hold. A variant's orders come from reference sizes that depend on the
template alone, never on earlier requests, so the same input gives the same
plan whatever was planned before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from mosaic.planner.offsets import Guard, Order, Problem, Solution, solve
from mosaic.planner.peaks import ALIGNMENT
from mosaic.planner.space import Config, Point, Variant

__all__ = ["NODE_LIMIT", "Placement", "place", "problem_of", "replayed"]

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
    found: list[Placement] = []
    for placement in replayed(point, config) if solver == "auto" else ():
        found.append(placement)
        if placement.peak_bytes == point.lower_bound(config):
            return placement
    solution = _solved(point.space.variant(config), point.root_sizes(config).tolist(), solver)
    found.append(Placement(solution.offsets, solution.peak_bytes, solution.solver))
    return min(found, key=lambda placement: placement.peak_bytes)  # the first of equals


def replayed(point: Point, config: Config) -> Iterator[Placement]:
    """Yield the packings that the orders of a variant give at these sizes, one by one, if they hold."""
    variant = point.space.variant(config)
    sizes = point.root_sizes(config)
    for number in range(len(REFERENCES)):
        order, guard, found_by = _reference_order(point, variant, number)
        offsets, peak = order.replay(sizes)
        if fault := guard.fault(offsets, sizes):
            _log.warning("dropped a replayed order of the solver %s: %s", found_by, fault)
            continue
        yield Placement(offsets, int(peak), f"{found_by}, replayed")


def _reference_order(point: Point, variant: Variant, number: int) -> tuple[Order, Guard, str]:
    """The order found at one of the reference sizes, solved on first use."""
    while len(variant.orders) <= number:
        extent, rows = REFERENCES[len(variant.orders)]
        template = point.space.template
        dims = {dim.name: extent if dim.value is None else dim.value for dim in template.dims}
        # a knob over a small fixed dim (heads) has fewer rows than it has tokens
        values = [*dims.values(), *(min(rows, dims[knob.over]) for knob in template.knobs)]
        problem = problem_of(variant, variant.formula.root_sizes(variant.body.monomials(values)).tolist())
        solution = _solve(problem, "auto")
        variant.orders.append((Order.of(problem, solution), Guard(problem), solution.solver))
    return variant.orders[number]


def _solved(variant: Variant, sizes: list[int], solver: str) -> Solution:
    """Solve from scratch, or give the variant's last answer again."""
    asked = (solver, tuple(sizes))
    if variant.last_solved is None or variant.last_solved[0] != asked:
        variant.last_solved = asked, _solve(problem_of(variant, sizes), solver)
    return variant.last_solved[1]


def _solve(problem: Problem, solver: str) -> Solution:
    return solve(problem, solver=solver, node_limit=NODE_LIMIT)


def problem_of(variant: Variant, sizes: list[int]) -> Problem:
    """Return the offset-assignment problem of a variant at given sizes of its roots."""
    life, roots = variant.life, variant.formula.roots.tolist()
    gaps = [life.gaps[b] for b in roots]
    return Problem(
        sizes=sizes,
        starts=[life.starts[b] for b in roots],
        ends=[life.ends[b] for b in roots],
        gaps=gaps if any(gaps) else None,
        alignments=ALIGNMENT,
    )
