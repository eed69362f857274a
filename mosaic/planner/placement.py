"""Addresses for the workspace: replay a known order for the new sizes, or solve for them.

An order is reused for other contexts and chunk counts as long as its peak equals the lower bound. A replayed answer is
checked like a solver's, and dropped if it is invalid. A variant's orders come from reference sizes that depend on the
template alone, and from the request's sizes up to powers of two, never on earlier requests. So the same input gives the
same plan whatever was planned before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from mosaic.planner.offsets import Guard, Order, Problem, Solution, solve
from mosaic.planner.peaks import ALIGNMENT
from mosaic.planner.space import Config, Point, Variant

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
    """Yield the valid packings that the orders of a variant give at these sizes, one by one."""
    variant, sizes = point.space.variant(config), point.root_sizes(config)
    for values in _sizes_of_orders(point, config):
        order, guard, found_by = _order_at(variant, values)
        offsets, peak = order.replay(sizes)
        if fault := guard.fault(offsets, sizes):
            _log.warning("dropped a replayed order of the solver %s: %s", found_by, fault)
            continue
        yield Placement(offsets, int(peak), f"{found_by}, replayed")


def _sizes_of_orders(point: Point, config: Config) -> Iterator[list[int]]:
    """Values of the body's variables at which orders are found: the references, then the step's, up to powers of two."""
    template = point.space.template
    for extent, rows in REFERENCES:
        dims = {dim.name: extent if dim.value is None else dim.value for dim in template.dims}
        # a knob over a small fixed dim (heads) has fewer rows than it has tokens
        yield [*dims.values(), *(min(rows, dims[knob.over]) for knob in template.knobs)]
    yield [1 << (value - 1).bit_length() for value in point.values(config)]


def _order_at(variant: Variant, values: list[int]) -> tuple[Order, Guard, str]:
    """The order found at some sizes, solved on first use."""
    monomials = variant.body.monomials(values)
    key = tuple(variant.formula.class_sizes(monomials).tolist())
    if key not in variant.orders:
        problem = problem_of(variant, variant.formula.root_sizes(monomials).tolist())
        solution = _solve(problem, "auto")
        variant.orders[key] = Order.of(problem, solution), Guard(problem), solution.solver
    return variant.orders[key]


def _solved(variant: Variant, sizes: list[int], solver: str) -> Solution:
    """Solve from scratch, or return the variant's last solution for the same sizes."""
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
