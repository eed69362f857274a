"""Plans of steps of a model or program, in a given configuration or the best one, with the weights in place."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from mosaic.errors import DoesNotFit
from mosaic.models.state import State
from mosaic.models.step import StepSize, rounded_states
from mosaic.planner.cut_steps import pays_up_to
from mosaic.planner.planner import Planner, Settings, SizedStep
from mosaic.planner.schedule import Schedule, scheduled
from mosaic.registrar.bucketed import ProgramStep
from mosaic.runtime.recent import Recent
from mosaic.units import format_bytes, format_tokens, round_up

if TYPE_CHECKING:
    from mosaic.planner.plan import Plan

__all__ = ["Settings", "StepPlans"]

KEPT_PLANS: Final = 32
"""Plans that are kept, by size."""
KEPT_ANSWERS: Final = 8192
"""Sizes for which `StepPlans.fits` remembers the answer."""
LOADED_BYTES_PER_S: Final = 2e9
"""Weights that a checkpoint's files give in a second, at least on most machines."""
MOST_BUDGET: Final = 1 << 50


class StepPlans:
    """Plans the steps of one model or program.

    Parameters
    ----------
    asked
        The planner as the caller asked for it.
    config
        Settings that every plan takes instead of searching; each kind of step takes the settings that it has.

    Raises
    ------
    UnknownName
        If `config` names an unknown knob, choice or option.

    Attributes
    ----------
    planner
        `asked`, with the weights where they are.
    aside_bytes
        Bytes of the budget that plans leave for captured graphs.
    """

    def __init__(self, asked: Planner, config: Settings | None) -> None:
        self.asked = self.planner = self._whole = asked
        self.aside_bytes, self.config = 0, config
        self._within: dict[int, tuple[Planner, Planner]] = {}  # `planner` and `asked`, by bytes set aside
        self._plans: Recent[Hashable, Plan | None] = Recent(KEPT_PLANS)  # None: it does not fit
        self._answers: Recent[Hashable, bool] = Recent(KEPT_ANSWERS)
        self._paying: Recent[Hashable, bool] = Recent(KEPT_PLANS)
        if config is not None and asked.program is None:
            asked.at(StepSize(windows=(1,), rows=1)).config(config)

    def settle_on(self, plan: Plan) -> None:
        """From now on, plan with the weights where this plan has them; all plans of a program have them there."""
        if self.asked.program is None:
            self.planner = self.asked.with_pinned({"stream": str(plan.config["stream"])})
            self._within.clear()

    def set_aside(self, num_bytes: int) -> None:
        """From now on, plan as if the budget had so many bytes less than it has."""
        if not self._within:
            self._within[self.aside_bytes] = self.planner, self.asked
        if num_bytes not in self._within:
            budget = self._whole.budget_bytes - num_bytes
            self._within[num_bytes] = self.planner.with_budgets(budget=budget), self.asked.with_budgets(budget=budget)
        self.planner, self.asked = self._within[num_bytes]
        self.aside_bytes = num_bytes

    def plan(self, step: SizedStep, config: Settings | None = None) -> Plan:
        """Plan with rows and keys rounded up, so that the plan can be reused; if only the exact size fits, plan that.

        Each size is planned once. These plans do not state the largest context, which would have to be solved for every
        number of masked rows.

        Parameters
        ----------
        config
            The settings of this step. A knob that is not named is off, a choice takes its first option.

        Raises
        ------
        DoesNotFit
            With the largest context that fits.
        UnknownName, UsageError
            If this kind of step does not have the settings.
        """
        plan = self._rounded_or_exact(step, config)
        if plan is None:
            raise self._refusal(step, self._settings(step, config))
        return plan

    def within(self, num_bytes: int, step: SizedStep) -> Plan | None:
        """Plan a step as if the budget had so many bytes less, rounded up; None if none fits."""
        before, eighth = self.aside_bytes, 1 << max(num_bytes.bit_length() - 4, 0)
        aside = before + round_up(num_bytes, eighth)
        if aside >= self._whole.budget_bytes:
            return None
        self.set_aside(aside)
        try:
            return self._rounded_or_exact(step, None)
        finally:
            self.set_aside(before)

    def _rounded_or_exact(self, step: SizedStep, config: Settings | None) -> Plan | None:
        return self._made(step.rounded(), config) or self._made(step, config)

    def _made(self, step: SizedStep, config: Settings | None) -> Plan | None:
        """The plan of a step, or None if none fits; made once while the weights stay where they are."""
        settings = None if config is None else frozenset((name, repr(value)) for name, value in config.items())
        key = self.planner, step.kind, settings, *step.dims(self.asked.architecture).items()
        return self._plans.find(key, lambda: self._fitting(step, self._settings(step, config), limit=False))

    def fits(self, sizes: Iterable[SizedStep], states: Mapping[State, int]) -> bool:
        """Return whether `plan` finds one for every step, with these rows of states, without making it.

        It is a lookup if steps of the same rounded sizes were asked for before.
        """
        taken = rounded_states(states)
        return all(self._fits_beside(graph, states, taken) for size in sizes for graph in size.graphs)

    def _fits_beside(self, size: SizedStep, states: Mapping[State, int], taken: Hashable) -> bool:
        if self._remembered((size.key, taken), lambda: size.beside(states).rounded()):
            return True
        return self.fits_exactly(size.beside(states))

    def fits_exactly(self, step: SizedStep) -> bool:
        """Return whether there is a plan for a step in its own numbers, without making it; found once."""
        return self._remembered((step.kind, *step.dims(self.asked.architecture).items()), lambda: step)

    def _remembered(self, key: Hashable, step: Callable[[], SizedStep]) -> bool:
        """The answer for a step, computed once while the weights stay where they are."""
        return self._answers.find((self.planner, key), lambda: self._fits(step()))

    def _fits(self, step: SizedStep) -> bool:
        """Whether `exact` finds a plan."""
        settings = self._settings(step, None)
        return any(planner.fits(step, config=settings) for planner in self._planners(step, settings))

    def require(self, sizes: Iterable[SizedStep], states: Mapping[State, int]) -> None:
        """Make sure that `plan` finds one for every step, with these rows of states; no plan is made.

        Raises
        ------
        DoesNotFit
            With the least need of the first step that does not fit, and the largest context that fits.
        """
        taken = rounded_states(states)
        for size in (graph for whole in sizes for graph in whole.graphs):
            if not self._fits_beside(size, states, taken):
                step = size.beside(states)
                raise self._refusal(step, self._settings(step, None))

    def pays(self, size: StepSize) -> bool:
        """Return whether a cut step is predicted faster than the same step whole, if it keeps the rows that it is
        planned for. The plans ignore the budget and are made once."""
        return self._paying.find((self.planner, size.key), lambda: self._pays(size))

    def _pays(self, size: StepSize) -> bool:
        fewest, whole = size.buckets[0], replace(size, phase=replace(size.phase, cut=None))
        whole_ms, prefix_ms, suffix_ms = (
            self.planner.plan(step.rounded(), limit=False).predicted_step_ms
            for step in (whole, size.graph(), size.graph(fewest))
        )
        return pays_up_to(whole_ms, prefix_ms, {fewest: suffix_ms}) > 0

    def placed(self, steps: Mapping[str, StepSize], times: Mapping[str, int]) -> Plan | None:
        """A plan with the weights where these steps, each run so many `times`, take the least predicted time in all; None if
        loading them again costs more than it saves."""
        now = Schedule.of(self.planner, steps, times)
        weights = next(iter(now.plans.values())).components["weights"]
        loading_ms = 1e3 * weights / LOADED_BYTES_PER_S
        unbounded = self.planner.with_budgets(budget=MOST_BUDGET).with_pinned({"stream": "none"})
        least_ms = Schedule.of(unbounded, steps, times).predicted_ms
        if now.fits and now.predicted_ms <= least_ms + loading_ms:
            return None
        found = scheduled(self.asked, steps, times)
        pays = found.fits and not (now.fits and now.predicted_ms <= found.predicted_ms + loading_ms)
        return next(iter(found.plans.values())) if pays else None

    def exact(self, step: SizedStep, config: Settings | None = None) -> Plan:
        """Plan with the weights where they are, or, if only that fits, elsewhere."""
        settings = self._settings(step, config)
        plan = self._fitting(step, settings, limit=True)
        if plan is None:
            raise self._refusal(step, settings)
        return plan

    def _fitting(self, step: SizedStep, settings: Settings | None, *, limit: bool) -> Plan | None:
        """The first plan that fits."""
        plans = (planner.plan(step, config=settings, limit=limit) for planner in self._planners(step, settings))
        return next((plan for plan in plans if plan.fits), None)

    def _planners(self, step: SizedStep, settings: Settings | None) -> tuple[Planner, ...]:
        """The planners to try in order. Weights that may not move stay in place: between the graphs of a step, or if
        settings are given."""
        moves = settings is None and not step.keeps_weights and self.asked.pinned != self.planner.pinned
        return (self.planner, self.asked) if moves else (self.planner,)

    def _refusal(self, step: SizedStep, settings: Settings | None) -> DoesNotFit:
        """The message for a step that does not fit."""
        planner = self._planners(step, settings)[-1]
        needed, budget = planner.least(step, config=settings), planner.budget
        on_host = needed.device_bytes <= budget.device_bytes
        asked, available = (
            (needed.host_bytes, budget.host_bytes) if on_host else (needed.device_bytes, budget.device_bytes)
        )
        where, whose = (" of host memory", "host budget") if on_host else ("", "budget")
        how = "" if settings is None else " as configured"
        graphs = (
            f" without {format_bytes(self.aside_bytes)} for captured graphs" if self.aside_bytes and not on_host else ""
        )
        return DoesNotFit(
            f"{_described(planner, step)} needs {format_bytes(asked)}{where}{how}, the {whose} is "
            f"{format_bytes(available)}{graphs}{_way_out(planner, step, settings)}",
            needed_bytes=asked, available_bytes=available,
        )  # fmt: skip

    def _settings(self, step: SizedStep, config: Settings | None) -> Settings | None:
        given = self.config if config is None else config
        if given is None or (config is not None and step.takes_all):
            return given
        return self.planner.space(step.kind).known(given)


def _described(planner: Planner, step: SizedStep) -> str:
    """Describe a step."""
    if isinstance(step, ProgramStep):
        sizes = ", ".join(f"{name} = {size:,}" for name, size in planner.at(step).dims.items())
        return f"the step '{step.name}' ({sizes})"
    seen = f", {format_tokens(sum(step.owned))} keys" if step.phase.cached else ""
    return f"a step over {format_tokens(step.tokens)} tokens ({format_tokens(step.rows)} masked{seen})"


def _way_out(planner: Planner, step: SizedStep, settings: Settings | None) -> str:
    """Advice for a step that does not fit; for a model's step of one sequence, with the largest context that fits."""
    if isinstance(step, ProgramStep):
        return ". Raise it, or run smaller steps."
    if settings is not None:
        return "; leave `config` out, and the planner looks for one that fits; or raise the budget."
    if len(step.windows) > 1:
        return "; raise the budget, or let fewer or shorter sequences share a step."
    longest = format_tokens(planner.max_context(step))
    return f"; the largest context that fits is {longest} tokens. Raise the budget, or call with fewer tokens."
