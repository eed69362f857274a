"""One function over all solvers: cheap ones first, and stop as soon as the peak equals the lower bound."""

from __future__ import annotations

import time
from collections.abc import Callable

from mosaic.errors import UnknownName

from .best_fit import best_fit
from .blocks import Blocks, blocks_of
from .first_fit import first_fit
from .greedy import greedy_by_area, greedy_by_conflicts, greedy_by_size
from .problem import Problem, Solution
from .skyline import skyline

__all__ = ["SOLVERS", "solve"]

_HEURISTICS: dict[str, Callable[[Blocks], list[int]]] = {
    "greedy_by_size": greedy_by_size,
    "skyline": skyline,
    "best_fit": best_fit,
    "first_fit": first_fit,
    "greedy_by_area": greedy_by_area,
    "greedy_by_conflicts": greedy_by_conflicts,
}

SOLVERS: dict[str, str] = {"auto": "the portfolio", **{name: name for name in _HEURISTICS}}


def solve(
    problem: Problem,
    *,
    solver: str = "auto",
    timeout_s: float | None = None,
    node_limit: int | None = None,
    seed: int = 0,
) -> Solution:
    """Place all buffers (first version)."""
    if solver not in SOLVERS:
        raise UnknownName("solver", solver, SOLVERS)
    began = time.perf_counter() if timeout_s is not None else 0.0
    blocks = blocks_of(problem)
    best: list[int] | None = None
    winner = solver
    for name in _HEURISTICS if solver == "auto" else (solver,):
        offsets = _HEURISTICS[name](blocks)
        if best is None or blocks.peak(offsets) < blocks.peak(best):
            best, winner = offsets, name
        if blocks.peak(best) <= blocks.lower_bound:
            break
    assert best is not None
    peak = blocks.peak(best) if len(blocks) else 0
    return Solution(
        offsets=blocks.expand(best), peak_bytes=max(peak, blocks.lower_bound), lower_bound_bytes=blocks.lower_bound,
        optimal=peak <= blocks.lower_bound, solver=winner, capacity=problem.capacity,
        seconds=time.perf_counter() - began if timeout_s is not None else 0.0,
    )
