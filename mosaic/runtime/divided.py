"""A step that is launched in parts: steps of others run between two of them, in other memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

from mosaic.runtime.host_copy import HostCopy
from mosaic.runtime.interrupts import interrupts_held

if TYPE_CHECKING:
    from torch import Tensor

    from mosaic.planner.plan import Plan
    from mosaic.runtime.executor import Executor
    from mosaic.runtime.steps import StepResult

__all__ = ["Divided"]

Results: TypeAlias = Callable[[Mapping[str, "Tensor"], "Plan", float], "list[StepResult]"]


class Divided:
    """A step in parts; its callers hold the engine's turn.

    Parameters
    ----------
    plan, executor
        What runs; inputs are written.
    share
        Of the step's FLOPs that a part has at most.
    in_force
        The threads of a step.
    names
        Outputs that are wanted.
    results
        The outcome, from these outputs in host memory, the plan and seconds.
    """

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        share: float,
        in_force: Callable[[], AbstractContextManager[None]],
        names: Sequence[str],
        results: Results,
    ) -> None:
        self._plan, self._executor, self._in_force = plan, executor, in_force
        self._parts, self._began = executor.in_parts(share), perf_counter()
        self._names, self._results = [name for name in names if name in executor.outputs], results
        self._ended: list[StepResult] | None = None
        self._error: BaseException | None = None
        self.is_over = False

    def go_on(self) -> list[StepResult] | None:
        """Launch the next part; with the last one, wait for the outcome and return it, from then on again. So with an error."""
        if self._error is not None:
            raise self._error
        if self._ended is None:
            try:
                with self._in_force():
                    self._ended = self._taken() if next(self._parts, self) is self else None
            except BaseException as error:
                self._error = error
                raise
            finally:
                self.is_over = self._ended is not None or self._error is not None
        return self._ended

    def _taken(self) -> list[StepResult]:
        sent = [self._executor.outputs[name] for name in self._names]  # of a prompt nothing is wanted
        found = HostCopy().start(sent).wait() if sent else []
        outputs = dict(zip(self._names, found, strict=True))
        return self._results(outputs, self._plan, perf_counter() - self._began)

    def finish(self) -> None:
        """Launch all that is left; an interrupt waits for it."""
        with interrupts_held():
            while not self.is_over:
                self.go_on()

    def drop(self) -> None:
        """Leave out what was not launched; nothing of the step runs on. What it had in memory may be overwritten from now on."""
        self._parts.close()
        self.is_over = True
