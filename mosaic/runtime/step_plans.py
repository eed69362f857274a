"""The size of a step, and its plan: in a given configuration or the best one, with the weights where they are."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from mosaic.errors import DoesNotFit
from mosaic.models.phase import FULL_STEP, Phase
from mosaic.runtime.batch import bucket
from mosaic.units import format_bytes, format_tokens

if TYPE_CHECKING:
    from mosaic.planner.plan import Plan
    from mosaic.planner.planner import Planner, Request

__all__ = ["Settings", "StepPlans", "StepSize"]

Settings: TypeAlias = Mapping[str, int | str | None]
"""A configuration: rows per chunk by knob (None: off), an option by choice."""

FEWEST_ROWS: Final = 16
FEWEST_KEYS: Final = 64
MOST_DOUBLED: Final = 256
"""What decoding steps are planned for at least, and up to how many rows plans are for powers of two: a few rows take about as
long as one, and a generation whose masks get fewer then needs few plans, each of which is captured once."""


class StepSize(NamedTuple):
    """The size of a step: windows, the keys they may see, rows of the state, rows that are unembedded and rows whose
    logits are returned."""

    phase: Phase
    lengths: tuple[int, ...]
    key_lens: tuple[int, ...]
    kv_rows: int
    masked: int
    logit_rows: int

    @property
    def tokens(self) -> int:
        """All windows together."""
        return sum(self.lengths)

    def rounded(self) -> StepSize:
        """Rows, keys and rows of the state rounded up, mostly by at most an eighth, so that the plan serves others too."""
        keys = sum(self.key_lens)
        more = bucket(keys, least=FEWEST_KEYS) - keys
        rows = {"least": FEWEST_ROWS, "doubled": MOST_DOUBLED} if self.phase.rule else {}
        return self._replace(
            key_lens=(*self.key_lens[:-1], self.key_lens[-1] + more) if keys else (),
            kv_rows=bucket(self.kv_rows, least=FEWEST_KEYS), masked=bucket(self.masked, self.tokens, **rows),
            logit_rows=bucket(self.logit_rows, self.tokens),
        )  # fmt: skip

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Equal for steps that one executor serves."""
        found = self.rounded()
        return (*found._replace(lengths=(len(self.lengths), self.tokens), key_lens=(sum(found.key_lens),)),)

    def request(self) -> Request:
        """The step as the planner takes it."""
        from mosaic.planner.planner import Request

        return Request(
            seq_lens=self.lengths, masked=self.masked or None, logit_rows=self.logit_rows, phase=self.phase,
            key_lens=self.key_lens, kv_rows=self.kv_rows or None,
        )  # fmt: skip


class StepPlans:
    """Plans the steps of one model.

    Parameters
    ----------
    asked
        The planner as the caller asked for it.
    config
        Settings that every plan takes instead of searching; each kind of step takes those that it has.

    Raises
    ------
    UnknownName
        If `config` names a knob, a choice or an option that there is not.

    Attributes
    ----------
    planner
        `asked`, with the weights where they are.
    """

    def __init__(self, asked: Planner, config: Settings | None) -> None:
        self.asked = self.planner = asked
        self.config = config
        if config is not None:
            asked.at(StepSize(FULL_STEP, (1,), (), 0, 1, 0).request()).config(config)

    def settle_on(self, plan: Plan) -> None:
        """Plan from here on with the weights where this plan has them."""
        self.planner = self.asked.with_pinned({"stream": str(plan.config["stream"])})

    def plan(self, step: StepSize, config: Settings | None = None) -> Plan:
        """Plan with rows and keys rounded up, to be used again; exactly, where only that fits.

        Parameters
        ----------
        config
            The settings of this step; what is not named is off, or the first option, and weights stay where they are.

        Raises
        ------
        DoesNotFit
            With the largest context that fits.
        UnknownName, UsageError
            If this kind of step does not have the settings.
        """
        try:
            return self.exact(step.rounded(), config)
        except DoesNotFit:
            return self.exact(step, config)

    def exact(self, step: StepSize, config: Settings | None = None) -> Plan:
        """Plan with the weights where they are; where only that fits, with weights elsewhere."""
        settings = self._settings(step, config)
        try:
            return _plan(self.planner, step, settings)
        except DoesNotFit:
            if settings is not None or self.asked.pinned == self.planner.pinned:
                raise
            return _plan(self.asked, step, None)

    def _settings(self, step: StepSize, config: Settings | None) -> Settings | None:
        if config is not None or self.config is None:
            return config
        return self.planner.space(step.request().kind).known(self.config)


def _plan(planner: Planner, step: StepSize, settings: Settings | None) -> Plan:
    """Plan one step, or say why it does not fit."""
    request = step.request()
    plan = planner.plan(request, config=settings, limit=not step.phase.rule and not step.phase.cached)
    if plan.fits:
        return plan
    on_host = plan.total_bytes <= plan.budget_bytes
    needed = plan.document["host_bytes"] if on_host else plan.total_bytes
    available = plan.document["host_budget_bytes"] if on_host else plan.budget_bytes
    seen = f", {format_tokens(sum(step.key_lens))} keys" if step.phase.cached else ""
    raise DoesNotFit(
        f"a step over {format_tokens(step.tokens)} tokens ({format_tokens(step.masked)} masked{seen}) needs "
        f"{format_bytes(needed)}{' of host memory' if on_host else ''}{'' if settings is None else ' as configured'}, the "
        f"{'host budget' if on_host else 'budget'} is {format_bytes(available)}; {_way_out(planner, request, settings)}",
        needed_bytes=needed,
        available_bytes=available,
    )


def _way_out(planner: Planner, request: Request, settings: Settings | None) -> str:
    if settings is not None:
        return "leave `config` out, and the planner looks for one that fits; or raise the budget."
    longest = planner.max_context(request)
    return f"the largest context that fits is {format_tokens(longest)} tokens. Raise the budget, or call with fewer tokens."
