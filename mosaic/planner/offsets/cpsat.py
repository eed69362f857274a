"""Constraint programming with OR-Tools CP-SAT: an independent prover for a few hundred buffers.

Rectangles in time (ranks of sections) and address (units of the greatest common divisor of the sizes) that must not
overlap.
"""

from __future__ import annotations

import math
from typing import Any

from mosaic.errors import MissingExtra

from .blocks import Blocks
from .incumbent import Incumbent, Outcome


def solve_cpsat(blocks: Blocks, best: Incumbent, *, timeout_s: float | None, seed: int, workers: int = 2) -> Outcome:
    """Minimise the peak, starting from the best answer known; without a timeout by CP-SAT's deterministic limit and one worker.

    Raises
    ------
    MissingExtra
        Without OR-Tools.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise MissingExtra("ortools", "solve", "the solver 'cpsat'") from error
    assert best.offsets is not None
    unit = _unit(blocks)
    model = cp_model.CpModel()
    places, peak = _model(model, blocks, best, unit)
    for row, place in enumerate(places):
        if not isinstance(place, int):
            model.add_hint(place, best.offsets[row] // unit)
    model.add_hint(peak, best.peak // unit)
    solver: Any = cp_model.CpSolver()
    solver.parameters.random_seed = seed
    if timeout_s is not None:
        solver.parameters.max_time_in_seconds = max(0.1, timeout_s - best.seconds)
        solver.parameters.num_workers = workers
    else:
        solver.parameters.max_deterministic_time = 20.0
        solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Outcome(offsets=None, bound=best.bound, exhausted=False)
    offsets = [(place if isinstance(place, int) else int(solver.value(place))) * unit for place in places]
    bound = math.ceil(solver.best_objective_bound - 1e-6) * unit
    return Outcome(offsets=offsets, bound=bound, exhausted=status == cp_model.OPTIMAL)


def _unit(blocks: Blocks) -> int:
    """Return the bytes that divide every size, pin and alignment."""
    pins = [pin for pin in blocks.pins or () if pin is not None]
    return math.gcd(*blocks.sizes, *pins, *(blocks.alignments or ()))


def _model(model: Any, blocks: Blocks, best: Incumbent, unit: int) -> tuple[list[Any], Any]:
    """Add rectangles and the peak; return the place of each block (an int if pinned) and the peak, in units."""
    limit = best.peak // unit
    peak = model.new_int_var(-(-best.bound // unit), limit, "peak")
    places: list[Any] = []
    times, spaces = [], []
    for row, size in enumerate(blocks.sizes):
        height = size // unit
        pin = blocks.pins[row] if blocks.pins is not None else None
        place = pin // unit if pin is not None else _place(model, blocks, row, limit - height, unit)
        places.append(place)
        model.add(place + height <= peak)
        space = model.new_fixed_size_interval_var(place, height, f"space{row}")
        for a, b in blocks.sections.spans[row]:
            times.append(model.new_fixed_size_interval_var(a, b - a, f"time{row}"))
            spaces.append(space)
    model.add_no_overlap_2d(times, spaces)
    model.minimize(peak)
    return places, peak


def _place(model: Any, blocks: Blocks, row: int, highest: int, unit: int) -> Any:
    place = model.new_int_var(0, highest, f"place{row}")
    step = blocks.alignments[row] // unit if blocks.alignments is not None else 1
    if step > 1:
        times = model.new_int_var(0, highest // step, f"step{row}")
        model.add(place == times * step)
    return place
