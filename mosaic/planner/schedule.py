"""Plans of the steps of a generation together: weights have one place for all of them, whichever step would want another.

A step that runs eight times may be worth less memory than one that runs 248 times: what a step alone would stream, all of them pay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from mosaic.planner.search import TOLERANCE

if TYPE_CHECKING:
    from mosaic.planner.plan import Plan
    from mosaic.planner.planner import Planner, Step

__all__ = ["Schedule", "scheduled"]


class Schedule(NamedTuple):
    """The plans of a generation's steps by name, and how often each runs."""

    plans: Mapping[str, Plan]
    times: Mapping[str, int]

    @classmethod
    def of(cls, planner: Planner, steps: Mapping[str, Step], times: Mapping[str, int]) -> Schedule:
        """Plan each step by itself."""
        return cls({name: planner.plan(step, limit=False) for name, step in steps.items()}, times)

    @property
    def fits(self) -> bool:
        """Whether all plans fit."""
        return all(plan.fits for plan in self.plans.values())

    @property
    def predicted_ms(self) -> float:
        """Predicted time of all steps, milliseconds."""
        return sum(self.times[name] * plan.predicted_step_ms for name, plan in self.plans.items())

    @property
    def stream(self) -> str:
        """What is streamed: the option of the choice `stream` that all plans have."""
        return str(next(iter(self.plans.values())).config["stream"])


def scheduled(planner: Planner, steps: Mapping[str, Step], times: Mapping[str, int]) -> Schedule:
    """Return plans in which all steps have the weights in one place: where they take the least predicted time together, and within
    0.25 % of that, where the least is streamed. If they fit nowhere, those of the place that needs the least memory.

    Parameters
    ----------
    planner
        Its pinned choices hold; with `stream` pinned there is one place.
    steps
        By name.
    times
        How often each step runs, by name.

    Examples
    --------
    >>> from mosaic.models.phase import FULL_STEP
    >>> from mosaic.models.policies.sparse_keys import SparseKeys
    >>> from mosaic.planner.planner import Planner
    >>> steps = SparseKeys(retention=0.1).steps(FULL_STEP, 8192, 32)
    >>> found = scheduled(Planner("llada-8b", device="h200", budget="17GiB"), steps, {"refresh": 8, "reuse": 248})
    >>> found.fits, found.stream
    (True, 'none')
    """
    found = [*_places(planner, steps, times)]
    fitting = [schedule for schedule in found if schedule.fits]
    if not fitting:
        return min(found, key=lambda schedule: max(plan.total_bytes for plan in schedule.plans.values()))
    least_ms = min(schedule.predicted_ms for schedule in fitting)
    return next(schedule for schedule in fitting if schedule.predicted_ms <= least_ms * (1 + TOLERANCE))


def _places(planner: Planner, steps: Mapping[str, Step], times: Mapping[str, int]) -> Iterator[Schedule]:
    """Plan all steps with the weights in one place after another, the one with the least streaming first."""
    first = next(iter(steps.values()))
    choice = next(choice for choice in planner.at(first).space.template.choices if choice.name == "stream")
    for option in choice.options:
        if planner.pinned.get("stream", option) == option:
            schedule = Schedule.of(planner.with_pinned({"stream": option}), steps, times)
            yield schedule
            if schedule.fits and not planner.host_budget_bytes:
                return  # the host has no room for what the others stream
