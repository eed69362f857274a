"""A step that has been given to the device, and its outcome for each request once that has arrived on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from mosaic.models.parts.part import ResultPer
from mosaic.runtime.host_copy import Arriving
from mosaic.runtime.steps import StepRequest, StepResult

if TYPE_CHECKING:
    from mosaic.planner.plan import Plan

__all__ = ["Launched"]

_NOTHING: Final = {
    "token": torch.empty(0, dtype=torch.int64), "score": torch.empty(0), "committed": torch.empty(0, dtype=torch.bool),
    "chosen": torch.empty(0, dtype=torch.int64),
}  # fmt: skip
"""The outcome of a phase without a commit rule."""


class Launched:
    """A step on its way.

    Parameters
    ----------
    requests
        Whose step it is.
    plan
        That it runs.
    arriving
        The outputs that go back to requests, in the order in which their phase declares them; None: there are none.
    started
        When it was asked for, by `perf_counter`.
    """

    def __init__(self, requests: Sequence[StepRequest], plan: Plan, arriving: Arriving | None, started: float) -> None:
        self.requests = tuple(requests)
        self._plan, self._arriving, self._started = plan, arriving, started
        self._results: list[StepResult] | None = None
        self._cutting = (
            Lock()
        )  # whoever launches a step waits for an earlier one too, whose outcome arrives in the same place

    def results(self) -> list[StepResult]:
        """Wait for the outcome, and cut it up: one result per request, in order."""
        with self._cutting:
            if self._results is None:
                declared = self.requests[0].phase.results
                outputs = [] if self._arriving is None else self._arriving.wait()
                self._results = self._cut(dict(zip(declared, outputs, strict=True)), declared)
                self._arriving = None
            return self._results

    def _cut(self, outputs: Mapping[str, Tensor], declared: Mapping[str, ResultPer]) -> list[StepResult]:
        seconds = perf_counter() - self._started
        bounds = {
            per: [0, *accumulate(_count(request, per) for request in self.requests)] for per in {*declared.values()}
        }
        found = []
        for number in range(len(self.requests)):
            mine = dict(_NOTHING)
            for name, per in declared.items():
                start, end = bounds[per][number : number + 2]
                mine[name] = outputs[name][start:end].clone()
            decided = {name: mine.pop(name) for name in ("token", "score", "chosen")}
            committed = mine.pop("committed").bool()
            found.append(StepResult(**decided, committed=committed, plan=self._plan, seconds=seconds, values=mine))
        return found


def _count(request: StepRequest, per: ResultPer) -> int:
    """How many values of a result a request has."""
    if per == "row":
        return request.rows.numel()
    return request.token_ids.numel() if per == "token" else len(request.lengths) or 1
