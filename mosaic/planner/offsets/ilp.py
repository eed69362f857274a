"""Integer programming with PuLP and CBC: one binary per pair of blocks that share time says which lies below.

Kept as a second, independent model for small problems; on hundreds of buffers it does not get anywhere in half a
minute.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from mosaic.errors import MissingExtra

from .blocks import Blocks
from .incumbent import Outcome

_MANY_PAIRS = 20_000


def solve_ilp(blocks: Blocks, upper_bound: int, *, timeout_s: float | None) -> Outcome:
    """Minimise the peak below an upper bound in bytes.

    Without a timeout CBC gets 30 s. Problems of more than 20,000 pairs are not tried.

    Raises
    ------
    MissingExtra
        Without PuLP.
    """
    if blocks.num_pairs > _MANY_PAIRS:
        return Outcome(offsets=None, bound=blocks.lower_bound, exhausted=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 3 announces the names of PuLP 4 on every call
        try:
            import pulp
        except ImportError as error:
            raise MissingExtra("pulp", "solve", "the solver 'ilp'") from error
        return _solve(pulp, blocks, upper_bound, timeout_s if timeout_s is not None else 30)


def _solve(pulp: Any, blocks: Blocks, upper_bound: int, timeout_s: float) -> Outcome:
    pins = [pin for pin in blocks.pins or () if pin is not None]
    unit = math.gcd(*blocks.sizes, *pins, *(blocks.alignments or ()))
    limit = upper_bound // unit
    model = pulp.LpProblem("offsets", pulp.LpMinimize)
    peak = pulp.LpVariable("peak", -(-blocks.lower_bound // unit), limit, "Integer")
    model += peak
    places = [_place(pulp, model, blocks, row, limit, unit) for row in range(len(blocks))]
    heights = [size // unit for size in blocks.sizes]
    for row, place in enumerate(places):
        model += place + heights[row] <= peak
        for other in blocks.conflicts[row]:
            if other > row:
                below = pulp.LpVariable(f"below_{row}_{other}", cat="Binary")
                model += place + heights[row] <= places[other] + limit * (1 - below)
                model += places[other] + heights[other] <= place + limit * below
    status = model.solve(pulp.PULP_CBC_CMD(msg=False, timeLimit=timeout_s))
    if status != pulp.LpStatusOptimal or peak.value() is None:
        return Outcome(offsets=None, bound=blocks.lower_bound, exhausted=False)
    offsets = [place * unit if isinstance(place, int) else round(pulp.value(place)) * unit for place in places]
    # CBC answers within a tolerance, and big-M pairs may round into each other: the incumbent drops such an answer
    return Outcome(offsets=offsets, bound=blocks.lower_bound, exhausted=model.sol_status == pulp.LpSolutionOptimal)


def _place(pulp: Any, model: Any, blocks: Blocks, row: int, limit: int, unit: int) -> Any:
    pin = blocks.pins[row] if blocks.pins is not None else None
    if pin is not None:
        return pin // unit
    step = blocks.alignments[row] // unit if blocks.alignments is not None else 1
    if step > 1:
        return step * pulp.LpVariable(f"step_{row}", 0, limit // step, "Integer")
    return pulp.LpVariable(f"place_{row}", 0, limit - blocks.sizes[row] // unit, "Integer")
