"""Kept keys of whose prefix the attention's output is kept as well: the policy of reuse. Legend: B sequences, T tokens.

A request says in `StepRequest.values` how many keys lie before its block ("prefix"), and whether it attends to them in this step
("refreshes"). Requests that refresh and that reuse share a step. A request's rows of a block have their places in one row of the
states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mosaic.errors import UsageError
from mosaic.models.inputs import Input
from mosaic.models.parts.cache import KV, Kept
from mosaic.models.parts.part import ResultPer
from mosaic.models.reuse import PrefixReuse
from mosaic.models.state import State

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.attention import Way
    from mosaic.models.inputs import Window

__all__ = [
    "CHANGE",
    "Reused",
    "check_reuse",
    "kept_outputs",
    "kept_queries",
    "kept_sums",
    "reuse_inputs",
    "reuse_states",
]

CHANGE = "change"
"""The output that says by how much a request's queries have changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOutputs(State):
    """What a block's rows attended to of its prefix, a row a request: of every layer that keeps and every token, all heads."""

    least_rows: int = 1
    layers: int

    def columns(self, arch: Architecture) -> int:
        """Return the numbers of all layers that keep."""
        return (self.layers or arch.layers) * arch.block * arch.heads * arch.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSums(PrefixOutputs):
    """The log-sum-exps that belong to them: one a head."""

    def columns(self, arch: Architecture) -> int:
        """Return the numbers of all layers that keep."""
        return (self.layers or arch.layers) * arch.block * arch.heads


def kept_outputs(layers: int) -> PrefixOutputs:
    """Return the state that outputs of the first `layers` layers are kept in; 0: of all."""
    return PrefixOutputs(name=f"prefix_outputs_{layers or 'all'}", layers=layers)


def kept_sums(layers: int) -> PrefixSums:
    """Return the state that their log-sum-exps are kept in."""
    return PrefixSums(name=f"prefix_sums_{layers or 'all'}", dtype="float32", layers=layers)


def kept_queries() -> PrefixOutputs:
    """Return the state that the queries of one layer are kept in, to be compared with later ones."""
    return PrefixOutputs(name="prefix_queries", layers=1)


def reuse_states(reuse: PrefixReuse, layers: int) -> Sequence[State]:
    """Return the states of a policy that reuses outputs of the first `layers` layers; 0: of all."""
    return kept_outputs(layers), kept_sums(layers), *((kept_queries(),) if reuse.change is not None else ())


def reuse_inputs(reuse: PrefixReuse, layers: int, *, refreshes: bool) -> Sequence[Input]:
    """Return where outputs are kept and queries, how many keys a block's prefix has, and how many are attended to again."""
    found = [
        Input(
            name="kept_row", dtype="int64", per="sequence",
            value=lambda window: _row(window, kept_outputs(layers), kept_sums(layers)),
        ),
        Input(name="prefix", dtype="int32", per="sequence", value="prefix"),
    ]  # fmt: skip
    if reuse.change is not None:
        found.append(
            Input(name="queries_row", dtype="int64", per="sequence", value=lambda window: _row(window, kept_queries()))
        )
    if refreshes:
        found.append(Input(name="refreshed", dtype="int32", per="sequence", value=_refreshed))
    return found


def _row(window: Window, *states: State) -> int:
    """The one row that a request has of each of the states, which are taken and given back together."""
    rows = {window.request.states[state].runs(0, 1)[0][0] for state in states}
    assert len(rows) == 1, rows
    return int(rows.pop())


def _refreshed(window: Window) -> int:
    values = window.request.values
    return int(values["prefix"]) if values["refreshes"] else 0


def check_reuse(request: Any, *, refreshes: bool) -> None:
    """Check that a request says how far its prefix goes and whether it refreshes, and forwards rows that have places.

    Raises
    ------
    UsageError
        In one line.
    """
    values = request.values
    if not {"prefix", "refreshes"} <= values.keys():
        raise UsageError(
            'reuse: a request says values={"prefix": keys before its block, "refreshes": whether it does}.'
        )
    if values["refreshes"] and not refreshes:
        raise UsageError("reuse: a request that refreshes is for a phase whose steps do; use its covering phase.")
    if not values["refreshes"] and request.start < values["prefix"]:
        raise UsageError(
            f"reuse: a window from position {request.start} on reuses what is kept from {values['prefix']} on; refresh."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused(Kept):
    """Windows write their keys and values as ever, and attend to those before their block once for several steps.

    Parameters
    ----------
    reuse
        The options.
    refreshes
        Whether requests may refresh in the step.
    """

    reuse: PrefixReuse
    refreshes: bool

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return, beside those of kept keys, what says where outputs are kept and which are made anew."""
        return *Kept.inputs(self, arch), *reuse_inputs(self.reuse, 0, refreshes=self.refreshes)

    @property
    def covering(self) -> Reused:
        """The policy of steps in which requests may refresh."""
        return self if self.refreshes else replace(self, refreshes=True)

    @property
    def states(self) -> Sequence[State]:
        """Keys and values, and what is kept of the attention to them."""
        return KV, *reuse_states(self.reuse, 0)

    @property
    def results(self) -> Mapping[str, ResultPer]:
        """By how much each request's queries have changed, where that is measured."""
        return {} if self.reuse.change is None else {CHANGE: "sequence"}

    def check(self, request: Any, arch: Architecture) -> None:
        """Check, beside what kept keys need, that a request reuses only what has a place."""
        Kept.check(self, request, arch)
        check_reuse(request, refreshes=self.refreshes)

    def ways(self) -> Sequence[Way]:
        """Return the one way: windows are short."""
        from mosaic.models.attention import reused

        return (reused.ReusedTogether(),)
