"""A step that was launched, and its outcome for each request once that has arrived on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, repeat
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch
from numpy.typing import NDArray
from torch import Tensor

from mosaic.models.parts.cut import COUNT, KEPT, PLACE
from mosaic.models.parts.part import ResultPer
from mosaic.models.parts.windows import OPEN
from mosaic.runtime.steps import StepRequest, StepResult

if TYPE_CHECKING:
    from mosaic.runtime.engine import Ran
    from mosaic.runtime.host_copy import HostCopy

_NOTHING: Final = {
    "token": torch.empty(0, dtype=torch.int64), "score": torch.empty(0), "committed": torch.empty(0, dtype=torch.bool),
    "chosen": torch.empty(0, dtype=torch.int64),
}  # fmt: skip
"""The outcome of a phase without a commit rule."""


class Launched:
    """A launched step.

    Parameters
    ----------
    requests
        The requests of the step.
    ran
        The launched graph.
    copy
        Copies the requests' outputs to the host.
    started
        When the step was asked for, by `perf_counter`.
    turns
        The engine's turn, held while the second graph runs.
    """

    def __init__(
        self, requests: Sequence[StepRequest], ran: Ran, copy: HostCopy, started: float,
        turns: AbstractContextManager[object],
    ) -> None:  # fmt: skip
        self.requests = tuple(requests)
        self._declared = self.requests[0].phase.results
        self._counts = _counts_of(self.requests, self._declared)
        self._copy, self._started, self._turns = copy, started, turns
        self._results: list[StepResult] | None = None
        self._failed: Exception | None = None
        self._cutting = Lock()  # launching a step waits for the outcome before last, which arrives in the same buffer
        self._arrives(ran)

    def _arrives(self, ran: Ran) -> None:
        """Begin to copy the outputs, if there are any."""
        self._ran = ran
        self._names = [name for name in self._declared if name in ran.outputs]
        self._arriving = self._copy.start([ran.outputs[name] for name in self._names]) if self._names else None

    def _outputs(self) -> dict[str, Tensor]:
        outputs = [] if self._arriving is None else self._arriving.wait()
        return dict(zip(self._names, outputs, strict=True))

    def proceed(self) -> None:
        """Run the step's second graph, or find that it need not run again, if the count has arrived; do not wait."""
        if self._ran.again is not None and self._arriving is not None and self._arriving.arrived:
            self.settle()

    def settle(self) -> None:
        """Wait for the count of kept rows; run the second graph, or run it again if it ran for too few rows."""
        if self._ran.again is None:
            return
        with self._turns:
            while (again := self._ran.again) is not None:
                count = int(self._outputs()[COUNT])
                self._ran = self._ran._replace(again=None)
                try:
                    larger = again(count)
                except Exception as failed:  # raised when the outcome is asked for
                    self._failed = failed
                except BaseException:
                    self._ran = self._ran._replace(again=again)
                    raise
                else:
                    if larger is not None:
                        self._arrives(larger)

    def results(self) -> list[StepResult]:
        """Wait for the outcome, and cut it up: one result per request, in order.

        Raises
        ------
        BucketOverflow
            If the step keeps more rows than its second graph has a size for.
        """
        self.keep()
        if self._failed is not None:
            raise self._failed
        assert self._results is not None
        return self._results

    def keep(self) -> None:
        """Wait for the outcome, if there is one, and cut it up; its host buffer may then be reused."""
        self.settle()
        with self._cutting:
            if self._results is None and self._failed is None:
                outputs = self._outputs()
                if PLACE in outputs:
                    outputs = _placed(outputs, self.requests)
                self._results = self._cut(outputs)
                self._arriving = None

    def _cut(self, outputs: Mapping[str, Tensor]) -> list[StepResult]:
        seconds, plan = perf_counter() - self._started, self._ran.plan
        cut: dict[str, Sequence[Tensor]] = {}
        arrays: dict[str, list[NDArray[Any]]] = {}
        for name, counts in self._counts.items():
            *firsts, end = accumulate(counts, initial=0)
            mine = outputs[name][:end].bool() if name == "committed" else outputs[name][:end].clone()
            cut[name], whole = torch.split(mine, counts), mine.numpy()
            arrays[name] = [whole[first : first + count] for first, count in zip(firsts, counts, strict=True)]
        main = [cut.pop(name) if name in cut else [nothing] * len(self.requests) for name, nothing in _NOTHING.items()]
        others = zip(*cut.values(), strict=True) if cut else repeat(())
        of_each = zip(*arrays.values(), strict=True) if arrays else repeat(())
        of_step = {name: outputs[name].clone() for name, per in self._declared.items() if per == "step"}
        return [
            StepResult(
                token=token, score=score, committed=committed, chosen=chosen, plan=plan, seconds=seconds,
                values=dict(zip(cut, values, strict=True)) | of_step,
            ).hold(zip(arrays, held, strict=True))
            for token, score, committed, chosen, values, held in zip(*main, others, of_each, strict=False)
        ]  # fmt: skip


def _placed(outputs: Mapping[str, Tensor], requests: Sequence[StepRequest]) -> dict[str, Tensor]:
    """The outcomes of all rows, from those of the kept rows: nothing is decided in the others."""
    phase, rows = requests[0].phase, sum(request.rows.numel() for request in requests)
    place = outputs[PLACE][:rows]
    kept, places = place >= 0, place.clamp(min=0)
    nothing = OPEN if phase.tokens.computes else torch.cat([request.current for request in requests])
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
    own = {KEPT if name == PLACE else name: per for name, per in declared.items() if per != "step"}
    counts = {per: [_count(request, per) for request in requests] for per in {*own.values()}}
    return {name: counts[per] for name, per in own.items()}


def _count(request: StepRequest, per: ResultPer) -> int:
    """The number of values that a request has of a result."""
    if per == "row":
        return request.rows.numel()
    return request.token_ids.numel() if per == "token" else len(request.lengths) or 1
