"""The outcome of a step for each of its requests, from the step's outputs on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from mosaic.models.parts.cut import KEPT, PLACE
from mosaic.models.parts.part import ResultPer
from mosaic.runtime.steps import StepRequest, StepResult

if TYPE_CHECKING:
    from mosaic.planner.plan import Plan

__all__ = ["results_of"]

_NOTHING: Final = {
    "token": torch.empty(0, dtype=torch.int64), "score": torch.empty(0), "committed": torch.empty(0, dtype=torch.bool),
    "chosen": torch.empty(0, dtype=torch.int64),
}  # fmt: skip
"""The outcome of a phase without a commit rule."""


def results_of(
    requests: Sequence[StepRequest], outputs: Mapping[str, Tensor], plan: Plan, seconds: float
) -> list[StepResult]:
    """Cut the outputs up: one result per request, in order, in memory of its own.

    Parameters
    ----------
    outputs
        By name, what the phase declares as results, on the host.
    plan, seconds
        As for `StepResult`.
    """
    declared = requests[0].phase.results
    if PLACE in outputs:
        outputs = _placed(outputs, requests)
    cut: dict[str, Sequence[Tensor]] = {}
    for name, counts in _counts_of(requests, declared).items():
        mine = outputs[name][: sum(counts)]
        cut[name] = torch.split(mine.bool() if name == "committed" else mine.clone(), counts)
    main = [cut.pop(name) if name in cut else [nothing] * len(requests) for name, nothing in _NOTHING.items()]
    others = zip(*cut.values(), strict=True) if cut else repeat(())
    return [
        StepResult(
            token=token, score=score, committed=committed, chosen=chosen, plan=plan, seconds=seconds,
            values=dict(zip(cut, values, strict=True)),
        )
        for token, score, committed, chosen, values in zip(*main, others, strict=False)
    ]  # fmt: skip


def _placed(outputs: Mapping[str, Tensor], requests: Sequence[StepRequest]) -> dict[str, Tensor]:
    """The outcomes of all rows, from those of the kept rows: nothing is decided in the others."""
    phase, rows = requests[0].phase, sum(request.rows.numel() for request in requests)
    place = outputs[PLACE][:rows]
    kept, places = place >= 0, place.clamp(min=0)
    nothing = torch.cat([request.current for request in requests])
    found = {name: value for name, value in outputs.items() if name != PLACE} | {KEPT: kept}
    for name, per in phase.results.items():
        if per != "row" or name == PLACE:
            continue
        value = outputs[name].index_select(0, places)  # one thread, unlike indexing
        if name in ("token", "chosen"):
            found[name] = value.where(kept, nothing)
        else:
            found[name] = value.masked_fill(~kept, float("-inf") if value.is_floating_point() else 0)
    return found


def _counts_of(requests: Sequence[StepRequest], declared: Mapping[str, ResultPer]) -> dict[str, list[int]]:
    """The number of values that each request has of each result, by the result's name."""
    own = {KEPT if name == PLACE else name: per for name, per in declared.items()}
    counts = {per: [_count(request, per) for request in requests] for per in {*own.values()}}
    return {name: counts[per] for name, per in own.items()}


def _count(request: StepRequest, per: ResultPer) -> int:
    """The number of values that a request has of a result."""
    if per == "row":
        return request.rows.numel()
    return request.token_ids.numel() if per == "token" else len(request.lengths) or 1
