"""The steps of a session's generators: which requests share the next one, and which steps are launched before they are waited for.

Requests whose phases one step can serve form a group. The group that has waited longest runs next. If tokens stay on the device,
the next step is launched before the outcome of the last one is read. If the host decides what a step asks, the device would wait
for it: a group with tokens for two busy steps is split into two crews, and the device runs a step of one while the host takes the
outcomes of the other.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from mosaic.models.phase import shared_phase
from mosaic.runtime.packing import group_of

if TYPE_CHECKING:
    from mosaic.decoding.live import LiveRequest
    from mosaic.runtime.steps import Outcome, StepRequest, StepResult, StepRunner

__all__ = ["CREW_TOKENS", "DOUBT", "Crews"]

DOUBT: Final = 1 / 17
"""Share of a step's requests that may be in it in vain. A step in vain costs a request one step. Waiting for outcomes costs every
request about a sixteenth of a step (H200, SDAR-8B, one request), and more with many requests."""
CREW_TOKENS: Final = 512
"""Fewest tokens of a crew's step: with fewer, a product takes as long as reading its weights."""
EXPERTS: Final = 4
"""`CREW_TOKENS` grows by this factor if a feed-forward has experts, as each of two steps reads nearly all of them."""


class _Asked(NamedTuple):
    """What live requests asked for, and the step that was launched for it."""

    requests: list[StepRequest]
    launched: Outcome
    cut: bool

    def proceed(self) -> None:
        """Launch the second graph of a cut step if the device has counted its rows."""
        if self.cut:
            self.launched.proceed()

    def settle(self) -> None:
        """Wait for the count of a cut step and launch its second graph."""
        if self.cut:
            self.launched.settle()


class Crews:
    """The steps that live requests ask for.

    Parameters
    ----------
    runner
        The model.
    live
        The session's requests; those that have no `pending` step are others' business.

    Attributes
    ----------
    in_vain
        Steps that were launched ahead and whose outcomes no request took.
    """

    def __init__(self, runner: StepRunner, live: Collection[LiveRequest]) -> None:
        self._runner, self._live = runner, live
        self._launched: list[_Asked] = []  # in order, until their outcomes are given
        self.in_vain = 0

    def taken(self) -> None:
        """Note that the outcome of the first launched step is in: it cannot run again."""
        del self._launched[0]

    def proceed(self) -> None:
        """Launch second graphs of cut steps whose rows the device has counted."""
        for step in self._launched:
            step.proceed()

    def settle(self) -> None:
        """Wait for the counts of cut steps and launch their second graphs."""
        for step in self._launched:
            step.settle()

    def results(self) -> tuple[list[LiveRequest], list[StepResult], bool]:
        """Requests of the next step, their outcomes, and whether the step had been launched.

        The step after it is launched before the outcomes are waited for.
        """
        while self._launched and not self._waiting_for(self._launched[0]):
            self.in_vain += 1
            del self._launched[0]
        if not self._launched:
            group = self._next_group(self._asking)
            crew = self._crew(group)
            if crew is None:
                return group, self._runner.step(_of_one_phase(_asked_by(group))) if group else [], False
            self._launch(_asked_by(crew))
        first = self._launched[0]
        waiting = self._waiting_for(first)
        group = [request for _, request in waiting]
        if len(self._launched) == 1:
            self._launch_beside(group)
        results = first.launched.results()
        return group, [results[place] for place, _ in waiting], True

    def _crew(self, group: Sequence[LiveRequest]) -> list[LiveRequest] | None:
        """The requests of a group whose step is launched without a wait for its outcome.

        All of them if tokens stay on the device. Otherwise the half of all requests that has waited longest, or None if the
        tokens of both halves are too few for two steps.
        """
        asked = _asked_by(group)
        if _on_device(asked):
            return list(group)
        tokens = sum(one.token_ids.numel() for one in chain(asked, *(step.requests for step in self._launched)))
        least = CREW_TOKENS * (EXPERTS if self._runner.architecture.feed_forward.experts else 1)
        live = len(self._asking)
        if live < 2 or tokens < 2 * least or not self._runner.asynchronous:
            return None
        half = -(-live // 2)
        if len(group) <= half:
            return list(group)
        # mixes first and later steps of blocks: crews whose steps are alike need fewer plans
        last = sorted(request.waiting_since for request in group)[half - 1]
        crew = [request for request in group if request.waiting_since < last]
        alike = [request for request in group if request.waiting_since == last]
        alike.sort(key=lambda request: 0 if request.pending is None else request.pending.token_ids.numel())
        more = half - len(crew)
        return crew + [alike[place * len(alike) // more] for place in range(more)]

    def _launch_beside(self, group: Sequence[LiveRequest]) -> None:
        """Launch a step beside the first launched one, if some step does not depend on its outcome."""
        if _on_device(self._launched[0].requests):
            self._get_ready(group)
            return
        busy = {*group}
        other = self._next_group([request for request in self._asking if request not in busy])
        crew = None if _on_device(_asked_by(other)) else self._crew(other)
        if crew:
            self._launch(_asked_by(crew))

    def _launch(self, asked: list[StepRequest]) -> None:
        step = _of_one_phase(asked)
        self._launched.append(_Asked(asked, self._runner.launch(step), step[0].phase.bucketed is not None))

    def _waiting_for(self, step: _Asked) -> list[tuple[int, LiveRequest]]:
        """Live requests that still ask for a launched step, with their places in it."""
        places = {id(one): place for place, one in enumerate(step.requests)}
        return [(places[id(request.pending)], request) for request in self._asking if id(request.pending) in places]

    def _get_ready(self, group: Sequence[LiveRequest]) -> None:
        """Launch the step that most likely follows, or prepare each step that may follow if none is likely enough.

        The step also serves requests outside the group, whose last step was launched in vain. If it cannot serve every live
        request, nothing is launched.
        """
        following = {request: request.following() for request in group}
        doubt = sum(one.doubt for one in following.values())
        for place in range(min([len(one.requests) for one in following.values()], default=0)):
            asked = [
                following[request].requests[place] if request in following else request.pending
                for request in self._asking
            ]
            step = [one for one in asked if one is not None]
            if not step or len({group_of(one, self._runner.architecture) for one in step}) > 1:
                continue
            if doubt <= DOUBT * len(step):
                self._launch(step)
                return
            self._runner.prepare(_of_one_phase(step))

    @property
    def _asking(self) -> list[LiveRequest]:
        """The live requests that ask for steps of the host."""
        return [request for request in self._live if request.pending is not None]

    def _next_group(self, among: Sequence[LiveRequest]) -> list[LiveRequest]:
        """The group of the request that has waited longest."""
        if len(among) == 1:
            return [*among]
        groups: dict[Hashable, list[LiveRequest]] = {}
        for request in among:
            asked = request.pending
            assert asked is not None
            groups.setdefault(group_of(asked, self._runner.architecture), []).append(request)
        longest = min(among, key=lambda request: request.waiting_since, default=None)
        return next((group for group in groups.values() if longest in group), [])


def _asked_by(group: Sequence[LiveRequest]) -> list[StepRequest]:
    """The steps that requests ask for."""
    return [request.pending for request in group if request.pending is not None]


def _on_device(asked: Sequence[StepRequest]) -> bool:
    """Whether any request has its tokens on the device."""
    return any(one.phase.tokens.computes for one in asked)


def _of_one_phase(asked: list[StepRequest]) -> list[StepRequest]:
    """The requests by the phase of the step that serves them all."""
    phase = shared_phase(request.phase for request in asked)
    return [request.within(phase) for request in asked]
