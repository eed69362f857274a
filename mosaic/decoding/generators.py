"""Steps of a session's generators: requests whose phases one step can serve are a group, and share it.

A step that would keep others waiting is launched in parts, and theirs run in between.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from mosaic.models.phase import shared_phase
from mosaic.runtime.packing import group_of

if TYPE_CHECKING:
    from mosaic.decoding.live import LiveRequest
    from mosaic.models.architecture import Architecture
    from mosaic.runtime.steps import DividedStep, StepRequest, StepResult, StepRunner

__all__ = ["Generators"]


class Generators:
    """The steps of a session's generators.

    Parameters
    ----------
    runner
        The model; steps are launched in parts if it is compiled (`CompiledModel.divide`).
    delay_ms
        How long others wait for a step, or for one launch of it where that is longer.

    Attributes
    ----------
    divided
        The requests whose step is launched in parts.
    """

    def __init__(self, runner: StepRunner, delay_ms: float) -> None:
        self._runner = runner
        self._divide: Callable[[Sequence[StepRequest], float], DividedStep | None] = getattr(
            runner, "divide", lambda *_: None
        )
        self._predicted_ms: Callable[[Sequence[StepRequest]], float] = getattr(runner, "predicted_ms", lambda _: 0.0)
        self._part_ms = delay_ms / (2 if getattr(runner, "asynchronous", False) else 1)  # a device has two on its way
        self._step: DividedStep | None = None
        self.divided: Sequence[LiveRequest] = ()

    def next_group(self, live: Iterable[LiveRequest]) -> list[LiveRequest]:
        """Return the live requests that share a step with the one that has waited longest; all of them have a `pending` step. While
        a step is launched in parts, those of it and of other long steps wait."""
        groups = _groups(live, self.divided, self._runner.architecture)
        if self._step is not None:
            groups = [group for group in groups if self._predicted_ms(_asked_by(group)) <= self._part_ms]
        return min(groups, key=lambda group: min(request.waiting_since for request in group), default=[])

    def run(self, group: Sequence[LiveRequest], *, beside: bool) -> list[StepResult] | None:
        """Run a step of a group; or begin it in parts if it is long, and there are others `beside` it: None."""
        asked = _asked_by(group)
        if beside and self._step is None:
            self._step = self._divide(asked, self._part_ms)
            if self._step is not None:
                self.divided = tuple(group)
                return None
        return self._runner.step(asked)

    def go_on(self) -> tuple[Sequence[LiveRequest], Sequence[StepResult]]:
        """Launch the next part of the step in parts, if there is one; return its requests and outcomes if it has ended by that."""
        if self._step is None:
            return (), ()
        try:
            results = self._step.go_on()
        except BaseException:
            self.forget(self.divided[0])
            raise
        if results is None:
            return (), ()
        group, self._step, self.divided = self.divided, None, ()
        return group, results

    def forget(self, request: LiveRequest) -> None:
        """Drop the step in parts if it serves a request that has ended; others of it begin again."""
        if self._step is not None and request in self.divided:
            step, self._step, self.divided = self._step, None, ()
            step.drop()


def _groups(live: Iterable[LiveRequest], but: Sequence[LiveRequest], arch: Architecture) -> Iterable[list[LiveRequest]]:
    groups: dict[Hashable, list[LiveRequest]] = {}
    for request in live:
        if request.pending is not None and request not in but:
            groups.setdefault(group_of(request.pending, arch), []).append(request)
    return groups.values()


def _asked_by(group: Sequence[LiveRequest]) -> list[StepRequest]:
    """What the requests of a group ask for, by the phase of the step that serves them all."""
    asked = [request.pending for request in group if request.pending is not None]
    phase = shared_phase(request.phase for request in asked)
    return [request.within(phase) for request in asked]
